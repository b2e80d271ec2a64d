"""One embedded stack for the whole test run, shared by all pytest-xdist workers, and a lone S3.

Neither is started unless a test asks for it. Both are stopped when the run ends, and by `tests/guardian.py`
when the run was killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from infra import processes, stack_services
from infra import stack as embedded
from infra.object_store import ObjectStore
from infra.settings import Connections, Settings, connections

ROOT = "REMERGE_TEST_ROOT"  # inherited by pytest-xdist's workers
CONTROLLER = "REMERGE_TEST_CONTROLLER"
HOMES = ("stack", "lone-s3", "faults")
_guardians: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class SharedStack:
    """The running stack of this test run."""

    settings: Settings
    connections: Connections


def pytest_configure(config: pytest.Config) -> None:
    if _is_controller(config):
        for name in [name for name in os.environ if name.startswith(("REMERGE_", "PREFECT_", "MLFLOW_"))]:
            del os.environ[name]
        os.environ[ROOT] = tempfile.mkdtemp(prefix="remerge-tests-")
        os.environ[CONTROLLER] = str(os.getpid())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _is_controller(config):
        root = Path(os.environ[ROOT])
        for home in (root / name for name in HOMES):
            if home.exists():
                embedded.stop(Settings(home=home), _quiet)
        shutil.rmtree(root, ignore_errors=True)


def _is_controller(config: pytest.Config) -> bool:
    return not hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def stack_settings() -> Iterator[Settings]:
    """Where the shared stack lives; `REMERGE_HOME` says so too. Not started yet."""
    settings = Settings(home=_root() / "stack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMERGE_HOME", str(settings.home))
        yield settings


@pytest.fixture(scope="session")
def stack(stack_settings: Settings) -> SharedStack:
    """The whole stack, up: one for all tests of the run. Tests must not stop it."""
    _guard()
    embedded.start(stack_settings, _quiet)
    pause_schedules(connections(stack_settings))
    return SharedStack(stack_settings, connections(stack_settings))


@pytest.fixture(scope="session")
def own_stack_settings() -> Settings:
    """Where a stack lives whose services tests may kill. Not started; stopped at the end of the run."""
    _guard()
    return Settings(home=_root() / "faults")


@pytest.fixture(scope="session")
def lone_s3() -> Connections:
    """S3 alone, which is up in a second: one for all tests of the run."""
    _guard()
    settings = Settings(home=_root() / "lone-s3")
    embedded.start(settings, _quiet, names=(stack_services.S3,))
    return connections(settings)


@pytest.fixture(scope="module")
def object_store(lone_s3: Connections) -> ObjectStore:
    """A bucket of the module's own on a real S3, empty at first."""
    store = ObjectStore(lone_s3, bucket=f"test-{uuid.uuid4().hex}")
    store.create_bucket()
    return store


def pause_schedules(found: Connections) -> None:
    """Keep what Prefect runs every few minutes from mending what a test wants to look at first."""
    with httpx.Client(base_url=found.prefect_api_url, trust_env=False) as api:
        for deployment in api.post("/deployments/filter", json={}).raise_for_status().json():
            api.post(f"/deployments/{deployment['id']}/pause_deployment").raise_for_status()


def _root() -> Path:
    return Path(os.environ[ROOT])


def _quiet(message: str) -> None:
    del message


def _guard() -> None:
    """Have one process outside pytest that stops everything should pytest be killed."""
    with suppress(FileExistsError):
        os.close(os.open(_root() / "guarded", os.O_CREAT | os.O_EXCL))
        controller = processes.identify(int(os.environ[CONTROLLER]))
        assert controller is not None
        guardian = Path(__file__).parent / "guardian.py"
        homes = [str(_root() / name) for name in HOMES]
        command = [sys.executable, str(guardian), str(controller.pid), controller.start_time, str(_root())]
        _guardians.append(
            subprocess.Popen(
                [*command, *homes],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
