"""kill -9 of the flow's process at random times of a promotion that an event started."""

from __future__ import annotations

import random
import time

import pytest

from infra.documents import Policy
from infra.orchestrator import TERMINAL
from tests.faults.harness import Chain, Field, Row, kill, until

pytestmark = [pytest.mark.system, pytest.mark.faults]

ROUNDS = 15
SEED = 20261129


def started(field: Field, policy: Policy) -> tuple[str, int]:
    """The run that an event has started, and its process."""
    event_id = field.emit(policy)
    run = field.services.orchestrator.wait_for_event(event_id, timeout=120, interval=0.05)
    return str(run["id"]), until(lambda: field.flow_process(str(run["id"])), timeout=120)


@pytest.mark.timeout(1800)
def test_kills_at_random_times_lose_nothing(shared: Field, row: Row) -> None:
    row.fault = "kill -9 of the flow at a random time, after its event"
    chains = [Chain(shared), Chain(shared)]
    clock = random.Random(SEED)

    begun = time.monotonic()
    ends = [started(shared, chain.policy())[0] for chain in chains]
    for run_id in ends:
        shared.services.orchestrator.wait(run_id, timeout=300)
    usual = time.monotonic() - begun

    finished = 0
    for _ in range(ROUNDS):
        deaths = []
        for chain in chains:
            run_id, pid = started(shared, chain.policy())
            deaths.append((time.monotonic() + clock.uniform(0, usual), run_id, pid))
        for when, run_id, pid in sorted(deaths):
            time.sleep(max(0.0, when - time.monotonic()))
            state = shared.services.orchestrator.read_flow_run(run_id).get("state_type")
            finished += state in TERMINAL
            kill([pid])
        for _, run_id, _ in deaths:  # the worker tells Prefect that the process is gone
            shared.services.orchestrator.wait(run_id, timeout=60)
        for chain in chains:
            shared.survived(chain.region, row)
    row.remark = f"{finished} had ended before; times from seed {SEED}, over {usual:.0f} s"
