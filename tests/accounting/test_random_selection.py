"""Random selection: published weights, exactness, saturation, and both accountants."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian
from accounting.bounds import INDEX_REVEALED, WEIGHTS_BLIND
from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError, IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.profile import GaussianProfile
from accounting.random_selection import (
    random_selection_bound,
    random_selection_profile,
    random_selection_rdp,
    random_selection_rdp_bound,
    solve_random_selection,
    solve_random_selection_rdp,
)
from accounting.rdp import order_grid

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
Maker = Callable[..., Any]


def test_published_linear_programs(golden: dict[str, Any]) -> None:
    for row in golden["random_selection_lp"]:
        deltas = gaussian.delta(np.array(row["mu"]), row["epsilon"])
        assert deltas == pytest.approx([float(d) for d in row["candidate_delta"]], rel=1e-11)
        weights = solve_random_selection(deltas, np.array(row["utility"]), float(row["delta"]))
        assert weights is not None
        for found, published in zip(weights, row["pi"], strict=True):
            assert found == pytest.approx(float(published), abs=1e-12, rel=1e-10)
        assert weights @ row["utility"] == pytest.approx(float(row["expected_utility"]), rel=1e-11)


def test_published_renyi_values(golden: dict[str, Any]) -> None:
    for row in golden["random_selection_rdp"]:
        orders = np.array([float(row["alpha"])])
        curves = np.array(row["mu"])[:, None] ** 2 / 2 * orders
        found = random_selection_rdp(curves, np.array(row["pi"]), orders)[0]
        assert found == pytest.approx(float(row["epsilon_alpha"]), rel=1e-11)
        assert found >= float(row["epsilon_alpha"]) * (1 - 1e-14)


@given(
    mus=st.lists(st.floats(min_value=0.01, max_value=5), min_size=1, max_size=8),
    exponent=st.floats(min_value=-30, max_value=-1),
    epsilon=st.floats(min_value=0.01, max_value=8),
)
def test_the_solution_is_feasible_sparse_and_saturates(
    mus: list[float], exponent: float, epsilon: float
) -> None:
    delta = 10.0**exponent
    deltas = np.array([gaussian.delta(mu, epsilon) for mu in mus])
    utilities = np.array(mus)  # the louder the better
    weights = solve_random_selection(deltas, utilities, delta)
    if deltas.min() > delta:
        assert weights is None
        return
    assert weights is not None
    assert abs(math.fsum(weights) - 1) <= 2**-52
    assert np.count_nonzero(weights) <= 2
    profile = random_selection_profile(weights, [GaussianProfile(mu=mu) for mu in mus])
    assert profile.delta(epsilon) <= delta
    best = int(np.argmax(utilities))
    if deltas[best] > delta:
        assert profile.delta(epsilon) >= delta * (1 - 1e-9)
    else:
        assert weights @ utilities == utilities.max()


def test_two_directions_are_summed_before_the_maximum() -> None:
    """Neither candidate fits, nor does the larger direction of each; yet half and half does."""
    deltas = np.array([[9e-6, 1e-7], [1e-7, 9e-6]])
    utilities = np.array([1.0, 1.0 + 1e-9])
    weights = solve_random_selection(deltas, utilities, 5e-6)
    assert weights is not None
    assert np.max(deltas @ weights) <= 5e-6
    assert solve_random_selection(deltas.max(axis=0), utilities, 5e-6) is None


def test_every_candidate_feasible_gives_the_best_alone() -> None:
    weights = solve_random_selection(np.array([1e-9, 1e-8, 1e-7]), np.array([0.1, 0.3, 0.2]), 1e-5)
    assert weights is not None
    assert weights.tolist() == [0.0, 1.0, 0.0]


def test_identical_candidates_give_one_alone() -> None:
    weights = solve_random_selection(np.full((2, 5), 1e-6), np.full(5, 0.5), 1e-5)
    assert weights is not None
    assert weights.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_no_feasible_candidate_gives_none() -> None:
    assert solve_random_selection(np.array([1e-4, 1e-3]), np.array([0.1, 0.3]), 1e-5) is None


@pytest.mark.parametrize("delta", [1e-300, 1e-12, 1e-5, 0.5])
def test_weights_hold_in_exact_arithmetic(delta: float) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        deltas = np.minimum(delta * 10.0 ** random.uniform(-5, 5, size=(2, 6)), 1.0)
        weights = solve_random_selection(deltas, random.normal(size=6), delta)
        if weights is not None:
            for row in deltas:
                exact = sum(
                    Fraction(float(w)) * Fraction(float(d)) for w, d in zip(weights, row, strict=True)
                )
                assert exact <= Fraction(delta)


@pytest.mark.parametrize("directions", [1, 2])
def test_a_thousand_candidates_are_quick(directions: int) -> None:
    random = np.random.default_rng(11)
    mus = random.uniform(0.05, 4, 1000)
    deltas = np.array([gaussian.delta(mus * random.uniform(0.9, 1.1, 1000), 1.0) for _ in range(directions)])
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        weights = solve_random_selection(deltas, -1 / mus**2, 1e-5)
        best = min(best, time.perf_counter() - start)
    assert weights is not None
    assert best < 0.5  # about 0.03 on an idle machine; others share this one


@pytest.mark.parametrize(
    ("deltas", "utilities", "delta"),
    [
        ([math.nan, 0.1], [1.0, 1.0], 1e-5),
        ([-0.1, 0.1], [1.0, 1.0], 1e-5),
        ([1.1, 0.1], [1.0, 1.0], 1e-5),
        ([0.1, 0.1], [math.nan, 1.0], 1e-5),
        ([0.1, 0.1], [1.0], 1e-5),
        ([], [], 1e-5),
        ([0.1], [1.0], 0.0),
        ([0.1], [1.0], math.nan),
    ],
)
def test_bad_programs_fail(deltas: list[float], utilities: list[float], delta: float) -> None:
    with pytest.raises(InvalidInput):
        solve_random_selection(np.array(deltas), np.array(utilities), delta)


@given(
    weight=st.floats(min_value=1e-12, max_value=1 - 1e-12),
    mus=st.tuples(st.floats(min_value=1e-6, max_value=3), st.floats(min_value=0.01, max_value=3)),
)
def test_renyi_lies_between_mean_and_worst_and_above_exact(weight: float, mus: tuple[float, float]) -> None:
    orders = np.array([1.01, 1.5, 2.0, 8.0, 64.0, 1024.0])
    curves = np.array([[mu * mu / 2 * order for order in orders] for mu in mus])
    weights = np.array([weight, 1 - weight])
    mixed = random_selection_rdp(curves, weights, orders)
    assert np.all(mixed <= curves.max(axis=0))
    assert np.all(mixed >= weights @ curves * (1 - 1e-12))
    with mpmath.workdps(60):
        for value, order, column in zip(mixed, orders, curves.T, strict=True):
            terms = (
                mpmath.mpf(float(w)) * mpmath.exp((mpmath.mpf(float(order)) - 1) * mpmath.mpf(float(v)))
                for w, v in zip(weights, column, strict=True)
            )
            total = mpmath.fsum(mpmath.mpf(float(w)) for w in weights)  # the weights sum to 1 but for an ulp
            truth = mpmath.log(mpmath.fsum(terms) / total) / (mpmath.mpf(float(order)) - 1)
            assert value >= truth * (1 - mpmath.mpf(10) ** -15)


def test_renyi_of_a_sure_choice_is_that_candidate_s() -> None:
    orders = np.array([2.0, 3.0])
    curves = np.array([[1.0, 1.5], [math.inf, math.inf]])
    assert random_selection_rdp(curves, np.array([1.0, 0.0]), orders) == pytest.approx(curves[0], rel=1e-11)
    assert np.all(np.isinf(random_selection_rdp(curves, np.array([0.5, 0.5]), orders)))


@pytest.mark.parametrize(
    ("curves", "weights", "orders"),
    [
        ([[1.0]], [0.5], [2.0]),
        ([[1.0]], [1.0], [1.0]),
        ([[math.nan]], [1.0], [2.0]),
        ([[-1.0]], [1.0], [2.0]),
        ([[1.0, 2.0]], [1.0], [2.0]),
    ],
)
def test_bad_curves_fail(curves: list[list[float]], weights: list[float], orders: list[float]) -> None:
    with pytest.raises(InvalidInput):
        random_selection_rdp(np.array(curves), np.array(weights), np.array(orders))


def test_bounds_of_drawn_runs(make_run: Maker) -> None:
    runs = [make_run("a", 8.0), make_run("b", 32.0)]
    bound = random_selection_bound([0.001, 0.999], runs, REPLACE)
    assert bound.name == "random_selection_pld"
    assert bound.mu is None
    assert {WEIGHTS_BLIND, INDEX_REVEALED} <= set(bound.assumptions)
    renyi = random_selection_rdp_bound([0.001, 0.999], runs, REPLACE, 1e-5)
    worst = max(single_run(run).epsilon(1e-5) for run in runs)
    assert bound.epsilon(1e-5) <= renyi.epsilon(1e-5)
    assert bound.epsilon(1e-5) <= worst
    assert bound.epsilon(1e-5) <= joint_release(runs, REPLACE).epsilon(1e-5)
    assert random_selection_bound([0.0, 1.0], runs, REPLACE) == single_run(runs[1])


def test_checkpoints_of_one_run_may_be_drawn(make_run: Maker) -> None:
    checkpoints = [make_run("run", 16.0, 5), make_run("run", 16.0, 20)]
    bound = random_selection_bound([0.5, 0.5], checkpoints, REPLACE)
    assert (
        single_run(checkpoints[0]).epsilon(1e-5)
        < bound.epsilon(1e-5)
        < single_run(checkpoints[1]).epsilon(1e-5)
    )


def test_poisson_directions_are_kept_apart_in_a_draw(make_run: Maker) -> None:
    """Sum within each direction, then the maximum: never more than the maxima summed."""
    runs = [
        make_run(n, s, 3, sampling_probability=q, relation=ADD_OR_REMOVE)
        for n, s, q in (("a", 0.5, 0.02), ("b", 2.0, 0.9))
    ]
    singles = [single_run(run).profile for run in runs]
    mixed = random_selection_bound([0.5, 0.5], runs, ADD_OR_REMOVE).profile
    for epsilon in (0.05, 0.5, 1.0):
        expected = [sum(0.5 * p.deltas(epsilon)[d] for p in singles) for d in (0, 1)]
        assert mixed.deltas(epsilon) == pytest.approx(expected, rel=1e-12)
        assert mixed.delta(epsilon) <= sum(0.5 * p.delta(epsilon) for p in singles) * (1 + 1e-12)


def test_relations_are_never_mixed(make_run: Maker) -> None:
    with pytest.raises(IncompatibleCandidates):
        random_selection_bound(
            [0.5, 0.5], [make_run("a", 8.0), make_run("b", 8.0, relation=ADD_OR_REMOVE)], REPLACE
        )


def test_renyi_bound_is_refused_for_poisson_replace_one(make_run: Maker) -> None:
    runs = [make_run(n, 8.0, sampling_probability=0.1) for n in "ab"]
    with pytest.raises(AccountingError):
        random_selection_rdp_bound([0.5, 0.5], runs, REPLACE, 1e-5)


def test_the_renyi_program_is_feasible_and_not_better_than_the_exact_one() -> None:
    mus, epsilon, delta = np.array([0.28, 0.56, 1.1]), 2.0, 1e-5
    utilities = -1 / mus**2
    orders = order_grid(256.0, whole=False)
    solved = solve_random_selection_rdp(np.outer(mus**2 / 2, orders), utilities, orders, epsilon, delta)
    assert solved is not None
    weights, order = solved
    profile = random_selection_profile(weights, [GaussianProfile(mu=float(mu)) for mu in mus])
    assert profile.epsilon(delta) <= epsilon
    exact = solve_random_selection(gaussian.delta(mus, epsilon), utilities, delta)
    assert exact is not None
    assert weights @ utilities <= exact @ utilities + 1e-12
    assert order in orders
    assert solve_random_selection_rdp(np.outer(mus**2 / 2, orders), utilities, orders, 0.01, delta) is None
