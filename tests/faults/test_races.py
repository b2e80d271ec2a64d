"""Two promoters that reach the same step at the same time, twenty times."""

from __future__ import annotations

from functools import partial

import pytest

from infra.documents import release_id_of
from tests.faults.harness import Chain, Row
from tests.faults.promoter import FORKS, Moment

pytestmark = [pytest.mark.system, pytest.mark.faults]

FLOW = "flows.policy_change:"
STEPS = (
    (f"{FLOW}make_draw", 1),
    (f"{FLOW}write_ledger", 1),
    (f"{FLOW}register", 1),
    (f"{FLOW}upload_release", 1),
    ("infra.releases:ReleaseStore.create_manifest", 1),
    ("infra.releases:ReleaseStore.switch", 1),  # both have read the same pointer
    (f"{FLOW}set_alias", 1),
    (f"{FLOW}write_ledger", 2),
)
TIMES = 20


@pytest.mark.timeout(1200)
def test_two_promoters_of_one_policy(chain: Chain, row: Row) -> None:
    row.fault = "two promoters of one policy, together at a step"
    for number in range(TIMES):
        where, nth = STEPS[number % len(STEPS)]
        policy = chain.policy()
        together = partial(FORKS.Barrier(2).wait, 60)
        ends = [
            promotion.wait()
            for promotion in [
                chain.field.promotion(policy, (Moment(where, "before", nth), together)) for _ in range(2)
            ]
        ]
        assert all(ended.completed for ended in ends), ends
        chain.field.survived(chain.region, row)
        entries = chain.field.services.ledger.entries(chain.field.portfolio.lineage)
        release_id = release_id_of(policy, chain.field.portfolio)
        assert [e.kind for e in entries if e.release_id == release_id] == ["intended", "live"]


@pytest.mark.timeout(1200)
def test_promoters_of_two_successive_policies(chain: Chain, row: Row) -> None:
    """The older one has passed its last look at the policies when the newer one is stored; then both go on together."""
    row.fault = "promoters of two successive policies, together at a step"
    for number in range(TIMES):
        where, nth = STEPS[3 + number % 3]
        older = chain.policy()
        begun = FORKS.Event()
        together = partial(FORKS.Barrier(2).wait, 60)
        meeting = (Moment(where, "before", nth), together)
        first = chain.field.promotion(older, (Moment(f"{FLOW}register", "before"), begun.set), meeting)
        assert begun.wait(60)
        newer = chain.policy()
        second = chain.field.promotion(newer, meeting)
        ends = [first.wait(), second.wait()]
        assert ends[1].completed, ends
        chain.field.survived(chain.region, row)
        found = chain.field.services.releases.read_pointer(chain.region)
        assert found is not None
        assert found[0].policy_serial == newer.serial


INTENDED = Moment(f"{FLOW}write_ledger", "before")
SEALING = Moment("infra.releases:ReleaseStore.create_manifest", "before")


class Gate:
    """Where a promotion stops until it is let through."""

    def __init__(self) -> None:
        self.arrived, self.opened = FORKS.Event(), FORKS.Event()

    def stop(self) -> None:
        self.arrived.set()
        self.opened.wait(60)

    def pass_through(self) -> None:
        self.opened.set()


@pytest.mark.parametrize("later_first", [True, False])
@pytest.mark.parametrize("sealing", [True, False])
def test_two_promoters_between_which_another_region_got_a_release(
    chain: Chain, row: Row, sealing: bool, later_first: bool
) -> None:
    """The ledger grows between their looks at it, so their certificates' cumulative figures would differ."""
    row.fault = "two promoters of one policy, and another region's release between their looks at the ledger"
    field = chain.field
    policy = chain.policy()
    early, early_seal, late = Gate(), Gate(), Gate()
    first = field.promotion(policy, (INTENDED, early.stop), (SEALING, early_seal.stop))
    assert early.arrived.wait(60)
    field.promote(field.policy(field.region()))
    second = field.promotion(policy, (SEALING if sealing else INTENDED, late.stop))
    assert late.arrived.wait(60)
    early.pass_through()
    if sealing:
        early_seal.arrived.wait(60)  # both have written their files now, and neither has sealed them
    if later_first:
        late.pass_through()
        second.wait()
    early_seal.pass_through()
    first.wait()
    late.pass_through()
    ends = [first.wait(), second.wait()]
    assert all(ended.completed for ended in ends), ends
    field.survived(chain.region, row)
