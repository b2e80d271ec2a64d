"""What is allowed: a privacy budget under a neighbouring relation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from accounting.errors import InvalidInput

LEAST_DELTA = 1e-300  # doubles lose their relative precision at 2e-308
LEAST_EPSILON, LARGEST_EPSILON = 1e-12, 1e6  # nats; of a budget: anything outside is a slip of the pen


class NeighboringRelation(StrEnum):
    """Which pairs of data sets count as neighbours (not to be confused with a PLD's adjacency)."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
    REPLACE_SPECIAL = "replace_special"

    @property
    def full_batch_factor(self) -> int:
        """`k` of theory: how many clipping norms one neighbouring record can move a full-batch sum.

        1 for add-or-remove-one and for zero-out (replace_special), 2 for replace-one.
        """
        return 2 if self is NeighboringRelation.REPLACE_ONE else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyBudget:
    """An allowed (epsilon, delta), in the sense of approximate differential privacy."""

    epsilon: float  # nats, in [1e-12, 1e6]
    delta: float  # in [1e-300, 1)

    def __post_init__(self) -> None:
        if not LEAST_EPSILON <= require_positive("epsilon", self.epsilon) <= LARGEST_EPSILON:
            raise InvalidInput(
                f"epsilon of a budget must lie between {LEAST_EPSILON:g} and {LARGEST_EPSILON:g} nats, but "
                f"{self.epsilon!r} was given."
            )
        require_open_unit("delta", self.delta)


def require_number(name: str, value: object) -> float:
    """Refuse what is not a real number (strings, booleans, None, NaN).

    Raises:
        InvalidInput: naming `name` and the value found.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{name} must be a number, but {value!r} was given.")
    if math.isnan(value):
        raise InvalidInput(f"{name} must be a number, but NaN was given.")
    return float(value)


def require_positive(name: str, value: object) -> float:
    """Refuse what is not a finite number above zero."""
    number = require_number(name, value)
    if not (number > 0 and math.isfinite(number)):
        raise InvalidInput(f"{name} must be a finite number above 0, but {value!r} was given.")
    return number


def require_non_negative(name: str, value: object) -> float:
    """Refuse what is not a finite number of at least zero."""
    number = require_number(name, value)
    if not (number >= 0 and math.isfinite(number)):
        raise InvalidInput(f"{name} must be a finite number of at least 0, but {value!r} was given.")
    return number


def require_open_unit(name: str, value: object) -> float:
    """Refuse what is not strictly between 0 and 1, and what arithmetic in doubles cannot tell from 0."""
    number = require_number(name, value)
    if not 0 < number < 1:
        raise InvalidInput(f"{name} must lie strictly between 0 and 1, but {value!r} was given.")
    if number < LEAST_DELTA:
        raise InvalidInput(f"{name} must be at least {LEAST_DELTA:g}, but {value!r} was given.")
    return number


def require_probability(name: str, value: object) -> float:
    """Refuse what is not in (0, 1]."""
    number = require_number(name, value)
    if not 0 < number <= 1:
        raise InvalidInput(f"{name} must lie in (0, 1], but {value!r} was given.")
    return number


def require_count(name: str, value: object) -> int:
    """Refuse what is not a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{name} must be a whole number of at least 1, but {value!r} was given.")
    return value
