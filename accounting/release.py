"""A release that fits a budget, as the solver's searches hand it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accounting.bounds import Bound
from accounting.plan import Alternative, Component, Mechanism

_CLEARLY = 1e-9  # relative
_WORTH_A_DRAW = 1e-3  # relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Weights under a bound that holds within the budget."""

    mechanism: Mechanism
    weights: Mapping[str, float]  # candidate name -> weight > 0; of a mixture the expected lambda
    bound: Bound
    epsilon: float  # nats, at the budget's delta, within the budget
    objective: float  # higher is better: minus the (expected) noise variance, or the expected utility
    fresh_noise: float = 0.0
    components: tuple[Component, ...] = ()  # of a mixture

    def clearly_better_than(self, other: Release) -> bool:
        """By more than rounding, or for a draw by a thousandth: else the simpler release is kept.

        The program's draws often gain next to nothing by a tiny chance of a much louder model, and a mixture's over a
        plain random selection's.
        """
        for_a_draw = self.is_drawn and not other.is_drawn
        for_a_mixture = bool(self.components) and not other.components
        needed = _WORTH_A_DRAW if for_a_draw or for_a_mixture else _CLEARLY
        return self.objective > other.objective + needed * abs(other.objective)

    @property
    def is_drawn(self) -> bool:
        """Whether chance decides what is released."""
        drawn = self.components or (self.weights if self.mechanism is Mechanism.RANDOM_SELECTION else ())
        return len(drawn) > 1

    @property
    def merges_several(self) -> bool:
        """Whether it may release an average of several models."""
        if self.mechanism is Mechanism.LINEAR_COMBINATION:
            return len(self.weights) > 1
        return any(len(component.weights) > 1 for component in self.components)

    def as_alternative(self, label: str) -> Alternative:
        return Alternative(
            label=label,
            mechanism=self.mechanism,
            weights=self.weights,
            bound_name=self.bound.name,
            epsilon=self.epsilon,
            objective=self.objective,
            fresh_noise=self.fresh_noise,
        )
