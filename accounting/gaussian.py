"""The exact privacy profile of the Gaussian mechanism, in log space, rounded up.

A mechanism is mu-GDP when it is at least as private as telling N(0, 1) from N(mu, 1). Its profile is
`delta(eps) = Phi(a) - exp(eps) * Phi(b)` with `a = mu/2 - eps/mu` and `b = -mu/2 - eps/mu`
(Balle and Wang 2018, theorem 8; Dong, Roth and Su 2022, corollary 2.13).

The textbook form loses every digit for large eps or small mu. Because `phi(a) = exp(eps) * phi(b)`, it
equals `phi(a) * (m(a) - m(b))` with Mills' ratio `m(x) = Phi(x) / phi(x)`, and `m(a) - m(b)` is the integral
over [b, a] of `m'(t) = 1 + t * m(t) > 0`: no cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, ndtr

from accounting.budget import require_non_negative, require_number, require_open_unit, require_positive
from accounting.errors import InvalidInput
from accounting.rounding import ULP

Array = NDArray[np.float64]

# Error of the evaluation below, measured against 60-digit arithmetic in the tests, times about ten.
_RELATIVE_SLACK = 1e-12  # of delta
_EXPONENT_SLACK = 16 * ULP  # of |log delta|, whose main term is -a^2/2

_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(20)
_SERIES_BELOW = -20.0  # ten terms of the asymptotic series are exact to double precision from here on
_HUGE_MU = 1e150  # mu^2 would overflow: no finite epsilon is reported above


@overload
def log_delta(mu: float, epsilon: float) -> float: ...
@overload
def log_delta(mu: Array, epsilon: float | Array) -> Array: ...
@overload
def log_delta(mu: float, epsilon: Array) -> Array: ...
def log_delta(mu: float | Array, epsilon: float | Array) -> float | Array:
    """Natural logarithm of the least delta for which mu-GDP implies (epsilon, delta)-DP.

    Args:
        mu: at least 0; infinity is a run without noise. Shape broadcasts with `epsilon`.
        epsilon: nats, at least 0, finite.

    Returns:
        An upper bound within about 1e-12 absolute plus 4e-15 relative of the exact value; at most 0;
        minus infinity for mu = 0 (the exact value) and 0 for mu = infinity.

    Raises:
        InvalidInput: NaN, a negative mu, or a negative or infinite epsilon.

    Source: Balle and Wang 2018, theorem 8.
    """
    scalar = np.ndim(mu) == 0 and np.ndim(epsilon) == 0
    mus, epsilons = np.broadcast_arrays(np.asarray(mu, dtype=float), np.asarray(epsilon, dtype=float))
    if not np.all(mus >= 0):
        raise InvalidInput("mu must be at least 0 and not NaN.")
    if not (np.all(epsilons >= 0) and np.all(np.isfinite(epsilons))):
        raise InvalidInput("epsilon must be a finite number of at least 0 nats.")
    result = np.full(mus.shape, -np.inf)
    result[mus > _HUGE_MU] = 0.0
    inner = (mus > 0) & (mus <= _HUGE_MU)
    if inner.any():
        exact = np.maximum(_log_delta(mus[inner], epsilons[inner]), -1e300)  # (eps/mu)^2 may overflow
        result[inner] = np.minimum(exact + _RELATIVE_SLACK + _EXPONENT_SLACK * np.abs(exact), 0.0)
    return float(result) if scalar else result


@overload
def delta(mu: float, epsilon: float) -> float: ...
@overload
def delta(mu: Array, epsilon: float | Array) -> Array: ...
@overload
def delta(mu: float, epsilon: Array) -> Array: ...
def delta(mu: float | Array, epsilon: float | Array) -> float | Array:
    """The least delta for which mu-GDP implies (epsilon, delta)-DP, rounded up.

    Arguments and errors as for `log_delta`. A value below the smallest double is reported as that double;
    mu = 0 gives exactly 0 and mu = infinity gives exactly 1.
    """
    logarithm = np.asarray(log_delta(mu, epsilon))
    value = np.where(np.isneginf(logarithm), 0.0, np.nextafter(np.exp(logarithm), 1.0))
    return float(value) if value.ndim == 0 else value


@lru_cache(maxsize=65536)
def epsilon(mu: float, delta: float) -> float:
    """The least epsilon for which mu-GDP implies (epsilon, delta)-DP, rounded up.

    Args:
        mu: at least 0; infinity is a run without noise.
        delta: in (0, 1).

    Returns:
        nats, at least 0, an upper bound, with `gaussian.delta(mu, result) <= delta`. `math.inf` where no
        finite epsilon exists or could be written as a double: mu = infinity, and mu above 1e150.

    Raises:
        InvalidInput: NaN, a negative mu, or a delta outside (0, 1).
    """
    mu = require_number("mu", mu)
    if not mu >= 0:
        raise InvalidInput(f"mu must be at least 0, but {mu!r} was given.")
    target = math.log(require_open_unit("delta", delta))
    target -= ULP * abs(target)
    if mu == 0 or log_delta(mu, 0.0) <= target:
        return 0.0
    if mu > _HUGE_MU:
        return math.inf
    high = mu * (mu / 2 + math.sqrt(-2 * target)) * (1 + 1e-9)  # Phi(a) <= exp(-a^2/2) <= delta
    while log_delta(mu, high) > target:
        high *= 2
    return _last_holding(lambda value: target - log_delta(mu, value), 0.0, high)


@lru_cache(maxsize=4096)
def mu_for(epsilon: float, delta: float) -> float:
    """The largest mu whose GDP guarantee implies (epsilon, delta)-DP, rounded down.

    Args:
        epsilon: nats, at least 0, finite.
        delta: in (0, 1).

    Returns:
        mu > 0 with `gaussian.epsilon(mu, delta) <= epsilon`, checked by evaluating it.

    Raises:
        InvalidInput: NaN or a value outside these ranges.
    """
    budget = require_non_negative("epsilon", epsilon)
    target = math.log(require_open_unit("delta", delta))
    target -= ULP * abs(target)
    high = 1.0
    while log_delta(high, budget) <= target:
        high *= 2
    low = high / 2
    while log_delta(low, budget) > target:
        high, low = low, low / 2
    # Searched downwards, so that the end where the budget holds is the one returned.
    mu = -_last_holding(lambda value: target - log_delta(-value, budget), -high, -low)
    while _epsilon_of(mu, delta) > budget:
        mu *= 1 - 4 * ULP
    return mu


def _epsilon_of(mu: float, delta_value: float) -> float:
    return epsilon(mu, delta_value)


def _last_holding(margin: Callable[[float], float], low: float, high: float) -> float:
    """Just above the root of an increasing `margin` with margin(low) < 0 <= margin(high).

    Returns:
        A point where margin is at least 0, checked by evaluating it, a few units in the last place from the
        root that Brent's method finds.
    """
    root = float(brentq(margin, low, high, xtol=5e-324, rtol=4 * ULP, maxiter=500))
    step = max(abs(root) * ULP, 5e-324)
    while not margin(root) >= 0:
        root = min(root + step, high)
        step *= 2
    return root


def _log_delta(mu: Array, eps: Array) -> Array:
    """The nearest double to log delta for 0 < mu <= 1e150, without any slack. Shape (n,)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        ratio = eps / mu
        a = mu / 2 - ratio
        b = -mu / 2 - ratio
        result = np.empty_like(a)
        # Where the two Mills ratios nearly agree, integrate; elsewhere subtract.
        close = (mu <= 1) | (eps > 30 * mu * mu)
        above = ~close & (a >= 0)
        below = ~close & (a < 0)
        result[close] = -(a[close] ** 2) / 2 - _HALF_LOG_TWO_PI + _log_mills_difference(b[close], mu[close])
        ratio_of_terms = erfcx(-b[above] / _ROOT_TWO) * np.exp(-(a[above] ** 2) / 2) / (2 * ndtr(a[above]))
        result[above] = log_ndtr(a[above]) + np.log1p(-ratio_of_terms)
        difference = erfcx(-a[below] / _ROOT_TWO) - erfcx(-b[below] / _ROOT_TWO)
        result[below] = -(a[below] ** 2) / 2 + np.log(difference / 2)
    return result


