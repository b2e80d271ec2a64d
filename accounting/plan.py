"""What the solver answers: which weights, under which bound, beside what else was on offer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError, InvalidInput
from accounting.profile import require_simplex


class Mechanism(StrEnum):
    """How several candidates become one released model."""

    LINEAR_COMBINATION = "linear_combination"  # release the weighted average of the parameters
    RANDOM_SELECTION = "random_selection"  # release one candidate, drawn by weight
    MIXTURE = "mixture"  # release one of several weighted averages, drawn by weight


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

    label: str  # "linear_combination", "random_selection" or "best_single"
    mechanism: Mechanism
    weights: Mapping[str, float]
    bound_name: str
    epsilon: float  # nats, at the budget's delta
    objective: float  # as in Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A certified choice of weights.

    `bound.delta(budget.epsilon) <= budget.delta` was checked by evaluating it.
    """

    mechanism: Mechanism
    weights: Mapping[str, float]  # candidate name -> weight > 0, summing to 1, in candidate order
    bound: Bound
    budget: PrivacyBudget
    relation: NeighboringRelation
    selection: str  # what the weights depend on, see `solver.solve`
    epsilon: float  # nats, at budget.delta; at most budget.epsilon
    objective: float  # minus the (expected) noise variance per coordinate of the released parameters
    member_epsilons: Mapping[str, float]  # each used candidate's own epsilon at budget.delta, nats
    other_bounds: Mapping[str, OtherBound] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    set_aside: Mapping[str, str] = field(default_factory=dict)  # candidate name -> reason
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_simplex(tuple(self.weights.values()))
        if not all(weight > 0 for weight in self.weights.values()):
            raise InvalidInput("A plan names only candidates with a weight above 0.")
        if set(self.member_epsilons) != set(self.weights):
            raise InvalidInput("A plan states the own epsilon of exactly the candidates it uses.")
        if not self.bound.sound_for_dp_sgd:
            raise AccountingError(f"The bound {self.bound.name!r} is not a guarantee and certifies nothing.")
        if not self.epsilon <= self.budget.epsilon:
            raise AccountingError(
                f"This release needs epsilon {self.epsilon:.6g}, over the budget's {self.budget.epsilon:.6g}."
            )
