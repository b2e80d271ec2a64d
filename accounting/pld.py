"""Privacy loss distributions of Poisson-sampled runs: the only door to dp_accounting.

dp_accounting discretises one step (pessimistic "connect the dots"); the steps are composed here, in one
Fourier transform of all groups, because the library's own composition
- drops nothing but keeps negative bins that rounding leaves, which lowers delta (its Gaussian of mu = 4,
  composed from 100,000 parts, claims epsilon 34.93 at delta 1e-12 where the truth is 35.56), and
- clips its window so tightly that the rounding error cannot always be seen.
Here the window reaches to a tail of 1e-20, so that the negative bins show the error of the transform; bins
times the largest of them is added to delta, and so is the rounding of the library's one-step deltas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import NeighboringRelation as LibraryRelation
from dp_accounting.pld import privacy_loss_distribution
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter
from scipy.special import logsumexp

from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError
from accounting.profile import DiscretisedProfile, GaussianProfile, PrivacyProfile
from accounting.rounding import ULP, root_up, sum_up
from accounting.trajectory import Segment

Array = NDArray[np.float64]

_TAIL = 1e-20  # probability outside the window, at each end
_LARGEST_BASE = 250_000  # bins of one step; the library takes about 5 microseconds a bin
_SMALLEST_BASE = 50_000  # bins aimed at where losses are small
_LARGEST_WINDOW = 2**21  # bins of the composition: about 200 MB while it is computed
_DEFAULT_INTERVAL = 2.0**-14  # nats, at most 1e-4; powers of two make grid points exact
_SMALLEST_INTERVAL = 2.0**-24
_LARGEST_INTERVAL = 2.0**-4  # coarser than this, the sampling is ignored instead (sound, see `split`)
_STEP_ROUNDING = 4 * ULP  # absolute error of one one-step delta, measured against 50-digit arithmetic
_LIBRARY_RELATION = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: LibraryRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_SPECIAL: LibraryRelation.REPLACE_SPECIAL,
    NeighboringRelation.REPLACE_ONE: LibraryRelation.REPLACE_ONE,
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PoissonGroup:
    """Equal Poisson-sampled steps: the noise multiplier, the sampling probability and how many."""

    noise_multiplier: float  # > 0, of the norm of one record, before any factor for the relation
    sampling_probability: float  # in (0, 1)
    steps: int  # >= 1


def full_batch_mu(segments: Iterable[Segment], relation: NeighboringRelation) -> float:
    """The exact mu of the full-batch segments composed: `mu^2 = sum (k / noise_multiplier)^2`, rounded up.

    Poisson segments are ignored. Infinity where a full-batch step has no noise; 0 where there is none.
    """
    factor = relation.full_batch_factor
    squares = []
    for segment in segments:
        if segment.is_full_batch:
            if segment.noise_multiplier == 0:
                return math.inf
            squares.append(segment.steps * (factor / segment.noise_multiplier) ** 2 * (1 + 4 * ULP))
    return root_up(sum_up(squares))


def poisson_groups(segments: Iterable[Segment]) -> tuple[PoissonGroup, ...]:
    """The Poisson segments, those with equal noise multiplier and sampling probability taken together."""
    steps: dict[tuple[float, float], int] = {}
    for segment in segments:
        if not segment.is_full_batch:
            key = (segment.noise_multiplier, segment.sampling_probability)
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
        relation: neighbouring data sets; under replace-one a full-batch step has k = 2 and a Poisson step
            is the library's dominating pair, given the norm of one record.

    Returns:
        `GaussianProfile` where every step is full batch or some step has no noise, else
        `DiscretisedProfile`. An upper bound in both directions.

    Source: Balle and Wang 2018 (Gaussian); Doroshenko et al. 2022, algorithm 1 (discretisation); Zhu, Dong
    and Wang 2022 (dominating pairs compose).
    """
    segments = tuple(segments)
    if any(segment.noise_multiplier == 0 for segment in segments):
        return GaussianProfile(mu=math.inf)
    return composed_profile(full_batch_mu(segments, relation), poisson_groups(segments), relation)


