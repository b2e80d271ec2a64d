"""Mean estimation: exact laws of both mechanisms, the comparison theorem, and where its reach ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian
from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from accounting.linear_combination import step_noise, step_sensitivity, stepwise
from accounting.mean_estimation import (
    compare,
    equal_error_weights,
    last_model_mu,
    linear_combination_error,
    linear_combination_mu,
    linear_combination_rdp,
    merged_path_mu,
    random_selection_error,
    selection_rdp,
)

ORDERS = np.array([1.01, 1.5, 2.0, 8.0, 64.0, 1024.0])
Maker = Callable[..., Any]


def simplex(shares: list[float]) -> list[float]:
    total = math.fsum(shares)
    return [share / total for share in shares]


@st.composite
def portfolios(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Sigmas and probabilities, some of them 0."""
    count = draw(st.integers(1, 6))
    sigmas = draw(st.lists(st.floats(1e-3, 1e3), min_size=count, max_size=count))
    shares = draw(
        st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0)), min_size=count, max_size=count).filter(any)
    )
    return sigmas, simplex(shares)


def exact_margin(sigmas: list[float], shares: list[float], order: float) -> mpmath.mpf:
    """RS minus LC at exactly equal error, in 120 digits, from the two formulas as published."""
    with mpmath.workdps(120):
        variances = [mpmath.mpf(sigma) ** 2 for sigma in sigmas]
        shares = [mpmath.mpf(share) for share in shares]
        shares = [share / mpmath.fsum(shares) for share in shares]
        order = mpmath.mpf(order)
        error = mpmath.fsum(w * v for w, v in zip(shares, variances, strict=True))
        mixed = mpmath.fsum(
            w * mpmath.exp((order - 1) * order / (2 * v)) for w, v in zip(shares, variances, strict=True)
        )
        return mpmath.log(mixed) / (order - 1) - order / (2 * error)


@pytest.mark.parametrize("order", [1.1, 2.0, 7.0, 50.0])
@pytest.mark.parametrize("ratio", [1 + 1e-9, 1.01, 1.5, 4.0, 30.0])
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5, 0.999])
def test_the_margin_holds_in_exact_arithmetic(share: float, ratio: float, order: float) -> None:
    for sigma in (0.2, 1.0, 40.0):
        sigmas, shares = [sigma, sigma * ratio], [share, 1 - share]
        found = compare(sigmas, shares, orders=np.array([order]))
        assert found.strictly_smaller
        assert 0 < found.margins[0] <= exact_margin(sigmas, shares, order)


@given(portfolio=portfolios())
def test_strictly_smaller_at_equal_error_whenever_two_sigmas_differ(
    portfolio: tuple[list[float], list[float]],
) -> None:
    sigmas, shares = portfolio
    found = compare(sigmas, shares)
    distinct = len({sigma for sigma, share in zip(sigmas, shares, strict=True) if share > 0})
    assert found.strictly_smaller == (distinct > 1)
    assert linear_combination_error(found.sigmas, found.weights) == pytest.approx(found.error, rel=1e-12)
    slack = found.random_selection_rdp * 1e-11 + 1e-13 / (found.orders - 1)
    assert np.all(found.linear_combination_rdp + found.margins <= found.random_selection_rdp + slack)
    assert np.all(found.linear_combination_rdp > 0)


def test_the_margin_is_seen_in_the_numbers() -> None:
    found = compare([1.0, 3.0], [0.5, 0.5], orders=ORDERS)
    assert found.error == pytest.approx(5.0)
    assert np.all(found.linear_combination_rdp < found.random_selection_rdp)
    assert found.linear_combination_rdp == pytest.approx(ORDERS / 10)
    # order -> 1: the expected divergence, (1 + 1/9) / 4, and the margin is exact there.
    assert found.random_selection_rdp[0] == pytest.approx(1.01 * (1 + 1 / 9) / 4, rel=1e-2)
    assert found.margins[0] == pytest.approx(1.01 * ((1 + 1 / 9) / 4 - 1 / 10), rel=1e-12)


def test_equal_sigmas_and_unused_ones_give_no_margin() -> None:
    for sigmas, shares in (([2.0, 2.0], [0.3, 0.7]), ([2.0, 5.0], [1.0, 0.0]), ([2.0], [1.0])):
        found = compare(sigmas, shares)
        assert not found.strictly_smaller
        assert found.margins == pytest.approx(np.zeros_like(found.orders))
        assert found.linear_combination_rdp == pytest.approx(found.random_selection_rdp, rel=1e-10)


