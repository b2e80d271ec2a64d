"""Candidates as the solver compares them, and the least sound bound of what is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError, IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.linear_combination import accumulated_noise_variance, generic
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Candidate, Trajectory

CLEARLY = 1e-9  # relative: a theorem with more assumptions must gain at least so much


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A candidate with a finite epsilon of its own, and what it is worth alone."""

    candidate: Candidate
    bound: Bound
    epsilon: float  # nats at the delta asked for, finite
    variance: float  # accumulated noise variance per coordinate; > 0 and finite where noise is compared
    utility: float | None = None  # None where noise is compared

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def worth(self) -> float:
        """Higher is better: the utility, or minus the noise variance."""
        return -self.variance if self.utility is None else self.utility

    @property
    def order(self) -> tuple[float, str]:
        """From the best to the worst, whatever order the candidates were given in."""
        return -self.worth, self.name


def members_of(
    candidates: Sequence[Candidate],
    delta: float,
    relation: NeighboringRelation,
    utilities: Mapping[str, float] | None = None,
) -> tuple[list[Member], dict[str, str]]:
    """Candidates with a finite epsilon at a delta, and why the others have none.

    Args:
        utilities: by name, of all candidates; None where noise is compared.
    """
    members, reasons = [], {}
    for candidate in candidates:
        try:
            bound = single_run(candidate.trajectory, relation)
            own = bound.epsilon(delta)
        except AccountingError as error:
            reasons[candidate.name] = f"could not be accounted: {error.message}"
            continue
        if not math.isfinite(own):
            reasons[candidate.name] = "was trained without noise, so it has no finite epsilon"
            continue
        variance = accumulated_noise_variance(candidate.trajectory)
        if utilities is None and not 0 < variance < math.inf:
            reasons[candidate.name] = "has a noise variance too small or too large to compare"
            continue
        utility = None if utilities is None else utilities[candidate.name]
        members.append(
            Member(candidate=candidate, bound=bound, epsilon=own, variance=variance, utility=utility)
        )
    return members, reasons


def independent(members: Sequence[Member]) -> list[Member]:
    """Runs that share no segment, the earliest in the sequence of those that do, in canonical order.

    An average of runs that share steps has correlated noise, which the sum of variances does not describe.
    """
    kept: list[Member] = []
    seen: set[str] = set()
    for member in members:
        ids = {segment.id for segment in member.candidate.trajectory.segments}
        if not ids & seen:
            kept.append(member)
            seen |= ids
    return sorted(kept, key=lambda member: member.order)


def least_bound(
    trajectories: Sequence[Trajectory],
    weights: Sequence[float],
    relation: NeighboringRelation,
    delta: float,
    fresh_noise: float = 0.0,
) -> Bound | None:
    """The least of the sound bounds of a linear combination; of nearly equal ones that which assumes least.

    Args:
        trajectories: the runs, shape (runs,).
        weights: lambda, > 0, on the simplex, shape (runs,).
        delta: where the bounds are compared.
        fresh_noise: tau.

    Returns:
        None where no bound can be computed at this delta.
    """
    theorems: list[Callable[[], Bound]] = [
        lambda: joint_release(trajectories, relation),  # what is added afterwards changes nothing here
        lambda: generic(trajectories, weights, relation, fresh_noise),
    ]
    if any(math.isfinite(s.update_lipschitz) for t in trajectories for s in t.segments):
        theorems.append(lambda: shifted(trajectories, weights, relation, fresh_noise))
    best: tuple[float, Bound] | None = None
    for theorem in theorems:
        try:
            bound = theorem()
            own = bound.epsilon(delta)
        except (IncompatibleCandidates, AccountingError, InvalidInput):
            continue  # not covered, delta too small to resolve, or lengths beyond floating point
        if best is None or own < best[0] * (1 - CLEARLY):
            best = own, bound
    return None if best is None else best[1]


def epsilon_within(bound: Bound, budget: PrivacyBudget) -> float | None:
    """The bound's epsilon at the budget's delta where the budget holds, else None."""
    try:
        own = bound.epsilon(budget.delta)
    except AccountingError:  # delta below what this bound can resolve: it certifies nothing here
        return None
    if own <= budget.epsilon:
        return own
    # The search for epsilon stops a few units in the last place above the root.
    return budget.epsilon if bound.delta(budget.epsilon) <= budget.delta else None
