"""Profiles: conversions, mixtures, rounding, and the refusals."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian
from accounting.errors import AccountingError, InvalidInput
from accounting.profile import (
    DiscretisedProfile,
    GaussianProfile,
    MixtureProfile,
    PrivacyProfile,
    StatedProfile,
    require_simplex,
)


def grid_profile(remove: list[float], add: list[float], *, error: float = 0.0) -> DiscretisedProfile:
    return DiscretisedProfile(
        interval=0.5,
        first=(0, 0),
        on_grid=(np.array(remove), np.array(add)),
        error=error,
        resolution_error=error,
    )


ONE_WAY = grid_profile([0.5, 0.3, 0.1, 0.02], [0.1, 0.05, 0.02, 0.01])
OTHER_WAY = grid_profile([0.1, 0.05, 0.02, 0.01], [0.5, 0.3, 0.1, 0.02])


def test_mixture_sums_within_each_direction_before_taking_the_worse() -> None:
    mixture = MixtureProfile(weights=(0.5, 0.5), profiles=(ONE_WAY, OTHER_WAY))
    assert mixture.delta(0.0) == pytest.approx(0.3)  # (0.5 + 0.1) / 2 in either direction
    maximum_first = 0.5 * ONE_WAY.delta(0.0) + 0.5 * OTHER_WAY.delta(0.0)
    assert maximum_first == pytest.approx(0.5)


@given(weight=st.floats(min_value=0, max_value=1), epsilon=st.floats(min_value=0, max_value=30))
def test_mixture_is_never_above_its_worst_member(weight: float, epsilon: float) -> None:
    members = (
        GaussianProfile(mu=0.4),
        GaussianProfile(mu=2.0),
        StatedProfile(stated_epsilon=1.0, stated_delta=1e-6),
    )
    mixture = MixtureProfile(weights=(weight, 1 - weight, 0.0), profiles=members)
    worst = max(profile.delta(epsilon) for profile in members)
    assert mixture.delta(epsilon) <= worst * (1 + 1e-14)


def test_mixture_matches_exact_arithmetic() -> None:
    weights, mus = (0.7, 0.3 - 1e-12, 1e-12), (0.5, 1.0, 40.0)
    mixture = MixtureProfile(weights=weights, profiles=tuple(GaussianProfile(mu=mu) for mu in mus))
    for epsilon in (0.0, 1.0, 10.0, 300.0):
        truth = mpmath.fsum(
            mpmath.mpf(w) * gaussian_delta(mu, epsilon) for w, mu in zip(weights, mus, strict=True)
        )
        assert truth <= mixture.delta(epsilon) <= truth * (1 + mpmath.mpf(10) ** -9)


def gaussian_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(400):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first = mpmath.erfc((e / m - m / 2) / mpmath.sqrt(2)) / 2
        return first - mpmath.exp(e) * mpmath.erfc((e / m + m / 2) / mpmath.sqrt(2)) / 2


@given(
    stated_epsilon=st.floats(min_value=0, max_value=50),
    stated_delta=st.floats(min_value=1e-30, max_value=0.5),
    share=st.floats(min_value=0, max_value=2),
)
def test_a_stated_guarantee_follows_its_worst_mechanism(
    stated_epsilon: float, stated_delta: float, share: float
) -> None:
    """Randomised response with a catastrophe of mass delta, its divergence summed outcome by outcome."""
    epsilon = share * stated_epsilon
    with mpmath.workdps(60):
        e0, d0, e = mpmath.mpf(stated_epsilon), mpmath.mpf(stated_delta), mpmath.mpf(epsilon)
        yes, no = (1 - d0) * mpmath.exp(e0) / (1 + mpmath.exp(e0)), (1 - d0) / (1 + mpmath.exp(e0))
        outcomes = [(d0, 0), (yes, no), (no, yes), (0, d0)]
        truth = mpmath.fsum(max(p - mpmath.exp(e) * q, 0) for p, q in outcomes)
    found = StatedProfile(stated_epsilon=stated_epsilon, stated_delta=stated_delta).delta(epsilon)
    assert (
        truth * (1 - mpmath.mpf(10) ** -15)
        <= found
        <= truth * (1 + mpmath.mpf(10) ** -12) + mpmath.mpf(10) ** -15
    )


def test_a_stated_guarantee_says_nothing_below_its_delta() -> None:
    stated = StatedProfile(stated_epsilon=2.0, stated_delta=1e-6)
    assert stated.epsilon(1e-6) == 2.0
    assert stated.epsilon(1e-3) < 2.0
    with pytest.raises(AccountingError, match="delta 1e-07 is below 1e-06"):
        stated.epsilon(1e-7)


def test_a_grid_is_linear_in_the_exponential_between_points_and_constant_beyond() -> None:
    profile = grid_profile([0.4, 0.2, 0.1], [0.4, 0.2, 0.1], error=1e-6)
    share = math.expm1(0.2) / math.expm1(0.5)
    assert profile.delta(0.2) == pytest.approx(0.4 * (1 - share) + 0.2 * share + 1e-6, rel=1e-8)
    assert profile.delta(0.5) == pytest.approx(0.2 + 1e-6, rel=1e-8)
    assert profile.delta(700.0) == pytest.approx(0.1 + 1e-6, rel=1e-8)
    assert profile.epsilon(0.05) == math.inf


def test_a_grid_that_starts_above_zero_says_nothing_below() -> None:
    values = np.array([1.0, 0.5, 0.1])
    profile = DiscretisedProfile(
        interval=0.5, first=(4, 4), on_grid=(values, values), error=0.0, resolution_error=0.0
    )
    assert profile.delta(1.9) == 1.0
    assert profile.epsilon(0.5) == pytest.approx(2.5, rel=1e-6)


def test_a_target_delta_within_a_hundred_errors_is_refused() -> None:
    profile = grid_profile([0.4, 0.2, 1e-9], [0.4, 0.2, 1e-9], error=1e-8)
    assert profile.smallest_delta == pytest.approx(1e-6)
    assert math.isfinite(profile.epsilon(1.01e-6))
    with pytest.raises(AccountingError, match="least that this accounting can resolve"):
        profile.epsilon(0.99e-6)
    mixture = MixtureProfile(weights=(0.1, 0.9), profiles=(profile, GaussianProfile(mu=1.0)))
    assert mixture.smallest_delta == pytest.approx(1e-7)


@pytest.mark.parametrize(
    "profile",
    [
        GaussianProfile(mu=1.0),
        StatedProfile(stated_epsilon=3.0, stated_delta=1e-7),
        ONE_WAY,
        MixtureProfile(weights=(0.25, 0.75), profiles=(GaussianProfile(mu=1.0), GaussianProfile(mu=3.0))),
    ],
)
def test_epsilon_inverts_delta_from_above(profile: PrivacyProfile) -> None:
    for delta in (0.9, 0.3, 0.05, 0.021):
        epsilon = profile.epsilon(delta)
        assert epsilon >= 0
        assert profile.delta(epsilon) <= delta
        if epsilon > 0:
            assert profile.delta(epsilon * (1 - 1e-6)) > delta


def test_a_run_without_noise_has_delta_one_and_no_epsilon() -> None:
    profile = GaussianProfile(mu=math.inf)
    assert profile.deltas(1e6) == (1.0, 1.0)
    assert profile.epsilon(0.5) == math.inf
    mixture = MixtureProfile(weights=(1 - 1e-6, 1e-6), profiles=(GaussianProfile(mu=0.5), profile))
    assert mixture.delta(50.0) == pytest.approx(1e-6)
    assert mixture.epsilon(1e-5) < gaussian.epsilon(0.5, 8e-6)


def test_the_generic_search_agrees_with_the_closed_form() -> None:
    one = GaussianProfile(mu=0.7)
    mixture = MixtureProfile(weights=(1.0,), profiles=(one,))
    for delta in (1e-5, 1e-100, 1e-290):
        assert mixture.epsilon(delta) == pytest.approx(one.epsilon(delta), rel=1e-11)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "profile", [GaussianProfile(mu=1.0), ONE_WAY, StatedProfile(stated_epsilon=1.0, stated_delta=0.1)]
)
def test_epsilon_must_be_finite_and_not_negative(profile: PrivacyProfile, epsilon: float) -> None:
    with pytest.raises(InvalidInput):
        profile.delta(epsilon)


def test_bad_values_fail() -> None:
    with pytest.raises(InvalidInput):
        GaussianProfile(mu=math.nan)
    with pytest.raises(InvalidInput):
        GaussianProfile(mu=-1.0)
    with pytest.raises(InvalidInput):
        StatedProfile(stated_epsilon=math.nan, stated_delta=1e-5)
    with pytest.raises(InvalidInput):
        StatedProfile(stated_epsilon=1.0, stated_delta=0.0)
    with pytest.raises(InvalidInput, match="2 weights were given for 1"):
        MixtureProfile(weights=(0.5, 0.5), profiles=(ONE_WAY,))


@pytest.mark.parametrize("weights", [(), (0.5,), (0.5, 0.6), (-0.1, 1.1), (math.nan, 1.0), (1.0, 1e-9)])
def test_weights_off_the_simplex_fail(weights: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput):
        require_simplex(weights)


def test_weights_may_round() -> None:
    require_simplex(tuple([0.1] * 10))
    require_simplex((1.0, 1e-17))
    require_simplex(tuple([1 / 1000] * 1000))
