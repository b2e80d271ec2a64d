"""The best average of several runs within a budget: proposed by the searches, certified by the least bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accounting import gaussian
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.linear_combination import inverse_variance_weights
from accounting.members import Member, epsilon_within, independent, least_bound
from accounting.merge_costs import MergeCosts
from accounting.merge_problem import Aim, Problem
from accounting.merge_search import best_merges
from accounting.noise_search import Subset, first_that_holds, sets_by_estimate, sets_by_value
from accounting.plan import Mechanism
from accounting.release import Release
from accounting.shifted_interpolation import arrange, shifted

Array = NDArray[np.float64]

_MOST_SETS = 50  # whose bound is evaluated; the first nearly always holds
_MARGINS = (1e-12, 1e-9, 1e-6, 1e-3)  # of mu^2, until the certified bound agrees with the search's
_DUST = 1e-2  # weights below are given up where that is hardly worse
_HARDLY = 1e-3
_COMPARABLE = 1e12  # ratio of variances beyond which a run is left out of the continuous search


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Independent runs, and their continuous search in units of `scale` times the parameters'."""

    runs: tuple[Member, ...]
    problem: Problem  # its limit is set anew for each search
    scale: float

    def merges(
        self, limit: float, *, fresh_allowed: bool, quick: bool = False
    ) -> Iterator[tuple[list[float], float]]:
        """Weights (shape (runs,)) and tau of merges with mu^2 within the limit, the best first."""
        problem = replace(self.problem, limit=limit, fresh_allowed=fresh_allowed)
        for merge in best_merges(problem, quick=quick):
            yield on_simplex(merge.weights), math.sqrt(merge.fresh) / self.scale


def families(
    members: Sequence[Member], budget: PrivacyBudget, relation: NeighboringRelation
) -> list[list[Member]]:
    """Sets of runs that share no steps: the best of those that do, and those that fit the budget alone first."""
    ordered = sorted(members, key=lambda member: member.order)
    kept = independent(ordered)
    if len(kept) == len(ordered):
        return [kept]
    other = independent(sorted(ordered, key=lambda member: member.epsilon > budget.epsilon))
    return [kept] if other == kept else [kept, other]


