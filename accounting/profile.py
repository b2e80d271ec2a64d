"""Privacy profiles: for each epsilon, how large delta must be. Always upper bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting import gaussian
from accounting.budget import require_non_negative, require_number, require_open_unit
from accounting.errors import AccountingError, InvalidInput
from accounting.rounding import ULP, sum_up, up

Array = NDArray[np.float64]

_INTERPOLATION_SLACK = 1e-8  # relative; covers the rounding of sums over the grid and between its points
_LARGEST_EPSILON = 1e9  # nats; nobody is served by a finite epsilon above


class PrivacyProfile(ABC):
    """The hockey-stick divergence between a mechanism's outputs on neighbouring data sets, bounded above.

    There are two directions: from the data set with the record to the one without ("remove"), and back
    ("add"). Under replace-one both are the same by symmetry.
    """

    __slots__ = ()

    @abstractmethod
    def deltas(self, epsilon: float) -> tuple[float, float]:
        """Upper bounds on the hockey-stick divergence in the two directions (remove, add).

        Args:
            epsilon: nats, at least 0, finite.

        Returns:
            Two numbers in [0, 1].

        Raises:
            InvalidInput: for any other epsilon.
        """

    @property
    def smallest_delta(self) -> float:
        """The least delta that `epsilon` accepts; 0 for a closed form, 100 times the error for a PLD."""
        return 0.0

    def delta(self, epsilon: float) -> float:
        """The least delta known to hold with `epsilon` (nats, >= 0), rounded up: the worse direction."""
        return max(self.deltas(epsilon))

    def epsilon(self, delta: float) -> float:
        """The least epsilon known to hold with `delta`, rounded up.

        Args:
            delta: in (0, 1), and at least `smallest_delta`.

        Returns:
            nats, at least 0, with `self.delta(result) <= delta`. `math.inf` where no epsilon up to 1e9
            qualifies, as for a run without noise; check it with `math.isfinite`.

        Raises:
            AccountingError: delta lies below `smallest_delta`.
            InvalidInput: delta is not in (0, 1).
        """
        self._require_reachable(delta)
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = 0.0, 1.0
        while self.delta(high) > delta:
            low, high = high, 2 * high
            if high > _LARGEST_EPSILON:
                return math.inf
        while high - low > 4 * ULP * high:
            middle = low + (high - low) / 2
            if self.delta(middle) <= delta:
                high = middle
            else:
                low = middle
        return high

    def _require_reachable(self, delta: float) -> None:
        require_open_unit("delta", delta)
        if delta < self.smallest_delta:
            raise AccountingError(
                f"delta {delta:.3g} is below {self.smallest_delta:.3g}, the least that this accounting can "
                "resolve; ask for a larger delta, or use full-batch candidates, which are accounted exactly."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianProfile(PrivacyProfile):
    """The exact profile of a mu-GDP mechanism; mu = infinity is a run without noise (delta 1 everywhere).

    Source: Balle and Wang 2018, theorem 8.
    """

    mu: float  # >= 0

    def __post_init__(self) -> None:
        if not require_number("mu", self.mu) >= 0:
            raise InvalidInput(f"mu must be at least 0, but {self.mu!r} was given.")

    def deltas(self, epsilon: float) -> tuple[float, float]:
        value = gaussian.delta(self.mu, require_non_negative("epsilon", epsilon))
        return value, value

    def epsilon(self, delta: float) -> float:
        return gaussian.epsilon(self.mu, delta)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedProfile(PrivacyProfile):
    """All that follows from a stated (epsilon, delta) guarantee, of which nothing else is known.

    Below the stated epsilon: `delta + (1 - delta) * (e^epsilon - e^eps') / (1 + e^epsilon)`, the profile of
    the worst mechanism that satisfies the statement (randomised response with a catastrophe of mass delta).

    Source: Kairouz, Oh and Viswanath 2015, theorem 3.1 and its dominating pair.
    """

    stated_epsilon: float  # nats, >= 0
    stated_delta: float  # in (0, 1)

    def __post_init__(self) -> None:
        require_non_negative("stated_epsilon", self.stated_epsilon)
        require_open_unit("stated_delta", self.stated_delta)

    @property
    def smallest_delta(self) -> float:
        """The stated delta: the statement says nothing at all about smaller ones."""
        return self.stated_delta

    def deltas(self, epsilon: float) -> tuple[float, float]:
        gap = self.stated_epsilon - require_non_negative("epsilon", epsilon)
        if gap <= 0:
            return self.stated_delta, self.stated_delta
        excess = -math.expm1(-gap) / (1 + math.exp(-self.stated_epsilon))
        value = min(up(self.stated_delta + (1 - self.stated_delta) * excess, 8), 1.0)
        return value, value

    def epsilon(self, delta: float) -> float:
        self._require_reachable(delta)
        # Not PrivacyProfile.epsilon: the search could stop an ulp above the stated value.
        return min(PrivacyProfile.epsilon(self, delta), self.stated_epsilon)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiscretisedProfile(PrivacyProfile):
    """A profile known on a grid of epsilons, with the measured error of the computation added to delta.

    Between two grid points delta is linear in e^epsilon, exactly so for a discrete privacy loss and an
    upper bound otherwise, since delta is convex in e^epsilon.

    Attributes:
        interval: nats between grid points, > 0.
        first: grid index (epsilon / interval, >= 0) of the first value, by direction (remove, add); delta
            is taken as 1 below it.
        on_grid: delta from `first` on in the directions (remove, add), without `error`; shapes (points,),
            non-increasing; the last value holds for every larger epsilon.
        error: what rounding and truncation may have taken away from delta, >= 0; added to every value.
        resolution_error: the part of delta that is an artefact, >= `error`; see `smallest_delta`.
    """

    interval: float
    first: tuple[int, int]
    on_grid: tuple[Array, Array]
    error: float
    resolution_error: float

    @property
    def smallest_delta(self) -> float:
        """100 times the error of the computation: smaller deltas would consist of the error."""
        return 100 * self.resolution_error

    def deltas(self, epsilon: float) -> tuple[float, float]:
        position = require_non_negative("epsilon", epsilon) / self.interval
        remove, add = (
            self._at(values, epsilon, position, first)
            for first, values in zip(self.first, self.on_grid, strict=True)
        )
        return remove, add

    def _at(self, values: Array, epsilon: float, position: float, first: int) -> float:
        last = first + len(values) - 1
        if position < first:
            return 1.0
        if position >= last:
            value = float(values[-1])
        else:
            below = min(int(position), last - 1)
            share = math.expm1(max(epsilon - below * self.interval, 0.0)) / math.expm1(self.interval)
            share = min(share, 1.0)
            value = float(values[below - first]) * (1 - share) + float(values[below - first + 1]) * share
        return min(value * (1 + _INTERPOLATION_SLACK) + self.error, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureProfile(PrivacyProfile):
    """Release one of several outputs drawn by fixed weights, and reveal which.

    delta is summed within each direction before the worse direction is taken.

    Source: arXiv 2604.20985, random selection; joint convexity of the hockey-stick divergence.
    """

    weights: tuple[float, ...]  # on the simplex, shape (members,)
    profiles: tuple[PrivacyProfile, ...]  # shape (members,)

    def __post_init__(self) -> None:
        require_simplex(self.weights)
        if len(self.weights) != len(self.profiles):
            raise InvalidInput(f"{len(self.weights)} weights were given for {len(self.profiles)} profiles.")

    @property
    def smallest_delta(self) -> float:
        members = self._members()
        return min(
            sum_up(w * p.smallest_delta for w, p in members), max(p.smallest_delta for _, p in members)
        )

    def deltas(self, epsilon: float) -> tuple[float, float]:
        pairs = [(weight, profile.deltas(epsilon)) for weight, profile in self._members()]
        remove, add = (average_up([(weight, pair[i]) for weight, pair in pairs]) for i in (0, 1))
        return remove, add

    def _members(self) -> list[tuple[float, PrivacyProfile]]:
        return [(w, p) for w, p in zip(self.weights, self.profiles, strict=True) if w > 0]


def average_up(pairs: Sequence[tuple[float, float]]) -> float:
    """The average of deltas by weights on the simplex, rounded up, and never above the largest of them.

    Args:
        pairs: (weight > 0, delta in [0, 1]), at least one.
    """
    return min(sum_up(up(weight * delta, 1) for weight, delta in pairs), max(delta for _, delta in pairs))


def deltas_at(profiles: Sequence[PrivacyProfile], epsilon: float) -> Array:
    """Upper bounds on the hockey-stick divergences of several mechanisms at one epsilon (nats, >= 0).

    Returns:
        Shape (2, profiles): one row a direction (remove, add). The closed forms are evaluated together, which
        for hundreds of candidates is much faster than one by one.

    Raises:
        InvalidInput: see `PrivacyProfile.deltas`.
    """
    table = np.empty((2, len(profiles)))
    closed = [i for i, profile in enumerate(profiles) if isinstance(profile, GaussianProfile)]
    mus = np.array([profile.mu for profile in profiles if isinstance(profile, GaussianProfile)])
    table[:, closed] = gaussian.delta(mus, require_non_negative("epsilon", epsilon))
    for i, profile in enumerate(profiles):
        if not isinstance(profile, GaussianProfile):
            table[:, i] = profile.deltas(epsilon)
    return table


def require_simplex(weights: tuple[float, ...]) -> None:
    """Refuse weights that are not numbers of at least 0 summing to 1 within rounding.

    Raises:
        InvalidInput: with the offending weight or sum.
    """
    for weight in weights:
        require_non_negative("each weight", weight)
    total = math.fsum(weights)
    if not abs(total - 1) <= 4 * ULP * max(len(weights), 2):
        raise InvalidInput(f"Weights must sum to 1, but they sum to {total!r}.")
