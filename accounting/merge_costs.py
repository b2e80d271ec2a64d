"""What a merge costs in mu^2, for many weights at once: for searching, never for certifying.

A merge `sum_i lambda_i theta_i + N(0, tau^2)` of independent full-batch runs is mu-GDP with

    mu^2 = sum_i K_i [lambda_i > 0] + sum_i P_i + W^2 / V,      V = tau^2 + sum_i lambda_i^2 nu_i^2,

by shifted interpolation (see `shifted_program`): `K_i` is what run i pays whatever its weight (all its steps
but the last where nothing is known of its updates), `P_i` what it pays by choice, `W = sum_i lambda_i R_i` what
the runs bring into the merge, and `nu_i` the noise of its last step. At a price p = W / V the pools of run i,
with slopes g and widths x, pay `P_i = sum x min(g, lambda_i p)^2`, which leaves
`R_i = (all that is owed) - sum x min(g, lambda_i p)`. Payments at the best price are optimal, so the gradient in
lambda is that at constant payments. Where the updates are unknown this is the generic bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.shifted_program import Path

Array = NDArray[np.float64]

_ROUNDS = 100  # of Newton's method, which ends after as many as there are kinks


@dataclass(frozen=True, slots=True)
class MergeCosts:
    """The runs' pools and last steps, in one unit of length."""

    settled: Array  # K, shape (runs,)
    owed: Array  # R without any payment, shape (runs,)
    noise: Array  # nu of the last step, shape (runs,)
    run_of: NDArray[np.intp]  # shape (pools,)
    slope: Array  # g, shape (pools,)
    width: Array  # x, shape (pools,)

    @staticmethod
    def of(paths: Sequence[Path]) -> MergeCosts:
        """The costs of runs that each end in a step of their own with noise (`shifted_program.prepare`)."""
        lasts = [path.last for path in paths]
        moved = np.array([last.moved if last else 0.0 for last in lasts])
        debts = np.array([path.open.debt.sum() for path in paths])
        counts = [len(path.open.x) for path in paths]
        empty = [np.zeros(0)]
        return MergeCosts(
            settled=np.array([path.settled_cost for path in paths]),
            owed=moved + debts,
            noise=np.array([last.noise if last else 0.0 for last in lasts]),
            run_of=np.repeat(np.arange(len(paths)), counts),
            slope=np.concatenate([*empty, *(path.open.pool_slope for path in paths)]),
            width=np.concatenate([*empty, *(path.open.x for path in paths)]),
        )

    def subset(self, runs: Sequence[int]) -> MergeCosts:
        """The same for some of the runs, in the order given."""
        pools = [np.flatnonzero(self.run_of == run) for run in runs]
        places = np.concatenate([np.zeros(0, dtype=np.intp), *pools])
        index = np.asarray(runs, dtype=np.intp)
        return MergeCosts(
            settled=self.settled[index],
            owed=self.owed[index],
            noise=self.noise[index],
            run_of=np.repeat(np.arange(len(runs)), [len(pool) for pool in pools]),
            slope=self.slope[places],
            width=self.width[places],
        )

    def squares(self, weights: Array, fresh: Array | float = 0.0) -> Array:
        """mu^2 of many merges.

        Args:
            weights: lambda, on the simplex, shape (merges, runs).
            fresh: tau^2 in squared units, shape (merges,) or one for all.

        Returns:
            Shape (merges,); infinite where V is 0.
        """
        variance = (weights * self.noise) ** 2 @ np.ones(len(self.noise)) + fresh
        settled = np.where(weights > 0, self.settled, 0.0).sum(axis=1)
        with np.errstate(all="ignore"):
            price, shares = self._price(weights, variance)
            paid = (np.minimum(self.slope, shares * price[:, None]) ** 2) @ self.width
            total: Array = settled + paid + price * price * variance
        return np.where(variance > 0, total, np.inf)

    def square_and_gradient(self, weights: Array, fresh: float = 0.0) -> tuple[float, Array, float]:
        """mu^2 of one merge, and its gradient in lambda (all lambda > 0) and in tau^2."""
        variance = float(((weights * self.noise) ** 2).sum()) + fresh
        prices, shares = self._price(weights[None, :], np.array([variance]))
        price = float(prices[0])
        slopes = np.minimum(self.slope, shares[0] * price)
        left = self.owed - np.bincount(self.run_of, self.width * slopes, minlength=len(self.owed))
        square = float(self.settled[weights > 0].sum() + self.width @ slopes**2) + price * price * variance
        gradient: Array = 2 * price * left - 2 * price * price * weights * self.noise**2
        return square, gradient, -price * price

    def _price(self, weights: Array, variance: Array) -> tuple[Array, Array]:
        """The root p of `p V + sum_i lambda_i sum x min(g, lambda_i p) = sum_i lambda_i owed_i`.

        The left side is increasing and concave, so Newton's method climbs to the root from 0, over a kink a
        step.

        Returns:
            (p, shape (merges,); each pool's lambda, shape (merges, pools)).
        """
        shares = weights[:, self.run_of]
        owed = weights @ self.owed
        price = np.zeros(len(weights))
        for _ in range(_ROUNDS):
            open_ = shares * price[:, None] < self.slope
            constant = owed - np.where(open_, 0.0, shares * self.slope) @ self.width
            climbed = constant / (variance + np.where(open_, shares**2, 0.0) @ self.width)
            if not np.any(climbed > price * (1 + 1e-15)):
                break
            price = np.maximum(price, climbed)
        return price, shares