def test_the_order_of_exact_profiles_is_another_matter() -> None:
    """Where delta is near 1, a random selection may be the more private one at equal error."""
    sigmas, shares, epsilon = [0.05, 0.3], [0.5, 0.5], 1.0
    found = compare(sigmas, shares)
    drawn = float(np.dot(shares, [gaussian.delta(1 / sigma, epsilon) for sigma in sigmas]))
    merged = gaussian.delta(linear_combination_mu(found.sigmas, found.weights), epsilon)
    assert found.strictly_smaller
    assert drawn < merged


@given(portfolio=portfolios(), sensitivity=st.floats(1e-3, 1e3))
def test_errors_and_mu_match_exact_arithmetic(
    portfolio: tuple[list[float], list[float]], sensitivity: float
) -> None:
    sigmas, shares = portfolio
    with mpmath.workdps(50):
        pairs = [(mpmath.mpf(w), mpmath.mpf(sigma)) for w, sigma in zip(shares, sigmas, strict=True)]
        variance = mpmath.fsum((w * sigma) ** 2 for w, sigma in pairs)
        truths = (
            variance,
            mpmath.fsum(w * sigma**2 for w, sigma in pairs),
            mpmath.mpf(sensitivity) / mpmath.sqrt(variance),
        )
        found = (
            linear_combination_error(sigmas, shares),
            random_selection_error(sigmas, shares),
            linear_combination_mu(sigmas, shares, sensitivity=sensitivity),
        )
        for value, truth in zip(found, truths, strict=True):
            assert truth <= value <= truth * (1 + mpmath.mpf(10) ** -13)


def test_divergences_match_integrals() -> None:
    """The Renyi divergence of the released estimates themselves, by quadrature over the real line."""
    sigmas, shares, sensitivity = [0.7, 2.0], [0.3, 0.7], 0.9
    for order in (1.5, 3.0, 6.0):

        def moment(sigma: float, order: float = order) -> mpmath.mpf:
            def density(x: mpmath.mpf, mean: float) -> mpmath.mpf:
                return mpmath.npdf(x, mean, sigma)

            return mpmath.quad(
                lambda x: density(x, sensitivity) ** order * density(x, 0) ** (1 - order),
                [-30, -5, 0, 1, 5, 10, 40],
            )

        merged = mpmath.log(moment(math.hypot(0.3 * 0.7, 0.7 * 2.0))) / (order - 1)
        drawn = mpmath.log(mpmath.fsum(w * moment(s) for w, s in zip(shares, sigmas, strict=True))) / (
            order - 1
        )
        grid = np.array([order])
        found = linear_combination_rdp(sigmas, shares, grid, sensitivity=sensitivity)[0]
        assert float(merged) * (1 - 1e-12) <= found <= float(merged) * (1 + 1e-9)
        found = selection_rdp(sigmas, shares, grid, sensitivity=sensitivity)[0]
        assert float(drawn) * (1 - 1e-12) <= found <= float(drawn) * (1 + 1e-9)


@given(portfolio=portfolios())
def test_equal_error_weights_are_on_the_simplex(portfolio: tuple[list[float], list[float]]) -> None:
    weights = equal_error_weights(*portfolio)
    assert np.all(weights >= 0)
    assert math.fsum(weights.tolist()) == pytest.approx(1.0, abs=1e-15)
    assert linear_combination_error(portfolio[0], weights) == pytest.approx(
        random_selection_error(*portfolio), rel=1e-11
    )


# The step-by-step formula, exact where gradients do not depend on the iterate.


def exact_mu(
    moves: list[list[float]], noises: list[list[float]], weights: list[float], *, path: bool
) -> float:
    """`sqrt(d' S^-1 d)` for the merged parameters: every run's recursion written out, nothing summed by hand.

    theta_i,t = theta_i,t-1 - (gradient + noise): the parameters after t steps hold all noise up to t.
    """
    with mpmath.workdps(40):
        steps = len(moves[0])
        shift, covariance = mpmath.matrix(steps, 1), mpmath.matrix(steps, steps)
        for weight, moved, noise in zip(weights, moves, noises, strict=True):
            for row in range(steps):
                shift[row] += mpmath.mpf(weight) * mpmath.fsum(moved[: row + 1])
                for column in range(steps):
                    shared = mpmath.fsum(mpmath.mpf(n) ** 2 for n in noise[: min(row, column) + 1])
                    covariance[row, column] += mpmath.mpf(weight) ** 2 * shared
        if not path:
            return float(shift[steps - 1] / mpmath.sqrt(covariance[steps - 1, steps - 1]))
        return float(mpmath.sqrt((shift.T * mpmath.lu_solve(covariance, shift))[0]))