def averaging_of(runs: Sequence[Member], relation: NeighboringRelation) -> Averaging | None:
    """Prepare the continuous search; None where the theorems on merges cover none of the runs."""
    covered = [run for run in runs if 0 < run.variance < math.inf and _is_covered(run, relation)]
    if not covered:
        return None
    middle = sorted(run.variance for run in covered)[len(covered) // 2]
    covered = [run for run in covered if middle / _COMPARABLE <= run.variance <= middle * _COMPARABLE]
    merge = arrange([run.candidate.trajectory for run in covered], relation)
    utilities = [run.utility for run in covered if run.utility is not None]
    aim = Aim(
        variances=np.array([run.variance for run in covered]) * merge.scale**2,
        utilities=np.array(utilities) if utilities else None,
    )
    problem = Problem(costs=MergeCosts.of(merge.paths), aim=aim, limit=1.0)
    return Averaging(runs=tuple(covered), problem=problem, scale=merge.scale)


def best_average(
    members: Sequence[Member],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    *,
    fresh_allowed: bool = False,
) -> Release | None:
    """The best average of independent runs, or the best single run where no average is clearly better."""
    best: Release | None = best_single(members, budget, Mechanism.LINEAR_COMBINATION)
    for runs in families(members, budget, relation):
        for found in (
            best_set(runs, budget, relation),
            without_dust(
                best_merge(averaging_of(runs, relation), budget, relation, fresh_allowed=fresh_allowed),
                runs,
                budget,
                relation,
                fresh_allowed=fresh_allowed,
            ),
        ):
            if found is not None and (best is None or found.clearly_better_than(best)):
                best = found
    return best


def best_single(members: Sequence[Member], budget: PrivacyBudget, mechanism: Mechanism) -> Release | None:
    """The best of the runs that fit on their own, by their own bounds."""
    within = [member for member in members if member.epsilon <= budget.epsilon]
    if not within:
        return None
    best = min(within, key=lambda member: member.order)
    return Release(
        mechanism=mechanism,
        weights={best.name: 1.0},
        bound=best.bound,
        epsilon=best.epsilon,
        objective=best.worth,
    )


def best_merge(
    averaging: Averaging | None,
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    *,
    fresh_allowed: bool,
) -> Release | None:
    """The best merge by the continuous search."""
    if averaging is None:
        return None
    limit = gaussian.mu_for(budget.epsilon, budget.delta) ** 2
    for margin in _MARGINS:
        first = next(averaging.merges(limit * (1 - margin), fresh_allowed=fresh_allowed), None)
        if first is None:
            return None
        found = certified(averaging.runs, *first, budget, relation)
        if found is not None:
            return found
    return None


def without_dust(
    found: Release | None,
    runs: Sequence[Member],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    *,
    fresh_allowed: bool,
) -> Release | None:
    """The same merge without runs of little weight that hardly better it.

    They cost a single release next to nothing, and all that is released later everything: once a second merge is
    out, every run in either may be known.
    """
    if found is None:
        return None
    kept = [run for run in runs if found.weights.get(run.name, 0.0) >= _DUST]
    if not kept or len(kept) == len(found.weights):
        return found
    cleaner = best_merge(averaging_of(kept, relation), budget, relation, fresh_allowed=fresh_allowed)
    return (
        cleaner if cleaner is not None and hardly_worse(cleaner.objective, found.objective, kept) else found
    )


def hardly_worse(objective: float, best: float, runs: Sequence[Member]) -> bool:
    """Whether an objective is within one part in a thousand of the best: of it, or of the spread of utilities."""
    utilities = [run.utility for run in runs if run.utility is not None]
    unit = max(utilities) - min(utilities) if utilities else abs(best)
    return objective >= best - _HARDLY * unit


def best_set(runs: Sequence[Member], budget: PrivacyBudget, relation: NeighboringRelation) -> Release | None:
    """The best average whose weights are inversely proportional to the noise variances, if noise is compared.

    Of full-batch runs the sets are searched whose joint release fits; of others, by estimates of it.
    """
    if len(runs) < 2 or runs[0].utility is not None:
        return None
    values = np.array([1 / run.variance for run in runs])
    capacity = gaussian.mu_for(budget.epsilon, budget.delta) ** 2
    if all(segment.is_full_batch for run in runs for segment in run.candidate.trajectory.segments):
        costs = np.array([(run.bound.mu or 0.0) ** 2 for run in runs])
        subsets = sets_by_value(values, costs, capacity)
    else:
        equivalent = np.array([gaussian.mu_for(run.epsilon, budget.delta) for run in runs])
        subsets = sets_by_estimate(values, equivalent**2, capacity)

    def solution(subset: Subset) -> Release | None:
        chosen = [runs[i] for i in subset]
        weights = inverse_variance_weights([run.variance for run in chosen])
        return certified(chosen, on_simplex(weights), 0.0, budget, relation)

    chosen = first_that_holds(subsets, lambda subset: solution(subset) is not None, _MOST_SETS)
    return None if chosen is None else solution(chosen)


def certified(
    runs: Sequence[Member],
    weights: Sequence[float],
    fresh_noise: float,
    budget: PrivacyBudget,
    relation: NeighboringRelation,
) -> Release | None:
    """A merge under its least bound, if that fits the budget."""
    used = [(weight, run) for weight, run in zip(weights, runs, strict=True) if weight > 0]
    bound = least_bound(
        [run.candidate.trajectory for _, run in used],
        [weight for weight, _ in used],
        relation,
        budget.delta,
        fresh_noise,
    )
    own = None if bound is None else epsilon_within(bound, budget)
    if bound is None or own is None:
        return None
    return Release(
        mechanism=Mechanism.LINEAR_COMBINATION,
        weights={run.name: weight for weight, run in used},
        bound=bound,
        epsilon=own,
        objective=merged_worth(used, fresh_noise),
        fresh_noise=fresh_noise,
    )


def merged_worth(used: Sequence[tuple[float, Member]], fresh_noise: float) -> float:
    """Minus the merge's noise variance `sum lambda_i^2 v_i + tau^2`, or the surrogate `sum lambda_i u_i`."""
    utilities = [weight * run.utility for weight, run in used if run.utility is not None]
    if utilities:
        return math.fsum(utilities)
    return -math.fsum([fresh_noise**2, *(weight * weight * run.variance for weight, run in used)])


def on_simplex(weights: Array) -> list[float]:
    """The same weights with the largest one taking up the rounding of the others."""
    values = [float(weight) for weight in weights]
    largest = max(range(len(values)), key=lambda i: (values[i], -i))
    values[largest] = 0.0
    values[largest] = 1 - math.fsum(values)
    return values


def _is_covered(run: Member, relation: NeighboringRelation) -> bool:
    try:
        shifted([run.candidate.trajectory], [1.0], relation)
    except (IncompatibleCandidates, InvalidInput):  # another kind of training, or beyond floating point
        return False
    return True
