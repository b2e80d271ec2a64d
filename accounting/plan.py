"""What the solver answers: which weights, under which bound, beside what else was on offer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget, require_non_negative
from accounting.errors import AccountingError, InvalidInput
from accounting.merges import LINEAR, Option, require_merge
from accounting.profile import require_simplex


class Mechanism(StrEnum):
    """How several candidates become one released model."""

    LINEAR_COMBINATION = "linear_combination"  # release the weighted average of the parameters
    RANDOM_SELECTION = "random_selection"  # release one candidate, drawn by weight
    MIXTURE = "mixture"  # release one of several weighted averages, drawn by weight
    OPERATOR = (
        "operator"  # release what a merge operator makes of at least two candidates, or of several tasks
    )

    @property
    def is_draw(self) -> bool:
        """Whether chance decides between its outcomes."""
        return self in (Mechanism.RANDOM_SELECTION, Mechanism.MIXTURE)


# What `solver.solve` may choose among; an operator is asked for by its name.
CHOICES = (Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION, Mechanism.MIXTURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBound:
    """Another accountant's epsilon for the same release, at the budget's delta, or why there is none."""

    epsilon: float | None = None  # nats, finite
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.reason is None):
            raise InvalidInput("Another bound states either an epsilon or the reason why there is none.")
        if self.epsilon is not None and not 0 <= self.epsilon < math.inf:
            raise InvalidInput(f"epsilon of another bound must be finite, but {self.epsilon!r} was given.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What another mechanism, or the best single candidate, would have given within the same budget."""

    label: str  # the mechanism's name, or "best_single"
    mechanism: Mechanism
    weights: Mapping[str, float]
    bound_name: str
    epsilon: float  # nats, at the budget's delta
    objective: float  # as in Plan
    fresh_noise: float = 0.0  # as in Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One merge of a mixture: drawn with `weight`, then released alone."""

    name: str  # "merge-1", ...
    weight: float  # probability, > 0
    weights: Mapping[str, float]  # lambda by candidate name, > 0, summing to 1, in candidate order
    bound: Bound  # of this merge alone, which is what whoever sees the draw sees
    epsilon: float  # nats, at the budget's delta; may exceed the budget
    fresh_noise: float = 0.0  # as in Plan

    def __post_init__(self) -> None:
        require_weights(self.weights)
        if not 0 < self.weight <= 1:
            raise InvalidInput(
                f"The weight of a component must lie in (0, 1], but {self.weight!r} was given."
            )
        require_non_negative("fresh_noise", self.fresh_noise)
        if not self.bound.sound_for_dp_sgd:
            raise AccountingError(f"The bound {self.bound.name!r} is not a guarantee and certifies nothing.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A certified choice of weights.

    `bound.delta(budget.epsilon) <= budget.delta` was checked by evaluating it.
    """

    mechanism: Mechanism
    # candidate name -> weight > 0, summing to 1, in candidate order; of a mixture the expected lambda
    weights: Mapping[str, float]
    bound: Bound
    budget: PrivacyBudget
    relation: NeighboringRelation
    selection: str  # what the weights depend on, see `solver.solve`
    epsilon: float  # nats, at budget.delta; at most budget.epsilon
    objective: float  # minus the (expected) noise variance per coordinate, or the expected utility
    member_epsilons: Mapping[str, float]  # each used candidate's own epsilon at budget.delta, nats
    other_bounds: Mapping[str, OtherBound] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    set_aside: Mapping[str, str] = field(default_factory=dict)  # candidate name -> reason
    notes: tuple[str, ...] = ()
    fresh_noise: float = 0.0  # tau: standard deviation per coordinate of noise still to be added, once
    components: tuple[Component, ...] = ()  # of a mixture, at least one; empty for other mechanisms
    # None where only noise was compared; of an average of models a surrogate, see `selection_rules.SURROGATE`
    expected_utility: float | None = None
    consulted: tuple[
        str, ...
    ] = ()  # candidates that the bound covers for their scores, whatever their weight

    merge: str = LINEAR  # the operator, see `merges`
    merge_options: Mapping[str, Option] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)  # candidate -> task; empty where all are of one
    records: str | None = None  # of the tasks: "disjoint" or "shared"

    def __post_init__(self) -> None:
        require_weights(self.weights)
        require_merge(
            is_operator=self.mechanism is Mechanism.OPERATOR,
            names={*self.weights, *self.consulted},
            weighted=self.weights,
            merge=self.merge,
            merge_options=self.merge_options,
            tasks=self.tasks,
            records=self.records,
            bound=self.bound.name,
        )
        require_non_negative("fresh_noise", self.fresh_noise)
        if self.fresh_noise > 0 and self.mechanism is not Mechanism.LINEAR_COMBINATION:
            raise InvalidInput("Fresh noise is added to a linear combination, or to a mixture's components.")
        if bool(self.components) != (self.mechanism is Mechanism.MIXTURE):
            raise InvalidInput("A mixture has components, and no other mechanism has.")
        if self.components:
            require_components(self.weights, self.components)
        if set(self.member_epsilons) != set(self.weights):
            raise InvalidInput("A plan states the own epsilon of exactly the candidates it uses.")
        if not self.bound.sound_for_dp_sgd:
            raise AccountingError(f"The bound {self.bound.name!r} is not a guarantee and certifies nothing.")
        if not self.epsilon <= self.budget.epsilon:
            raise AccountingError(
                f"This release needs epsilon {self.epsilon:.6g}, over the budget's {self.budget.epsilon:.6g}."
            )

    @property
    def outcomes(self) -> dict[str, float]:
        """What may be released, by name, with its probability; a single one where nothing is drawn.

        Of a random selection the candidates, of a mixture its components; any other merge is one.
        """
        if self.mechanism is Mechanism.RANDOM_SELECTION:
            return dict(self.weights)
        if self.mechanism is Mechanism.MIXTURE:
            return {component.name: component.weight for component in self.components}
        return {self.mechanism.value: 1.0}

    def merged_weights(self, outcome: str) -> dict[str, float]:
        """lambda by candidate name of one of the outcomes."""
        if self.mechanism is Mechanism.RANDOM_SELECTION:
            return {outcome: 1.0}
        component = next((c for c in self.components if c.name == outcome), None)
        return dict(self.weights if component is None else component.weights)

    def outcome_epsilon(self, outcome: str) -> float:
        """nats, at the budget's delta: what whoever knows the outcome of the draw sees."""
        if self.mechanism is Mechanism.RANDOM_SELECTION:
            return self.member_epsilons[outcome]
        component = next((c for c in self.components if c.name == outcome), None)
        return self.epsilon if component is None else component.epsilon


class Weighted(Protocol):
    """A component of a mixture, as planned or as certified."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def weights(self) -> Mapping[str, float]: ...


def require_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that are not all above 0 and on the simplex."""
    require_simplex(tuple(weights.values()))
    if not all(weight > 0 for weight in weights.values()):
        raise InvalidInput("Only candidates with a weight above 0 are named.")


def require_components(weights: Mapping[str, float], components: Sequence[Weighted]) -> None:
    """Refuse components with repeated names, or whose expected weights are not `weights`."""
    require_simplex(tuple(component.weight for component in components))
    if len({component.name for component in components}) < len(components):
        raise InvalidInput("The components of a mixture need different names.")
    expected = expected_weights(components)
    if set(expected) != set(weights) or any(abs(expected[n] - w) > 1e-9 for n, w in weights.items()):
        raise InvalidInput(
            "The weights of a mixture must be its components' weights, expected over the draw."
        )


def expected_weights(components: Sequence[Weighted]) -> dict[str, float]:
    """Each candidate's lambda, expected over a mixture's draw, in order of appearance."""
    names = dict.fromkeys(name for component in components for name in component.weights)
    return {
        name: math.fsum(component.weight * component.weights.get(name, 0.0) for component in components)
        for name in names
    }