_ROOT_TWO = math.sqrt(2)
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def _log_mills_difference(b: Array, mu: Array) -> Array:
    """`log(m(b + mu) - m(b))` by Gauss-Legendre quadrature of the positive derivative. Shape (n,)."""
    points = b[:, None] + mu[:, None] * ((1 + _NODES) / 2)
    # The logarithm of mu on its own, lest the product underflow; the node weights sum to 2.
    return np.log(mu) + np.log(_mills_derivative(points) @ (_NODE_WEIGHTS / 2))


def _mills_derivative(t: Array) -> Array:
    """`m'(t) = 1 + t * m(t)` for t <= 1/2."""
    far = t < _SERIES_BELOW
    near_t = np.where(far, -1.0, t)
    near = 1 + near_t * math.sqrt(math.pi / 2) * erfcx(-near_t / _ROOT_TWO)
    square = 1 / np.where(far, t, _SERIES_BELOW) ** 2
    # m'(t) = t^-2 - 3 t^-4 + 15 t^-6 - ..., summed from the smallest term.
    series = np.ones_like(square)
    for k in range(10, 0, -1):
        series = 1 - (2 * k + 1) * square * series
    return np.where(far, square * series, near)


def noise_multiplier_for(mu: float, steps: int, factor: int) -> float:
    """The noise multiplier at which `steps` full-batch steps are mu-GDP: `factor * sqrt(steps) / mu`.

    Args:
        mu: > 0.
        steps: number of steps.
        factor: k, see `NeighboringRelation.full_batch_factor`.

    Returns:
        Rounded up.
    """
    return math.nextafter(factor * math.sqrt(steps) / require_positive("mu", mu) * (1 + 4 * ULP), math.inf)
