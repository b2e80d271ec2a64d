"""Which candidates a merge operator gets: the best set of at least two whose joint release fits the budget.

Whatever the operator, the joint release of the set covers it. By noise the best set is that of the largest sum of
1 / v_i (v_i: each run's noise variance), which is what averaging with weights inverse to the variances leaves least
noise; by utilities that of the largest mean utility, of equal ones the larger set; where scores are consulted, all
consulted candidates are paid for, and all are merged.

Up to 40,000 sets are all looked at, in that order; by utilities of more than 15 candidates all pairs, one of which has
the largest mean. Beyond, a search that goes on from the best set it knows: what
it returns fits, and a better set may exist. The same holds for Poisson runs, of which at most 30 joint releases are
computed: the first 16 whatever they are estimated to cost, then those that are estimated to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from accounting import gaussian
from accounting.ascent import accounted_multiplier
from accounting.averages import families, on_simplex
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.joint_release import joint_release
from accounting.linear_combination import inverse_variance_weights
from accounting.members import Member, epsilon_within
from accounting.noise_search import sets_by_value
from accounting.plan import Mechanism
from accounting.release import Release

Array = NDArray[np.float64]
Sets = NDArray[np.bool_]

_MOST_SETS = 40_000
_MOST_BOUNDS, _ANY_ESTIMATE = 30, 16  # joint releases of Poisson runs; of these, whatever the estimate
_EXACT = 1 + 1e-9  # of mu^2 of full-batch runs
_DIGITS = 12  # of values that count as equal


def best_operator_set(
    members: Sequence[Member],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    set_size: int | None = None,
) -> Release | None:
    """The best set of candidates for a merge operator; None where no two (or `set_size`) fit together.

    Args:
        members: compared by noise or by utilities, all alike.
        budget: that the joint release has to fit.
        relation: neighbouring data sets.
        set_size: exactly so many candidates, >= 2; None: at least two.

    Returns:
        Weights inverse to the variances and objective `-1 / sum(1 / v_i)` by noise; equal weights and the mean
        utility otherwise.
    """
    if not members:
        return None
    by_noise = members[0].utility is None
    # An average of runs that share steps has correlated noise, which no sum of variances describes.
    pools = families(members, budget, relation) if by_noise else [sorted(members, key=lambda m: m.order)]
    best: Release | None = None
    for pool in pools:
        fitting = [member for member in pool if epsilon_within(member.bound, budget) is not None]
        found = _best_of(fitting, budget, relation, set_size)
        if found is not None and (best is None or found.clearly_better_than(best)):
            best = found
    return best


def release_of(
    members: Sequence[Member], budget: PrivacyBudget, relation: NeighboringRelation
) -> Release | None:
    """A set of candidates for an operator under their joint release, if that fits the budget."""
    bound = joint_release([member.candidate.trajectory for member in members], relation)
    own = epsilon_within(bound, budget)
    if own is None:
        return None
    utilities = [member.utility for member in members if member.utility is not None]
    if utilities:
        weights = [1 / len(members)] * len(members)
        objective = math.fsum(utilities) / len(members)
    else:
        weights = on_simplex(inverse_variance_weights([member.variance for member in members]))
        objective = -1 / math.fsum(1 / member.variance for member in members)
    return Release(
        mechanism=Mechanism.OPERATOR,
        weights={member.name: weight for member, weight in zip(members, weights, strict=True)},
        bound=bound,
        epsilon=own,
        objective=objective,
    )


def _best_of(
    members: Sequence[Member], budget: PrivacyBudget, relation: NeighboringRelation, size: int | None
) -> Release | None:
    if len(members) < (size or 2):
        return None
    capacity = gaussian.mu_for(budget.epsilon, budget.delta) ** 2
    sampled = not all(s.is_full_batch for member in members for s in member.candidate.trajectory.segments)
    costs = _Costs(members, budget)
    too_much: list[Sets] = []
    for row, expense in _by_value(members, costs, capacity, sampled, size):
        if any(bool(np.all(row[known])) for known in too_much):
            continue  # a set that holds one that does not fit does not fit
        if sampled and len(too_much) >= _MOST_BOUNDS:
            break
        if sampled and len(too_much) >= _ANY_ESTIMATE and expense > capacity:
            continue
        found = release_of([members[int(i)] for i in np.flatnonzero(row)], budget, relation)
        if found is not None:
            return found
        too_much.append(row)
    return None


class _Costs:
    """About how much mu^2 sets cost: exact for full batch up to rounding, each shared step counted once."""

    def __init__(self, members: Sequence[Member], budget: PrivacyBudget) -> None:
        self.alone = np.array([_mu_of(member, budget) ** 2 for member in members])
        columns: dict[str, Array] = {}
        for i, member in enumerate(members):
            for name, share in _shares(member).items():
                columns.setdefault(name, np.zeros(len(members)))[i] = self.alone[i] * share
        self.segments = list(columns.values())

    def of(self, sets: Sets) -> Array:
        """Shape (sets,)."""
        if all(np.count_nonzero(column) <= 1 for column in self.segments):
            own: Array = sets @ self.alone
            return own
        total: Array = np.zeros(len(sets))
        for column in self.segments:
            total += np.max(np.where(sets, column, 0.0), axis=1)
        return total


def _mu_of(member: Member, budget: PrivacyBudget) -> float:
    if member.bound.mu is not None:
        return member.bound.mu
    return gaussian.mu_for(member.epsilon, budget.delta) if member.epsilon > 0 else 0.0


def _shares(member: Member) -> dict[str, float]:
    """How much of a run's mu^2 each of its segments costs: exact for full batch."""
    parts = {
        s.id: s.steps * (s.sampling_probability / accounted_multiplier(s)) ** 2
        for s in member.candidate.trajectory.segments
    }
    total = math.fsum(parts.values())
    return {name: part / total for name, part in parts.items()}


