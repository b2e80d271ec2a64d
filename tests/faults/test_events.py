"""Events that come twice, ten at once, beside a reconcile, or again after success: one release and one draw."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime

import pytest

from infra.documents import release_id_of
from tasks.reconciling import reconcile_region
from tests.faults.harness import Chain, Field, Row

pytestmark = pytest.mark.system


def kinds(field: Field, region: str) -> list[str]:
    """Of the ledger entries of the release that the region's newest policy names, oldest first."""
    policy = field.services.policies.newest(region)
    assert policy is not None
    release_id = release_id_of(policy, field.portfolio)
    entries = field.services.ledger.entries(field.portfolio.lineage)
    return [entry.kind for entry in entries if entry.release_id == release_id]


def test_duplicates_at_once_and_again_are_one_release(chain: Chain, row: Row) -> None:
    row.fault = "three promotions of one policy at once, and a fourth after success"
    policy = chain.policy()
    ends = [promotion.wait() for promotion in [chain.field.promotion(policy) for _ in range(3)]]
    assert all(ended.completed for ended in ends), ends
    assert kinds(chain.field, chain.region) == ["intended", "live"]
    again = chain.field.promotion(policy).wait()
    assert "already serves release" in again.sentence
    chain.field.survived(chain.region, row)
    assert kinds(chain.field, chain.region) == ["intended", "live"]


@pytest.mark.faults
@pytest.mark.parametrize("same_id", [True, False], ids=["same id", "ids of their own"])
def test_ten_duplicate_events_are_one_release(chain: Chain, row: Row, same_id: bool) -> None:
    row.fault = f"ten duplicate events at once, {'with one id' if same_id else 'each with an id of its own'}"
    before = len(chain.field.runs_of(chain.region))
    policy = chain.policy()
    first = str(uuid.uuid4()) if same_id else None
    emitters = [threading.Thread(target=chain.field.emit, args=(policy, first)) for _ in range(10)]
    for emitter in emitters:
        emitter.start()
    for emitter in emitters:
        emitter.join()
    runs = chain.field.wait_for_runs(chain.region, before + (1 if same_id else 10))
    row.remark = f"{sum(run['parameters']['serial'] == policy.serial for run in runs)} runs"
    chain.field.survived(chain.region, row)
    assert kinds(chain.field, chain.region) == ["intended", "live"]


@pytest.mark.faults
def test_an_event_and_a_reconcile_at_once_are_one_release(chain: Chain, row: Row) -> None:
    row.fault = "an event and two reconciles at once"
    before = len(chain.field.runs_of(chain.region))
    policy = chain.policy()
    chain.field.emit(policy)
    reports = [reconcile_region(chain.field.services, chain.region, datetime.now(UTC)) for _ in range(2)]
    # One that already sees the event's run, or the other's, starts none.
    started = sum(report.flow_run_id is not None for report in reports)
    chain.field.wait_for_runs(chain.region, before + 1 + started)
    row.remark = f"{started} of 2 reconciles started a run too"
    chain.field.survived(chain.region, row)
    assert kinds(chain.field, chain.region) == ["intended", "live"]


@pytest.mark.faults
def test_the_same_event_again_after_success_changes_nothing(chain: Chain, row: Row) -> None:
    row.fault = "the same event again after success"
    policy = chain.policy()
    for _ in range(2):
        event_id = chain.field.emit(policy)
        run = chain.field.services.orchestrator.wait_for_event(event_id, timeout=60)
        ended = chain.field.services.orchestrator.wait(run["id"], timeout=300)
        assert ended["state_type"] == "COMPLETED"
    chain.field.survived(chain.region, row)
    assert kinds(chain.field, chain.region) == ["intended", "live"]
