"""How bounds are shown to people: rounded, but never below the number."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context


def rounded_up(value: float, digits: int = 4) -> str:
    """An upper bound, or noise that must not be less, with so many significant digits: never less than the number."""
    if not math.isfinite(value):
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"
