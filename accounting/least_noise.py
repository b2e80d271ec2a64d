"""The search for the least noise multiplier that fits a budget, whatever the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

from accounting.words import rounded_up

SMALLEST, LARGEST = 1e-3, 1e9  # noise multipliers looked at
_CURVATURE = 0.05  # of log epsilon in the logarithm of the noise, at most about so much


def least_noise(
    epsilon_of: Callable[[float], float], target: float, guess: float, digits: int
) -> float | None:
    """The least noise multiplier with `epsilon_of(multiplier) <= target`, rounded up to a short decimal.

    Args:
        epsilon_of: nats at some delta, falling in the multiplier but for small errors; infinity where it
            cannot be computed. Each evaluation may be slow: some nine are made.
        target: nats, > 0.
        guess: > 0, where the search begins.
        digits: significant decimal digits of the answer.

    Returns:
        A multiplier of so many digits that was evaluated and fits, within 10^(1 - digits) relative of one that
        does not; 0.001 where even that fits, and None where nothing up to 1e9 does.
    """
    epsilon = cache(epsilon_of)
    bracket = _bracket(epsilon, target, min(max(guess, SMALLEST), LARGEST))
    if bracket is None:
        return None
    low, high = bracket
    tolerance = 0.1**digits
    for turn in itertools.count(1):
        if high / low <= 1 + tolerance:
            break
        # The secant in the logarithms, kept a little inside the bracket; the middle where there is none, and
        # now and then where epsilon jumps.
        rise, fall = _excess(epsilon(low), target), -_excess(epsilon(high), target)
        share = rise / (rise + fall) if math.isfinite(rise) and rise + fall > 0 and turn % 3 else 0.5
        width = math.log(high / low)
        middle = low * math.exp(min(max(share, 0.02), 0.98) * width)
        near = max(tolerance / 2, _CURVATURE * width * width)  # how far the secant may be off
        for tried in (middle, middle * (1 + near), middle / (1 + near)):
            if low < tried < high:
                low, high = (low, tried) if epsilon(tried) <= target else (tried, high)
    rounded = float(rounded_up(high, digits))
    while not epsilon(rounded) <= target:
        rounded = float(rounded_up(rounded * (1 + 0.1**digits), digits))
    return rounded


def _bracket(epsilon: Callable[[float], float], target: float, guess: float) -> tuple[float, float] | None:
    """(a multiplier that does not fit, one that does); both 0.001 where even that fits."""
    low, high, factor = guess, guess, 1.05
    while not epsilon(high) <= target:
        if high >= LARGEST:
            return None
        low, high, factor = high, min(high * factor, LARGEST), factor**3
    while epsilon(low) <= target:
        if low <= SMALLEST:
            return SMALLEST, SMALLEST
        low, high, factor = max(low / factor, SMALLEST), low, factor**3
    return low, high


def _excess(epsilon: float, target: float) -> float:
    """log of epsilon over the target: nearly linear in the logarithm of the noise."""
    return math.log(max(min(epsilon, 1e300), 1e-300) / target) if math.isfinite(epsilon) else math.inf