@lru_cache(maxsize=64)
def composed_profile(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation
) -> PrivacyProfile:
    """A mu-GDP part composed with groups of Poisson-sampled Gaussian steps. See `profile_of`."""
    mu, groups = _split(mu, groups, relation)
    if not groups:
        return GaussianProfile(mu=mu)
    interval, parts = _discretise(mu, groups, relation)
    on_grid: list[Array] = []
    first: list[int] = []
    negative, infinity = [], []
    for direction in (0, 1):
        if direction == 1 and relation is NeighboringRelation.REPLACE_ONE:
            on_grid.append(on_grid[0])
            first.append(first[0])
            break
        composition = _compose([part[direction] for part in parts], interval)
        negative.append(composition.rounding_error)
        infinity.append(composition.infinity)
        start, values = _hockey_stick(composition, interval)
        first.append(start)
        on_grid.append(values)
    steps = sum(group.steps for group in groups) + 1
    error = max(negative) + steps * _STEP_ROUNDING
    return DiscretisedProfile(
        interval=interval,
        first=(first[0], first[1]),
        on_grid=(on_grid[0], on_grid[1]),
        error=error,
        resolution_error=error + max(infinity),
    )


def _split(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation
) -> tuple[float, tuple[PoissonGroup, ...]]:
    """Move groups with a loss too wide for any grid to the Gaussian part, as if every record took part.

    Sound: the sampled pair is obtained from the unsampled one by replacing, with probability 1 - q, the
    output by fresh noise; that is post-processing, at every epsilon.
    """
    kept, squares = [], [mu * mu * (1 + 4 * ULP)]
    for group in groups:
        if _loss_range(group, relation) > _LARGEST_INTERVAL * _LARGEST_BASE:
            ratio = relation.full_batch_factor / group.noise_multiplier
            squares.append(group.steps * ratio * ratio * (1 + 4 * ULP))
        else:
            kept.append(group)
    if len(kept) == len(groups):
        return mu, groups
    return root_up(sum_up(squares)), tuple(kept)


def _loss_range(group: PoissonGroup, relation: NeighboringRelation) -> float:
    """About the width of one step's privacy loss, in nats, out to ten standard deviations."""
    shift = relation.full_batch_factor / group.noise_multiplier
    return shift * (20 + shift)


@dataclass(frozen=True, slots=True)
class _Part:
    """One direction of a discretised step, repeated: losses (lower + j) * interval with probabilities."""

    lower: int
    probabilities: Array
    infinity: float
    count: int


def _discretise(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation
) -> tuple[float, list[tuple[_Part, _Part]]]:
    """Choose the grid and discretise every part on it.

    The grid is as fine as the number of bins allows, so that a step's loss spans many bins (a loss smaller
    than a bin is rounded up to one, which is sound and wasteful), and coarser where long runs need it.
    """
    coarse = max(_loss_range(group, relation) for group in groups) / 1000
    if mu:
        coarse = max(coarse, mu * (20 + mu) / 1000)
    for _ in range(2):  # the second pass on a grid that fits: sampling may shrink the losses by much
        rough = _parts(mu, groups, relation, coarse)
        base = max(len(part.probabilities) for pair in rough for part in pair) * coarse
        if base > 500 * coarse:
            break
        coarse = max(base / 1000, _SMALLEST_INTERVAL)
    window = max(_window([pair[i] for pair in rough], coarse)[1] for i in (0, 1)) * coarse
    interval = min(_DEFAULT_INTERVAL, base / _SMALLEST_BASE)
    interval = max(interval, base / _LARGEST_BASE, window / _LARGEST_WINDOW, _SMALLEST_INTERVAL)
    interval = 2.0 ** math.ceil(math.log2(interval))
    steps = sum(group.steps for group in groups)
    while True:
        parts = _parts(mu, groups, relation, interval)
        # Rounding that the library clips at zero adds probability; a coarser grid has less of it.
        surplus = max(float(part.probabilities.sum()) - 1 for pair in parts for part in pair)
        if surplus * steps < 0.01 or interval >= _LARGEST_INTERVAL:
            return interval, parts
        interval *= 4


def _parts(
    mu: float, groups: tuple[PoissonGroup, ...], relation: NeighboringRelation, interval: float
) -> list[tuple[_Part, _Part]]:
    parts = []
    if mu > 0:
        # The factor k is already in mu, so this is one plain Gaussian of sensitivity 1.
        gaussian = privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=1 / (mu * (1 + 2 * ULP)), value_discretization_interval=interval
        )
        parts.append(_both_directions(gaussian, 1))
    for group in groups:
        # REPLACE_ONE takes the norm of one record and doubles by itself; halving the noise is unsound.
        step = privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=group.noise_multiplier,
            sensitivity=1,
            sampling_prob=group.sampling_probability,
            value_discretization_interval=interval,
            neighboring_relation=_LIBRARY_RELATION[relation],
        )
        parts.append(_both_directions(step, group.steps))
    return parts


def _both_directions(
    step: privacy_loss_distribution.PrivacyLossDistribution, count: int
) -> tuple[_Part, _Part]:
    remove, add = (
        _Part(
            lower=int(dense._lower_loss),
            probabilities=np.asarray(dense._probs, dtype=float),
            infinity=float(dense._infinity_mass),
            count=count,
        )
        for dense in (step._pmf_remove.to_dense_pmf(), step._pmf_add.to_dense_pmf())
    )
    return remove, add


