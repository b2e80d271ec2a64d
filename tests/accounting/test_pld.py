"""Composed privacy losses: against closed forms, direct integration, the library, and its known traps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting import NeighboringRelation as LibraryRelation
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy.special import ndtr

from accounting import gaussian
from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError
from accounting.pld import PoissonGroup, composed_profile, full_batch_mu, poisson_groups, profile_of
from accounting.profile import DiscretisedProfile, GaussianProfile, PrivacyProfile
from accounting.trajectory import Segment

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
ZERO_OUT = NeighboringRelation.REPLACE_SPECIAL


def poisson(
    noise: float, q: float, steps: int, relation: NeighboringRelation, mu: float = 0.0
) -> PrivacyProfile:
    group = PoissonGroup(noise_multiplier=noise, sampling_probability=q, steps=steps)
    return composed_profile(mu, (group,), relation)


@pytest.mark.parametrize(("mu", "steps"), [(1.0, 1), (1.0, 1000), (4.0, 100_000), (0.3, 1_000_000)])
def test_composed_gaussians_stay_above_the_closed_form(mu: float, steps: int) -> None:
    """q = 1 makes every step a plain Gaussian, so the truth is known, also far in the tail."""
    profile = poisson(math.sqrt(steps) / mu, 1.0, steps, ADD_OR_REMOVE)
    assert isinstance(profile, DiscretisedProfile)
    for delta in (0.3, 1e-3, 1e-5, 1e-8, 1e-10, 1e-12, 1e-15):
        epsilon = gaussian.epsilon(mu, delta)
        truth = gaussian.delta(mu, epsilon)
        for found in profile.deltas(epsilon):
            assert found >= truth * (1 - 1e-12)
            assert found <= truth * 1.001 + 1.01 * profile.error
    with pytest.raises(AccountingError):
        profile.epsilon(0.99 * profile.smallest_delta)


def test_the_library_is_not_pessimistic_in_its_tail() -> None:
    """dp_accounting 0.6: Gaussian mu = 4 from 100,000 parts: 34.93 to 35.07 by its grid, the truth is 35.56."""
    part = privacy_loss_distribution.from_gaussian_mechanism(
        math.sqrt(100_000) / 4, value_discretization_interval=1e-4
    )
    claimed = part.self_compose(100_000).get_epsilon_for_delta(1e-12)
    truth = gaussian.epsilon(4.0, 1e-12)
    assert claimed < 35.1 < 35.56 < truth < 35.563
    ours = poisson(math.sqrt(100_000) / 4, 1.0, 100_000, ADD_OR_REMOVE)
    assert ours.delta(claimed) > 1e-12
    with pytest.raises(AccountingError, match="least that this accounting can resolve"):
        ours.epsilon(1e-12)


def one_step(
    noise: float, q: float, relation: NeighboringRelation, eps: np.ndarray
) -> tuple[np.ndarray, ...]:
    """(remove, add) deltas of one step for any real eps, by the distribution functions."""
    m, growth = 1 / noise, np.exp(eps)
    if relation is REPLACE:
        c = math.exp(-m * m / 2)
        a, b = growth * q * c, (1 - q) * (growth - 1)
        x = np.log((-b + np.sqrt(b * b + 4 * a * q * c)) / (2 * a)) / m
        delta = (1 - q) * ndtr(x) + q * ndtr(x + m) - growth * ((1 - q) * ndtr(x) + q * ndtr(x - m))
        return delta, delta
    ratio = (growth - (1 - q)) / q
    with np.errstate(invalid="ignore", divide="ignore"):
        x = -np.log(ratio) / m - m / 2
    remove = np.where(ratio > 0, (1 - q) * ndtr(x) + q * ndtr(x + m) - growth * ndtr(x), 1 - growth)
    ratio = (1 / growth - (1 - q)) / q
    with np.errstate(invalid="ignore", divide="ignore"):
        x = np.log(ratio) / m + m / 2
    return remove, np.where(ratio > 0, ndtr(x) - growth * ((1 - q) * ndtr(x) + q * ndtr(x - m)), 0.0)


def two_steps(noise: float, q: float, relation: NeighboringRelation, epsilon: float) -> tuple[float, float]:
    """Two steps composed by integrating over the first one's outcome: no grid of losses, no transform."""
    m = 1 / noise
    x = np.linspace(-14 - m, 14 + m, 400_001)
    at_zero, at_minus, at_plus = (
        np.exp(-((x - shift) ** 2) / 2) / math.sqrt(2 * math.pi) for shift in (0, -m, m)
    )
    if relation is REPLACE:
        p, r = (1 - q) * at_zero + q * at_minus, (1 - q) * at_zero + q * at_plus
        pairs = [(p, r), (p, r)]
    else:
        mixed = (1 - q) * at_zero + q * at_minus
        pairs = [(mixed, at_zero), (at_zero, mixed)]
    results = []
    for direction, (p, r) in enumerate(pairs):
        inner = one_step(noise, q, relation, epsilon - np.log(p / r))[direction]
        results.append(float(np.trapezoid(p * inner, x)))
    return results[0], results[1]


