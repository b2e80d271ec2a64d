"""What reconcile decides for a region, from documents and a clock alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from infra.documents import Attempt, LedgerEntry, Policy, PortfolioManifest, Provenance, release_id_of
from infra.orchestrator import FlowRun
from tasks import reconciling
from tasks.reconciling import Action, Found, decide, reconcile_all, unended_run

NOW = datetime(2027, 3, 1, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def policy(serial: int = 1, effective_at: datetime = NOW - MINUTE, portfolio: str = "digits@1") -> Policy:
    return Policy.from_fields(
        {
            "region": "eu",
            "serial": serial,
            "epsilon": 3.0,
            "delta": 1e-5,
            "portfolio": portfolio,
            "author": "test",
            "effective_at": effective_at.isoformat(),
        },
        "policy",
    )


def manifest(serial: int = 1) -> PortfolioManifest:
    split = {"rows": 10, "digest": "1" * 64}
    return PortfolioManifest.from_fields(
        {
            "name": "digits",
            "serial": serial,
            "created_at": "2026-01-01T00:00:00Z",
            "lineage": "digits",
            "unit": "record",
            "neighboring_relation": "replace_one",
            "recipe_digest": "2" * 64,
            "data": {
                "loader": "module:function",
                "split_rule": "a rule",
                "private": {**split, "rows": None},
                "public_train": split,
                "public_gate": split,
            },
            "network": {"factory": "module:function"},
            "initialisation_digest": "3" * 64,
            "feature_radius": 1.0,
            "n_max": 1200,
            "flow_run_id": None,
            "candidates": [
                {
                    "name": "only",
                    "registered_model": "digits",
                    "version": 1,
                    "run_id": "run",
                    "model_sha256": "4" * 64,
                    "trajectory_sha256": "5" * 64,
                }
            ],
        },
        "manifest",
    )


def attempt(outcome: str, serial: int = 1, portfolio: str | None = "digits@1") -> Attempt:
    return Attempt(
        region="eu",
        policy_serial=serial,
        outcome=outcome,
        portfolio=portfolio,
        release_id=None,
        reason="The smallest epsilon on offer is 4.",
        at=NOW,
        provenance=Provenance(started_by="hand"),
    )


def failed_check(release_id: str) -> LedgerEntry:
    return LedgerEntry.from_fields(
        {
            "serial": 1,
            "previous_digest": None,
            "lineage": "digits",
            "release_id": release_id,
            "region": "eu",
            "kind": "failed_check",
            "written_at": "2026-01-01T00:00:00Z",
            "neighboring_relation": "replace_one",
            "unit": "record",
            "outcomes": [
                {
                    "name": "only",
                    "weight": 1.0,
                    "candidates": ["only"],
                    "segments": [{"steps": 1}],
                    "paths": {"only": [["a", 1]]},
                    "coefficients": None,
                }
            ],
            "drawn": None,
            "selection": "noise",
            "certificate_digest": "6" * 64,
            "counted": 0,
        },
        "entry",
    )


def found(**changes: Any) -> Found:
    fields: dict[str, Any] = {
        "policy": policy(),
        "upcoming": None,
        "manifest": manifest(),
        "live_release_id": None,
        "failed_check": None,
        "attempt": None,
        "unended": None,
    }
    return Found(**{**fields, **changes})


def test_a_policy_in_effect_that_is_not_live_is_started() -> None:
    for live in (None, "9" * 64):
        decision = decide("eu", found(live_release_id=live, policy=policy(7)))
        assert (decision.action, decision.serial) == (Action.START, 7)


def test_a_live_release_is_only_mended() -> None:
    live = release_id_of(policy(), manifest())
    # whatever else is known: the pointer is the truth
    for more in ({}, {"attempt": attempt("error")}, {"unended": FlowRun(name="slow")}):
        assert decide("eu", found(live_release_id=live, **more)).action is Action.MEND


def test_nothing_is_in_effect_yet() -> None:
    coming = policy(effective_at=NOW + MINUTE)
    decision = decide("eu", found(policy=None, manifest=None, upcoming=coming))
    assert decision.action is Action.WAIT
    assert "2027-03-01 12:01:00 UTC" in decision.reason


def test_an_upcoming_policy_does_not_hold_up_the_one_in_effect() -> None:
    coming = policy(2, effective_at=NOW + MINUTE)
    decision = decide("eu", found(upcoming=coming))
    assert (decision.action, decision.serial) == (Action.START, 1)


@pytest.mark.parametrize("outcome", ["failed_check", "infeasible"])
def test_what_ended_for_good_is_not_tried_again(outcome: str) -> None:
    decision = decide("eu", found(attempt=attempt(outcome)))
    assert decision.action is Action.NOTHING
    assert "smallest epsilon on offer" in decision.reason


@pytest.mark.parametrize("outcome", ["error", "superseded", "not_in_effect", "promoted"])
def test_what_did_not_end_for_good_is_tried_again(outcome: str) -> None:
    assert decide("eu", found(attempt=attempt(outcome))).action is Action.START


def test_the_ledger_knows_a_failed_check_even_where_the_note_was_lost() -> None:
    entry = failed_check(release_id_of(policy(), manifest()))
    assert decide("eu", found(failed_check=entry)).action is Action.NOTHING
    assert decide("eu", found(failed_check=entry, attempt=attempt("error"))).action is Action.NOTHING


def test_an_infeasible_policy_is_tried_again_with_a_new_portfolio_version() -> None:
    latest = policy(portfolio="digits@latest")
    ended = attempt("infeasible", portfolio="digits@1")
    assert decide("eu", found(policy=latest, attempt=ended)).action is Action.NOTHING
    assert decide("eu", found(policy=latest, manifest=manifest(2), attempt=ended)).action is Action.START


def test_a_note_on_another_policy_says_nothing_of_this_one() -> None:
    decision = decide("eu", found(policy=policy(2), attempt=attempt("infeasible", serial=1)))
    assert decision.action is Action.START


def test_a_run_that_is_at_it_is_waited_for() -> None:
    decision = decide("eu", found(unended=FlowRun(name="eu-policy-1", state_name="Running")))
    assert decision.action is Action.WAIT
    assert "eu-policy-1 is running" in decision.reason


class Runs:
    """Stands for Prefect's list of unended runs, which cannot be made two minutes old in a test."""

    def __init__(self, *runs: FlowRun) -> None:
        self.runs = runs

    def unended_runs(self, deployment: str) -> list[FlowRun]:
        assert deployment == "policy-change"
        return list(self.runs)