def _by_value(
    members: Sequence[Member], costs: _Costs, capacity: float, sampled: bool, size: int | None
) -> Iterator[tuple[Sets, float]]:
    """Sets that may fit, and about what they cost, the best first: all of them where they are few."""
    count = len(members)
    by_noise = members[0].utility is None
    sizes = [size] if size is not None else list(range(2, count + 1))
    if not by_noise and size is None and 2**count > _MOST_SETS:
        sizes = [2]  # no set has a larger mean than the best pair in it, which fits if the set does
    if sum(math.comb(count, k) for k in sizes) > _MOST_SETS:
        for row in _searched(members, costs, capacity * _EXACT, size):
            yield row, float(costs.of(row[None, :])[0])
        return
    sets = np.zeros((sum(math.comb(count, k) for k in sizes), count), dtype=bool)
    rows = (chosen for k in sizes for chosen in combinations(range(count), k))
    for row, chosen in zip(sets, rows, strict=True):
        row[list(chosen)] = True
    expense = costs.of(sets)
    largest = math.inf if sampled else capacity * _EXACT
    sets, expense = sets[expense <= largest], expense[expense <= largest]
    value, counts = values_of(members, sets), sets.sum(axis=1)
    # Equal values: by utilities the larger set, by noise the smaller, then the cheaper.
    order = np.lexsort((expense, counts if by_noise else -counts, -value))
    yield from zip(sets[order], expense[order].tolist(), strict=True)


def values_of(members: Sequence[Member], sets: Sets) -> Array:
    """What each set is worth, higher is better, to 12 digits; shape (sets,)."""
    utilities = [member.utility for member in members if member.utility is not None]
    if utilities:
        worth = np.array(utilities)
        unit = float(np.max(np.abs(worth))) or 1.0
        value = (sets @ (worth / unit)) / sets.sum(axis=1)
    else:
        worth = np.array([1 / member.variance for member in members])
        value = sets @ (worth / float(worth.max()))
    rounded: Array = np.round(value, _DIGITS)
    return rounded


def _searched(members: Sequence[Member], costs: _Costs, largest: float, size: int | None) -> Iterator[Sets]:
    """Of very many candidates: good sets, the best first, found by adding and exchanging one at a time."""
    count = len(members)
    starts: list[Sequence[int]] = [np.argsort(costs.alone, kind="stable")[: size or 2].tolist()]
    if members[0].utility is None and size is None:
        worth = np.array([1 / member.variance for member in members])
        starts += sets_by_value(worth / worth.max(), costs.alone, largest)
    found: dict[bytes, Sets] = {}
    for start in starts:
        row = np.zeros(count, dtype=bool)
        row[list(start)] = True
        while costs.of(row[None, :])[0] <= largest:
            found[row.tobytes()] = row
            better = _neighbours(row, grows=size is None)
            better = better[costs.of(better) <= largest]
            values = values_of(members, np.vstack((row, better)))
            if len(better) == 0 or values[1:].max() <= values[0]:
                break
            row = better[int(np.argmax(values[1:]))]
    rows = np.array(list(found.values()), dtype=bool).reshape(-1, count)
    if len(rows):
        yield from rows[np.argsort(-values_of(members, rows), kind="stable")]


def _neighbours(row: Sets, *, grows: bool) -> Sets:
    """Sets with one member exchanged, or added where sets may grow."""
    inside, outside = np.flatnonzero(row), np.flatnonzero(~row)
    sets = []
    for new in outside:
        for old in (*inside, *([None] if grows else [])):
            other = row.copy()
            other[new] = True
            if old is not None:
                other[old] = False
            sets.append(other)
    return np.array(sets, dtype=bool).reshape(-1, len(row))