@given(data=st.data())
def test_the_stepwise_formula_is_exact_for_the_merged_path(data: st.DataObject) -> None:
    runs, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    entries = st.lists(st.floats(0.01, 10.0), min_size=steps, max_size=steps)
    moves = data.draw(st.lists(entries, min_size=runs, max_size=runs))
    noises = data.draw(st.lists(entries, min_size=runs, max_size=runs))
    weights = simplex(data.draw(st.lists(st.floats(0.01, 1.0), min_size=runs, max_size=runs)))
    path = merged_path_mu(np.array(moves), np.array(noises), weights)
    last = last_model_mu(np.array(moves), np.array(noises), weights)
    for found, is_path in ((path, True), (last, False)):
        truth = exact_mu(moves, noises, weights, path=is_path)
        assert truth * (1 - 1e-15) <= found <= truth * (1 + 1e-11)
    assert last <= path * (1 + 1e-12)
    joint = math.sqrt(np.sum((np.array(moves) / np.array(noises)) ** 2))
    assert path <= joint * (1 + 1e-11)


def test_equal_steps_make_the_last_model_as_telling_as_the_path(make_run: Maker) -> None:
    """And the formula on recorded runs is the same one, where it is marked as unsound for training."""
    relation = NeighboringRelation.REPLACE_ONE
    trajectories = [make_run("a", 8.0, 7), make_run("b", 32.0, 7)]
    segments = [run.segments[0] for run in trajectories]
    moves = np.array([[step_sensitivity(s, relation)] * 7 for s in segments])
    noises = np.array([[step_noise(s)] * 7 for s in segments])
    bound = stepwise(trajectories, [0.1, 0.9], relation)
    assert not bound.sound_for_dp_sgd
    assert merged_path_mu(moves, noises, [0.1, 0.9]) == pytest.approx(bound.mu, rel=1e-11)
    assert last_model_mu(moves, noises, [0.1, 0.9]) == pytest.approx(bound.mu, rel=1e-11)


def test_steps_without_noise_or_movement_and_unused_runs() -> None:
    still, silent = np.zeros((1, 3)), np.zeros((1, 3))
    assert merged_path_mu(still, silent, [1.0]) == 0.0
    assert last_model_mu(still, silent, [1.0]) == 0.0
    moving = np.ones((2, 3))
    noises = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert merged_path_mu(moving, noises, [0.0, 1.0]) == math.inf
    assert merged_path_mu(moving, noises, [1.0, 0.0]) == pytest.approx(math.sqrt(3))
    assert last_model_mu(moving, noises, [0.5, 0.5]) == pytest.approx(2 * math.sqrt(3))
    tiny = 1e-200 * moving[:1]
    assert merged_path_mu(tiny, tiny, [1.0]) == pytest.approx(math.sqrt(3))
    assert 0 < merged_path_mu(tiny, moving[:1], [1.0]) < 1e-199


def test_extreme_scales_stay_finite() -> None:
    found = compare([1e-100, 1.0, 1e100], [1e-3, 0.5, 0.499], sensitivity=1e-100)
    for values in (found.linear_combination_rdp, found.random_selection_rdp, found.margins):
        assert np.all(np.isfinite(values))
        assert np.all(values >= 0)


@pytest.mark.parametrize(
    ("sigmas", "shares"),
    [
        ([1.0], [0.5, 0.5]),
        ([], []),
        ([0.0, 1.0], [0.5, 0.5]),
        ([math.nan], [1.0]),
        ([1e200], [1.0]),
        ([1.0, 2.0], [0.5, 0.6]),
        ([1.0, 2.0], [math.nan, 1.0]),
        ([1.0, 2.0], [-0.5, 1.5]),
    ],
)
def test_invalid_portfolios_are_refused(sigmas: list[float], shares: list[float]) -> None:
    for function in (compare, linear_combination_error, random_selection_error, linear_combination_mu):
        with pytest.raises(InvalidInput):
            function(sigmas, shares)


def test_invalid_orders_steps_and_sensitivities_are_refused() -> None:
    for orders in ([1.0], [], [math.nan], [math.inf]):
        with pytest.raises(InvalidInput, match="orders"):
            compare([1.0, 2.0], [0.5, 0.5], orders=np.array(orders))
    for sensitivity in (0.0, math.nan, math.inf, 1e200):
        with pytest.raises(InvalidInput, match="sensitivity"):
            compare([1.0, 2.0], [0.5, 0.5], sensitivity=sensitivity)
    good = np.ones((2, 3))
    for moves, noises, weights in (
        (good, good[:1], [0.5, 0.5]),
        (good, good, [1.0]),
        (good[0], good[0], [1.0]),
        (good * math.nan, good, [0.5, 0.5]),
        (good, -good, [0.5, 0.5]),
        (good, good * math.inf, [0.5, 0.5]),
        (good, good, [0.6, 0.5]),
    ):
        for function in (merged_path_mu, last_model_mu):
            with pytest.raises(InvalidInput):
                function(moves, noises, weights)
