"""kill -9 of the flow's process at every boundary of a promotion, and within its longest steps."""

from __future__ import annotations

import pytest

from infra.documents import DEFAULT_MECHANISMS, release_id_of
from infra.releases import CERTIFICATE, MODEL, release_key
from tests.faults.harness import Chain, Row
from tests.faults.promoter import Moment, die

pytestmark = pytest.mark.system

FLOW = "flows.policy_change:"
STEPS = {
    "the draw": (f"{FLOW}make_draw", 1),
    "the merge": (f"{FLOW}merge_models", 1),
    "the ledger entry `intended`": (f"{FLOW}write_ledger", 1),
    "the check": (f"{FLOW}check_on_public_rows", 1),
    "the registration": (f"{FLOW}register", 1),
    "the upload": (f"{FLOW}upload_release", 1),
    "the pointer": (f"{FLOW}switch_pointer", 1),
    "the alias": (f"{FLOW}set_alias", 1),
    "the ledger entry `live`": (f"{FLOW}write_ledger", 2),
    "the note on the attempt": (f"{FLOW}note_attempt", 1),
    # within a step
    "the writing of draw.json": ("infra.releases:ReleaseStore.create_draw", 1),
    "the upload of the model": ("infra.releases:ReleaseStore.write_file", 1),
    "the upload of the certificate": ("infra.releases:ReleaseStore.write_file", 2),
    "the sealing manifest": ("infra.releases:ReleaseStore.create_manifest", 1),
    "the write of the pointer": ("infra.releases:ReleaseStore.switch", 1),
    "MLflow's new version": ("mlflow:MlflowClient.create_model_version", 1),
}
FAST = {("the ledger entry `intended`", "after"), ("the pointer", "after")}


@pytest.mark.parametrize(
    ("step", "when"),
    [
        pytest.param(step, when, marks=() if (step, when) in FAST else pytest.mark.faults)
        for step in STEPS
        for when in ("before", "after")
    ],
)
def test_a_flow_that_is_killed_loses_nothing(chain: Chain, row: Row, step: str, when: str) -> None:
    row.fault = f"kill -9 of the flow before and after {step}"
    where, nth = STEPS[step]
    policy = chain.policy()
    ended = chain.field.promotion(policy, (Moment(where, when, nth), die)).wait()
    assert ended.killed
    chain.field.survived(chain.region, row)


@pytest.mark.parametrize("operator", ["dare", pytest.param("regmean", marks=pytest.mark.faults)])
def test_a_merge_by_an_operator_is_the_same_after_a_kill(chain: Chain, row: Row, operator: str) -> None:
    """DARE draws masks, RegMean needs statistics: made again, they give the bytes that are stored already."""
    row.fault = f"kill -9 of the flow between the model and the certificate of a merge by {operator}"
    field = chain.field
    policy = field.policy(chain.region, 2.4, merge=operator, mechanisms=list(DEFAULT_MECHANISMS))
    release_id = release_id_of(policy, field.portfolio)
    ended = field.promotion(
        policy, (Moment("infra.releases:ReleaseStore.write_file", "after", 1), die)
    ).wait()
    assert ended.killed
    store = field.services.releases.store
    stored = store.read(release_key(release_id, MODEL)).content
    assert not store.exists(release_key(release_id, CERTIFICATE))
    field.survived(chain.region, row)
    assert field.services.releases.find_manifest(release_id) is not None
    assert store.read(release_key(release_id, MODEL)).content == stored
