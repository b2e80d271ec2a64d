"""What is asked of a merge: how good it is, and the largest mu^2 allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accounting.merge_costs import MergeCosts

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Merge:
    """Weights, and the variance tau^2 of fresh noise, in the unit of the variances."""

    weights: Array  # on the simplex within rounding, shape (runs,)
    fresh: float
    value: float


@dataclass(frozen=True, slots=True)
class Aim:
    """What makes a merge good: little noise `sum lambda_i^2 v_i + tau^2`, or utilities `sum lambda_i u_i`."""

    variances: Array  # v, > 0, shape (runs,)
    utilities: Array | None = None  # where given they alone count

    def values(self, weights: Array, fresh: Array | float = 0.0) -> Array:
        """Higher is better; weights of shape (merges, runs)."""
        if self.utilities is not None:
            result: Array = weights @ self.utilities
        else:
            result = -(weights**2 @ self.variances + fresh)
        return result

    def gradient(self, weights: Array) -> tuple[Array, float]:
        """In lambda and in tau^2, of one merge."""
        if self.utilities is not None:
            return self.utilities, 0.0
        return -2 * weights * self.variances, -1.0

    def subset(self, runs: Sequence[int]) -> Aim:
        index = np.asarray(runs, dtype=np.intp)
        utilities = None if self.utilities is None else self.utilities[index]
        return Aim(self.variances[index], utilities)


@dataclass(frozen=True, slots=True)
class Problem:
    """Runs, what makes a merge of them good, and the largest mu^2 allowed."""

    costs: MergeCosts
    aim: Aim  # variances in the units of costs
    limit: float  # mu^2
    fresh_allowed: bool = False

    def within(self, runs: Sequence[int]) -> Problem:
        return replace(self, costs=self.costs.subset(runs), aim=self.aim.subset(runs))
