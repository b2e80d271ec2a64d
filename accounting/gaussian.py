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
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, ndtr

from accounting.budget import require_non_negative, require_number, require_open_unit
from accounting.errors import InvalidInput
from accounting.rounding import ULP

Array = NDArray[np.float64]
Number = float | Array

# Error of the evaluation below, measured against 60-digit arithmetic in the tests, times about ten.
_RELATIVE_SLACK = 1e-12  # of delta
_EXPONENT_SLACK = 16 * ULP  # of |log delta|, whose main term is -a^2/2

_LEGENDRE_NODES, _LEGENDRE_WEIGHTS = np.polynomial.legendre.leggauss(8)
_NODES, _NODE_WEIGHTS = (1 + _LEGENDRE_NODES) / 2, _LEGENDRE_WEIGHTS / 2  # on [0, 1], nodes increasing
_SERIES_BELOW = -20.0  # ten terms of the asymptotic series are exact to double precision from here on
_ROOT_TWO = math.sqrt(2)
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_HUGE_MU = 1e150  # mu^2 would overflow: no finite epsilon is reported above
_TINY_MU = 1e-305  # a smaller mu is taken for this one, which is less private: lest ratios lose their digits


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
        An upper bound within about 1e-12 absolute plus 1e-14 relative of the exact value (for mu up to
        1000; beyond, within the rounding of `mu^2`); at most 0;
        minus infinity for mu = 0 (the exact value) and 0 for mu = infinity.

    Raises:
        InvalidInput: NaN, a negative mu, or a negative or infinite epsilon.

    Source: Balle and Wang 2018, theorem 8.
    """
    if np.ndim(mu) == 0 and np.ndim(epsilon) == 0:
        return _checked_scalar(float(mu), float(epsilon))
    mus, epsilons = np.broadcast_arrays(np.asarray(mu, dtype=float), np.asarray(epsilon, dtype=float))
    if not np.all(mus >= 0):
        raise InvalidInput("mu must be at least 0 and not NaN.")
    if not (np.all(epsilons >= 0) and np.all(np.isfinite(epsilons))):
        raise InvalidInput("epsilon must be a finite number of at least 0 nats.")
    result = np.where(mus == 0, -np.inf, 0.0)
    inner = (mus > 0) & (mus <= _HUGE_MU)
    kept = np.maximum(mus[inner], _TINY_MU)
    exact = log_delta_nearest(kept, epsilons[inner])
    result[inner] = np.minimum(exact + _slack(kept, epsilons[inner], exact), 0.0)
    return result


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
        delta: in [1e-300, 1).

    Returns:
        nats, at least 0, an upper bound, with `gaussian.delta(mu, result) <= delta`. `math.inf` where no
        finite epsilon exists or could be written as a double: mu = infinity, and mu above 1e150.

    Raises:
        InvalidInput: NaN, a negative mu, or a delta outside [1e-300, 1).
    """
    mu = require_number("mu", mu)
    if not mu >= 0:
        raise InvalidInput(f"mu must be at least 0, but {mu!r} was given.")
    target = _log_target(delta)
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
        delta: in [1e-300, 1).

    Returns:
        mu > 0 with `gaussian.epsilon(mu, delta) <= epsilon`, checked by evaluating it.

    Raises:
        InvalidInput: NaN or a value outside these ranges.
    """
    budget = require_non_negative("epsilon", epsilon)
    target = _log_target(delta)
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


def _log_target(delta: float) -> float:
    """log delta, lowered by what `delta` adds in rounding up."""
    target = math.log(require_open_unit("delta", delta))
    return target - ULP * max(abs(target), 2.0)


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


def _checked_scalar(mu: float, epsilon: float) -> float:
    if not mu >= 0:
        raise InvalidInput(f"mu must be at least 0, but {mu!r} was given.")
    if not 0 <= epsilon < math.inf:
        raise InvalidInput(f"epsilon must be a finite number of at least 0 nats, but {epsilon!r} was given.")
    if mu == 0:
        return -math.inf
    if mu > _HUGE_MU:
        return 0.0
    mu = max(mu, _TINY_MU)
    ratio = epsilon / mu
    if ratio > 1e150:  # its square would overflow
        return -1e299
    a, b = mu / 2 - ratio, -mu / 2 - ratio
    if _nearly_equal_ratios(mu, epsilon):
        exact = float(_by_integral(a, b, mu))
    elif a >= 0:
        exact = float(_by_upper_tail(a, b))
    else:
        exact = float(_by_lower_tail(a, b))
    return min(exact + float(_slack(mu, epsilon, exact)), 0.0)


def log_delta_nearest(mu: Array, epsilon: Array) -> Array:
    """log delta without slack, its relative error in delta about 1e-13: for composing, not for claims.

    Args:
        mu: in (0, 1e150], shape (n,).
        epsilon: nats, >= 0, finite, shape (n,).
    """
    with np.errstate(over="ignore"):
        ratio = np.minimum(epsilon / mu, 1e150)
    a, b = mu / 2 - ratio, -mu / 2 - ratio
    near = _nearly_equal_ratios(mu, epsilon)
    upper = ~near & (a >= 0)
    lower = ~near & (a < 0)
    result = np.empty_like(a)
    result[near] = _by_integral(a[near], b[near], mu[near])
    result[upper] = _by_upper_tail(a[upper], b[upper])
    result[lower] = _by_lower_tail(a[lower], b[lower])
    return result


def _slack(mu: Number, epsilon: Number, exact: Number) -> Number:
    """More than the evaluation's error in log delta."""
    # For large mu, a = mu/2 - eps/mu is a small difference of large numbers; log delta moves with it by at
    # most 1 + |a|.
    ratio = np.minimum(epsilon / mu, 1e150)
    cancellation = 2 * ULP * (mu / 2 + ratio) * (1 + np.abs(mu / 2 - ratio))
    slack: Number = _RELATIVE_SLACK + _EXPONENT_SLACK * np.abs(exact) + cancellation
    return slack


