"""Sets of candidates for a merge operator: no better one fits, whatever decides, and nothing else is certified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate import Certificate
from accounting.errors import AccountingError, BudgetInfeasible, IncompatibleCandidates, InvalidInput
from accounting.independent import derive_again
from accounting.joint_release import joint_release
from accounting.linear_combination import accumulated_noise_variance, generic
from accounting.members import members_of
from accounting.merges import OPERATOR_SURROGATE
from accounting.operator_sets import best_operator_set
from accounting.plan import Mechanism
from accounting.recheck import recheck
from accounting.restate import restate
from accounting.selection_rules import SCORES_UNACCOUNTED
from accounting.solver import solve
from accounting.trajectory import Candidate, Trajectory
from tests.accounting.test_certificate import certify

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
Maker = Callable[..., Any]


def fitting(
    candidates: Sequence[Candidate],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    sizes: Sequence[int],
) -> Iterator[tuple[Candidate, ...]]:
    """Every set whose joint release fits, by trying all of them."""
    for size in sizes:
        for chosen in combinations(candidates, size):
            bound = joint_release([c.trajectory for c in chosen], relation)
            if bound.delta(budget.epsilon) <= budget.delta:
                yield chosen


def precision(chosen: Sequence[Candidate]) -> float:
    return math.fsum(1 / accumulated_noise_variance(c.trajectory) for c in chosen)


@given(
    noises=st.lists(st.sampled_from([9.0, 10.0, 12.0, 15.0, 20.0, 31.0, 50.0]), min_size=2, max_size=7),
    epsilon=st.sampled_from([1.0, 2.0, 3.0, 4.5]),
    size=st.sampled_from([None, None, 2, 3]),
)
def test_no_set_with_less_noise_fits(
    noises: list[float], epsilon: float, size: int | None, make_candidates: Maker
) -> None:
    candidates, budget = make_candidates(noises), PrivacyBudget(epsilon=epsilon, delta=1e-5)
    sizes = [size] if size else range(2, len(noises) + 1)
    best = max((precision(s) for s in fitting(candidates, budget, REPLACE, sizes)), default=None)
    members, _ = members_of(candidates, budget.delta, REPLACE)
    found = best_operator_set(members, budget, REPLACE, size)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.objective == pytest.approx(-1 / best, rel=1e-11)
        assert found.epsilon <= epsilon
        assert len(found.weights) >= 2
        chosen = {
            c.name: accumulated_noise_variance(c.trajectory) for c in candidates if c.name in found.weights
        }
        for name, weight in found.weights.items():
            assert weight == pytest.approx(1 / chosen[name] / best, rel=1e-9)


@given(
    given=st.lists(
        st.tuples(st.sampled_from([9.0, 12.0, 20.0, 50.0]), st.sampled_from([0.5, 0.7, 0.7, 0.9])),
        min_size=2,
        max_size=6,
    ),
    size=st.sampled_from([None, None, 2, 3]),
)
def test_no_set_of_larger_mean_utility_fits(
    given: list[tuple[float, float]], size: int | None, make_candidates: Maker
) -> None:
    """Of equal means the larger set."""
    plain = make_candidates([noise for noise, _ in given])
    candidates = [replace(c, utility=utility) for c, (_, utility) in zip(plain, given, strict=True)]
    budget = PrivacyBudget(epsilon=3.0, delta=1e-5)
    sizes = [size] if size else range(2, len(given) + 1)
    means = [
        (round(math.fsum(c.utility or 0.0 for c in s) / len(s), 12), len(s))
        for s in fitting(candidates, budget, REPLACE, sizes)
    ]
    members, _ = members_of(candidates, budget.delta, REPLACE, {c.name: c.utility or 0.0 for c in candidates})
    found = best_operator_set(members, budget, REPLACE, size)
    assert (found is None) == (not means)
    if found is not None:
        assert (round(found.objective, 12), len(found.weights)) == max(means)
        assert set(found.weights.values()) == {1 / len(found.weights)}


def test_no_sampled_set_with_less_noise_fits(make_candidates: Maker) -> None:
    candidates = make_candidates([0.9, 1.2, 2.0], steps=50, sampling_probability=0.02)
    for epsilon in (1.6, 2.4):
        budget = PrivacyBudget(epsilon=epsilon, delta=1e-5)
        best = max((precision(s) for s in fitting(candidates, budget, REPLACE, (2, 3))), default=None)
        members, _ = members_of(candidates, budget.delta, REPLACE)
        found = best_operator_set(members, budget, REPLACE)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.objective == pytest.approx(-1 / best, rel=1e-11)


def test_a_shared_prefix_is_paid_once_where_utilities_decide(make_run: Maker, make_segment: Maker) -> None:
    """Two checkpoints of one run cost the longer one; by noise such runs are not merged."""
    long = make_run(segments=[make_segment("a", 16.0, 20)])
    short = make_run(segments=[make_segment("a", 16.0, 12)])
    pair = [
        Candidate(name="long", trajectory=long, utility=0.8),
        Candidate(name="short", trajectory=short, utility=0.7),
    ]
    budget = PrivacyBudget(epsilon=joint_release([long], REPLACE).epsilon(1e-5) * 1.001, delta=1e-5)
    plan = solve(budget, pair, relation=REPLACE, selection="stated", merge="ties")
    assert set(plan.weights) == {"long", "short"}
    assert plan.bound.mu == joint_release([long], REPLACE).mu


@pytest.mark.parametrize("size", [None, 3])
def test_of_very_many_candidates_a_good_set_is_found(size: int | None, make_candidates: Maker) -> None:
    """40 candidates have 10^12 sets. Of equal recipes the value is the cost, so the budget should be used up."""
    candidates = make_candidates([20.0 + 0.37 * i for i in range(40)])
    for utilities in (None, {c.name: 0.5 + 0.001 * i for i, c in enumerate(candidates)}):
        budget = PrivacyBudget(epsilon=6.0, delta=1e-5)
        members, _ = members_of(candidates, budget.delta, REPLACE, utilities)
        found = best_operator_set(members, budget, REPLACE, size)
        assert found is not None
        assert found.epsilon <= budget.epsilon
        if size is None and utilities is None:
            assert found.epsilon > 0.98 * budget.epsilon
        else:
            assert len(found.weights) == (size or 2)
        if size is None and utilities is not None:
            assert set(found.weights) == {"c38", "c39"}


def test_a_plan_of_an_operator(make_candidates: Maker) -> None:
    candidates = make_candidates([8.0, 16.0, 32.0])
    budget = PrivacyBudget(epsilon=3.0, delta=1e-5)
    plan = solve(budget, candidates, relation=REPLACE, merge="ties", merge_options={"density": 0.3})
    assert plan.mechanism is Mechanism.OPERATOR
    assert (plan.merge, plan.merge_options) == ("ties", {"density": 0.3})
    assert plan.bound.name == "joint"
    assert set(plan.weights) == {"c1", "c2"}
    assert plan.outcomes == {"operator": 1.0}
    assert plan.merged_weights("operator") == plan.weights
    assert plan.outcome_epsilon("operator") == plan.epsilon <= 3.0
    assert [a.label for a in plan.alternatives] == ["best_single"]
    assert not {"generic", "shifted"} & set(plan.other_bounds)
    assert plan.notes == ()
    linear = solve(budget, candidates, relation=REPLACE, mechanisms=["linear_combination"])
    assert (linear.merge, dict(linear.merge_options), dict(linear.tasks), linear.records) == (
        "linear",
        {},
        {},
        None,
    )


def test_where_no_two_fit_one_is_released_alone(make_candidates: Maker) -> None:
    candidates = make_candidates([8.0, 16.0, 17.0])
    alone = joint_release([candidates[2].trajectory], REPLACE).epsilon(1e-5)
    plan = solve(
        PrivacyBudget(epsilon=alone * 1.01, delta=1e-5),
        candidates,
        relation=REPLACE,
        merge="slerp",
        set_size=2,
    )
    assert plan.mechanism is Mechanism.LINEAR_COMBINATION
    assert (dict(plan.weights), plan.merge) == ({"c2": 1.0}, "linear")
    assert "No 2 candidates fit" in plan.notes[0]
    with pytest.raises(BudgetInfeasible, match="noise_multiplier"):
        solve(PrivacyBudget(epsilon=alone / 2, delta=1e-5), candidates, relation=REPLACE, merge="ties")


def test_scores_that_were_consulted_are_paid_for(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 20.0, 32.0])
    scores = {"c0": 0.7, "c1": 0.9, "c2": 0.8}
    budget = PrivacyBudget(epsilon=8.0, delta=1e-5)
    for size, merged in ((None, ["c0", "c1", "c2"]), (2, ["c1", "c2"])):
        plan = solve(
            budget,
            candidates,
            relation=REPLACE,
            merge="ties",
            selection="validation",
            scores=scores,
            set_size=size,
        )
        assert list(plan.weights) == merged
        assert set(plan.weights.values()) == {1 / len(merged)}
        assert plan.consulted == ("c0", "c1", "c2")
        assert plan.bound.mu == joint_release([c.trajectory for c in candidates], REPLACE).mu
        assert plan.expected_utility == pytest.approx(0.8 if size is None else 0.85)
        assert OPERATOR_SURROGATE in plan.notes
        assert_holds(certify(plan), candidates)
    with pytest.raises(BudgetInfeasible, match="3 private candidates"):
        solve(
            PrivacyBudget(epsilon=1.0, delta=1e-5),
            candidates,
            relation=REPLACE,
            merge="ties",
            selection="validation",
            scores=scores,
        )
    uncovered = solve(
        budget,
        candidates,
        relation=REPLACE,
        merge="ties",
        selection="validation_unaccounted",
        scores=scores,
    )
    assert SCORES_UNACCOUNTED in uncovered.bound.assumptions
    assert set(uncovered.weights) == {"c1", "c2"}


def test_bad_requests(make_candidates: Maker) -> None:
    candidates, budget = make_candidates([8.0, 16.0]), PrivacyBudget(epsilon=3.0, delta=1e-5)
    for bad in (
        {"merge": ""},
        {"merge": "linear", "merge_options": {"scale": 1.0}},
        {"merge": "linear", "set_size": 2},
        {"merge": "ties", "merge_options": {"density": math.nan}},
        {"merge": "ties", "merge_options": {"density": [1]}},
        {"merge": "ties", "set_size": 1},
        {"merge": "ties", "set_size": 2.0},
        {"merge": "ties", "allow_fresh_noise": True},
        {"mechanisms": ["operator"]},
    ):
        with pytest.raises(InvalidInput):
            solve(budget, candidates, relation=REPLACE, **bad)


def assert_holds(certificate: Certificate, candidates: Sequence[Candidate]) -> None:
    runs: dict[str, Trajectory] = {c.name: c.trajectory for c in candidates}
    recheck(certificate, runs)
    found = [*restate(certificate, runs), *derive_again(certificate, runs)]
    assert not [check for check in found if not check.holds]


@pytest.fixture(scope="module")
def merged(make_candidates: Maker) -> tuple[Certificate, list[Candidate]]:
    candidates = make_candidates([8.0, 16.0, 32.0])
    plan = solve(
        PrivacyBudget(epsilon=3.0, delta=1e-5),
        candidates,
        relation=REPLACE,
        merge="ties",
        merge_options={"density": 0.3, "sign": "mass", "rescale": True, "rounds": 2},
    )
    return certify(plan), candidates


def test_a_certificate_of_an_operator(merged: tuple[Certificate, list[Candidate]]) -> None:
    certificate, candidates = merged
    assert_holds(certificate, candidates)
    document = certificate.to_dict()
    assert document["merge"] == "ties"
    assert document["merge_options"] == {"density": 0.3, "sign": "mass", "rescale": True, "rounds": 2}
    assert not {"tasks", "records"} & set(document)
    assert Certificate.from_dict(document) == certificate
    assert "operator" in certificate.merge_rule


def test_an_operator_is_never_certified_by_a_bound_of_averages(
    merged: tuple[Certificate, list[Candidate]],
) -> None:
    certificate, candidates = merged
    for bound in ("generic", "shifted", "joint_rdp", "mixture", "parallel_tasks"):
        with pytest.raises(InvalidInput, match="joint"):
            replace(certificate, bound=bound)
    runs = [c.trajectory for c in candidates if c.name in certificate.weights]
    tighter = generic(runs, [0.5, 0.5], REPLACE)  # at weights inverse to the variances the two are equal
    assert certificate.mu is not None
    assert tighter.mu is not None
    assert tighter.mu < certificate.mu
    claimed = replace(
        certificate, weights={"c1": 0.5, "c2": 0.5}, mu=tighter.mu, epsilon=tighter.epsilon(1e-5)
    )
    by_name = {c.name: c.trajectory for c in candidates}
    with pytest.raises(AccountingError):
        recheck(claimed, by_name)
    assert [c for c in restate(claimed, by_name) if not c.holds]
    assert [c for c in derive_again(claimed, by_name) if not c.holds]


@pytest.mark.parametrize(
    "changes",
    [
        {"merge": "linear", "merge_options": {}},
        {"merge": "linear"},
        {"merge": " "},
        {"merge_options": {"density": math.inf}},
        {"merge_options": {"density": None}},
        {"merge_options": {"": 1}},
        {"mechanism": Mechanism.LINEAR_COMBINATION},
        {"mechanism": Mechanism.RANDOM_SELECTION},
        {"fresh_noise": 0.1},
        {"tasks": {"c1": "a", "c2": "b"}},
        {"records": "shared"},
    ],
)
def test_fields_of_an_operator_that_do_not_fit(
    changes: dict[str, Any], merged: tuple[Certificate, list[Candidate]]
) -> None:
    with pytest.raises(InvalidInput):
        replace(merged[0], **changes)


def test_a_linear_certificate_keeps_its_bytes(make_candidates: Maker) -> None:
    plan = solve(PrivacyBudget(epsilon=3.0, delta=1e-5), make_candidates([8.0, 16.0, 32.0]), relation=REPLACE)
    certificate = certify(plan, realised=next(iter(plan.outcomes)) if len(plan.outcomes) > 1 else None)
    document = certificate.to_dict()
    assert list(document) == [
        "schema",
        "release_id",
        "region",
        "policy_digest",
        "policy_serial",
        "manifest_digest",
        "portfolio",
        "lineage",
        "unit",
        "neighboring_relation",
        "mechanism",
        "weights",
        "candidates",
        "merge_rule",
        "bound",
        "assumptions",
        "source",
        "budget",
        "epsilon",
        "delta",
        "mu",
        "profile",
        "other_bounds",
        "selection",
        "realised",
        "fresh_noise",
        "consulted",
        "components",
        "versions",
    ]
    assert Certificate.from_dict(document) == certificate
    for bad in (
        {"merge": "ties"},
        {"merge": 3},
        {"tasks": []},
        {"records": ["shared"]},
        {"merge_options": 1},
    ):
        with pytest.raises(InvalidInput):
            Certificate.from_dict(document | bad)


def test_mixed_relations_are_refused(make_candidates: Maker) -> None:
    with pytest.raises(IncompatibleCandidates, match="relation"):
        solve(
            PrivacyBudget(epsilon=3.0, delta=1e-5),
            make_candidates([8.0, 16.0]),
            relation=ADD_OR_REMOVE,
            merge="ties",
        )
