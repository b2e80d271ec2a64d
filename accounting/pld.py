"""Privacy loss distributions: Poisson-sampled steps, and full-batch ones among them, composed.

Each step is discretised exactly and pessimistically (`sampled_gaussian`), all steps are composed in one
Fourier transform (`composition`), and the measured error of that is added to delta.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from accounting.ascent import accounted_multiplier
from accounting.budget import NeighboringRelation
from accounting.composition import LARGEST_WINDOW, Part, Window, compose, delta_on_grid, window_of
from accounting.profile import DiscretisedProfile, GaussianProfile, PrivacyProfile
from accounting.profile_cache import cached_by_size
from accounting.rounding import ULP, root_up, sum_up
from accounting.sampled_gaussian import discretise, loss_bounds
from accounting.trajectory import Segment

_FINE_BASE = 100_000  # bins aimed at for the loss of one step
_LARGEST_BASE = 400_000
_DEFAULT_INTERVAL = 2.0**-14  # nats, under 1e-4; powers of two make the grid points exact
_SMALLEST_INTERVAL, _LARGEST_INTERVAL = 2.0**-40, 1.0
_LARGEST_LOSS = _LARGEST_BASE / 16  # nats; a wider step is accounted as if full batch, see `_split`
_MOST_NOISE, _LEAST_SAMPLING, _LEAST_MU = 1e9, 1e-12, 1e-12
_MOST_BYTES = 600_000_000  # of the profiles held: some 64 of 10,000 steps each
_ROUGH_BASE = 8_000  # bins of one step while the window is sought


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PoissonGroup:
    """Equal Poisson-sampled steps: the noise multiplier, the sampling probability and how many."""

    noise_multiplier: float  # > 0, of the norm of one record, before any factor for the relation
    sampling_probability: float  # in (0, 1)
    steps: int  # >= 1


def full_batch_mu(segments: Iterable[Segment], relation: NeighboringRelation) -> float:
    """The exact mu of the full-batch segments composed: `mu^2 = sum (k / noise_multiplier)^2`, rounded up.

    Poisson segments are ignored. Infinity where a full-batch step has no noise; 0 where there is none. A paired
    step counts with its `accounted_multiplier`, so with 2 (k / noise_multiplier)^2.
    """
    factor = relation.full_batch_factor
    squares = []
    for segment in segments:
        if segment.is_full_batch:
            noise = accounted_multiplier(segment)
            if noise == 0:
                return math.inf
            ratio = factor / noise
            squares.append(segment.steps * (ratio * ratio) * (1 + 4 * ULP))  # may be inf, never an error
    return root_up(sum_up(squares))


def poisson_groups(segments: Iterable[Segment]) -> tuple[PoissonGroup, ...]:
    """The Poisson segments, those with equal accounted noise and sampling probability taken together."""
    steps: dict[tuple[float, float], int] = {}
    for segment in segments:
        if not segment.is_full_batch:
            key = (accounted_multiplier(segment), segment.sampling_probability)
            steps[key] = steps.get(key, 0) + segment.steps
    return tuple(
        sorted(
            PoissonGroup(noise_multiplier=noise, sampling_probability=q, steps=count)
            for (noise, q), count in steps.items()
        )
    )


def profile_of(segments: Iterable[Segment], relation: NeighboringRelation) -> PrivacyProfile:
    """The privacy profile of distinct segments composed: exact for full batch, a PLD for Poisson sampling.

    Args:
        segments: each executed step once (see `trajectory.union_of_segments`).
        relation: neighbouring data sets; under replace-one a full-batch step has k = 2, and a Poisson step
            is the pair of mixtures of `sampled_gaussian`.

    Returns:
        `GaussianProfile` where every step is full batch or some step has no noise, else `ComposedProfile`. An
        upper bound in both directions.

    Raises:
        AccountingError: the composition needs more grid points than may be held.

    Source: Balle and Wang 2018 (Gaussian); Zhu, Dong and Wang 2022 (dominating pairs compose).
    """
    segments = tuple(segments)
    if any(segment.noise_multiplier == 0 for segment in segments):
        return GaussianProfile(mu=math.inf)
    mu, groups = full_batch_mu(segments, relation), poisson_groups(segments)
    composed = composed_profile(mu, groups, relation)
    if isinstance(composed, GaussianProfile):
        return composed
    return ComposedProfile(mu=mu, groups=groups, relation=relation, smallest=composed.smallest_delta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedProfile(PrivacyProfile):
    """What `composed_profile` gives, computed anew where the cache no longer holds it: millions of bytes each."""

    mu: float
    groups: tuple[PoissonGroup, ...]
    relation: NeighboringRelation
    smallest: float  # delta, > 0

    @property
    def smallest_delta(self) -> float:
        return self.smallest

    def deltas(self, epsilon: float) -> tuple[float, float]:
        return composed_profile(self.mu, self.groups, self.relation).deltas(epsilon)

    def epsilon(self, delta: float) -> float:
        return composed_profile(self.mu, self.groups, self.relation).epsilon(delta)


@cached_by_size(_MOST_BYTES)
def composed_profile(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation
) -> PrivacyProfile:
    """A mu-GDP part composed with groups of Poisson-sampled Gaussian steps. See `profile_of`."""
    mu, groups = _split(mu, tuple(_clamped(group) for group in groups), relation)
    if mu > 0:
        mu = max(mu, _LEAST_MU)
    if not groups:
        return GaussianProfile(mu=mu)
    interval, windows = _choose_grid(mu, groups, relation)
    if interval > _LARGEST_INTERVAL:
        return GaussianProfile(mu=_as_full_batch(mu, groups, relation))
    parts = _parts(mu, groups, relation, interval)
    directions = (0,) if relation is NeighboringRelation.REPLACE_ONE else (0, 1)
    compositions = [compose([part[i] for part in parts], windows[i], interval) for i in directions]
    values = [delta_on_grid(composition, interval) for composition in compositions]
    first = [max(composition.first, 0) for composition in compositions]
    error = max(composition.rounding_error for composition in compositions)
    return DiscretisedProfile(
        interval=interval,
        first=(first[0], first[-1]),
        on_grid=(values[0], values[-1]),
        error=error,
        resolution_error=error + max(composition.infinity for composition in compositions),
    )


def _split(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation
) -> tuple[float, tuple[PoissonGroup, ...]]:
    """Account groups with a loss too wide for any grid as full batch: what is left to compose."""
    if mu * (mu + 22) > _LARGEST_LOSS:
        return _as_full_batch(mu, groups, relation), ()
    ratios = [relation.full_batch_factor / group.noise_multiplier for group in groups]
    wide = [ratio * (ratio + 22) > _LARGEST_LOSS for ratio in ratios]
    if not any(wide):
        return mu, groups
    narrow = tuple(group for group, is_wide in zip(groups, wide, strict=True) if not is_wide)
    widest = tuple(group for group, is_wide in zip(groups, wide, strict=True) if is_wide)
    return _split(_as_full_batch(mu, widest, relation), narrow, relation)


def _as_full_batch(mu: float, groups: Iterable[PoissonGroup], relation: NeighboringRelation) -> float:
    """The mu of everything together, as if every record took part in every step.

    Sound: the sampled pair is obtained from the unsampled one by replacing, with probability 1 - q, the
    output by fresh noise; that is post-processing, at every epsilon.
    """
    squares = [mu * mu * (1 + 4 * ULP)]
    for group in groups:
        ratio = relation.full_batch_factor / group.noise_multiplier
        squares.append(group.steps * (ratio * ratio) * (1 + 4 * ULP))
    return root_up(sum_up(squares))


def _clamped(group: PoissonGroup) -> PoissonGroup:
    """Noise and rarity beyond what arithmetic can tell are not credited: less noise is less private, and a
    record sampled less often is post-processing of one sampled more often.
    """
    return PoissonGroup(
        noise_multiplier=min(group.noise_multiplier, _MOST_NOISE),
        sampling_probability=max(group.sampling_probability, _LEAST_SAMPLING),
        steps=group.steps,
    )


def _parts(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation, interval: float | None
) -> list[tuple[Part, Part]]:
    """Every part in both directions, on the given grid or, where it is None, each on a rough one of its own."""
    steps = [(group.noise_multiplier, group.sampling_probability, relation, group.steps) for group in groups]
    if mu > 0:  # the factor k is already in mu, so this is one plain Gaussian of sensitivity 1
        steps.append(((1 - 4 * ULP) / mu, 1.0, NeighboringRelation.ADD_OR_REMOVE_ONE, 1))
    parts = []
    for noise_multiplier, q, kind, count in steps:
        remove, add = discretise(noise_multiplier, q, kind, interval or _rough(noise_multiplier, q, kind))
        parts.append((Part(remove, count), Part(add, count)))
    return parts


def _rough(noise_multiplier: float, q: float, relation: NeighboringRelation) -> float:
    low, high = loss_bounds(noise_multiplier, q, relation)
    return (high - low) / _ROUGH_BASE


def _choose_grid(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation
) -> tuple[float, tuple[Window, Window]]:
    """A grid so fine that every step's loss spans many bins, as far as the number of bins allows it.

    A loss smaller than a bin is rounded up to one, which is sound and wasteful.
    """
    kinds = [(group.noise_multiplier, group.sampling_probability, relation) for group in groups]
    if mu > 0:
        kinds.append((1 / mu, 1.0, NeighboringRelation.ADD_OR_REMOVE_ONE))
    roughs = [_rough(*kind) for kind in kinds]
    parts = _parts(mu, groups, relation, None)
    remove = window_of([pair[0] for pair in parts], roughs)
    symmetric = relation is NeighboringRelation.REPLACE_ONE
    add = remove if symmetric else window_of([pair[1] for pair in parts], roughs)
    window = max(remove.high - remove.low, add.high - add.low)
    interval = min(_DEFAULT_INTERVAL, min(roughs) * _ROUGH_BASE / _FINE_BASE)
    interval = max(interval, max(roughs) * _ROUGH_BASE / _LARGEST_BASE, 1.1 * window / LARGEST_WINDOW)
    return 2.0 ** math.ceil(math.log2(max(interval, _SMALLEST_INTERVAL))), (remove, add)
