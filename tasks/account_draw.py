"""Random selection by stated utilities: the exact linear program over runs that need not share a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError
from accounting.members import epsilon_within
from accounting.random_selection import solve_random_selection
from tasks.account_bounds import bound_of, profile_of
from tasks.account_runs import Release, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A random selection that fits the budget."""

    release: Release
    bound: Bound
    epsilon: float  # nats, at the budget's delta
    expected_utility: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What random selection has to offer."""

    best: Draw | None  # None: no weights fit the budget
    best_single: Draw | None  # the most useful run that fits the budget alone
    epsilons: Mapping[str, float | None]  # of each run alone, at the budget's delta; None where it has none
    set_aside: Mapping[str, str]  # by run, why it may not be drawn


def best_draw(
    runs: Sequence[Run],
    utilities: Mapping[str, float],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    cap: float | None,
) -> Draws:
    """Maximise the expected utility within the budget.

    Args:
        runs: to choose from.
        utilities: of each run, by name; higher is better.
        budget: epsilon in nats and delta.
        relation: of the file.
        cap: nats; a run whose own epsilon exceeds it, or is not known at the budget's delta, is never drawn.

    Returns:
        Weights from an exact linear program; its bound was evaluated at the answer.
    """
    epsilons: dict[str, float | None] = {}
    set_aside: dict[str, str] = {}
    for run in runs:
        epsilon, reason = _own_epsilon(run, budget.delta, relation)
        epsilons[run.name] = epsilon
        if reason is None and cap is not None and (epsilon is None or epsilon > cap):
            own = "is not known" if epsilon is None else f"is {epsilon:.4g}"
            reason = f"may not be drawn: its own epsilon {own}, and the cap is {cap:g}"
        if reason is not None:
            set_aside[run.name] = reason
    offered = [run for run in runs if run.name not in set_aside]
    # An order of their own, so that the order in the file decides nothing.
    offered.sort(key=lambda run: (-utilities[run.name], epsilons[run.name] or math.inf, run.name))
    alone = [_draw({run.name: 1.0}, utilities, runs, budget, relation) for run in offered]
    weights = _program(offered, utilities, budget, relation)
    return Draws(
        best=None if weights is None else _draw(weights, utilities, runs, budget, relation),
        best_single=next((draw for draw in alone if draw is not None), None),
        epsilons=epsilons,
        set_aside=set_aside,
    )


def _own_epsilon(run: Run, delta: float, relation: NeighboringRelation) -> tuple[float | None, str | None]:
    try:
        own = profile_of(run, relation).epsilon(delta)
    except AccountingError as error:
        # Below its stated delta a guarantee says nothing, but a small weight scales that delta down.
        return None, None if run.stated else f"could not be accounted: {error.message}"
    if not math.isfinite(own):
        return None, "was trained without noise, so it has no finite epsilon"
    return own, None


def _program(
    runs: Sequence[Run],
    utilities: Mapping[str, float],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
) -> dict[str, float] | None:
    """The best weights, by run; None where none fit."""
    if not runs:
        return None
    deltas = np.array([profile_of(run, relation).deltas(budget.epsilon) for run in runs]).T
    values = np.array([utilities[run.name] for run in runs])
    weights = solve_random_selection(deltas, values, budget.delta)
    if weights is None:
        return None
    return {run.name: weight for run, weight in zip(runs, weights.tolist(), strict=True) if weight > 0}


def _draw(
    weights: Mapping[str, float],
    utilities: Mapping[str, float],
    runs: Sequence[Run],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
) -> Draw | None:
    """The release with its bound evaluated, its runs in the order of the file; None where it does not fit."""
    used = tuple(run for run in runs if run.name in weights)
    release = Release(
        kind="random_selection",
        runs=used,
        weights=tuple(weights[run.name] for run in used),
        relation=relation,
    )
    bound = bound_of("random_selection_pld", release, budget.delta)
    epsilon = epsilon_within(bound, budget)
    if epsilon is None:
        return None
    expected = math.fsum(weight * utilities[name] for name, weight in weights.items())
    return Draw(release=release, bound=bound, epsilon=epsilon, expected_utility=expected)
