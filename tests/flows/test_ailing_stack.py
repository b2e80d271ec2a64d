"""What the commands say where a service has ended, a document is damaged, or they are told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from infra import processes
from infra import stack as embedded
from infra.orchestrator import Orchestrator
from infra.releases import attempt_key
from infra.settings import OWN_SERVICES, Settings, StackDown, connections
from infra.stack_services import MLFLOW, NAMES, WORKER
from infra.stack_state import State
from tasks.services import open_services

pytestmark = pytest.mark.system


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    settings = Settings(home=tmp_path / "home")
    try:
        yield settings
    finally:
        embedded.stop(settings, _quiet)


def _quiet(message: str) -> None:
    del message


def _start(settings: Settings, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "remerge"), *arguments],
        env={**os.environ, "REMERGE_HOME": str(settings.home), "COLUMNS": "80", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(settings: Settings, *arguments: str, **environment: str) -> tuple[int, str, str]:
    command = _start(settings, *arguments, **environment)
    stdout, stderr = command.communicate(timeout=120)
    return command.returncode, stdout, stderr


def _all_marked(settings: Settings) -> list[int]:
    state = State.read(settings)
    return [pid for name in NAMES for pid in processes.marked(state.mark(name))]


def test_status_shows_what_is_damaged_or_has_ended_and_the_rest_too(settings: Settings) -> None:
    embedded.start(settings, _quiet)
    services = open_services(settings)
    own = {
        f"REMERGE_{name.upper()}": found.get_secret_value() if isinstance(found, SecretStr) else found
        for name, found in connections(settings)
        if name in OWN_SERVICES
    }
    status, shown, _ = _run(settings, "status", **{**own, "REMERGE_MLFLOW_URL": "http://127.0.0.1:9"})
    assert status == 1  # no region is non-compliant, but a service does not work
    assert "MLflow does not answer at http://127.0.0.1:9" in shown  # one's own are asked, not looked up
    for region in ("atlantis", "lemuria"):
        fields: dict[str, Any] = {"region": region, "epsilon": 2.0, "delta": 1e-5, "author": "test"}
        services.policies.append({**fields, "portfolio": "digits@1"})
    services.store.put(attempt_key("atlantis"), b"{")
    services.store.put("portfolios/broken/00000001.json", b"{")
    status, shown, _ = _run(settings, "status")
    assert status == 2
    assert "Services:       all up, Prefect's worker online" in shown
    assert "Portfolio broken:" in shown
    assert "atlantis, last attempt: s3://production/regions/atlantis/last_attempt.json" in shown
    assert "lemuria: No model has been promoted in this region yet." in shown

    waiting = _start(settings, "train")
    # Those of the weekly schedule wait for their day.
    while all(run["state_name"] == "Scheduled" for run in services.orchestrator.runs("train-portfolio")):
        assert waiting.poll() is None, waiting.communicate()
        time.sleep(0.1)
    for service in embedded.status(settings).services:
        if service.name in (MLFLOW, WORKER):
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            while processes.identify(service.pid) is not None:
                time.sleep(0.01)
    _, error = waiting.communicate(timeout=60)  # it does not wait for a day
    assert waiting.returncode == 1
    assert "Error: Prefect's worker has ended while the flow run" in error
    _, shown, _ = _run(settings, "status")
    for title, log in (("MLflow", "mlflow.log"), ("Prefect's worker", "worker.log")):
        assert f"{title} has ended: run `remerge up` (its log is {settings.home / 'logs' / log})" in shown
    assert "all up" not in shown
    assert "lemuria" in shown

    terms = ("--region", "lemuria", "--epsilon", "1", "--delta", "1e-5", "--yes")
    status, _, error = _run(settings, "policy", "set", *terms)
    assert status == 1
    assert error.startswith("Error: Prefect's worker has ended, so no flow would run")
    assert "run `remerge up`, which starts it again; nothing was stored" in error
    newest = services.policies.newest("lemuria")
    assert newest is not None
    assert newest.serial == 1
    status, _, error = _run(settings, "train")
    assert (status, "Prefect's worker has ended" in error) == (1, True)


def test_a_demo_that_is_told_to_stop_leaves_nothing_running(settings: Settings) -> None:
    demo = _start(settings, "demo")
    training: list[Any] = []
    while not training and demo.poll() is None:
        with suppress(StackDown):
            runs = Orchestrator(connections(settings)).runs("train-portfolio")
            training = [
                run for run in runs if run["state_name"] != "Scheduled"
            ]  # as those of the weekly schedule
        time.sleep(0.5)
    demo.send_signal(signal.SIGTERM)
    stdout, stderr = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert "Stopping the stack" in stdout
    assert "stopped its stack and the run with it" in stderr
    assert "goes on" not in stderr
    assert _all_marked(settings) == []
    assert not settings.stack_file.exists()
