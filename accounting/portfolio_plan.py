"""Which candidates to train so that every foreseen budget is served, and what serves the budgets between.

One candidate for each foreseen budget, with the least noise that fits it. What then serves other budgets is asked
of the product's own solver, which sees the candidates as if they had been trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accounting.budget import LARGEST_EPSILON, PrivacyBudget, require_count
from accounting.calibration import TrainingShape, calibrated_noise
from accounting.errors import InvalidInput
from accounting.plan import Mechanism, Plan
from accounting.solver import solve
from accounting.trajectory import Candidate

SINGLE = "single_candidate"
MOST_BUDGETS = 16
DRAWN_CAP = 4.0  # times the budget: the default of a policy's realised_epsilon_cap
_BETWEEN = 3  # budgets looked at between two foreseen ones
_BEYOND = 1.5  # times the largest foreseen budget: looked at too
_DIGITS = 3  # significant, of budgets that nobody named
_MECHANISMS = (Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION)  # a policy's default


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCandidate:
    """A run to be trained."""

    name: str  # a recipe accepts it
    target_epsilon: float  # nats, at the plan's delta
    epsilon: float  # nats: the run's own, at most the target
    noise_multiplier: float
    average_noise: float  # standard deviation in a step's average gradient, in units of max_grad_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBudget:
    """What the solver would release within a budget."""

    budget_epsilon: float  # nats, at the plan's delta
    foreseen: bool
    served_by: str  # SINGLE or a Mechanism's value
    weights: Mapping[str, float]  # as in Plan
    bound_name: str
    epsilon: float  # nats: certified, at most the budget
    gain: float  # in [0, 1): the share of the best single candidate's noise variance that is gone
    gains: Mapping[Mechanism, float]  # the same, by mechanism, chosen or not


@dataclass(frozen=True, slots=True, kw_only=True)
class PortfolioPlan:
    """A proposed portfolio."""

    shape: TrainingShape
    delta: float
    records: int
    update_lipschitz: float  # infinity where it is not known
    candidates: tuple[PlannedCandidate, ...]  # the most private first
    served: tuple[ServedBudget, ...]  # by rising budget
    warnings: tuple[str, ...]  # sentences


def plan_portfolio(
    shape: TrainingShape,
    delta: float,
    budgets: Sequence[float],
    *,
    records: int,
    update_lipschitz: float = math.inf,
) -> PortfolioPlan:
    """Propose a portfolio for foreseen budgets.

    Args:
        shape: of every candidate; the sampling probability as the coins really fall.
        delta: of all budgets, in (0, 1).
        budgets: epsilons in nats, 1 to 16 of them; equal ones count once.
        records: n, how many private records take part; at least 1. No guarantee depends on it, but what a delta
            means and how much the noise disturbs training do.
        update_lipschitz: c of every update, proven for all data sets allowed (`Segment`); full batch only.

    Returns:
        Multipliers rounded up, each verified by `calibrated_noise`; gains of noise variance, which are no gains of
        accuracy.

    Raises:
        InvalidInput: no or too many budgets, or a value out of range.
        AccountingError, BudgetInfeasible: no noise meets a budget, see `calibrated_noise`.
    """
    require_count("records", records)
    foreseen = [PrivacyBudget(epsilon=epsilon, delta=delta) for epsilon in sorted(set(map(float, budgets)))]
    if not 1 <= len(foreseen) <= MOST_BUDGETS:
        raise InvalidInput(f"Name 1 to {MOST_BUDGETS} different budgets, but {len(foreseen)} were given.")
    if not (update_lipschitz > 0 and (shape.is_full_batch or math.isinf(update_lipschitz))):
        raise InvalidInput(
            "update_lipschitz must be above 0 and can be used for full-batch training only, but "
            f"{update_lipschitz!r} was given; leave it out."
        )
    planned = tuple(_candidate(budget, shape, records) for budget in foreseen)
    offered = [
        Candidate(
            name=one.name,
            trajectory=shape.run(one.noise_multiplier, one.name, update_lipschitz=update_lipschitz),
        )
        for one in planned
    ]
    named = [budget.epsilon for budget in foreseen]
    return PortfolioPlan(
        shape=shape,
        delta=delta,
        records=records,
        update_lipschitz=update_lipschitz,
        candidates=planned,
        served=tuple(
            _served(
                PrivacyBudget(epsilon=epsilon, delta=delta), offered, shape, foreseen=epsilon in set(named)
            )
            for epsilon in _looked_at(named)
        ),
        warnings=_warnings(delta, records),
    )


def name_of(epsilon: float) -> str:
    """For example eps-0-5; different epsilons have different names, which every recipe accepts."""
    return "eps-" + repr(float(epsilon)).removesuffix(".0").replace(".", "-")


def _candidate(budget: PrivacyBudget, shape: TrainingShape, records: int) -> PlannedCandidate:
    noise = calibrated_noise(budget, shape)
    return PlannedCandidate(
        name=name_of(budget.epsilon),
        target_epsilon=budget.epsilon,
        epsilon=shape.bound(noise).epsilon(budget.delta),
        noise_multiplier=noise,
        average_noise=noise / (shape.sampling_probability * records),
    )


def _looked_at(named: Sequence[float]) -> list[float]:
    """The foreseen budgets, some between each two by equal ratios, and one beyond the largest."""
    found = {*named, min(_short(_BEYOND * named[-1]), LARGEST_EPSILON)}
    for low, high in itertools.pairwise(named):
        steps = (low * (high / low) ** (k / (_BETWEEN + 1)) for k in range(1, _BETWEEN + 1))
        found |= {value for value in map(_short, steps) if low < value < high}
    return sorted(found)


def _short(epsilon: float) -> float:
    return float(f"{epsilon:.{_DIGITS}g}")


def _served(
    budget: PrivacyBudget, offered: Sequence[Candidate], shape: TrainingShape, *, foreseen: bool
) -> ServedBudget:
    plan = solve(
        budget,
        offered,
        relation=shape.relation,
        mechanisms=_MECHANISMS,
        realised_epsilon_cap=DRAWN_CAP * budget.epsilon,
    )
    found = {alternative.label: alternative.objective for alternative in plan.alternatives}
    single = found["best_single"]  # every budget looked at is at least the smallest candidate's
    found[plan.mechanism.value] = plan.objective
    gains = {m: max(0.0, 1 - found[m.value] / single) for m in _MECHANISMS if m.value in found}
    return ServedBudget(
        budget_epsilon=budget.epsilon,
        foreseen=foreseen,
        served_by=_served_by(plan),
        weights=plan.weights,
        bound_name=plan.bound.name,
        epsilon=plan.epsilon,
        gain=gains[plan.mechanism],
        gains=gains,
    )


def _served_by(plan: Plan) -> str:
    return SINGLE if len(plan.weights) == 1 else plan.mechanism.value


def _warnings(delta: float, records: int) -> tuple[str, ...]:
    if delta < 1 / records:
        return ()
    return (
        f"Delta {delta:g} is not below 1 / {records} = {1 / records:.3g}: it would allow a mechanism that publishes "
        "one of the records outright; ask for a delta far below that.",
    )
