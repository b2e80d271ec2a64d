"""A proposed portfolio, from what `remerge plan` is asked to a recipe snippet and a JSON document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accounting.budget import NeighboringRelation
from accounting.calibration import TrainingShape
from accounting.errors import InvalidInput
from accounting.portfolio_plan import PortfolioPlan, plan_portfolio
from accounting.trajectory import parse_relation
from tasks.randomness import executed_probability
from tasks.recipes import MAX_STEPS

LESSONS = (
    "Random selection needs close neighbours: in a ladder that doubles from candidate to candidate it is nearly "
    "invisible, for the less private one is drawn one time in ten at most, and mostly far less often.",
    "Linear combination gains most from close neighbours too, at budgets above theirs that cover both: the average of "
    "two equally noisy models has half the noise.",
    "What is saved is a share of the noise variance of the best single candidate that fits. It is not accuracy: where "
    "there is little noise to save, expect little.",
)


def budgets_of(text: str) -> list[float]:
    """The epsilons in a list such as `1,2,4`.

    Raises:
        InvalidInput: one sentence that names the part at fault.
    """
    budgets = []
    for part in text.split(","):
        try:
            budgets.append(float(part))
        except ValueError:
            raise InvalidInput(
                f"--budgets must be epsilons separated by commas, for example 1,2,4, but {part.strip()!r} was given."
            ) from None
    return budgets


def portfolio_for(
    *,
    records: int,
    steps: int,
    delta: float,
    budgets: Sequence[float],
    sampling_probability: float = 1.0,
    neighboring_relation: str = "replace_one",
    update_lipschitz: float | None = None,
) -> PortfolioPlan:
    """Propose a portfolio, see `accounting.portfolio_plan.plan_portfolio`.

    Args:
        sampling_probability: q as a recipe would state it; accounted as the coins really fall.
        update_lipschitz: None where it is not known.

    Raises:
        RemergeError: one sentence.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise InvalidInput(f"--steps must lie between 1 and {MAX_STEPS}, but {steps} was given.")
    if not 0 < sampling_probability <= 1:
        raise InvalidInput(
            f"--sampling-probability must lie in (0, 1], but {sampling_probability!r} was given."
        )
    shape = TrainingShape(
        steps=steps,
        relation=parse_relation(neighboring_relation),
        sampling_probability=executed_probability(sampling_probability),
    )
    return plan_portfolio(
        shape,
        delta,
        budgets,
        records=records,
        update_lipschitz=math.inf if update_lipschitz is None else update_lipschitz,
    )


def recipe_snippet(plan: PortfolioPlan, sampling_probability: float) -> str:
    """The part of a recipe that the plan fixes, to be pasted over a recipe's own.

    Reading it finds the same noise multipliers again, or others where steps, sampling or delta were changed.

    Args:
        sampling_probability: q as stated.
    """
    spare = 1 if plan.shape.relation is NeighboringRelation.ADD_OR_REMOVE_ONE else 0  # the neighbour's record
    lines = [
        f"neighboring_relation: {plan.shape.relation}",
        f"n_max: {plan.records + spare}",
        f"delta: {plan.delta!r}",
        "",
        "defaults: # beside max_grad_norm and learning_rate, which no guarantee depends on",
        f"  steps: {plan.shape.steps}",
        f"  expected_batch_size: {sampling_probability * plan.records!r}",
        f"  sampling_probability: {sampling_probability!r}",
        "",
        "candidates:",
        *(
            f"  {one.name}: {{target_epsilon: {one.target_epsilon!r}}} # noise_multiplier {one.noise_multiplier!r}"
            for one in plan.candidates
        ),
    ]
    return "\n".join(lines) + "\n"


def plan_document(plan: PortfolioPlan, sampling_probability: float) -> dict[str, Any]:
    """Everything a plan says, for programs; all numbers in full."""
    return {
        "records": plan.records,
        "steps": plan.shape.steps,
        "sampling_probability": sampling_probability,
        "delta": plan.delta,
        "neighboring_relation": plan.shape.relation.value,
        "update_lipschitz": plan.update_lipschitz if math.isfinite(plan.update_lipschitz) else None,
        "candidates": [
            {
                "name": one.name,
                "target_epsilon": one.target_epsilon,
                "epsilon": one.epsilon,
                "noise_multiplier": one.noise_multiplier,
                "average_noise": one.average_noise,
            }
            for one in plan.candidates
        ],
        "budgets": [
            {
                "epsilon": one.budget_epsilon,
                "foreseen": one.foreseen,
                "served_by": one.served_by,
                "weights": dict(one.weights),
                "bound": one.bound_name,
                "certified_epsilon": one.epsilon,
                "gain": one.gain,
                "gains": {mechanism.value: gain for mechanism, gain in one.gains.items()},
            }
            for one in plan.served
        ],
        "warnings": list(plan.warnings),
        "recipe": recipe_snippet(plan, sampling_probability),
    }
