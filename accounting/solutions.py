"""The best release of each mechanism from comparable candidates, certified by evaluating its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from accounting import gaussian
from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError, IncompatibleCandidates
from accounting.joint_release import joint_release, single_run
from accounting.linear_combination import accumulated_noise_variance, generic, inverse_variance_weights
from accounting.noise_search import Subset, first_that_holds, sets_by_estimate, sets_by_value
from accounting.plan import Alternative, Mechanism
from accounting.random_selection import random_selection_bound, solve_random_selection
from accounting.trajectory import Candidate

_MOST_SETS = 50  # whose bound is evaluated; the first nearly always holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A candidate with a finite epsilon of its own, and how noisy its parameters are."""

    candidate: Candidate
    bound: Bound
    epsilon: float  # nats at the budget's delta, finite
    variance: float  # accumulated noise variance per coordinate, > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A release that fits the budget."""

    mechanism: Mechanism
    weights: Mapping[str, float]  # candidate name -> weight > 0
    bound: Bound
    epsilon: float  # nats, at the budget's delta, within the budget
    objective: float  # minus the (expected) noise variance

    def as_alternative(self, label: str) -> Alternative:
        return Alternative(
            label=label,
            mechanism=self.mechanism,
            weights=self.weights,
            bound_name=self.bound.name,
            epsilon=self.epsilon,
            objective=self.objective,
        )


def members_of(
    candidates: Sequence[Candidate], budget: PrivacyBudget, relation: NeighboringRelation
) -> tuple[list[Member], dict[str, str]]:
    """Candidates with a finite epsilon at the budget's delta, and why the others have none."""
    members, reasons = [], {}
    for candidate in candidates:
        try:
            bound = single_run(candidate.trajectory, relation)
            own = bound.epsilon(budget.delta)
        except AccountingError as error:
            reasons[candidate.name] = f"could not be accounted: {error.message}"
            continue
        if not math.isfinite(own):
            reasons[candidate.name] = "was trained without noise, so it has no finite epsilon"
            continue
        variance = accumulated_noise_variance(candidate.trajectory)
        if not 0 < variance < math.inf:
            reasons[candidate.name] = "has a noise variance too small or too large to compare"
            continue
        members.append(Member(candidate=candidate, bound=bound, epsilon=own, variance=variance))
    return members, reasons


def best_average(
    members: list[Member],
    within: list[Member],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
) -> Solution | None:
    """The best average of independent runs, or the best single run where no average is better."""
    single = best_single(within, Mechanism.LINEAR_COMBINATION)
    runs = _independent(members)
    if len(runs) < 2:
        return single
    values = np.array([1 / run.variance for run in runs])

    def solution(subset: Subset) -> Solution | None:
        return _average([runs[i] for i in subset], budget, relation)

    def holds(subset: Subset) -> bool:
        return solution(subset) is not None

    if all(segment.is_full_batch for run in runs for segment in run.candidate.trajectory.segments):
        costs = np.array([(run.bound.mu or 0.0) ** 2 for run in runs])
        capacity = gaussian.mu_for(budget.epsilon, budget.delta) ** 2
        # The generic bound may be a little below the joint one, so sets just above the budget are tried.
        subsets = sets_by_value(values, costs, capacity * (1 + _last_step_share(runs)))
    else:
        equivalent = np.array([gaussian.mu_for(run.epsilon, budget.delta) for run in runs])
        capacity = gaussian.mu_for(budget.epsilon, budget.delta) ** 2
        subsets = sets_by_estimate(values, equivalent**2, capacity)
    chosen = first_that_holds(subsets, holds, _MOST_SETS)
    merged = None if chosen is None else solution(chosen)
    return max((s for s in (single, merged) if s is not None), key=lambda s: s.objective, default=None)


def _last_step_share(runs: list[Member]) -> float:
    return 0.0 if all(len(run.candidate.trajectory.segments) == 1 for run in runs) else 0.05


def _independent(members: list[Member]) -> list[Member]:
    """Runs that share no segment, in an order that does not depend on the candidates' order.

    Of runs that share steps only the least noisy is kept: an average of them has correlated noise, which
    the variance above does not describe.
    """
    kept: list[Member] = []
    seen: set[str] = set()
    for member in sorted(members, key=lambda m: (m.variance, m.candidate.name)):
        ids = {segment.id for segment in member.candidate.trajectory.segments}
        if not ids & seen:
            kept.append(member)
            seen |= ids
    return kept


def _average(runs: list[Member], budget: PrivacyBudget, relation: NeighboringRelation) -> Solution | None:
    """The average with inverse-variance weights, certified by the lesser sound bound, if it fits."""
    variances = np.array([run.variance for run in runs])
    weights = inverse_variance_weights(variances)
    trajectories = [run.candidate.trajectory for run in runs]
    bounds = [joint_release(trajectories, relation)]
    with suppress(IncompatibleCandidates):  # the joint release covers what the generic bound does not
        bounds.append(generic(trajectories, weights.tolist(), relation))
    certified = [(own, bound) for bound in bounds if (own := _epsilon_within(bound, budget)) is not None]
    if not certified:
        return None
    own, bound = min(certified, key=lambda pair: pair[0])
    return Solution(
        mechanism=Mechanism.LINEAR_COMBINATION,
        weights={r.candidate.name: float(w) for r, w in zip(runs, weights, strict=True) if w > 0},
        bound=bound,
        epsilon=own,
        objective=-float(weights**2 @ variances),
    )


def best_draw(members: list[Member], budget: PrivacyBudget, relation: NeighboringRelation) -> Solution | None:
    """The random selection of least expected noise variance."""
    if not members:
        return None
    ordered = sorted(members, key=lambda m: (m.variance, m.candidate.name))
    deltas = np.array([member.bound.profile.deltas(budget.epsilon) for member in ordered]).T
    utilities = -np.array([member.variance for member in ordered])
    weights = solve_random_selection(deltas, utilities, budget.delta)
    if weights is None:
        return None
    used = [(float(w), member) for w, member in zip(weights, ordered, strict=True) if w > 0]
    bound = random_selection_bound(
        [w for w, _ in used], [member.candidate.trajectory for _, member in used], relation
    )
    own = _epsilon_within(bound, budget)
    if own is None:
        return None
    return Solution(
        mechanism=Mechanism.RANDOM_SELECTION,
        weights={member.candidate.name: w for w, member in used},
        bound=bound,
        epsilon=own,
        objective=-math.fsum(w * member.variance for w, member in used),
    )


def _epsilon_within(bound: Bound, budget: PrivacyBudget) -> float | None:
    """The bound's epsilon at the budget's delta where the budget holds, else None."""
    try:
        own = bound.epsilon(budget.delta)
    except AccountingError:  # delta below what this bound can resolve: it certifies nothing here
        return None
    if own <= budget.epsilon:
        return own
    # The search for epsilon stops a few units in the last place above the root.
    return budget.epsilon if bound.delta(budget.epsilon) <= budget.delta else None


def best_single(within: list[Member], mechanism: Mechanism) -> Solution | None:
    if not within:
        return None
    best = min(within, key=lambda member: (member.variance, member.candidate.name))
    return Solution(
        mechanism=mechanism,
        weights={best.candidate.name: 1.0},
        bound=best.bound,
        epsilon=best.epsilon,
        objective=-best.variance,
    )
