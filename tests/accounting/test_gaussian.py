"""The exact Gaussian profile against 60-digit arithmetic, published numbers and its own laws."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian
from accounting.errors import InvalidInput

MU = st.floats(min_value=1e-6, max_value=1e3)
EPSILON = st.floats(min_value=0.0, max_value=1e3)
DELTA = st.floats(min_value=1e-300, max_value=0.999)


def exact_log_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """The textbook difference, with as many digits as its cancellation and its exponents eat, plus 60."""
    with mpmath.workdps(60):
        scale = abs(mpmath.log10(mpmath.mpf(mu))) + abs(
            mpmath.log10(mpmath.mpf(epsilon) + mpmath.mpf(10) ** -30)
        )
    with mpmath.workdps(160 + int(4 * scale)):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first = mpmath.erfc((e / m - m / 2) / mpmath.sqrt(2)) / 2
        second = mpmath.erfc((e / m + m / 2) / mpmath.sqrt(2)) / 2
        return +mpmath.log(first - mpmath.exp(e) * second)


def assert_tight_upper_bound(mu: float, epsilon: float) -> None:
    truth = exact_log_delta(mu, epsilon)
    found = gaussian.log_delta(mu, epsilon)
    assert found >= truth or found == 0.0, (mu, epsilon)
    assert found - truth <= 1e-9 * max(1, abs(truth)), (mu, epsilon)


def test_epsilon_matches_sixty_digit_values(golden: dict[str, Any]) -> None:
    for row in golden["gaussian_epsilon"]:
        found = gaussian.epsilon(row["mu"], float(row["delta"]))
        assert found == pytest.approx(float(row["epsilon"]), rel=1e-12)
        assert found >= float(row["epsilon"]) * (1 - 1e-14)


def test_log_delta_matches_sixty_digit_values(golden: dict[str, Any]) -> None:
    for row in golden["gaussian_delta"]:
        truth = mpmath.log(mpmath.mpf(row["delta"]))
        assert gaussian.log_delta(row["mu"], row["epsilon"]) == pytest.approx(
            float(truth), rel=1e-13, abs=1e-11
        )


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.019, 0.02, 0.1, 0.9999, 1.0001, 4.0, 30.0, 1e3])
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 1e-6, 1e-3, 0.3, 1.0, 15.0, 1e3])
def test_log_delta_is_a_tight_upper_bound_at_the_extremes(mu: float, epsilon: float) -> None:
    assert_tight_upper_bound(mu, epsilon)


@given(mu=MU, epsilon=EPSILON)
def test_log_delta_is_a_tight_upper_bound(mu: float, epsilon: float) -> None:
    assert_tight_upper_bound(mu, epsilon)


@given(mu=st.floats(min_value=1e-3, max_value=1e6), share=st.floats(min_value=0.3, max_value=3))
def test_log_delta_near_the_middle_of_large_mu(mu: float, share: float) -> None:
    """Where mu/2 and eps/mu nearly cancel."""
    epsilon = share * mu * mu / 2
    truth = exact_log_delta(mu, epsilon)
    found = gaussian.log_delta(mu, epsilon)
    assert found >= truth or found == 0.0
    assert found - truth <= 1e-9 * max(1, abs(truth)) + 1e-15 * mu * mu


def test_arrays_agree_with_numbers() -> None:
    mus = np.array([0.0, 1e-6, 0.05, 0.5, 1.0, 4.0, 100.0, math.inf])
    for epsilon in (0.0, 0.1, 5.0, 300.0):
        logs = gaussian.log_delta(mus, epsilon)
        np.testing.assert_allclose(logs, [gaussian.log_delta(float(mu), epsilon) for mu in mus], rtol=1e-14)
        deltas = gaussian.delta(mus, epsilon)
        np.testing.assert_allclose(deltas, [gaussian.delta(float(mu), epsilon) for mu in mus], rtol=1e-12)
    assert gaussian.log_delta(mus[:, None], np.array([0.1, 1.0])).shape == (8, 2)


def test_no_noise_and_no_release() -> None:
    assert gaussian.delta(math.inf, 1e3) == 1.0
    assert gaussian.log_delta(math.inf, 0.0) == 0.0
    assert gaussian.epsilon(math.inf, 1e-5) == math.inf
    assert gaussian.delta(0.0, 0.0) == 0.0
    assert gaussian.log_delta(0.0, 1.0) == -math.inf
    assert gaussian.epsilon(0.0, 1e-300) == 0.0


def test_a_delta_below_the_smallest_double_is_not_reported_as_zero() -> None:
    assert gaussian.delta(0.05, 5.0) > 0.0


def test_epsilon_stays_finite_and_right_far_out() -> None:
    assert gaussian.epsilon(1e100, 1e-5) == pytest.approx(5e199, rel=1e-9)
    assert gaussian.epsilon(1e200, 1e-5) == math.inf
    assert gaussian.epsilon(1e-12, 1e-5) == 0.0


@given(mu=MU, delta=DELTA)
def test_epsilon_inverts_delta_from_above(mu: float, delta: float) -> None:
    epsilon = gaussian.epsilon(mu, delta)
    assert epsilon >= 0
    assert gaussian.delta(mu, epsilon) <= delta * (1 + 1e-13)
    assert exact_log_delta(mu, epsilon) <= mpmath.log(mpmath.mpf(delta))
    if epsilon > 1e-9:
        assert exact_log_delta(mu, epsilon * (1 - 1e-9)) > mpmath.log(mpmath.mpf(delta)) - 1e-9


@given(
    mu=st.floats(min_value=1e-3, max_value=100), factor=st.floats(min_value=1.0, max_value=10.0), delta=DELTA
)
def test_more_mu_is_never_more_private(mu: float, factor: float, delta: float) -> None:
    assert gaussian.epsilon(mu * factor, delta) >= gaussian.epsilon(mu, delta) * (1 - 1e-12)


@given(mu=MU, delta=DELTA, factor=st.floats(min_value=1e-6, max_value=1.0))
def test_epsilon_does_not_increase_with_delta(mu: float, delta: float, factor: float) -> None:
    smaller = max(delta * factor, 1e-300)
    assert gaussian.epsilon(mu, delta) <= gaussian.epsilon(mu, smaller) * (1 + 1e-12)


@given(epsilon=st.floats(min_value=0.0, max_value=1e4), delta=DELTA)
def test_mu_for_is_the_largest_mu_within_the_budget(epsilon: float, delta: float) -> None:
    mu = gaussian.mu_for(epsilon, delta)
    assert gaussian.epsilon(mu, delta) <= epsilon
    assert gaussian.epsilon(mu * (1 + 1e-6), delta) > epsilon


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_nan_and_negative_values_fail(bad: float) -> None:
    for call in (
        lambda: gaussian.log_delta(bad, 1.0),
        lambda: gaussian.log_delta(1.0, bad),
        lambda: gaussian.log_delta(np.array([1.0, bad]), 1.0),
        lambda: gaussian.log_delta(np.array([1.0]), np.array([bad])),
        lambda: gaussian.delta(bad, 1.0),
        lambda: gaussian.epsilon(bad, 1e-5),
        lambda: gaussian.epsilon(1.0, bad),
        lambda: gaussian.mu_for(bad, 1e-5),
        lambda: gaussian.mu_for(1.0, bad),
    ):
        with pytest.raises(InvalidInput):
            call()


@pytest.mark.parametrize("delta", [0.0, 1.0, 2.0])
def test_delta_must_be_strictly_between_zero_and_one(delta: float) -> None:
    with pytest.raises(InvalidInput, match="delta"):
        gaussian.epsilon(1.0, delta)
