"""The continuous search for weights: never over the budget, no worse than ten thousand random merges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import gaussian
from accounting.averages import averaging_of, on_simplex
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import BudgetInfeasible
from accounting.joint_release import joint_release
from accounting.linear_combination import accumulated_noise_variance, generic
from accounting.members import members_of
from accounting.plan import Mechanism
from accounting.shifted_interpolation import shifted
from accounting.solver import solve
from accounting.trajectory import Candidate

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
LC = [Mechanism.LINEAR_COMBINATION]
Maker = Callable[..., Any]

NOISES = st.lists(st.floats(min_value=4, max_value=100), min_size=2, max_size=6)
LIPSCHITZ = st.sampled_from([1.0, 0.95, math.inf])


def budget(epsilon: float) -> PrivacyBudget:
    return PrivacyBudget(epsilon=epsilon, delta=1e-5)


def demo(make_candidates: Maker, c: float = 1.0) -> list[Candidate]:
    """Epsilon 0.5, 1, 2, 4 and 8 in 160 full-batch steps."""
    noises = [2 * math.sqrt(160) / gaussian.mu_for(e, 1e-5) for e in (0.5, 1, 2, 4, 8)]
    return make_candidates(noises, steps=160, update_lipschitz=c)


@given(noises=NOISES, c=LIPSCHITZ, steps=st.sampled_from([1, 2, 20]), seed=st.integers(0, 2**32 - 1))
def test_the_search_costs_what_the_certified_bound_says(
    noises: list[float], c: float, steps: int, seed: int, make_candidates: Maker
) -> None:
    candidates = make_candidates(noises, steps=steps, update_lipschitz=c)
    averaging = averaging_of(members_of(candidates, 1e-5, REPLACE)[0], REPLACE)
    assert averaging is not None
    random = np.random.default_rng(seed)
    for alpha in (0.1, 1.0):
        weights = np.array(on_simplex(random.dirichlet(np.full(len(noises), alpha))))
        fresh = float(random.choice([0.0, 1e-3]))
        square = averaging.problem.costs.squares(weights[None, :], (fresh * averaging.scale) ** 2)[0]
        runs = [run.candidate.trajectory for run in averaging.runs]
        assert math.sqrt(square) == pytest.approx(
            shifted(runs, weights.tolist(), REPLACE, fresh).mu, rel=1e-9
        )


@given(noises=NOISES, c=LIPSCHITZ, seed=st.integers(0, 2**32 - 1))
def test_the_gradient_is_that_of_the_costs(
    noises: list[float], c: float, seed: int, make_candidates: Maker
) -> None:
    candidates = make_candidates(noises, steps=5, update_lipschitz=c)
    averaging = averaging_of(members_of(candidates, 1e-5, REPLACE)[0], REPLACE)
    assert averaging is not None
    costs = averaging.problem.costs
    weights = np.random.default_rng(seed).dirichlet(np.full(len(noises), 2.0))
    value, gradient, outer = costs.square_and_gradient(weights, 2.0)
    assert value == pytest.approx(costs.squares(weights[None, :], 2.0)[0], rel=1e-12)
    for i, slope in enumerate(gradient):
        step = 1e-6 * weights[i]
        moved = np.array([weights + sign * step * np.eye(len(noises))[i] for sign in (1, -1)])
        above, below = costs.squares(moved, 2.0)
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-4, abs=1e-5 * value / weights[i])
    above, below = costs.squares(np.array([weights, weights]), np.array([2.0 + 1e-5, 2.0 - 1e-5]))
    assert (above - below) / 2e-5 == pytest.approx(outer, rel=1e-4)


@settings(max_examples=25)
@given(
    noises=NOISES,
    c=LIPSCHITZ,
    steps=st.sampled_from([1, 2, 20]),
    epsilon=st.floats(min_value=0.3, max_value=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_random_merge_is_better(
    noises: list[float], c: float, steps: int, epsilon: float, seed: int, make_candidates: Maker
) -> None:
    candidates = make_candidates([n * math.sqrt(steps / 20) for n in noises], steps=steps, update_lipschitz=c)
    averaging = averaging_of(members_of(candidates, 1e-5, REPLACE)[0], REPLACE)
    assert averaging is not None
    random = np.random.default_rng(seed)
    many = np.concatenate([random.dirichlet(np.full(len(noises), a), 2500) for a in (0.1, 0.3, 1, 3)])
    limit = gaussian.mu_for(epsilon, 1e-5) ** 2 * (1 - 1e-9)
    fits = averaging.problem.costs.squares(many) <= limit
    variances = np.array([accumulated_noise_variance(run.candidate.trajectory) for run in averaging.runs])
    best = max((-(many[fits] ** 2 @ variances)).tolist(), default=-math.inf)
    try:
        plan = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=LC)
    except BudgetInfeasible:
        assert best == -math.inf
        return
    assert plan.objective >= best * (1 + 1e-6)
    runs = [next(c.trajectory for c in candidates if c.name == name) for name in plan.weights]
    assert plan.bound.delta(epsilon) <= 1e-5
    weights = list(plan.weights.values())
    assert plan.objective == pytest.approx(
        -sum(w * w * accumulated_noise_variance(r) for w, r in zip(weights, runs, strict=True))
    )


def test_the_demo_gains_over_the_joint_release(make_candidates: Maker) -> None:
    """Beyond {eps-half, eps-1}, the best pair that fits jointly, once the updates are known not to expand."""
    unknown = solve(budget(1.5), demo(make_candidates, math.inf), relation=REPLACE, mechanisms=LC)
    assert set(unknown.weights) == {"c0", "c1"}
    known = solve(budget(1.5), demo(make_candidates), relation=REPLACE, mechanisms=LC)
    assert known.bound.name == "shifted"
    assert known.weights == pytest.approx({"c0": 0.2065, "c1": 0.7335, "c2": 0.0600}, abs=1e-4)
    assert known.objective / unknown.objective == pytest.approx(0.8849, abs=1e-4)
    assert known.bound.delta(1.5) == pytest.approx(1e-5, rel=1e-6)  # the budget is used up


def test_fresh_noise_reaches_budgets_below_every_candidate(make_candidates: Maker) -> None:
    candidates = demo(make_candidates)
    with pytest.raises(BudgetInfeasible):
        solve(budget(0.3), candidates, relation=REPLACE, mechanisms=LC)
    plan = solve(budget(0.3), candidates, relation=REPLACE, mechanisms=LC, allow_fresh_noise=True)
    assert plan.fresh_noise > 0
    assert plan.bound.delta(0.3) <= 1e-5
    (name,) = plan.weights  # a merge is not better than one run with noise added
    run = next(c.trajectory for c in candidates if c.name == name)
    # Output perturbation of T steps that do not expand, with the run's own noise: T^2 s^2 / (T nu^2 + tau^2).
    moved = 160 * 2 * 0.1 / 100
    total = accumulated_noise_variance(run) + plan.fresh_noise**2
    assert moved / math.sqrt(total) == pytest.approx(gaussian.mu_for(0.3, 1e-5), rel=1e-9)
    assert plan.objective == pytest.approx(-total)
    assert any("Fresh Gaussian noise" in sentence for sentence in plan.bound.assumptions)
    with pytest.raises(BudgetInfeasible):  # the earlier steps alone cost more than this budget
        solve(
            budget(0.3),
            demo(make_candidates, math.inf),
            relation=REPLACE,
            mechanisms=LC,
            allow_fresh_noise=True,
        )


@pytest.mark.parametrize("epsilon", [0.7, 1.5, 3.0, 6.0])
def test_fresh_noise_is_never_worse_and_never_unused_for_nothing(
    epsilon: float, make_candidates: Maker
) -> None:
    candidates = demo(make_candidates)
    without = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=LC)
    assert without.fresh_noise == 0
    with_it = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=LC, allow_fresh_noise=True)
    assert with_it.objective >= without.objective * (1 + 1e-9)
    # No release of these runs has less noise than a run trained for exactly this budget.
    moved = 160 * 2 * 0.1 / 100
    floor = -((moved / gaussian.mu_for(epsilon, 1e-5)) ** 2)
    assert with_it.objective == pytest.approx(floor, rel=1e-6)
    assert without.objective < floor


@pytest.mark.parametrize("c", [1.0, math.inf])
def test_order_and_unused_candidates_change_nothing(c: float, make_candidates: Maker) -> None:
    candidates = demo(make_candidates, c)
    plan = solve(budget(1.5), candidates, relation=REPLACE, mechanisms=LC)
    backwards = solve(budget(1.5), candidates[::-1], relation=REPLACE, mechanisms=LC)
    assert dict(plan.weights) == dict(backwards.weights)
    used = [candidate for candidate in candidates if candidate.name in plan.weights]
    again = solve(budget(1.5), used, relation=REPLACE, mechanisms=LC)
    assert again.objective == pytest.approx(plan.objective, rel=1e-9)
    assert dict(again.weights) == pytest.approx(dict(plan.weights), rel=1e-4)


def test_a_single_step_is_merged_by_its_exact_bound(make_candidates: Maker) -> None:
    """With one step nothing is hidden: weights between the inverse variances and one run fill the budget."""
    candidates = make_candidates([4.0, 8.0, 16.0], steps=1)
    plan = solve(budget(1.0), candidates, relation=REPLACE, mechanisms=LC)
    assert plan.bound.name == "generic"
    moved = 2 * 0.1 / 100
    assert plan.objective == pytest.approx(-((moved / gaussian.mu_for(1.0, 1e-5)) ** 2), rel=1e-9)


def test_the_counterexample_portfolio_is_never_certified_step_by_step(make_candidates: Maker) -> None:
    """Theory 3.2: n = 2000, four steps, noise multipliers 0.5 and 50; step by step would claim mu 0.080."""
    candidates = make_candidates(
        [0.5, 50.0], steps=4, learning_rate=1.0, expected_batch_size=2000.0, relation=ADD_OR_REMOVE
    )
    runs = [candidate.trajectory for candidate in candidates]
    for epsilon in (0.1, 0.3, 1.0, 5.0, 10.0, 20.0, 30.0):
        for fresh in (False, True):
            try:
                plan = solve(
                    budget(epsilon),
                    candidates,
                    relation=ADD_OR_REMOVE,
                    mechanisms=LC,
                    allow_fresh_noise=fresh,
                )
            except BudgetInfeasible:
                continue
            assert plan.bound.name in ("joint", "generic")
            used = [runs[int(name[1:])] for name in plan.weights]
            weights = list(plan.weights.values())
            least = min(
                joint_release(used, ADD_OR_REMOVE).epsilon(1e-5),
                generic(used, weights, ADD_OR_REMOVE, plan.fresh_noise).epsilon(1e-5),
            )
            assert plan.epsilon >= least * (1 - 1e-9)
            if "c0" in plan.weights:  # the loud run's first three steps are paid in full
                assert plan.bound.mu is not None
                assert plan.bound.mu >= math.sqrt(12)


def test_mixed_knowledge_of_updates(make_run: Maker) -> None:
    """Runs of unknown updates cost all they have; those of known ones fill what is left."""
    candidates = [
        Candidate(name=f"c{i}", trajectory=make_run(f"s{i}", noise, 20, update_lipschitz=c))
        for i, (noise, c) in enumerate(
            ((40.0, 1.0), (60.0, 1.0), (25.0, 1.0), (45.0, math.inf), (8.0, math.inf))
        )
    ]
    plan = solve(budget(1.2), candidates, relation=REPLACE, mechanisms=LC)
    assert plan.bound.delta(1.2) <= 1e-5
    subsets = [[c for c in candidates if c.trajectory.segments[0].update_lipschitz == 1.0], candidates[3:]]
    for subset in subsets:
        try:
            part = solve(budget(1.2), subset, relation=REPLACE, mechanisms=LC)
        except BudgetInfeasible:
            continue
        assert plan.objective >= part.objective * (1 + 1e-9)


@pytest.mark.parametrize("count", [14, 60])
def test_many_runs(count: int, make_candidates: Maker) -> None:
    candidates = make_candidates([20.0 + 3 * i for i in range(count)], update_lipschitz=1.0)
    plan = solve(budget(1.5), candidates, relation=REPLACE, mechanisms=LC)
    unknown = solve(
        budget(1.5), make_candidates([20.0 + 3 * i for i in range(count)]), relation=REPLACE, mechanisms=LC
    )
    assert plan.bound.delta(1.5) <= 1e-5
    assert plan.objective >= unknown.objective * (1 + 1e-9)
