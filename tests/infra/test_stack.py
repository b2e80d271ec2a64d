"""The embedded stack, started, damaged, repaired and stopped for real."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import processes, stack_services
from infra import stack as embedded
from infra.object_store import ObjectStore
from infra.orchestrator import Orchestrator, message_of
from infra.settings import Settings, StackDown, connections
from infra.stack_services import MLFLOW, NAMES, PREFECT, S3, WORKER
from infra.stack_state import State

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A stack that these tests may break, beside the one that all others share."""
    settings = Settings(home=tmp_path_factory.mktemp("own-stack"))
    reached: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(settings.home)  # not the repository
            patch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # a user's own Prefect
            patch.setenv("AWS_PROFILE", "nobody")
            status = embedded.start(settings, reached.append)
        assert status.up
        assert not status.already_up
        assert len(reached) == 1 + len(NAMES)
        yield settings
    finally:
        embedded.stop(settings, _quiet)


def _quiet(message: str) -> None:
    del message


def _pids(settings: Settings) -> dict[str, int | None]:
    return {service.name: service.pid for service in embedded.status(settings).services}


def _all_marked(settings: Settings) -> list[int]:
    state = State.read(settings)
    return [pid for name in NAMES for pid in processes.marked(state.mark(name))]


def _kill(pid: int | None) -> None:
    """As the kernel does when memory is short, and wait until it is done."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while processes.identify(pid) is not None:
        time.sleep(0.01)


def test_two_stacks_side_by_side(own_stack: Settings, stack: Any) -> None:
    assert embedded.status(own_stack).up
    assert embedded.status(stack.settings).up
    mine, shared = connections(own_stack), stack.connections
    assert mine.s3_endpoint != shared.s3_endpoint
    ObjectStore(mine).create("only/here", b"")
    assert not ObjectStore(shared).exists("only/here")


def test_prefect_yaml_is_deployed(own_stack: Settings) -> None:
    deployments = Orchestrator(connections(own_stack)).deployments()
    assert set(deployments) == {"policy-change", "reconcile", "train-portfolio", "task-merging"}
    train = deployments["train-portfolio"]
    assert train["parameters"]["recipe"] == "infra/portfolios/digits.yaml"
    schedule = train["schedules"][0]
    assert schedule["active"]
    assert schedule["schedule"]["timezone"] == "UTC"
    assert re.fullmatch(r"\S+ \S+ \S+ \S+ \S+", schedule["schedule"]["cron"])
    for deployment in deployments.values():
        step = deployment["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]
        assert Path(step["directory"]) == stack_services.repository_root()


def test_no_path_of_this_machine_is_committed() -> None:
    text = (stack_services.repository_root() / "prefect.yaml").read_text()
    assert str(stack_services.repository_root()) not in text
    assert not re.search(r"(?m)^\s*[^#]*: *[\"']?/", text)


def test_secrets_are_for_the_owner_alone(own_stack: Settings) -> None:
    for file in (own_stack.credentials_file, own_stack.stack_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secrets = connections(own_stack)
    assert secrets.s3_secret_key.get_secret_value() not in own_stack.stack_file.read_text()
    logs = "".join(file.read_text() for file in (own_stack.home / "logs").rglob("*") if file.is_file())
    for secret in (secrets.s3_secret_key, secrets.data_digest_key):
        assert secret.get_secret_value() not in logs


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_only_this_machine_is_listened_to(own_stack: Settings) -> None:
    inodes = set()
    for pid in _all_marked(own_stack):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.match(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                inodes.add(match[1])
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                listening.add(words[1].partition(":")[0])
    assert listening == {"0100007F"}  # 127.0.0.1


def test_s3_has_no_open_back_door(own_stack: Settings) -> None:
    """SeaweedFS's own HTTP ports must not serve what S3 asks keys for."""
    ObjectStore(connections(own_stack)).put("secret/object", b"secret")
    ports = State.read(own_stack).ports
    filer, volume = (f"http://127.0.0.1:{ports[name]}" for name in ("filer.port", "volume.port"))
    object_url = f"{filer}/buckets/production/secret/object"
    assert httpx.get(object_url).status_code == 401
    assert httpx.put(object_url, content=b"replaced").status_code == 401
    assert httpx.delete(object_url).status_code == 401
    assert httpx.get(f"{volume}/1,01").status_code in {401, 404}
    assert httpx.get(f"{connections(own_stack).s3_endpoint}/production/secret/object").status_code == 403


