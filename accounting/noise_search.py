"""Which independent runs to average, so that the merged noise is least within a budget.

With weights inversely proportional to the runs' noise variances v_i, a set's merged variance is
`1 / sum(1 / v_i)`, so each run adds a value `1 / v_i`; and each adds its mu^2 to the joint release. Choosing
the set is a knapsack, and where every run has one noise multiplier a subset sum (`1 / v_i` is proportional
to `mu_i^2`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Subset = tuple[int, ...]

ENUMERATED = 14  # up to so many runs every set is looked at
_CELLS = 20_000  # of the dynamic program beyond


def sets_by_value(values: Array, costs: Array, capacity: float) -> Iterator[Subset]:
    """Sets of at least two runs whose costs fit, by falling value.

    Up to 14 runs every such set comes, exactly ordered. Beyond, one set: the best of a dynamic program over
    costs rounded up to 1/20,000 of the capacity, completed by the runs that still fit; it is feasible, and
    loses at most (runs in it) / 20,000 of the capacity before the completion.

    Args:
        values: > 0, shape (runs,).
        costs: > 0, shape (runs,).
        capacity: > 0, the largest sum of costs.
    """
    if len(values) <= ENUMERATED:
        chosen = _all_sets(len(values))
        fits = (chosen @ costs <= capacity) & (chosen.sum(axis=1) >= 2)
        chosen = chosen[fits]
        for row in chosen[np.argsort(-(chosen @ values), kind="stable")]:
            yield tuple(int(i) for i in np.flatnonzero(row))
        return
    best = _knapsack(values, costs, capacity)
    if len(best) >= 2:
        yield best


def sets_by_estimate(values: Array, estimated_costs: Array, capacity: float) -> Iterator[Subset]:
    """As `sets_by_value`, where the costs are estimates good to a few per cent.

    First the eight most valuable sets of up to 1.05 times the capacity, then four of up to 0.95 times it.
    """
    for share, most in ((1.05, 8), (0.95, 4)):
        found = sets_by_value(values, estimated_costs, share * capacity)
        for _, subset in zip(range(most), found, strict=False):
            yield subset


def first_that_holds(subsets: Iterator[Subset], holds: Callable[[Subset], bool], most: int) -> Subset | None:
    """The first of at most `most` sets that passes the exact check."""
    for _, subset in zip(range(most), subsets, strict=False):
        if holds(subset):
            return subset
    return None


def _all_sets(count: int) -> Array:
    numbers = np.arange(2**count)[:, None]
    sets: Array = ((numbers >> np.arange(count)) & 1).astype(float)
    return sets


def _knapsack(values: Array, costs: Array, capacity: float) -> Subset:
    cells = np.ceil(np.minimum(costs / capacity, 2) * _CELLS).astype(int)
    best = np.zeros(_CELLS + 1)
    taken = np.zeros((len(values), _CELLS + 1), dtype=bool)
    for i, (value, cell) in enumerate(zip(values, cells, strict=True)):
        if cell > _CELLS:
            continue
        with_it = best[: _CELLS + 1 - cell] + value
        improved = with_it > best[cell:]
        taken[i, cell:] = improved
        best[cell:] = np.where(improved, with_it, best[cell:])
    at = _CELLS
    chosen: list[int] = []
    for i in range(len(values) - 1, -1, -1):
        if taken[i, at]:
            chosen.append(i)
            at -= int(cells[i])
    return _completed(sorted(chosen), values, costs, capacity)


def _completed(chosen: Sequence[int], values: Array, costs: Array, capacity: float) -> Subset:
    """Add, most valuable first, what the rounding of the cells left room for."""
    result = list(chosen)
    room = capacity - float(costs[result].sum()) if result else capacity
    for i in np.argsort(-values, kind="stable"):
        if i not in result and costs[i] <= room * (1 - 1e-12):
            result.append(int(i))
            room -= float(costs[i])
    return tuple(sorted(result))
