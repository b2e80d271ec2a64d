"""One Poisson-sampled Gaussian step: its exact hockey-stick divergence, and a pessimistic grid of it.

With probability q the step sees the record, which moves its mean by m = 1 / noise_multiplier standard
deviations. Write G(L) for the Gaussian divergence `delta(L)` at mu = m (see `gaussian`). The dominating pairs
(the library dp_accounting uses the same) and their divergences, each a sum of positive terms:

- remove, P = (1-q) N(0) + q N(-m) from Q = N(0):  `q * G(L)` with `exp(L) = 1 + (exp(eps) - 1) / q`;
- add, the same pair exchanged:  `delta_add(eps) = 1 - exp(eps) + exp(eps) * delta_remove(-eps)`;
- replace, P = (1-q) N(0) + q N(-m) from Q = (1-q) N(0) + q N(m):
  `q * G(-m x - m^2/2) + q * exp(eps + m x - m^2/2) * G(m^2/2 - m x)`, x the point where the loss is eps.

For negative eps the divergence is near 1 and only `f(eps) = delta(eps) - (1 - exp(eps))` carries
information; it equals `exp(eps)` times the other direction's delta at -eps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from accounting.budget import NeighboringRelation
from accounting.gaussian import log_delta_nearest

Array = NDArray[np.float64]

_REACH = 11.0  # standard deviations: beyond lies less than 2e-28
_RELATIVE_ERROR = 1e-11  # ten times the error of the divergences below against 50-digit arithmetic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossGrid:
    """A discrete privacy loss that dominates the true one: losses (first + j) * interval.

    Attributes:
        first: grid index of the first probability.
        probabilities: >= 0, shape (bins,); with `infinity` they sum to 1 or a little more.
        infinity: probability of an infinite loss.
    """

    first: int
    probabilities: Array
    infinity: float


def loss_bounds(
    noise_multiplier: float, sampling_probability: float, relation: NeighboringRelation
) -> tuple[float, float]:
    """The least and largest loss in the direction "remove" (or replace), 11 standard deviations out, in nats.

    The direction "add" has the negatives.
    """
    m = 1 / noise_multiplier
    if relation is NeighboringRelation.REPLACE_ONE:
        x = -_REACH - m
        seen = _log_mixture(sampling_probability, -m * x - m * m / 2)
        top = seen - _log_mixture(sampling_probability, m * x - m * m / 2)
        return -top, top
    low = _log_mixture(sampling_probability, -_REACH * m - m * m / 2)
    return low, _log_mixture(sampling_probability, _REACH * m + m * m / 2)


def discretise(
    noise_multiplier: float, sampling_probability: float, relation: NeighboringRelation, interval: float
) -> tuple[LossGrid, LossGrid]:
    """Dominating losses of one step in the directions (remove, add), on multiples of `interval`.

    Connecting the dots of the exact divergence on the grid, as a convex function of exp(eps), gives a
    discrete loss whose divergence is nowhere smaller; what rounding takes away again is measured and put
    back.

    Args:
        noise_multiplier: > 0, of the norm of one record; under replace-one the doubling is done here.
        sampling_probability: in (0, 1]; 1 only for add-or-remove and zero-out.
        relation: neighbouring data sets.
        interval: nats, > 0.

    Source: Doroshenko et al. 2022, algorithm 1; dominating pairs: Zhu, Dong and Wang 2022.
    """
    low, high = loss_bounds(noise_multiplier, sampling_probability, relation)
    first, last = math.floor(low / interval), math.ceil(high / interval)
    m, q = 1 / noise_multiplier, sampling_probability
    if relation is NeighboringRelation.REPLACE_ONE:
        positive = _replace(_multiples(last + 2, interval), m, q)
        grid = _connect_the_dots(positive, positive, first, last, interval)
        return grid, grid
    count = max(last, -first) + 2
    epsilons = _multiples(count, interval)
    remove, add = _remove(epsilons, m, q), _add(epsilons, m, q)
    return (
        _connect_the_dots(remove, add, first, last, interval),
        _connect_the_dots(add, remove, -last, -first, interval),
    )


def _multiples(count: int, interval: float) -> Array:
    return np.arange(count, dtype=np.float64) * np.float64(interval)


def _log_mixture(q: float, log_ratio: float) -> float:
    """`log(1 - q + q * exp(log_ratio))`."""
    if q == 1:
        return log_ratio
    if log_ratio > 1:
        return log_ratio + math.log(q) + math.log1p((1 - q) / q * math.exp(-log_ratio))
    return math.log1p(q * math.expm1(log_ratio))


def _remove(epsilons: Array, m: float, q: float) -> Array:
    """delta_remove at epsilons >= 0: `q * G(log(1 + (exp(eps) - 1) / q))`."""
    small, large = np.minimum(epsilons, 1.0), np.maximum(epsilons, 1.0)
    losses = np.where(
        epsilons <= 1,
        np.log1p(np.expm1(small) / q),
        large - math.log(q) + np.log1p(-(1 - q) * np.exp(-large)),
    )
    return q * _gauss(losses, m)


def _add(epsilons: Array, m: float, q: float) -> Array:
    """delta_add at epsilons >= 0: `q * exp(eps - L) * G(L)` with `exp(-L) = 1 - (1 - exp(-eps)) / q`."""
    shrink = np.expm1(-epsilons) / q
    possible = shrink > -1  # a loss of -log(1 - q) or more never occurs
    losses = -np.log1p(np.where(possible, shrink, 0.0))
    deltas = q * np.exp(np.where(possible, epsilons - losses, 0.0)) * _gauss(losses, m)
    return np.where(possible, deltas, 0.0)


def _replace(epsilons: Array, m: float, q: float) -> Array:
    """delta under replace-one at epsilons >= 0; the two directions are equal."""
    log_alpha = m * m / 2 + math.log1p(-q) - math.log(q)
    small, large = np.minimum(epsilons, 1.0), np.maximum(epsilons, 1.0)
    with np.errstate(divide="ignore"):
        log_sinh = np.where(
            epsilons <= 1,
            np.log(np.sinh(small / 2)),
            large / 2 - math.log(2) + np.log1p(-np.exp(-large)),
        )
        exponent = log_sinh + log_alpha
        # asinh of exp(exponent), which may be too large to write down.
        inverse = np.where(
            exponent < 300, np.arcsinh(np.exp(np.minimum(exponent, 300))), exponent + math.log(2)
        )
    x = -(inverse + epsilons / 2) / m
    seen_by_one = _gauss(-m * x - m * m / 2, m)
    seen_by_other = np.exp(epsilons + m * x - m * m / 2) * _gauss(m * m / 2 - m * x, m)
    return q * (seen_by_one + seen_by_other)


def _gauss(losses: Array, m: float) -> Array:
    """G(L) for L >= -m^2/2."""
    return np.exp(log_delta_nearest(np.full_like(losses, m), losses))


def _connect_the_dots(delta: Array, other: Array, first: int, last: int, interval: float) -> LossGrid:
    """The grid from delta at 0, interval, ... in this direction and in the other one."""
    growth = math.expm1(interval)
    negatives = np.arange(first, 0)
    # f at the negative points, at 0, and at one point beyond: there delta = f + 1 - exp(eps).
    f = np.concatenate((np.exp(negatives * interval) * other[-negatives], [delta[0], delta[1] + growth]))
    left = np.diff(f)
    right = np.diff(delta[: last + 1])
    # p_i = (step above - exp(interval) * step below) / (exp(interval) - 1), written without the factor.
    below = np.concatenate(([left[0] / growth - f[0]], np.diff(left) / growth - left[:-1]))
    above = np.diff(right) / growth - right[:-1]
    end = -right[-1] / -math.expm1(-interval)
    probabilities = np.maximum(np.concatenate((below, above, [end])), 0.0)
    infinity = float(delta[last])
    # What the grid gives back, against what it was made from.
    given = hockey_stick(probabilities, infinity, interval)
    wanted = np.concatenate((f[: len(negatives)] - np.expm1(negatives * interval), delta[: last + 1]))
    missing = float(np.max((wanted - given) / np.maximum(wanted, 1e-300)))
    inflation = 1 + _RELATIVE_ERROR + max(missing, 0.0) * (1 + 1e-6)
    return LossGrid(first=first, probabilities=probabilities * inflation, infinity=infinity * inflation)


def hockey_stick(probabilities: Array, infinity: float, interval: float) -> Array:
    """delta at each grid point of a discrete loss. Shape (bins,), non-increasing.

    `delta(x_i) = exp(-interval) * delta(x_{i+1}) + (1 - exp(-interval)) * P(loss > x_i)`: positive terms only.
    """
    beyond = np.concatenate(([0.0], np.cumsum(probabilities[::-1])[:-1]))
    shrink = -math.expm1(-interval)
    values: Array = lfilter([shrink], [1.0, shrink - 1.0], beyond)[::-1] + infinity
    return values
