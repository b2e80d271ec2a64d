"""Fifty policy changes for ten regions within a minute."""

from __future__ import annotations

import time

import pytest

from tests.faults.harness import Field, Row

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(1500)]

REGIONS, CHANGES = 10, 5
SECONDS = 300.0  # within which everything must be settled, on a machine that does nothing else


def test_fifty_changes_in_a_minute(shared: Field, row: Row) -> None:
    row.fault = "fifty policy changes for ten regions within a minute"
    regions = [shared.region() for _ in range(REGIONS)]
    begun = time.monotonic()
    for number in range(CHANGES):
        for region in regions:
            shared.emit(shared.policy(region, 3.9 * 0.985**number))
    emitted = time.monotonic() - begun
    assert emitted < 60

    most = 0
    quiet_since = time.monotonic()
    while (
        time.monotonic() - quiet_since < 10
    ):  # Prefect may lose an event under load: so not all need have a run
        time.sleep(0.5)
        runs = [run for run in shared.services.orchestrator.runs("policy-change") if _of(run) in regions]
        most = max(most, sum(run["state_type"] in {"RUNNING", "PENDING"} for run in runs))
        if not runs or not all(run.get("end_time") for run in runs):
            quiet_since = time.monotonic()
        assert time.monotonic() - begun < 4 * SECONDS, "the runs do not come to an end"
    took = time.monotonic() - begun
    superseded = sum("superseded" in str((run.get("state") or {}).get("message")) for run in runs)
    states = {
        state: sum(run["state_name"] == state for run in runs) for state in {r["state_name"] for r in runs}
    }
    for region in regions:
        shared.survived(region, row)
    row.remark = (
        f"{len(runs)} runs, emitted in {emitted:.0f} s, settled after {took:.0f} s, at most {most} runs at once, "
        f"{superseded} superseded; {states}"
    )
    assert most <= 2
    assert set(states) == {"Completed"}
    assert took < SECONDS


def _of(run: object) -> str | None:
    return (run.get("parameters") or {}).get("region")  # type: ignore[attr-defined]