def ago(age: timedelta) -> str:
    return (NOW - age).isoformat().replace("+00:00", "Z")


def run(age: timedelta | None, region: str = "eu", serial: int = 1, **more: Any) -> FlowRun:
    begun = None if age is None else ago(age)
    parameters = {"region": region, "serial": serial}
    fields: Any = {"state_type": "SCHEDULED" if age is None else "RUNNING", **more}
    return FlowRun(name=f"{region}-{serial}", start_time=begun, parameters=parameters, **fields)


def unended(*runs: FlowRun) -> FlowRun | None:
    services: Any = type("Only", (), {"orchestrator": Runs(*runs)})()
    return unended_run(services, "eu", 1, NOW)


def test_a_young_run_counts_and_an_old_one_may_be_dead() -> None:
    assert unended(run(timedelta(seconds=119))) is not None
    assert unended(run(timedelta(seconds=121))) is None


def test_a_run_that_waits_for_its_turn_counts_however_long() -> None:
    assert unended(run(None)) is not None
    assert unended(run(None, state={"timestamp": ago(60 * MINUTE)})) is not None


def test_a_run_whose_worker_died_before_it_began_may_be_dead() -> None:
    for seconds, counts in ((119, True), (121, False)):
        state = {"timestamp": ago(timedelta(seconds=seconds))}
        assert (unended(run(None, state_type="PENDING", state=state)) is not None) is counts


def test_runs_of_other_regions_and_policies_do_not_count() -> None:
    assert (
        unended(run(MINUTE, region="us"), run(MINUTE, serial=2), FlowRun(name="bare", parameters={})) is None
    )


class Policies:
    """One region's policies, without a store."""

    def __init__(self, *policies: Policy) -> None:
        self.policies = policies

    def regions(self) -> list[str]:
        return ["eu"]

    def newest(self, region: str) -> Policy:
        return self.policies[-1]

    def in_effect(self, region: str, now: datetime) -> Policy | None:
        from infra.policies import PolicyStore

        store = PolicyStore.__new__(PolicyStore)
        store.documents = type("Last", (), {"last_serial": lambda _, region: len(self.policies)})()  # type: ignore[assignment]
        store.read = lambda region, serial: self.policies[serial - 1]  # type: ignore[method-assign]
        return store.in_effect(region, now)


def test_which_policy_is_in_effect_as_the_clock_goes_on() -> None:
    one = policy(1, NOW - 10 * MINUTE)
    two = policy(2, NOW + 10 * MINUTE)
    three = policy(3, NOW + 5 * MINUTE)  # takes effect first, and cancels policy 2
    policies = Policies(one, two, three)
    at = [policies.in_effect("eu", NOW + minutes * MINUTE) for minutes in (-11, -10, 0, 4, 5, 10, 11)]
    assert [found and found.serial for found in at] == [None, 1, 1, 1, 3, 3, 3]


def test_a_later_policy_cancels_an_earlier_one_only_when_it_takes_effect() -> None:
    policies = Policies(policy(1, NOW), policy(2, NOW + 5 * MINUTE), policy(3, NOW + 10 * MINUTE))
    at = [policies.in_effect("eu", NOW + minutes * MINUTE) for minutes in (0, 5, 9, 10)]
    assert [found and found.serial for found in at] == [1, 2, 2, 3]


def test_what_is_wrong_with_one_region_is_told_and_keeps_no_other_from_its_turn() -> None:
    from infra.object_store import Corrupted

    class Damaged(Policies):
        def regions(self) -> list[str]:
            return ["aa", "zz"]

        def in_effect(self, region: str, now: datetime) -> Policy | None:
            if region == "aa":
                raise Corrupted("s3://production/policies/aa/00000001.json is damaged.")
            return None

        def next_to_come(self, region: str, now: datetime) -> Policy:
            return policy(1, NOW + MINUTE)

    services: Any = type("Only", (), {"policies": Damaged(), "orchestrator": Runs()})()
    first, second = reconcile_all(services, NOW)
    assert (first.region, first.failed) == ("aa", True)
    assert "policies/aa/00000001.json" in first.sentence
    assert (second.region, second.failed, second.action) == ("zz", False, Action.WAIT)


def test_two_minutes_is_what_a_run_may_take_before_another_is_started_beside_it() -> None:
    assert timedelta(minutes=2) == reconciling.GIVEN_UP
