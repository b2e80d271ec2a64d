"""What a merge operator is: its name, what it needs, its options with their defaults, and how it merges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from accounting.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np

    from tasks.merging.inputs import Inputs

Value = float | int | bool
Options = Mapping[str, Any]
Prepare = Callable[["Inputs"], Callable[[str], "Iterator[np.ndarray]"]]
SAME_CANDIDATES = "tensors that are not floating point must be equal in all candidates and are copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a merge operator needs beside the candidates' models and their weights."""

    base: bool = False  # the public start w0
    statistics: Literal["fisher", "gram"] | None = None  # of each candidate, from public rows
    models: int | None = None  # exactly so many candidates; None: any number
    # Whether the bytes depend on nothing but the inputs; otherwise they also depend, in the last unit and so almost
    # never after rounding to float32, on the machine's exponential, tangent and arc cosine.
    same_bytes_everywhere: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: what it is when nothing is said, and what it may be. The default's type is the option's."""

    default: Value
    fits: Callable[[Any], bool] = field(repr=False)
    words: str  # "a number above 0 and at most 1"

    def checked(self, operator: str, name: str, value: Any) -> Value:
        if isinstance(self.default, float) and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                value = None
        if type(value) is not type(self.default) or not self.fits(value):
            raise InvalidInput(
                f"Option {name} of the merge operator {operator} must be {self.words}, but it is {value!r}."
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One merge operator.

    Attributes:
        weights: what they must be: "finite" (any), "positive", or on the "simplex".
        rule: the sentence that a certificate states, from the checked options.
        prepare: takes the inputs, perhaps goes through all of them once, and returns how one tensor is merged: from
            its name to consecutive parts of its flattened float64 values. None: a linear combination, which has an
            engine of its own.
    """

    name: str
    needs: Needs = Needs()
    options: Mapping[str, Option] = field(default_factory=dict)
    weights: Literal["finite", "positive", "simplex"] = "finite"
    rule: Callable[[Options], str]
    prepare: Prepare | None = None

    def checked_options(self, options: Options) -> dict[str, Value]:
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = f"it has {', '.join(self.options)}" if self.options else "it has none"
            raise InvalidInput(f"The merge operator {self.name} has no option {unknown[0]}; {known}.")
        return {
            name: option.checked(self.name, name, options[name]) if name in options else option.default
            for name, option in self.options.items()
        }


def share(default: float) -> Option:
    """A share of the parameters to keep."""
    return Option(default=default, fits=lambda value: 0 < value <= 1, words="a number above 0 and at most 1")


def scaling(default: float) -> Option:
    """Of a task vector; 0 would release the public start, and more than a million overflows most types."""
    return Option(
        default=default,
        fits=lambda value: 0 < abs(value) <= 1e6,
        words="a number other than 0, from -1e6 to 1e6",
    )


def positive(default: float) -> Option:
    return Option(
        default=default, fits=lambda value: value > 0 and isfinite(value), words="a finite number above 0"
    )


def unit(default: float) -> Option:
    return Option(default=default, fits=lambda value: 0 <= value <= 1, words="a number between 0 and 1")


def flag(default: bool) -> Option:
    return Option(default=default, fits=lambda value: True, words="true or false")


def whole(default: int) -> Option:
    return Option(
        default=default,
        fits=lambda value: 0 <= value < 2**63,
        words="a whole number that is not negative and below 2**63",
    )


def ridge(default: float) -> Option:
    """What keeps a layer's equations solvable, as a share of their mean diagonal; less drowns in float64's rounding."""
    return Option(
        default=default,
        fits=lambda value: value >= 1e-10 and isfinite(value),
        words="a finite number of at least 1e-10",
    )