@pytest.mark.parametrize("relation", [ADD_OR_REMOVE, REPLACE])
@pytest.mark.parametrize(("noise", "q"), [(1.0, 0.9), (0.7, 0.05), (3.0, 0.3)])
def test_two_steps_match_direct_integration(noise: float, q: float, relation: NeighboringRelation) -> None:
    profile = poisson(noise, q, 2, relation)
    for epsilon in (0.0, 0.1, 0.5, 1.0):
        for found, truth in zip(profile.deltas(epsilon), two_steps(noise, q, relation, epsilon), strict=True):
            assert truth * (1 - 1e-9) - 1e-13 <= found <= truth * 1.005 + 1e-10


def test_halving_the_noise_instead_of_replacing_is_unsound() -> None:
    """sigma 1, q 0.9, two steps, epsilon 0: 0.7709 by halving, 0.7763 in truth."""
    assert poisson(0.5, 0.9, 2, ADD_OR_REMOVE).delta(0.0) == pytest.approx(0.7709, abs=5e-5)
    assert poisson(1.0, 0.9, 2, REPLACE).delta(0.0) == pytest.approx(0.7763, abs=5e-5)
    assert two_steps(1.0, 0.9, REPLACE, 0.0)[0] == pytest.approx(0.7763, abs=5e-5)


def test_full_batch_doubles_under_replace_one_only(make_segment: Callable[..., Segment]) -> None:
    segments = [make_segment("a", 16.0, 12), make_segment("b", 8.0, 2)]
    once = math.sqrt(12 / 16**2 + 2 / 8**2)
    assert full_batch_mu(segments, ADD_OR_REMOVE) == pytest.approx(once, rel=1e-14)
    assert full_batch_mu(segments, ZERO_OUT) == pytest.approx(once, rel=1e-14)
    assert full_batch_mu(segments, REPLACE) == pytest.approx(2 * once, rel=1e-14)
    assert full_batch_mu(segments, REPLACE) >= 2 * once
    assert profile_of(segments, REPLACE) == GaussianProfile(mu=full_batch_mu(segments, REPLACE))


def test_the_library_s_renyi_accountant_ignores_replace_one() -> None:
    """The trap for which the Renyi accountant is never asked about that relation."""
    orders = [2.0, 8.0]
    curves = []
    for relation in (LibraryRelation.ADD_OR_REMOVE_ONE, LibraryRelation.REPLACE_ONE):
        accountant = RdpAccountant(orders, relation)
        accountant.compose(GaussianDpEvent(1.0))
        curves.append(list(accountant._rdp))
    assert curves[0] == curves[1] == [1.0, 4.0]


@pytest.mark.parametrize(
    ("noise", "q", "steps", "relation"),
    [
        (1.0, 0.01, 1000, ADD_OR_REMOVE),
        (1.0, 0.01, 1000, REPLACE),
        (0.6, 0.2, 50, ZERO_OUT),
        (0.6, 0.2, 50, REPLACE),
        (4.0, 0.5, 300, REPLACE),
    ],
)
def test_agrees_with_the_library_s_accountant(
    noise: float, q: float, steps: int, relation: NeighboringRelation
) -> None:
    accountant = PLDAccountant(LibraryRelation[relation.name], value_discretization_interval=1e-3)
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(noise)), steps))
    theirs = accountant.get_epsilon(1e-5)
    ours = poisson(noise, q, steps, relation).epsilon(1e-5)
    assert 0.995 * theirs <= ours <= theirs * (1 + 1e-6)
    optimistic = privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=q,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=2e-4,
        neighboring_relation=LibraryRelation[relation.name],
    ).self_compose(steps)
    assert ours >= optimistic.get_epsilon_for_delta(1e-5)


def test_directions_differ_and_are_kept_apart() -> None:
    remove, add = poisson(0.8, 0.3, 1, ADD_OR_REMOVE).deltas(0.3)
    assert remove > 2 * add
    expected = [float(side[0]) for side in one_step(0.8, 0.3, ADD_OR_REMOVE, np.array([0.3]))]
    assert [remove, add] == pytest.approx(expected, rel=1e-4)


