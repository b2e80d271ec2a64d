"""Privacy profiles for checking certificates, derived anew: no line of the accountant's own profiles is used.

| profile | how | agreement with the accountant |
|---|---|---|
| of a Gaussian | trapezoidal rule on the defining integral, on a logarithmic scale; nothing cancels | 1e-9 relative |
| of Poisson steps | dp_accounting's privacy loss distributions, connect-the-dots | see `POISSON_*` |
| of a draw | sum of `probability * delta` within each direction, then the worse one | as its members |

dp_accounting's traps are kept clear of: under replace-one it does the doubling itself (so it gets the plain noise
multiplier), and its composed deltas mean nothing near the rounding of its transform (so nothing below
`POISSON_FLOOR` is compared).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation as LibraryRelation
from dp_accounting.pld import privacy_loss_distribution as library

from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError
from accounting.independent_steps import released_sums
from accounting.trajectory import Segment

Deltas = Callable[[float], tuple[float, float]]  # epsilon in nats -> (remove, add)

POISSON_FLOOR = 1e-10  # of delta
POISSON_RELATIVE = 2e-2  # of delta
_INTERVAL = 1e-3  # nats, of dp_accounting's grid
_MOST_BINS = 4e6
_SMALLEST = 1e-322  # of delta, where doubles no longer have nine digits
_CERTAIN = -40.0  # standard deviations: a likelihood ratio is above e^epsilon but for less than 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProfile:
    """Delta by epsilon in both directions, and how far a right certificate may be from it.

    A stated delta has to lie between `low * (1 - relative) - floor` and `high * (1 + relative) + floor`.
    """

    low: Deltas  # delta is at least this, up to the tolerance
    high: Deltas  # delta is at most this, up to the tolerance
    relative: float
    floor: float

    def range(self, epsilon: float) -> tuple[float, float]:
        """The least and the largest delta at `epsilon` nats that agree with this profile, both in [0, 1]."""
        low, high = max(self.low(epsilon)), max(self.high(epsilon))
        return max(low * (1 - self.relative) - self.floor, 0.0), min(
            high * (1 + self.relative) + self.floor, 1.0
        )


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The hockey-stick divergence of N(mu, 1) from N(0, 1), by numerical integration.

    With z the standardised loss, `delta = integral over u > 0 of phi(z0 + u) * (1 - exp(-mu u))` from the point z0
    where the loss is epsilon. In t = log u the integrand is analytic and falls off at both ends, for which the
    trapezoidal rule is exact up to rounding (Trefethen and Weideman 2014).

    Args:
        mu: > 0, finite.
        epsilon: nats, >= 0.

    Returns:
        Within 1e-11 relative, to nearest: no bound.
    """
    start = epsilon / mu - mu / 2
    if start < _CERTAIN:
        return 1.0
    step = 0.05 / (1 + max(-start, 0.0))
    slope = max(mu, 1.0, start)
    last = math.log(40.0 + max(-start, 0.0))
    first = math.log(1e-10 / slope)
    t = np.arange(first, last, step)
    u = np.exp(t)
    # phi(z0 + u) without phi(z0), which may be too small to write down.
    exponent = -start * u - u * u / 2
    peak = float(exponent.max())
    total = float(np.sum(np.exp(exponent - peak) * -np.expm1(-mu * u) * u)) * step
    log_delta = math.log(total) + peak - start * start / 2 - math.log(2 * math.pi) / 2
    return max(math.exp(min(log_delta, 0.0)), 5e-324)


def gaussian_profile(low: float, high: float) -> CheckedProfile:
    """Of a Gaussian mechanism whose mu lies between two numbers, equal ones where it is known exactly."""

    def at(mu: float) -> Deltas:
        def deltas(epsilon: float) -> tuple[float, float]:
            value = gaussian_delta(mu, epsilon)
            return value, value

        return deltas

    return CheckedProfile(low=at(low), high=at(high), relative=1e-9, floor=_SMALLEST)


def steps_profile(steps: Mapping[str, Segment], relation: NeighboringRelation) -> CheckedProfile:
    """Of distinct executed steps composed, some of them sampled by Poisson coins.

    Raises:
        AccountingError: a loss too wide for dp_accounting's grid.
    """
    composition = library_composition(steps, LibraryRelation[relation.name])
    remove = composition._pmf_remove
    add = composition._pmf_add

    @lru_cache(maxsize=256)
    def deltas(epsilon: float) -> tuple[float, float]:
        return float(remove.get_delta_for_epsilon(epsilon)), float(add.get_delta_for_epsilon(epsilon))

    return CheckedProfile(low=deltas, high=deltas, relative=POISSON_RELATIVE, floor=POISSON_FLOOR)


def drawn_profile(parts: Sequence[tuple[float, CheckedProfile]]) -> CheckedProfile:
    """Of releasing one of several, drawn by probability, the draw revealed."""

    def total(side: Callable[[CheckedProfile], Deltas]) -> Deltas:
        def deltas(epsilon: float) -> tuple[float, float]:
            values = [(weight, side(profile)(epsilon)) for weight, profile in parts]
            return math.fsum(w * v[0] for w, v in values), math.fsum(w * v[1] for w, v in values)

        return deltas

    return CheckedProfile(
        low=total(lambda profile: profile.low),
        high=total(lambda profile: profile.high),
        relative=max(profile.relative for _, profile in parts),
        floor=math.fsum(weight * profile.floor for weight, profile in parts),
    )


def library_composition(steps: Mapping[str, Segment], kind: LibraryRelation) -> Any:
    """dp_accounting's distribution of distinct executed steps composed.

    Raises:
        AccountingError: a loss too wide for dp_accounting's grid, or no noise at all.
    """
    factor = 2 if kind is LibraryRelation.REPLACE_ONE else 1
    sampled: dict[tuple[float, float], int] = {}
    square = 0.0
    for segment in steps.values():
        if not segment.noise_multiplier > 0:
            raise AccountingError(f"Segment {segment.id} has no noise, so nothing is private.")
        sums = released_sums(segment)
        if segment.sampling_probability < 1:
            # Both sums of a paired step see one coin: one sampled Gaussian, of sqrt(2) times the sensitivity.
            key = (segment.noise_multiplier / math.sqrt(sums), segment.sampling_probability)
            sampled[key] = sampled.get(key, 0) + segment.steps
        else:
            square += segment.steps * sums * (factor / segment.noise_multiplier) ** 2
    return _composed(tuple(sorted((*key, n) for key, n in sampled.items())), square, factor, kind)


@lru_cache(maxsize=64)
def _composed(
    sampled: tuple[tuple[float, float, int], ...], square: float, factor: int, kind: LibraryRelation
) -> Any:
    widest = max(((10 / noise + 1 / noise**2) * factor**2 for noise, _, _ in sampled), default=0.0)
    if widest / _INTERVAL > _MOST_BINS or square > 1e4:
        raise AccountingError(
            "These steps have so little noise that dp_accounting's grid cannot hold their loss, so the certificate "
            "cannot be checked a second way."
        )
    parts = [
        library.from_gaussian_mechanism(
            noise, sampling_prob=q, value_discretization_interval=_INTERVAL, neighboring_relation=kind
        ).self_compose(count)
        for noise, q, count in sampled
    ]
    if square > 0:  # the relation's factor is in it already
        parts.append(
            library.from_gaussian_mechanism(1 / math.sqrt(square), value_discretization_interval=_INTERVAL)
        )
    composed = parts[0]
    for part in parts[1:]:
        composed = composed.compose(part)
    return composed
