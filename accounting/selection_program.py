"""The exact linear program behind random selection: one row a direction, in rational arithmetic.

A general solver accepts points that violate a row by 1e-7, the size of a delta. Every double is a rational
number, and a vertex has at most three non-zero weights, so the simplex method is run exactly: pricing in
floating point finds the column to enter, and everything that decides is a fraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from accounting.errors import AccountingError

Array = NDArray[np.float64]
Column = tuple[Fraction, ...]

_PIVOTS_BEFORE_BLAND = 200
_MOST_PIVOTS = 20_000


def maximise(utilities: Array, rows: Array, limit: Fraction) -> dict[int, Fraction] | None:
    """Maximise `sum_i w_i u_i` over the simplex under `sum_i w_i rows[r, i] <= limit` for every row r.

    Args:
        utilities: finite, shape (candidates,).
        rows: finite and >= 0, shape (rows, candidates).
        limit: > 0.

    Returns:
        The non-zero weights of an optimal vertex, at most `rows + 1`, exactly; None where no point of the
        simplex satisfies every row. Among equal candidates the first is used.
    """
    kept = undominated(utilities, rows)
    weights = _Simplex(utilities[kept], rows[:, kept], limit).solve()
    if weights is None:
        return None
    return {int(kept[j]): weight for j, weight in sorted(weights.items())}


def undominated(utilities: Array, rows: Array) -> NDArray[np.intp]:
    """Indices, increasing, of candidates that no other one equals or beats in utility and in every row."""
    order = np.lexsort((np.arange(len(utilities)), rows.max(axis=0), -utilities))
    ordered = rows[:, order]  # by falling utility: only an earlier one can dominate
    if len(rows) == 1:
        least = np.minimum.accumulate(ordered[0])
        return np.sort(order[np.concatenate(([True], ordered[0, 1:] < least[:-1]))])
    front: list[int] = []
    costs = np.empty_like(ordered)
    for index, column in zip(order, ordered.T, strict=True):
        earlier = costs[:, : len(front)] <= column[:, None]
        if not earlier.all(axis=0).any():
            costs[:, len(front)] = column
            front.append(int(index))
    return np.sort(np.asarray(front, dtype=np.intp))


class _Simplex:
    """Columns 0..n-1 are candidates; then one slack and one artificial column a row."""

    def __init__(self, utilities: Array, rows: Array, limit: Fraction) -> None:
        self.count = len(utilities)
        self.rows = len(rows)
        self.utilities = utilities
        self.float_rows = rows / float(limit)
        self.exact_rows = rows
        self.limit = limit
        start = int(np.argmin(rows.max(axis=0)))
        self.basis = [start]
        for r in range(self.rows):
            fits = Fraction(float(rows[r, start])) <= limit
            self.basis.append(self.count + r if fits else self.count + self.rows + r)

    def solve(self) -> dict[int, Fraction] | None:
        artificial = range(self.count + self.rows, self.count + 2 * self.rows)
        if any(j in artificial for j in self.basis):
            self._optimise(feasibility=True)
            for j, value in zip(self.basis, self._levels(), strict=True):
                if j in artificial and value > 0:
                    return None
            # An artificial column at level zero is the negative of its slack: exchange them.
            self.basis = [j - self.rows if j in artificial else j for j in self.basis]
        self._optimise(feasibility=False)
        levels = self._levels()
        return {j: x for j, x in zip(self.basis, levels, strict=True) if j < self.count and x > 0}

    def _column(self, j: int) -> Column:
        if j < self.count:
            return (*(Fraction(float(value)) / self.limit for value in self.exact_rows[:, j]), Fraction(1))
        row, sign = (j - self.count, 1) if j < self.count + self.rows else (j - self.count - self.rows, -1)
        return (*(Fraction(sign if r == row else 0) for r in range(self.rows)), Fraction(0))

    def _cost(self, j: int, feasibility: bool) -> Fraction:
        if feasibility:
            return Fraction(-1 if j >= self.count + self.rows else 0)
        return Fraction(float(self.utilities[j])) if j < self.count else Fraction(0)

    def _levels(self) -> list[Fraction]:
        columns = [self._column(j) for j in self.basis]
        return _solve([list(row) for row in zip(*columns, strict=True)], [Fraction(1)] * (self.rows + 1))

    def _optimise(self, feasibility: bool) -> None:
        for pivot in range(_MOST_PIVOTS):
            columns = [self._column(j) for j in self.basis]
            prices = _solve([list(c) for c in columns], [self._cost(j, feasibility) for j in self.basis])
            entering = self._entering(prices, feasibility, first=pivot > _PIVOTS_BEFORE_BLAND)
            if entering is None:
                return
            matrix = [list(row) for row in zip(*columns, strict=True)]
            levels = _solve(matrix, [Fraction(1)] * (self.rows + 1))
            change = _solve(matrix, list(self._column(entering)))
            steps = [
                (level / rate, self.basis[place], place)
                for place, (level, rate) in enumerate(zip(levels, change, strict=True))
                if rate > 0
            ]
            self.basis[min(steps)[2]] = entering  # never empty: the simplex is bounded
        raise AccountingError("The program for random selection did not converge; report these candidates.")

    def _entering(self, prices: Sequence[Fraction], feasibility: bool, *, first: bool) -> int | None:
        """A column with a positive reduced cost: the largest, or the first where cycling is feared."""
        gains = {self.count + r: -prices[r] for r in range(self.rows)}
        with np.errstate(all="ignore"):
            floats = np.array([_to_float(price) for price in prices])
            costs = np.zeros(self.count) if feasibility else self.utilities
            reduced = costs - floats[:-1] @ self.float_rows - floats[-1]
        every = first or not np.all(np.isfinite(reduced))
        candidates = range(self.count) if every else np.argsort(-reduced)[:4].tolist()
        for j in candidates:
            if j not in self.basis:
                column = self._column(j)
                gains[j] = self._cost(j, feasibility) - sum(
                    (price * entry for price, entry in zip(prices, column, strict=True)), Fraction(0)
                )
        positive = [j for j in sorted(gains) if gains[j] > 0 and j not in self.basis]
        if not positive:
            return None
        return positive[0] if first else max(positive, key=lambda j: (gains[j], -j))


def _to_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _solve(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction]:
    """Gaussian elimination on a small regular rational system."""
    size = len(right)
    table = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = next(r for r in range(i, size) if table[r][i] != 0)
        table[i], table[pivot] = table[pivot], table[i]
        for r in range(size):
            if r != i and table[r][i] != 0:
                factor = table[r][i] / table[i][i]
                table[r] = [x - factor * y for x, y in zip(table[r], table[i], strict=True)]
    return [table[i][size] / table[i][i] for i in range(size)]