def test_groups_gather_equal_steps(make_segment: Callable[..., Segment]) -> None:
    segments = [
        make_segment("a", 1.0, 10, sampling_probability=0.1),
        make_segment("b", 2.0, 5, sampling_probability=0.1),
        make_segment("c", 1.0, 7, sampling_probability=0.1, learning_rate=0.5),
        make_segment("d", 30.0, 7),
    ]
    groups = poisson_groups(segments)
    assert [(g.noise_multiplier, g.sampling_probability, g.steps) for g in groups] == [
        (1.0, 0.1, 17),
        (2.0, 0.1, 5),
    ]
    shuffled = profile_of(segments[::-1], REPLACE)
    assert shuffled == profile_of(segments, REPLACE)


def test_mixing_full_batch_and_poisson_steps(make_segment: Callable[..., Segment]) -> None:
    """A Gaussian of mu 1 next to steps that almost never see the record is almost the Gaussian alone."""
    full = make_segment("full", 2.0, 1)  # mu = 1 under replace-one
    rare = make_segment("rare", 1.0, 10, sampling_probability=1e-9)
    mixed = profile_of([full, rare], REPLACE)
    alone = gaussian.epsilon(1.0, 1e-5)
    assert alone <= mixed.epsilon(1e-5) <= alone * 1.0001
    both = composed_profile(
        1.0, (PoissonGroup(noise_multiplier=2.0, sampling_probability=1.0, steps=4),), ADD_OR_REMOVE
    )
    truth = gaussian.epsilon(math.sqrt(2), 1e-5)
    assert truth <= both.epsilon(1e-5) <= truth * 1.0001


@pytest.mark.parametrize("relation", [ADD_OR_REMOVE, REPLACE])
@pytest.mark.parametrize("q", [1e-300, 1e-6, 0.5, 0.999999])
@pytest.mark.parametrize("noise", [0.001, 0.02, 3.0, 1e6, 1e300])
@pytest.mark.parametrize("steps", [1, 1_000_000])
def test_sampling_never_hurts_and_extremes_hold(
    noise: float, q: float, steps: int, relation: NeighboringRelation
) -> None:
    profile = poisson(noise, q, steps, relation)
    unsampled = relation.full_batch_factor * math.sqrt(steps) / min(noise, 1e9)  # more is not credited
    previous = math.inf
    for epsilon in (0.0, 0.01, 1.0, 30.0, 1e3):
        delta = profile.delta(epsilon)
        assert 0 <= delta <= 1
        assert delta <= previous * (1 + 1e-9)
        slack = 1.01 * profile.error if isinstance(profile, DiscretisedProfile) else 0.0
        assert delta <= gaussian.delta(unsampled, epsilon) * 1.001 + slack + 1e-12 or noise == 0.001
        previous = delta


@pytest.mark.parametrize("relation", [ADD_OR_REMOVE, REPLACE])
def test_a_step_too_wide_for_any_grid_is_accounted_as_full_batch(relation: NeighboringRelation) -> None:
    profile = poisson(0.001, 0.5, 10, relation)
    assert isinstance(profile, GaussianProfile)
    assert profile.mu == pytest.approx(relation.full_batch_factor * math.sqrt(10) / 0.001, rel=1e-12)
    fine = PoissonGroup(noise_multiplier=1.0, sampling_probability=0.1, steps=10)
    with_wide = composed_profile(1e4, (fine,), relation)
    assert isinstance(with_wide, GaussianProfile)
    assert with_wide.mu == pytest.approx(math.sqrt(1e8 + 10 * relation.full_batch_factor**2), rel=1e-12)


@pytest.mark.parametrize("relation", [ADD_OR_REMOVE, REPLACE])
def test_monotone_in_noise_steps_and_sampling(relation: NeighboringRelation) -> None:
    base = poisson(1.0, 0.05, 100, relation).epsilon(1e-5)
    assert poisson(1.1, 0.05, 100, relation).epsilon(1e-5) < base
    assert poisson(1.0, 0.06, 100, relation).epsilon(1e-5) > base
    assert poisson(1.0, 0.05, 101, relation).epsilon(1e-5) > base


def test_zero_out_equals_add_or_remove_and_replacing_is_worse() -> None:
    assert poisson(1.0, 0.05, 100, ZERO_OUT).epsilon(1e-5) == poisson(1.0, 0.05, 100, ADD_OR_REMOVE).epsilon(
        1e-5
    )
    assert poisson(1.0, 0.05, 100, REPLACE).epsilon(1e-5) > poisson(1.0, 0.05, 100, ADD_OR_REMOVE).epsilon(
        1e-5
    )


def test_a_run_without_noise_has_delta_one(make_segment: Callable[..., Segment]) -> None:
    noisy, silent = make_segment("a", 10.0), make_segment("b", 0.0, 1, sampling_probability=0.01)
    for segments in ([silent], [noisy, silent], [noisy, make_segment("c", 0.0)]):
        assert profile_of(segments, REPLACE).deltas(100.0) == (1.0, 1.0)
