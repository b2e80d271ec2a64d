"""Rounding in one direction: what is an upper bound on paper stays one in floating point."""

from __future__ import annotations

import math
from collections.abc import Iterable

from accounting.errors import AccountingError

ULP = 2.0**-52


def up(value: float, ulps: int = 4) -> float:
    """`value` >= 0 raised by `ulps` units in the last place, and by at least one representable number."""
    return math.nextafter(value * (1 + ulps * ULP), math.inf)


def sum_up(values: Iterable[float]) -> float:
    """The sum of non-negative numbers, rounded up; an empty or all-zero sum is exactly zero.

    Raises:
        AccountingError: a number is NaN or negative, which no bound may be built on.
    """
    try:
        total = math.fsum(values)
    except OverflowError:  # larger than any double
        return math.inf
    if not total >= 0:
        raise AccountingError("A figure of this bound is not a number; check the runs' settings.")
    return math.nextafter(total, math.inf) if total > 0 else 0.0


def root_up(square: float) -> float:
    """The square root of a non-negative number, rounded up; zero stays zero and infinity stays infinity."""
    if not square >= 0:
        raise AccountingError("A figure of this bound is not a number; check the runs' settings.")
    if square == 0 or math.isinf(square):
        return square
    return math.nextafter(math.sqrt(square), math.inf)