def _nearly_equal_ratios(mu: Number, epsilon: Number) -> Any:
    """Whether m(b) / m(a) is within about 0.02 of 1, so that subtracting would cost digits."""
    return mu * mu < 0.02 * (epsilon + mu)


def _by_upper_tail(a: Number, b: Number) -> Number:
    """For a >= 0."""
    share = erfcx(-b / _ROOT_TWO) * np.exp(-a * a / 2) / (2 * ndtr(a))
    return log_ndtr(a) + np.log1p(-share)


def _by_lower_tail(a: Number, b: Number) -> Number:
    """For a < 0."""
    return -a * a / 2 + np.log((erfcx(-a / _ROOT_TWO) - erfcx(-b / _ROOT_TWO)) / 2)


def _by_integral(a: Number, b: Number, mu: Number) -> Number:
    """For nearly equal Mills ratios: Gauss-Legendre quadrature of m' over [b, a].

    The interval is at most 1/50 of the length over which m' changes, so few nodes are exact.
    """
    difference: Number = 0.0
    for node, weight in zip(_NODES, _NODE_WEIGHTS, strict=True):
        difference = difference + weight * _mills_derivative(b + mu * node)
    # The logarithm of mu on its own, lest the product underflow.
    result: Number = -a * a / 2 - _HALF_LOG_TWO_PI + np.log(mu) + np.log(difference)
    return result


def _mills_derivative(t: Number) -> Any:
    """`m'(t) = 1 + t * m(t)` for t <= 1/2; far out `t^-2 - 3 t^-4 + 15 t^-6 - ...`."""
    clipped = np.maximum(t, _SERIES_BELOW)
    near = 1 + clipped * (math.sqrt(math.pi / 2) * erfcx(-clipped / _ROOT_TWO))
    square = 1 / np.minimum(t, _SERIES_BELOW) ** 2
    series: Number = 1.0
    for k in range(10, 0, -1):  # from the smallest term
        series = 1 - (2 * k + 1) * square * series
    return np.where(t < _SERIES_BELOW, square * series, near)
