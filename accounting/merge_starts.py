"""Merges within a privacy budget from which to search on.

They lie on straight lines from merges that fit (single runs, and averages of sets of runs with weights
inversely proportional to their noise variances) towards every run and towards the averages that do not fit,
as far as each line allows.

A run of whose updates nothing is known costs nearly all it has as soon as its weight is above 0. Sets of such
runs are tried by falling promise (`noise_search`), and lines are drawn within each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from accounting.linear_combination import inverse_variance_weights
from accounting.merge_problem import Aim, Merge, Problem
from accounting.noise_search import Subset, sets_by_value

Array = NDArray[np.float64]

_MOST_ANCHORS = 6  # from which lines are drawn
_MOST_SETS = 50  # of runs that cost something at any weight
_MOST_RUNS = 12  # searched together, beside those of the best set
_ALL_SUBSETS = 8  # up to so many runs every subset's average is looked at
_STEPS = np.concatenate((np.geomspace(1e-7, 0.03, 16), np.linspace(0.04, 1, 33)))  # along a line


def starts_of(problem: Problem) -> list[Merge]:
    """Merges that fit, from which to go on."""
    settled = problem.costs.settled
    costly = np.flatnonzero(settled > 1e-9 * problem.limit)
    free = np.setdiff1d(np.arange(len(settled)), costly)
    base = _selected(problem, free)
    found = list(_expanded(problem, base, costly=False)) if base else []
    for subset in _costly_sets(problem, costly, most=_MOST_ANCHORS if base else _MOST_SETS):
        support = sorted({*subset, *base})
        incumbent = max((merge.value for merge in found), default=-math.inf)
        if incumbent >= _promise(problem.aim.subset(support)):
            continue
        found += _expanded(problem, support, costly=not base)
    return found


def starts_from(problem: Problem, merge: Merge) -> list[Merge]:
    """The best merges that fit on the lines from one merge to runs that are not in it."""
    costless = problem.costs.settled <= 1e-9 * problem.limit
    others = np.flatnonzero((merge.weights == 0) & costless)
    places = np.concatenate((merge.weights[None, :], np.eye(len(merge.weights))[others]))
    return list(_along_lines(problem, places, [(0, 1 + i) for i in range(len(others))], steps=_STEPS[8:]))


def _promise(aim: Aim) -> float:
    """More than any merge of these runs can be worth, whatever the budget."""
    if aim.utilities is not None:
        return float(aim.utilities.max())
    return -1 / float((1 / aim.variances).sum())


def _costly_sets(problem: Problem, costly: NDArray[np.intp], most: int) -> Iterator[Subset]:
    """Sets of costly runs whose cost alone fits, by falling promise, and every single run."""
    settled, aim = problem.costs.settled, problem.aim
    room = problem.limit * (1 - 1e-12)
    usable = [int(i) for i in costly if settled[i] <= room]
    yield from ((i,) for i in usable)
    if aim.utilities is not None:
        utilities = aim.utilities
        best = sorted(usable, key=lambda i: -utilities[i])[: 2 * _MOST_SETS]
        pairs = [p for p in itertools.combinations(sorted(best), 2) if settled[list(p)].sum() <= room]
        pairs.sort(key=lambda p: (-max(utilities[list(p)]), float(settled[list(p)].sum())))
        yield from pairs[:most]
    elif len(usable) > 1:
        sets = sets_by_value(1 / aim.variances[usable], settled[usable], room)
        for _, subset in zip(range(most), sets, strict=False):
            yield tuple(usable[i] for i in subset)


def _selected(problem: Problem, free: NDArray[np.intp]) -> list[int]:
    """Of many runs without a cost of their own: the best set that fits jointly, and some of every loudness."""
    if len(free) <= _MOST_RUNS:
        return [int(i) for i in free]
    squares = problem.costs.subset(free.tolist()).squares(np.eye(len(free)))
    order = np.argsort(squares, kind="stable")
    chosen = set(np.linspace(0, len(free) - 1, _MOST_RUNS).round().astype(int).tolist())
    near = int(np.searchsorted(squares[order], problem.limit))
    chosen = set(order[sorted(chosen | set(range(max(near - 3, 0), min(near + 3, len(free)))))].tolist())
    if problem.aim.utilities is None:
        chosen |= set(next(sets_by_value(1 / problem.aim.variances[free], squares, problem.limit), ()))
    else:
        chosen |= set(np.argsort(-problem.aim.utilities[free], kind="stable")[:6].tolist())
    return sorted(int(free[i]) for i in chosen)


def _expanded(problem: Problem, support: Sequence[int], *, costly: bool) -> Iterator[Merge]:
    """Lines, and merges with fresh noise, within the face of the simplex that belongs to a set of runs."""
    inner = problem.within(support)
    count = len(support)
    if costly:  # the single runs are sets of their own
        points = inverse_variance_weights(inner.aim.variances)[None, :]
        pairs = [(0, 1 + i) for i in range(count)] if count > 1 else []
        places = np.concatenate((points, np.eye(count)))
    else:
        points = places = _points(inner.aim.variances)
        pairs = _pairs(inner, points)
    found = [*_fitting(inner, points), *_along_lines(inner, places, pairs)]
    if problem.fresh_allowed:
        found += _with_fresh_noise(inner, points)
    for merge in found:
        weights = np.zeros(len(problem.costs.settled))
        weights[list(support)] = merge.weights
        yield replace(merge, weights=weights)


def _points(variances: Array) -> Array:
    """Single runs, and averages of many sets of runs with weights of least noise."""
    count = len(variances)
    if count <= _ALL_SUBSETS:
        sets = [s for size in range(2, count + 1) for s in itertools.combinations(range(count), size)]
    else:
        order = np.argsort(variances, kind="stable").tolist()
        sets = [tuple(order[i:j]) for i in range(count) for j in range(i + 2, count + 1)]
    averages = np.zeros((len(sets), count))
    for row, chosen in zip(averages, sets, strict=True):
        row[list(chosen)] = inverse_variance_weights(variances[list(chosen)])
    return np.concatenate((np.eye(count), averages))


def _fitting(problem: Problem, points: Array) -> Iterator[Merge]:
    """The best of the points that fit as they are."""
    values = problem.aim.values(points)
    values = np.where(problem.costs.squares(points) <= problem.limit, values, -np.inf)
    for place in np.argsort(-values, kind="stable")[:_MOST_ANCHORS]:
        if values[place] > -np.inf:
            yield Merge(points[place], 0.0, float(values[place]))


def _pairs(problem: Problem, points: Array) -> list[tuple[int, int]]:
    """Which points to draw lines between: the first fits, or is a single run."""
    squares, values = problem.costs.squares(points), problem.aim.values(points)
    order = np.argsort(-values, kind="stable")
    fits = squares[order] <= problem.limit
    anchors, count = order[fits][:_MOST_ANCHORS].tolist(), points.shape[1]
    goals = [*range(count), *order[~fits][:_MOST_ANCHORS].tolist()]
    pairs = {(a, b) for a in anchors for b in goals if a != b}
    pairs |= {(a, b) for b in goals if not squares[b] <= problem.limit for a in range(count) if a != b}
    return sorted(pairs)


def _along_lines(
    problem: Problem, points: Array, pairs: Sequence[tuple[int, int]], steps: Array = _STEPS
) -> Iterator[Merge]:
    """The best merge that fits on each line between two points."""
    if not pairs:
        return
    origins, ends = points[[a for a, _ in pairs]], points[[b for _, b in pairs]]
    shares = steps[None, :, None]
    lines = origins[:, None, :] * (1 - shares) + ends[:, None, :] * shares
    flat = lines.reshape(-1, points.shape[1])
    worth = np.where(problem.costs.squares(flat) <= problem.limit, problem.aim.values(flat), -np.inf)
    worth = worth.reshape(lines.shape[:2])
    for row, place in enumerate(worth.argmax(axis=1)):
        if worth[row, place] > -np.inf:
            yield Merge(lines[row, place], 0.0, float(worth[row, place]))


def _with_fresh_noise(problem: Problem, points: Array) -> Iterator[Merge]:
    """As much fresh noise on each merge that does not fit as makes it fit."""
    squares = problem.costs.squares(points)
    loud = points[~(squares <= problem.limit)]
    if not len(loud):
        return
    low, high = np.zeros(len(loud)), np.full(len(loud), float(problem.aim.variances.min()))
    for _ in range(200):
        over = problem.costs.squares(loud, high) > problem.limit
        if not over.any():
            break
        low, high = np.where(over, high, low), np.where(over, 4 * high, high)
    for _ in range(100):
        middle = (low + high) / 2
        over = problem.costs.squares(loud, middle) > problem.limit
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    fits = problem.costs.squares(loud, high) <= problem.limit
    values = problem.aim.values(loud, high)
    for index in np.flatnonzero(fits & np.isfinite(high)):
        yield Merge(loud[index], float(high[index]), float(values[index]))
