"""What a set of candidates has on offer for a budget: the best release of each mechanism."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from accounting.averages import best_average
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.comparable import comparable_class
from accounting.draws import best_draw
from accounting.errors import InvalidInput
from accounting.joint_release import joint_release
from accounting.members import Member, epsilon_within, members_of
from accounting.mixtures import best_mixture
from accounting.plan import Mechanism
from accounting.release import Release
from accounting.selection_rules import VALIDATION, utilities_by
from accounting.trajectory import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Candidates as a selection rule considers them, at one delta."""

    candidates: tuple[Candidate, ...]  # considered by the rule
    members: tuple[Member, ...]  # of these, those with a finite epsilon
    set_aside: Mapping[str, str]  # why the others are not used
    incomparable: tuple[Candidate, ...]  # set aside for being unlike the rest, whatever their epsilon
    delta: float
    relation: NeighboringRelation
    selection: str
    cap: float | None  # nats; on the own epsilon of what may be drawn
    fresh_allowed: bool

    @property
    def drawable(self) -> list[Member]:
        """Members that random selection may draw."""
        return [m for m in self.members if self.cap is None or m.epsilon <= self.cap]

    @property
    def consulted(self) -> tuple[str, ...]:
        """Names of the private models whose scores the weights may depend on, if that is to be covered."""
        covered = self.selection == VALIDATION
        return tuple(candidate.name for candidate in self.candidates) if covered else ()

    def best(self, mechanism: Mechanism, epsilon: float) -> Release | None:
        """The best release by one mechanism with this epsilon, certified; None where none was found."""
        return next(iter(self.best_of_each([mechanism], epsilon).values()), None)

    def best_of_each(self, mechanisms: Collection[Mechanism], epsilon: float) -> dict[Mechanism, Release]:
        """The best release by each mechanism that has one with this epsilon, the simplest mechanism first."""
        budget = PrivacyBudget(epsilon=epsilon, delta=self.delta)
        if self.consulted:
            found = {m: self._best_score(m, budget) for m in Mechanism if m in mechanisms}
            return {mechanism: release for mechanism, release in found.items() if release is not None}
        average = None
        if Mechanism.LINEAR_COMBINATION in mechanisms or Mechanism.MIXTURE in mechanisms:
            average = best_average(self.members, budget, self.relation, fresh_allowed=self.fresh_allowed)
        found = {Mechanism.LINEAR_COMBINATION: average}
        if Mechanism.RANDOM_SELECTION in mechanisms:
            found[Mechanism.RANDOM_SELECTION] = best_draw(self.drawable, budget, self.relation)
        if Mechanism.MIXTURE in mechanisms:
            found[Mechanism.MIXTURE] = best_mixture(
                self.members,
                budget,
                self.relation,
                average=average,
                cap=self.cap,
                fresh_allowed=self.fresh_allowed,
            )
        return {m: release for m, release in found.items() if release is not None and m in mechanisms}

    def _best_score(self, mechanism: Mechanism, budget: PrivacyBudget) -> Release | None:
        """The best candidate, if the joint release of all whose scores were consulted fits."""
        bound = joint_release([candidate.trajectory for candidate in self.candidates], self.relation)
        own = epsilon_within(bound, budget)
        if own is None or mechanism is Mechanism.MIXTURE:
            return None
        best = min(self.members, key=lambda member: member.order)
        return Release(
            mechanism=mechanism,
            weights={best.name: 1.0},
            bound=bound,
            epsilon=own,
            objective=best.worth,
        )


def offers_of(
    candidates: Sequence[Candidate],
    delta: float,
    relation: NeighboringRelation,
    *,
    selection: str,
    scores: Mapping[str, float] | None,
    cap: float | None,
    fresh_allowed: bool,
) -> Offers:
    """Apply a selection rule.

    Raises:
        InvalidInput: what the rule needs is missing, or no two candidates are comparable by noise.
    """
    utilities = utilities_by(selection, candidates, scores)
    if utilities is None:
        considered, set_aside = comparable_class(candidates)
    else:
        if fresh_allowed:
            raise InvalidInput(
                "Fresh noise lowers the utility by an amount that no stated utility tells; select by 'noise', or "
                "do not allow it."
            )
        considered = [candidate for candidate in candidates if candidate.name in utilities]
        set_aside = {c.name: "no score was consulted for it" for c in candidates if c.name not in utilities}
    incomparable = tuple(candidate for candidate in candidates if candidate.name in set_aside)
    members, unusable = members_of(considered, delta, relation, utilities)
    return Offers(
        candidates=tuple(considered),
        members=tuple(members),
        set_aside={**set_aside, **unusable},
        incomparable=incomparable,
        delta=delta,
        relation=relation,
        selection=selection,
        cap=cap,
        fresh_allowed=fresh_allowed,
    )
