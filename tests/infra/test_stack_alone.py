"""Starting and stopping under adverse circumstances, with as few services as show it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import processes, stack_services
from infra import stack as embedded
from infra.object_store import ObjectStore
from infra.processes import ProcessId
from infra.settings import CredentialsDamaged, Settings, StackDown, connections
from infra.stack import StackFailed
from infra.stack_services import MLFLOW, NAMES, S3
from infra.stack_state import State

START_S3 = """
import sys
from pathlib import Path
from infra import stack
from infra.settings import Settings
status = stack.start(Settings(home=Path(sys.argv[1])), lambda message: None, names=("s3",))
print("already up" if status.already_up else "started")
"""


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    settings = Settings(home=tmp_path / "home")
    try:
        yield settings
    finally:
        embedded.stop(settings, _quiet)


def _quiet(message: str) -> None:
    del message


def _all_marked(settings: Settings) -> list[int]:
    state = State.read(settings)
    return [pid for name in NAMES for pid in processes.marked(state.mark(name))]


def test_two_starts_at_once_take_turns_and_outlive_their_commands(settings: Settings) -> None:
    command = [sys.executable, "-c", START_S3, str(settings.home)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(child.communicate(timeout=60)[0].strip() for child in both) == ["already up", "started"]
    assert len(_all_marked(settings)) == 1
    ObjectStore(connections(settings)).put("key", b"")


def test_an_interrupted_start_leaves_nothing(settings: Settings) -> None:
    def interrupt(message: str) -> None:
        assert _all_marked(settings)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded.start(settings, interrupt, names=(S3,))
    assert _all_marked(settings) == []
    assert not settings.stack_file.exists()


def test_a_failed_start_names_its_log_and_leaves_nothing(settings: Settings) -> None:
    (settings.home / "mlflow").mkdir(parents=True)
    (settings.home / "mlflow" / "mlflow.db").write_bytes(b"this is no database " * 500)
    with pytest.raises(StackFailed, match=r"MLflow ended with status \d+") as caught:
        embedded.start(settings, _quiet, names=(S3, MLFLOW))
    assert str(settings.home / "logs" / "mlflow.log") in caught.value.message
    assert "file is not a database" in caught.value.message
    assert _all_marked(settings) == []
    with pytest.raises(StackDown, match="remerge up"):
        connections(settings)


def test_damaged_secrets_are_not_replaced(settings: Settings) -> None:
    settings.home.mkdir()
    settings.credentials_file.write_text('{"s3_access_key": "a"}')
    with pytest.raises(CredentialsDamaged, match="s3_secret_key"):
        embedded.start(settings, _quiet, names=(S3,))
    assert settings.credentials_file.read_text() == '{"s3_access_key": "a"}'
    assert _all_marked(settings) == []


def test_a_damaged_record_hides_no_process(settings: Settings) -> None:
    embedded.start(settings, _quiet, names=(S3,))
    before = _all_marked(settings)
    settings.stack_file.write_text("{")
    embedded.start(settings, _quiet, names=(S3,))
    assert not set(before) & set(_all_marked(settings))
    settings.stack_file.unlink()
    assert embedded.stop(settings, _quiet)
    assert _all_marked(settings) == []


MALFORMED = (
    lambda record: {**record, "processes": {"s3": "a process"}},
    lambda record: {**record, "processes": {"s3": {"pid": "1", "start_time": 2}, "s4": {}}},
    lambda record: {**record, "processes": ["s3"]},
    lambda record: {**record, "processes": None},
    lambda record: {**record, "ports": [9]},
    lambda record: {**record, "ports": {"s3.port": "nine"}},
    lambda record: {"processes": record["processes"]},
    lambda record: [record],
)


def test_a_malformed_record_does_not_keep_the_stack_from_stopping(settings: Settings) -> None:
    embedded.start(settings, _quiet, names=(S3,))
    record = json.loads(settings.stack_file.read_text())
    ports = State.read(settings).ports
    (settings.home / "ports.json").unlink()
    for change in MALFORMED:
        settings.stack_file.write_text(json.dumps(change(record)))
        embedded.status(settings)
    assert embedded.stop(settings, _quiet)
    assert _all_marked(settings) == []
    for change in MALFORMED:
        settings.stack_file.write_text(json.dumps(change(record)))
        assert not embedded.stop(settings, _quiet)
        assert not settings.stack_file.exists()
    stack_services.remove_sockets(ports)


def test_stopping_makes_no_folder(settings: Settings) -> None:
    assert not embedded.stop(settings, _quiet)
    assert not settings.home.exists()


def test_a_stack_whose_folder_was_moved_away_is_stopped_too(settings: Settings) -> None:
    embedded.start(settings, _quiet, names=(S3,))
    ports = State.read(settings).ports
    settings.home.rename(settings.home.with_name("elsewhere"))
    assert embedded.stop(settings, _quiet)
    assert _all_marked(settings) == []
    assert not settings.home.exists()
    stack_services.remove_sockets(ports)


def test_a_record_of_an_earlier_boot_stops_nobody_else(settings: Settings) -> None:
    embedded.start(settings, _quiet, names=(S3,))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        found = processes.identify(bystander.pid)
        assert found is not None
        record = json.loads(settings.stack_file.read_text())
        record["processes"]["mlflow"] = {"pid": bystander.pid, "start_time": "an-earlier-boot/1"}
        settings.stack_file.write_text(json.dumps(record))
        assert embedded.stop(settings, _quiet)
        assert processes.is_alive(ProcessId(bystander.pid, found.start_time))
        bystander.kill()


def test_a_port_that_was_taken_meanwhile_is_not_used(settings: Settings) -> None:
    import socket

    embedded.start(settings, _quiet, names=(S3,))
    port = State.read(settings).ports["s3.port"]
    embedded.stop(settings, _quiet)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((stack_services.HOST, port))
        taken.listen()
        embedded.start(settings, _quiet, names=(S3,))
        assert State.read(settings).ports["s3.port"] != port
    ObjectStore(connections(settings)).put("key", b"")
