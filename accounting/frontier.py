"""What each mechanism has to offer, from budget to budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accounting.budget import NeighboringRelation, require_open_unit, require_positive
from accounting.errors import InvalidInput
from accounting.plan import Mechanism
from accounting.release import Release
from accounting.solver import offers_for
from accounting.trajectory import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The best that was found for one mechanism within one budget."""

    mechanism: Mechanism
    budget_epsilon: float  # nats, at the frontier's delta
    objective: float | None  # as in Plan; None where nothing fits
    expected_utility: float | None  # as in Plan; None where only noise is compared or nothing fits
    epsilon: float | None  # nats: what the release found is certified for, at most the budget
    weights: Mapping[str, float]  # as in Plan; empty where nothing fits
    bound_name: str | None


def frontier(
    candidates: Sequence[Candidate],
    delta: float,
    relation: NeighboringRelation,
    mechanisms: Sequence[str | Mechanism],
    epsilons: Sequence[float],
    *,
    selection: str = "noise",
    scores: Mapping[str, float] | None = None,
    realised_epsilon_cap: float | None = None,
    allow_fresh_noise: bool = False,
) -> tuple[Point, ...]:
    """The objective of the best release against epsilon, for each mechanism.

    What fits a budget also fits a larger one, so along a mechanism's points the objective never falls.

    Args:
        candidates, relation, mechanisms, selection, scores, realised_epsilon_cap, allow_fresh_noise: as for
            `solver.solve`; the cap is the same at every budget.
        delta: of all budgets.
        epsilons: of the budgets, nats, > 0, at least one; equal ones count once.

    Returns:
        By mechanism, simplest first, and within it by rising epsilon: one point each.

    Raises:
        As `solver.solve`, except that a budget that nothing fits is a point without an objective.
    """
    require_open_unit("delta", delta)
    budgets = sorted({require_positive("each epsilon of a frontier", epsilon) for epsilon in epsilons})
    if not budgets:
        raise InvalidInput("A frontier needs at least one epsilon.")
    offers, wanted = offers_for(
        candidates,
        delta,
        relation=relation,
        mechanisms=mechanisms,
        selection=selection,
        scores=scores,
        realised_epsilon_cap=realised_epsilon_cap,
        allow_fresh_noise=allow_fresh_noise,
    )
    best: dict[Mechanism, Release] = {}
    points: dict[Mechanism, list[Point]] = {mechanism: [] for mechanism in Mechanism if mechanism in wanted}
    for epsilon in budgets:
        for mechanism, release in offers.best_of_each(wanted, epsilon).items():
            if mechanism not in best or release.objective > best[mechanism].objective:
                best[mechanism] = release
        for mechanism, row in points.items():
            row.append(_point(mechanism, epsilon, best.get(mechanism), by_noise=selection == "noise"))
    return tuple(point for row in points.values() for point in row)


def _point(mechanism: Mechanism, epsilon: float, release: Release | None, *, by_noise: bool) -> Point:
    return Point(
        mechanism=mechanism,
        budget_epsilon=epsilon,
        objective=None if release is None else release.objective,
        expected_utility=None if release is None or by_noise else release.objective,
        epsilon=None if release is None else release.epsilon,
        weights={} if release is None else dict(release.weights),
        bound_name=None if release is None else release.bound.name,
    )