def test_mlflow_keeps_artifacts_in_s3(own_stack: Settings) -> None:
    found = connections(own_stack)
    url = f"{found.mlflow_url}/api/2.0/mlflow-artifacts/artifacts/test/file"
    assert httpx.put(url, content=b"artifact", timeout=30).is_success
    assert ObjectStore(found, bucket="mlflow").read("artifacts/test/file").content == b"artifact"


def test_starting_again_changes_nothing(own_stack: Settings) -> None:
    before = _pids(own_stack)
    said: list[str] = []
    status = embedded.start(own_stack, said.append)
    assert status.already_up
    assert said == ["The stack is up already."]
    assert _pids(own_stack) == before


def test_a_killed_service_is_repaired(own_stack: Settings) -> None:
    before, group = _pids(own_stack), processes.marked(State.read(own_stack).mark(MLFLOW))
    _kill(before[MLFLOW])  # its uvicorn worker lives on, and holds the port
    assert not embedded.status(own_stack).up
    assert embedded.start(own_stack, _quiet).up
    after = _pids(own_stack)
    assert {name for name in NAMES if after[name] != before[name]} == {MLFLOW}
    assert not set(group) & set(processes.marked(State.read(own_stack).mark(MLFLOW)))


def test_a_killed_worker_is_repaired_and_its_runs_closed(own_stack: Settings) -> None:
    orchestrator = Orchestrator(connections(own_stack))
    deployment = orchestrator.deployments()["policy-change"]
    body = {"parameters": {"region": "eu", "serial": 1}, "state": {"type": "RUNNING"}}
    run = orchestrator._call("POST", f"/deployments/{deployment['id']}/create_flow_run", json=body)
    before = _pids(own_stack)
    _kill(before[WORKER])
    assert embedded.start(own_stack, _quiet).up
    after = _pids(own_stack)
    assert {name for name in NAMES if after[name] != before[name]} == {WORKER}
    run = orchestrator.read_flow_run(run["id"])
    assert run["state_type"] == "CRASHED"
    assert "was stopped while this run was going" in message_of(run)


def test_stopping_leaves_nothing_running_and_keeps_the_data(own_stack: Settings) -> None:
    assert embedded.start(own_stack, _quiet).up
    ObjectStore(connections(own_stack)).put("kept", b"data")
    ports, endpoint = State.read(own_stack).ports, connections(own_stack).s3_endpoint
    assert len(_all_marked(own_stack)) >= len(NAMES)
    assert embedded.stop(own_stack, _quiet)
    assert _all_marked(own_stack) == []
    assert all(stack_services.ports_are_free(ports, name) for name in NAMES)
    assert not embedded.status(own_stack).up
    with pytest.raises(StackDown, match="remerge up"):
        connections(own_stack)
    assert not embedded.stop(own_stack, _quiet)
    embedded.start(own_stack, _quiet, names=(S3,))
    assert connections(own_stack).s3_endpoint == endpoint
    assert ObjectStore(connections(own_stack)).read("kept").content == b"data"


def test_a_prefect_yaml_that_prefect_cannot_use_fails_the_start(
    own_stack: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("infra", "accounting", "flows", "tasks"):
        (tmp_path / package).symlink_to(stack_services.repository_root() / package)
    good = (stack_services.repository_root() / "prefect.yaml").read_text()
    (tmp_path / "prefect.yaml").write_text(good.replace("posture: Reactive", "posture: Sometimes"))
    monkeypatch.setattr(stack_services, "repository_root", lambda: tmp_path)
    embedded.stop(own_stack, _quiet)
    with pytest.raises(embedded.StackFailed, match=r"Prefect's worker ended .* read .*worker\.log") as caught:
        embedded.start(own_stack, _quiet, names=(S3, PREFECT, WORKER))
    assert "Posture.Reactive or Posture.Proactive" in caught.value.message
    assert _all_marked(own_stack) == []
