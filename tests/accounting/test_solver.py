"""From budget to certified weights: optimal, within the budget, indifferent to order, and clear when it fails."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import BudgetInfeasible, IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.linear_combination import accumulated_noise_variance
from accounting.plan import Mechanism, Plan
from accounting.profile import GaussianProfile
from accounting.random_selection import random_selection_profile
from accounting.solver import solve
from accounting.training_hint import noise_multiplier_needed
from accounting.trajectory import Candidate
from accounting.words import rounded_up

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
LC, RS = Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION
Maker = Callable[..., Any]


def budget(epsilon: float, delta: float = 1e-5) -> PrivacyBudget:
    return PrivacyBudget(epsilon=epsilon, delta=delta)


def check(plan: Plan, candidates: list[Candidate]) -> None:
    """What must be true of every plan."""
    assert plan.bound.delta(plan.budget.epsilon) <= plan.budget.delta
    assert plan.epsilon <= plan.budget.epsilon
    assert math.fsum(plan.weights.values()) == pytest.approx(1, abs=1e-14)
    names = [candidate.name for candidate in candidates]
    assert list(plan.weights) == sorted(plan.weights, key=names.index)
    assert plan.bound.sound_for_dp_sgd
    for alternative in plan.alternatives:
        assert alternative.epsilon <= plan.budget.epsilon
        if alternative.label != "best_single" or plan.mechanism is not alternative.mechanism:
            assert alternative.objective <= plan.objective or alternative.label == "best_single"
    assert plan.epsilon <= min(
        (b.epsilon for b in plan.other_bounds.values() if b.epsilon), default=math.inf
    ) * (1 + 1e-9)


@given(
    noises=st.lists(st.floats(min_value=4, max_value=100), min_size=2, max_size=6),
    epsilon=st.floats(min_value=0.3, max_value=8),
)
def test_linear_combination_finds_the_best_set(
    noises: list[float], epsilon: float, make_candidates: Maker
) -> None:
    """Against all subsets, with the joint release worked out by hand."""
    candidates = make_candidates(noises)
    capacity = gaussian.mu_for(epsilon, 1e-5) ** 2
    best = -math.inf
    for size in range(1, len(noises) + 1):
        for subset in itertools.combinations(noises, size):
            if math.fsum(20 * (2 / s) ** 2 for s in subset) <= capacity * (1 - 1e-9):
                best = max(best, -1e-6 * 20 / math.fsum(s**-2 for s in subset))
    try:
        plan = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=[LC])
    except BudgetInfeasible:
        assert best == -math.inf
        return
    check(plan, candidates)
    assert plan.objective >= best * (1 + 1e-9)


@given(
    noises=st.lists(st.floats(min_value=4, max_value=100), min_size=1, max_size=6),
    epsilon=st.floats(min_value=0.3, max_value=8),
)
def test_random_selection_solves_its_program(
    noises: list[float], epsilon: float, make_candidates: Maker
) -> None:
    candidates = make_candidates(noises)
    try:
        plan = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=[RS])
    except BudgetInfeasible:
        assert min(single_run(c.trajectory).epsilon(1e-5) for c in candidates) > epsilon
        return
    check(plan, candidates)
    variance = {c.name: accumulated_noise_variance(c.trajectory) for c in candidates}
    assert plan.objective == pytest.approx(-sum(w * variance[n] for n, w in plan.weights.items()))
    profiles = [GaussianProfile(mu=2 * math.sqrt(20) / s) for s in noises]
    random = np.random.default_rng(1)
    for _ in range(30):
        point = random.dirichlet(np.full(len(noises), 0.2))
        point[-1] = 1 - math.fsum(point[:-1])
        if point[-1] >= 0 and random_selection_profile(point, profiles).delta(epsilon) <= 1e-5:
            assert plan.objective >= -float(point @ list(variance.values())) - 1e-12
    if len(plan.weights) > 1:
        assert plan.bound.delta(epsilon) == pytest.approx(1e-5, rel=1e-9)


@pytest.mark.parametrize("mechanisms", [[LC], [RS], [LC, RS]])
@pytest.mark.parametrize("epsilon", [1.5, 3.0])
def test_order_and_unused_candidates_change_nothing(
    mechanisms: list[Mechanism], epsilon: float, make_candidates: Maker
) -> None:
    candidates = make_candidates([8.0, 16.0, 16.0, 32.0, 45.0])
    plan = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=mechanisms)
    backwards = solve(budget(epsilon), candidates[::-1], relation=REPLACE, mechanisms=mechanisms)
    assert dict(plan.weights) == dict(backwards.weights)
    assert plan.epsilon == backwards.epsilon
    kept = [c for c in candidates if c.name in plan.weights]
    if len(kept) > 1:
        again = solve(budget(epsilon), kept, relation=REPLACE, mechanisms=mechanisms)
        assert dict(again.weights) == pytest.approx(dict(plan.weights))


def test_the_better_mechanism_wins_and_the_other_is_reported(make_candidates: Maker) -> None:
    candidates = make_candidates([8.0, 16.0, 32.0])
    plan = solve(budget(3.0), candidates, relation=REPLACE)
    check(plan, candidates)
    assert plan.mechanism is LC
    assert plan.weights == pytest.approx({"c1": 0.8, "c2": 0.2})
    assert {a.label for a in plan.alternatives} == {"random_selection", "best_single"}
    assert set(plan.other_bounds) == {"generic", "joint_rdp", "basic_composition", "advanced_composition"} | (
        {"joint"} if plan.bound.name == "generic" else set()
    ) - ({"generic"} if plan.bound.name == "generic" else set())
    tight = solve(budget(1.5), candidates, relation=REPLACE)
    check(tight, candidates)
    assert tight.mechanism is RS
    assert tight.weights == pytest.approx(
        {"c1": 0.00779782883, "c2": 0.99220217117}, rel=1e-9
    )  # the golden program
    assert "random_selection_rdp" in tight.other_bounds


def test_one_candidate_keeps_its_own_bound(make_candidates: Maker) -> None:
    (candidate,) = make_candidates([16.0])
    plan = solve(budget(3.0), [candidate], relation=REPLACE)
    assert dict(plan.weights) == {"c0": 1.0}
    assert plan.bound == single_run(candidate.trajectory)
    assert plan.epsilon == single_run(candidate.trajectory).epsilon(1e-5)


def test_utilities_are_not_looked_at(make_candidates: Maker) -> None:
    candidates = make_candidates([8.0, 16.0, 32.0])
    scored = [replace(c, utility=float(i)) for i, c in enumerate(candidates)]
    assert (
        solve(budget(2.0), candidates, relation=REPLACE).weights
        == solve(budget(2.0), scored, relation=REPLACE).weights
    )


def test_candidates_that_differ_in_more_than_noise_are_set_aside(
    make_run: Maker, make_candidates: Maker
) -> None:
    odd = [
        Candidate(name="longer", trajectory=make_run("x", 32.0, 40)),
        Candidate(name="faster", trajectory=make_run("y", 32.0, learning_rate=0.2, max_grad_norm=2.0)),
    ]
    plan = solve(budget(3.0), [*odd, *make_candidates([16.0, 32.0])], relation=REPLACE)
    assert set(plan.weights) <= {"c0", "c1"}
    assert "steps" in plan.set_aside["longer"]
    assert "learning_rate" in plan.set_aside["faster"]
    assert "max_grad_norm" in plan.set_aside["faster"]


def test_equal_classes_take_the_first(make_run: Maker) -> None:
    def pair(name: str, steps: int) -> list[Candidate]:
        return [
            Candidate(name=f"{name}{i}", trajectory=make_run(f"{name}{i}", 40.0, steps)) for i in range(2)
        ]

    one, other = pair("a", 10), pair("b", 20)
    assert set(solve(budget(3.0), one + other, relation=REPLACE).set_aside) == {"b0", "b1"}
    assert set(solve(budget(3.0), other + one, relation=REPLACE).set_aside) == {"a0", "a1"}


def test_nothing_comparable_is_an_error(make_run: Maker) -> None:
    candidates = [Candidate(name=f"c{n}", trajectory=make_run(f"s{n}", 16.0, n)) for n in (10, 20)]
    with pytest.raises(InvalidInput, match="differ in more than their noise"):
        solve(budget(3.0), candidates, relation=REPLACE)


def test_runs_without_noise_are_never_used(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 0.0])
    plan = solve(budget(2.5), candidates, relation=REPLACE)
    assert dict(plan.weights) == {"c0": 1.0}
    assert "without noise" in plan.set_aside["c1"]
    with pytest.raises(BudgetInfeasible, match="c0 was trained without noise"):
        solve(budget(2.5), make_candidates([0.0]), relation=REPLACE)


def test_the_cap_on_drawn_candidates(make_candidates: Maker) -> None:
    """With delta to spare the program puts about delta on a nearly public model."""
    candidates = make_candidates([0.5, 32.0])
    loose = solve(budget(1.5), candidates, relation=REPLACE, mechanisms=[RS])
    assert 0 < loose.weights["c0"] < 1e-5
    assert loose.member_epsilons["c0"] > 100
    capped = solve(budget(1.5), candidates, relation=REPLACE, mechanisms=[RS], realised_epsilon_cap=6.0)
    assert set(capped.weights) == {"c1"}
    assert "cap of 6" in capped.set_aside["c0"]
    assert all(epsilon <= 6.0 for epsilon in capped.member_epsilons.values())


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_no_dust_in_an_average(epsilon: float, make_candidates: Maker) -> None:
    """A candidate fits the budget alone; a trace of a louder one would gain nothing and cost every later release."""
    noises = [177.9, 94.379, 50.44, 27.352, 15.185]  # epsilon 0.5, 1, 2, 4 and 8
    candidates = make_candidates(noises, steps=160, update_lipschitz=1.0)
    plan = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=[LC])
    assert len(plan.weights) == 1
    assert plan.epsilon == pytest.approx(epsilon, rel=1e-3)
    assert (
        min(solve(budget(1.5 * epsilon), candidates, relation=REPLACE, mechanisms=[LC]).weights.values())
        >= 1e-2
    )


def test_a_cap_below_every_candidate_is_named_as_the_reason(make_candidates: Maker) -> None:
    with pytest.raises(BudgetInfeasible, match="raise realised_epsilon_cap"):
        solve(
            budget(3.0), make_candidates([16.0]), relation=REPLACE, mechanisms=[RS], realised_epsilon_cap=1.0
        )


@pytest.mark.parametrize("noise", [1e-100, 1e140, 1e200, 1e308])
def test_noise_beyond_comparison(noise: float, make_candidates: Maker) -> None:
    candidates = make_candidates([80.0, noise], learning_rate=1e-90)
    for mechanism in (LC, RS):
        plan = solve(budget(1.0), candidates, relation=REPLACE, mechanisms=[mechanism])
        check(plan, candidates)
        assert plan.weights["c0"] >= 1 - 1e-15


def test_infeasible_says_what_to_train(make_candidates: Maker) -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        solve(budget(0.5), make_candidates([8.0, 32.0]), relation=REPLACE)
    error = caught.value
    assert error.best == pytest.approx(1.047, abs=1e-3)
    assert error.target == 0.5
    needed = float(error.hint.split(">= ")[1].split(" ")[0])
    enough, short = make_candidates([needed]), make_candidates([needed * 0.99])
    assert (
        single_run(enough[0].trajectory).epsilon(1e-5) <= 0.5 < single_run(short[0].trajectory).epsilon(1e-5)
    )
    assert solve(budget(0.5), enough, relation=REPLACE).epsilon <= 0.5
    assert error.message.count(".") >= 1
    assert f"is {rounded_up(error.best)}," in error.message
    assert f"is {rounded_up(error.best)}," in error.message


def test_infeasible_says_what_to_train_also_for_poisson(make_candidates: Maker) -> None:
    shape = {"sampling_probability": 0.05, "relation": ADD_OR_REMOVE, "steps": 100}
    (candidate,) = make_candidates([1.0], **shape)
    needed = noise_multiplier_needed(budget(1.0), candidate.trajectory, ADD_OR_REMOVE)
    assert needed is not None
    assert single_run(make_candidates([needed], **shape)[0].trajectory).epsilon(1e-5) <= 1.0
    assert single_run(make_candidates([needed * 0.99], **shape)[0].trajectory).epsilon(1e-5) > 1.0


def test_a_budget_no_noise_can_meet(make_candidates: Maker) -> None:
    """Below what a PLD resolves at this delta no multiplier helps, and the hint says so."""
    shape = {"sampling_probability": 0.05, "relation": ADD_OR_REMOVE, "steps": 100}
    with pytest.raises(BudgetInfeasible, match="c0 could not be accounted: delta 1e-14 is below"):
        solve(budget(1.0, 1e-14), make_candidates([1.0], **shape), relation=ADD_OR_REMOVE)


def test_poisson_portfolio(make_candidates: Maker) -> None:
    candidates = make_candidates(
        [1.0, 2.0, 4.0], sampling_probability=0.05, relation=ADD_OR_REMOVE, steps=100
    )
    plan = solve(budget(1.5), candidates, relation=ADD_OR_REMOVE)
    check(plan, candidates)
    assert plan.mechanism is LC
    assert plan.weights == pytest.approx({"c1": 0.8, "c2": 0.2})
    assert plan.bound.mu is None
    joint = joint_release([c.trajectory for c in candidates[1:]], ADD_OR_REMOVE).epsilon(1e-5)
    assert plan.epsilon == pytest.approx(joint, rel=1e-9)
    assert "Poisson" in (plan.other_bounds["generic"].reason or "")
    drawn = solve(budget(1.5), candidates, relation=ADD_OR_REMOVE, mechanisms=[RS])
    check(drawn, candidates)


def test_adapted_schedules_only_take_part_in_joint_release_and_selection(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 32.0], schedule="adapted")
    plan = solve(budget(3.0), candidates, relation=REPLACE)
    check(plan, candidates)
    assert plan.bound.name == "joint"


def test_runs_that_share_steps_are_not_averaged(make_segment: Maker, make_run: Maker) -> None:
    trunk = make_segment("trunk", 40.0, 10)
    candidates = [
        Candidate(name=n, trajectory=make_run(segments=[trunk, make_segment(n, s, 10)]))
        for n, s in (("a", 30.0), ("b", 50.0))
    ]
    plan = solve(budget(3.0), candidates, relation=REPLACE, mechanisms=[LC])
    assert dict(plan.weights) == {"a": 1.0}
    drawn = solve(budget(1.35), candidates, relation=REPLACE, mechanisms=[RS])
    check(drawn, candidates)


@pytest.mark.parametrize("count", [14, 15, 200])
def test_large_portfolios(count: int, make_candidates: Maker) -> None:
    candidates = make_candidates([20.0 + 3 * i for i in range(count)])
    start = time.perf_counter()
    plan = solve(budget(3.0), candidates, relation=REPLACE)
    assert time.perf_counter() - start < 10
    check(plan, candidates)
    assert plan.epsilon > 2.9


def test_a_thousand_candidates(make_candidates: Maker) -> None:
    candidates = make_candidates([10.0 + 0.5 * i for i in range(1000)])
    start = time.perf_counter()
    plan = solve(budget(3.0), candidates, relation=REPLACE)
    assert time.perf_counter() - start < 30
    check(plan, candidates)


def test_extreme_candidates(make_run: Maker, make_candidates: Maker) -> None:
    candidates = make_candidates([1e-3, 1.0, 1e6], steps=1)
    for delta in (1e-300, 1e-5, 0.5):
        plan = solve(budget(1.0, delta), candidates, relation=REPLACE)
        check(plan, candidates)
    endless = make_candidates([1e6, 2e6], steps=10**6)
    check(solve(budget(0.01), endless, relation=REPLACE), endless)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mechanisms": []}, "must be allowed"),
        ({"mechanisms": ["averaging"]}, "mechanisms must be among"),
        ({"selection": "accuracy"}, "selection must be one of"),
        ({"realised_epsilon_cap": 0.0}, "realised_epsilon_cap"),
        ({"realised_epsilon_cap": math.nan}, "realised_epsilon_cap"),
    ],
)
def test_bad_requests_fail(arguments: dict[str, Any], message: str, make_candidates: Maker) -> None:
    with pytest.raises(InvalidInput, match=message):
        solve(budget(3.0), make_candidates([16.0, 32.0]), relation=REPLACE, **arguments)


def test_no_or_repeated_candidates_fail(make_candidates: Maker) -> None:
    with pytest.raises(InvalidInput, match="no candidate"):
        solve(budget(3.0), [], relation=REPLACE)
    candidates = make_candidates([16.0, 32.0])
    with pytest.raises(InvalidInput, match="same name"):
        solve(budget(3.0), [candidates[0], candidates[0]], relation=REPLACE)


def test_another_relation_fails(make_candidates: Maker) -> None:
    with pytest.raises(IncompatibleCandidates, match="never mixed"):
        solve(budget(3.0), make_candidates([16.0, 32.0]), relation=ADD_OR_REMOVE)


def test_mixed_lineages_fail(make_run: Maker, make_candidates: Maker) -> None:
    other = Candidate(name="x", trajectory=make_run("x", 16.0, lineage="others"))
    with pytest.raises(IncompatibleCandidates, match="lineage"):
        solve(budget(3.0), [*make_candidates([16.0, 32.0]), other], relation=REPLACE)
