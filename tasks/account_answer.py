"""What `remerge account solve` answers: the best release, and what stands beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accounting.bounds import Bound
from accounting.budget import PrivacyBudget
from accounting.frontier import Point
from accounting.plan import Component, Mechanism
from tasks.account_bounds import Account


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One release that fits the budget."""

    label: str  # the mechanism's name, or "best_single"
    weights: Mapping[str, float]  # of a mixture expected over its draw
    bound: str
    epsilon: float  # nats, at the budget's delta
    expected_utility: float | None
    fresh_noise: float = 0.0  # standard deviation per parameter, to be added to the merged parameters, once


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best option, what stands beside it, and how it was chosen."""

    best: Option
    bound: Bound  # which certifies it
    budget: PrivacyBudget
    selection: str  # "noise", or "stated" utilities
    utility_reason: str | None  # why no expected utility is known
    account: Account  # every bound of the same release
    member_epsilons: Mapping[str, float | None]  # of each run used, alone, at the budget's delta; nats
    components: tuple[Component, ...]  # of a mixture: the merges, one of which is drawn
    alternatives: tuple[Option, ...]
    set_aside: Mapping[str, str]  # by run, why it was not considered
    notes: tuple[str, ...]
    frontier: tuple[Point, ...] = ()  # of the runs known step by step

    @property
    def drawn_epsilons(self) -> dict[str, float | None]:
        """What whoever learns the outcome of the draw is protected by; empty where nothing is drawn."""
        if self.components:
            return {component.name: component.epsilon for component in self.components}
        drawn = self.best.label == Mechanism.RANDOM_SELECTION.value and len(self.best.weights) > 1
        return dict(self.member_epsilons) if drawn else {}