def _window(parts: list[_Part], interval: float) -> tuple[int, int]:
    """The first bin and the number of bins that hold all but `_TAIL` of the composition at each end.

    Chernoff's bound at many exponents, of either sign.
    """
    lowest = sum(part.count * part.lower for part in parts)
    highest = sum(part.count * (part.lower + len(part.probabilities) - 1) for part in parts)
    variance = 0.0
    logs = []
    for part in parts:
        bins = part.lower + np.arange(len(part.probabilities), dtype=float)
        mean = float(bins @ part.probabilities)
        variance += part.count * float((bins - mean) ** 2 @ part.probabilities)
        with np.errstate(divide="ignore"):
            logs.append((bins, np.log(part.probabilities)))
    scale = math.sqrt(-2 * math.log(_TAIL) / variance)
    low, high = lowest, highest
    for exponent in scale * 2.0 ** np.arange(-8, 4.5, 0.5):
        for sign in (1, -1):
            cumulant = sum(
                part.count * float(logsumexp(sign * exponent * bins + log_probabilities))
                for part, (bins, log_probabilities) in zip(parts, logs, strict=True)
            )
            reach = (cumulant - math.log(_TAIL)) / exponent
            if not math.isfinite(reach):
                continue
            if sign == 1:
                high = min(high, math.ceil(reach) + 1)
            else:
                low = max(low, math.floor(-reach) - 1)
    return low, high - low + 1


@dataclass(frozen=True, slots=True)
class _Composition:
    first: int  # grid index of the first bin
    probabilities: Array  # >= 0
    infinity: float  # probability of an infinite loss, truncation included
    rounding_error: float  # bins times the largest error of one


def _compose(parts: list[_Part], interval: float) -> _Composition:
    """Convolve all parts, each to its power, in one Fourier transform.

    What lies outside the window wraps round to its other end: mass from below ends up at larger losses,
    which is pessimistic; mass from above, at most `_TAIL`, is added to the infinite loss instead.
    """
    first, size = _window(parts, interval)
    if size > 4 * _LARGEST_WINDOW:
        raise AccountingError(
            f"Composing these runs needs {size:,} grid points, which is more than this machine should hold; "
            "account fewer Poisson-sampled runs together, or use a larger noise multiplier."
        )
    length = next_fast_len(size, real=True)
    spectrum = np.ones(length // 2 + 1, dtype=complex)
    offset = 0
    log_finite = 0.0
    for part in parts:
        folds = -(-len(part.probabilities) // length)
        folded = np.zeros(folds * length)
        folded[: len(part.probabilities)] = part.probabilities
        spectrum *= rfft(folded.reshape(folds, length).sum(axis=0)) ** part.count
        offset += part.count * part.lower
        log_finite += part.count * math.log1p(-part.infinity)
    probabilities = np.roll(irfft(spectrum, length), -((first - offset) % length))
    # The error of the transform as seen in its negative bins, and no less than is to be expected of it:
    # powers multiply the rounding of the spectrum, and its root mean square spreads over all bins.
    steps = sum(part.count for part in parts)
    expected = 4 * (steps + 1) * ULP * float(np.linalg.norm(spectrum)) * math.sqrt(2) / length
    bin_error = max(-float(probabilities.min()), expected)
    return _Composition(
        first=first,
        probabilities=np.maximum(probabilities, 0.0),
        infinity=(-math.expm1(log_finite) + _TAIL) * (1 + 8 * ULP),
        rounding_error=length * bin_error,
    )


def _hockey_stick(composition: _Composition, interval: float) -> tuple[int, Array]:
    """delta at every grid point from epsilon 0 on: (index of the first point, values with infinity mass).

    `delta(x_i) = exp(-h) * delta(x_{i+1}) + (1 - exp(-h)) * P(loss > x_i)`: only positive terms.
    """
    backwards = composition.probabilities[::-1]
    beyond = np.concatenate(([0.0], np.cumsum(backwards)[:-1]))
    decay = math.exp(-interval)
    values = lfilter([-math.expm1(-interval)], [1.0, -decay], beyond)[::-1] + composition.infinity
    if composition.first < 0:
        values = values[-composition.first :]
    # Far out, delta consists of the error alone; one point more stands for all the rest.
    useful = int(np.searchsorted(-values, -max(composition.rounding_error, 1e-30) / 1000)) + 1
    kept = np.minimum(values[: max(useful, 2)], 1.0).copy()
    kept.flags.writeable = False
    return max(composition.first, 0), kept
