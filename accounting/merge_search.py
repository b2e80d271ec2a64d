"""The best weights of a merge within a privacy budget, by continuous search.

Merges that satisfy the budget do not form a convex set, so the search starts from many places (`merge_starts`)
and goes on from the best of them by sequential quadratic programming with exact gradients. Everything is
deterministic, and the runs' order decides nothing but ties.

Nothing here is a guarantee: the caller certifies what it uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from accounting.merge_problem import Merge, Problem
from accounting.merge_starts import starts_from, starts_of

Array = NDArray[np.float64]

_APART = 0.1  # total difference in weights of starts with the same runs
_MOST_STARTS = 16  # from which the search goes on
_MOST_RESTARTS = 8  # from the neighbourhood of the best merge found
_QUICK_STARTS = 4
_FEW_RUNS, _MANY_RUNS = 12, 20
_NEGLIGIBLE = 1e-9  # weights below are dropped
_EQUAL = 1e-9  # relative difference of values that does not count


def best_merges(problem: Problem, *, quick: bool = False) -> list[Merge]:
    """Merges that fit, the best first; of equally good ones that with fewer runs, then less fresh noise.

    Args:
        quick: go on from four starts only, for a merge that is merely one of many to choose from; done for
            more than 20 runs anyhow, whose averages come close to the best without.
    """
    quick = quick or len(problem.aim.variances) > _MANY_RUNS
    starts = _diverse(_sorted(starts_of(problem)))[: _QUICK_STARTS if quick else _MOST_STARTS]
    found = _sorted([polished(problem, start) for start in starts])
    if not found or quick or problem.fresh_allowed:
        return found
    again = starts_from(problem, found[0])
    return _sorted([*found, *(polished(problem, start) for start in _sorted(again)[:_MOST_RESTARTS])])


def _sorted(merges: Sequence[Merge]) -> list[Merge]:
    best = max((merge.value for merge in merges), default=0.0)
    margin = _EQUAL * abs(best)

    def key(merge: Merge) -> tuple[float, int, float]:
        level = best if merge.value >= best - margin else merge.value
        return -level, int(np.count_nonzero(merge.weights)), merge.fresh

    return sorted(merges, key=key)


def polished(problem: Problem, start: Merge) -> Merge:
    """Go on from a merge that fits to a local optimum, in the face of the simplex that it ends in."""
    best = start
    for _ in range(3):
        runs = np.flatnonzero(best.weights > _NEGLIGIBLE)
        inner = problem.within(runs.tolist())
        weights = best.weights[runs] / best.weights[runs].sum()
        ended = _ascend(inner, Merge(weights, best.fresh, best.value))
        if ended is None:
            break
        full = np.zeros(len(best.weights))
        full[runs] = ended.weights
        improved = ended.value > best.value + _EQUAL * 1e-3 * abs(best.value)
        settled = len(runs) == np.count_nonzero(ended.weights > _NEGLIGIBLE)
        if improved:
            best = Merge(full, ended.fresh, ended.value)
        if settled or not improved:
            break
    return best


def _ascend(problem: Problem, start: Merge) -> Merge | None:
    """One run of sequential quadratic programming; None where it ends outside the budget."""
    count, utilities = len(start.weights), problem.aim.utilities
    unit = abs(start.value) if utilities is None else float(np.ptp(utilities)) or 1.0
    extra = 1 if problem.fresh_allowed else 0
    first = np.concatenate((start.weights, [start.fresh / unit][:extra]))

    def parts(x: Array) -> tuple[Array, float]:
        return np.maximum(x[:count], 0.0), max(float(x[count]), 0.0) * unit if extra else start.fresh

    def objective(x: Array) -> float:
        weights, fresh = parts(x)
        return -float(problem.aim.values(weights[None, :], fresh)[0]) / unit

    def objective_gradient(x: Array) -> Array:
        inner, outer = problem.aim.gradient(parts(x)[0])
        return -np.concatenate((inner / unit, [outer][:extra]))

    def room(x: Array) -> float:
        weights, fresh = parts(x)
        return 1 - problem.costs.square_and_gradient(weights, fresh)[0] / problem.limit

    def room_gradient(x: Array) -> Array:
        weights, fresh = parts(x)
        _, inner, outer = problem.costs.square_and_gradient(weights, fresh)
        return -np.concatenate((inner, [outer * unit][:extra])) / problem.limit

    ones = np.concatenate((np.ones(count), np.zeros(extra)))
    constraints: Any = (
        {"type": "eq", "fun": lambda x: float(ones @ x) - 1, "jac": lambda _: ones},
        {"type": "ineq", "fun": room, "jac": room_gradient},
    )
    with np.errstate(all="ignore"):
        result = minimize(
            objective,
            first,
            jac=objective_gradient,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * count + [(0.0, math.inf)] * extra,
            constraints=constraints,
            options={"ftol": 1e-15, "maxiter": 60 if count <= _FEW_RUNS else 20},
        )
    weights, fresh = parts(result.x)
    if not (np.all(np.isfinite(weights)) and math.isfinite(fresh) and weights.sum() > 0):
        return None
    weights = np.where(weights > _NEGLIGIBLE, weights, 0.0)
    return _pulled_back(problem, weights / weights.sum(), fresh, start)


def _pulled_back(problem: Problem, weights: Array, fresh: float, start: Merge) -> Merge | None:
    """The merge nearest to the one given, on the line to the start, that fits."""
    shares = np.concatenate(([0.0], np.geomspace(1e-15, 1.0, 46)))[:, None]
    line = (1 - shares) * weights + shares * start.weights
    noises = ((1 - shares) * fresh + shares * start.fresh)[:, 0]
    fits = np.flatnonzero(problem.costs.squares(line, noises) <= problem.limit)
    if not len(fits):
        return None
    place = fits[0]
    value = problem.aim.values(line[place : place + 1], float(noises[place]))[0]
    return Merge(line[place], float(noises[place]), float(value))


def _diverse(starts: Sequence[Merge]) -> list[Merge]:
    """The best start of each support, then others that differ from these, at most sixteen."""
    chosen: dict[tuple[object, ...], list[Merge]] = {}
    count = 0
    for again in (False, True):
        for start in starts:
            if count == _MOST_STARTS:
                break
            key = (*np.flatnonzero(start.weights > 0).tolist(), start.fresh > 0)
            near = [m for m in chosen.get(key, []) if np.abs(m.weights - start.weights).sum() < _APART]
            if not near and (again or key not in chosen):
                chosen.setdefault(key, []).append(start)
                count += 1
    return _sorted([start for group in chosen.values() for start in group])
