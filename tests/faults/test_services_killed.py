"""kill -9 of each service, alone and with what it was doing; `remerge up` and one reconcile make everything whole."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from accounting.errors import RemergeError
from infra import stack as embedded
from infra.documents import Policy
from infra.object_store import ObjectStore
from infra.orchestrator import TERMINAL
from infra.settings import StackDown
from tests.conftest import pause_schedules
from tests.faults.harness import Chain, Field, Row, kill, quiet, until
from tests.faults.promoter import Moment
from tests.faults.test_events import kinds

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

FLOW = "flows.policy_change:"
TIMES = 2


@pytest.fixture(scope="module")
def region(own: Field) -> Chain:
    return Chain(own)


def up(field: Field) -> None:
    """`remerge up`, as a person gives it; what runs on a schedule is paused again at once."""
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "remerge"), "up"],
        env={"REMERGE_HOME": str(field.settings.home), "PATH": "/usr/bin:/bin"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    pause_schedules(field.connections)


def begin(field: Field, policy: Policy) -> tuple[str, int]:
    """Let an event start a run, and wait for the run's process."""
    run = field.services.orchestrator.wait_for_event(field.emit(policy), timeout=120)
    return str(run["id"]), until(lambda: field.flow_process(str(run["id"])), timeout=120)


@pytest.mark.parametrize("together", [False, True], ids=["worker", "worker and flow"])
def test_the_worker(region: Chain, row: Row, together: bool) -> None:
    row.fault = f"kill -9 of the worker{' and its flow together' if together else ', the flow goes on'}"
    field = region.field
    for number in range(TIMES):
        run_id, _ = begin(field, region.policy())
        time.sleep(2 * number)
        victims = field.service_processes("worker")
        kill(victims if together else victims[:1])
        up(field)
        state = field.services.orchestrator.read_flow_run(run_id)["state_type"]
        assert state in TERMINAL, "a run whose worker is gone is not shown as running for ever"
        field.survived(region.region, row)


@pytest.mark.parametrize("service", ["prefect", "mlflow"])
@pytest.mark.parametrize("whole", [False, True], ids=["first process", "all processes"])
def test_a_server(region: Chain, row: Row, service: str, whole: bool) -> None:
    row.fault = (
        f"kill -9 of {embedded.TITLES[service]} in a promotion, {'whole' if whole else 'first process'}"
    )
    field = region.field
    for number in range(TIMES):
        _, pid = begin(field, region.policy())
        time.sleep(2 * number + 1)
        victims = field.service_processes(service)
        kill(victims if whole else victims[:1])
        up(field)
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), timeout=200)
        field.survived(region.region, row)


def test_an_event_that_is_lost(region: Chain, row: Row) -> None:
    row.fault = "the event lost: Prefect was down, or died having taken it"
    field = region.field
    kill(field.service_processes("prefect"))
    policy = region.policy()
    with pytest.raises(StackDown):
        field.emit(policy)
    up(field)
    assert field.services.releases.read_pointer(region.region)[0].policy_serial < policy.serial  # type: ignore[index]
    field.survived(region.region, row)

    field.emit(region.policy())
    kill(field.service_processes("prefect"))
    up(field)
    field.survived(region.region, row)


def test_the_same_event_after_a_restart(region: Chain, row: Row) -> None:
    row.fault = "the same event again after a restart of Prefect"
    field = region.field
    policy = region.policy()
    event_id = field.emit(policy)
    run = field.services.orchestrator.wait_for_event(event_id, timeout=120)
    field.services.orchestrator.wait(run["id"], timeout=200)
    kill(field.service_processes("prefect"))
    up(field)
    before = len(field.runs_of(region.region))
    field.emit(policy, event_id)
    with suppress(AssertionError):
        until(lambda: len(field.runs_of(region.region)) > before, timeout=15)
    runs = field.wait_for_runs(region.region, before)
    row.remark = f"{len(runs) - before} run more"
    field.survived(region.region, row)
    assert kinds(field, region.region) == ["intended", "live"]


def kill_store(pids: list[int]) -> None:
    kill(pids)


MOMENTS: dict[str, Moment] = {
    "before the upload": Moment(f"{FLOW}upload_release", "before"),
    "after the model": Moment("infra.releases:ReleaseStore.write_file", "after", 1),
    "after the certificate": Moment("infra.releases:ReleaseStore.write_file", "after", 2),
    "after the manifest": Moment("infra.releases:ReleaseStore.create_manifest", "after"),
    "after the pointer": Moment("infra.releases:ReleaseStore.switch", "after"),
}


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_the_store_in_an_upload(region: Chain, row: Row, moment: str) -> None:
    row.fault = "kill -9 of SeaweedFS between the objects of an upload"
    field = region.field
    policy = region.policy()
    act = partial(kill_store, field.service_processes("s3"))
    ended = field.promotion(policy, (MOMENTS[moment], act)).wait()
    assert not ended.completed
    assert "remerge up" in ended.sentence
    up(field)
    field.survived(region.region, row)


def test_the_store_in_the_middle_of_an_object(region: Chain, row: Row) -> None:
    row.fault = "kill -9 of SeaweedFS in the middle of a 48 MB object"
    field = region.field
    content = uuid.uuid4().bytes * (3 * 1024 * 1024)
    partly = 0
    for number in range(5):
        store = ObjectStore(field.connections)
        key = f"uploads/{uuid.uuid4().hex}"
        acknowledged: list[str] = []

        def upload(store: ObjectStore = store, key: str = key, told: list[str] = acknowledged) -> None:
            with suppress(RemergeError):
                store.create(key, content)
                told.append(key)

        uploading = threading.Thread(target=upload)
        uploading.start()
        time.sleep(0.05 + 0.08 * number)
        kill(field.service_processes("s3"))
        uploading.join()
        partly += not acknowledged
        up(field)
        if acknowledged or store.exists(key):
            assert store.read(key).content == content, "an object is there whole or not at all"
        field.survived(region.region, row)
    row.remark = f"{partly} uploads were broken off"


def test_everything_at_once(region: Chain, row: Row) -> None:
    row.fault = "kill -9 of all processes of the stack in a promotion"
    field = region.field
    for number in range(TIMES):
        begin(field, region.policy())
        time.sleep(2 * number + 1)
        kill(pid for name in ("worker", "prefect", "mlflow", "s3") for pid in field.service_processes(name))
        up(field)
        field.survived(region.region, row)


def test_down_and_up_in_a_promotion(region: Chain, row: Row) -> None:
    row.fault = "`remerge down` in a promotion, then `remerge up`"
    field = region.field
    begin(field, region.policy())
    time.sleep(3)
    embedded.stop(field.settings, quiet)
    up(field)
    field.survived(region.region, row)
