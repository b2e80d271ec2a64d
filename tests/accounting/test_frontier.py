"""The objective against epsilon: what `solve` finds at each budget, and never falling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import BudgetInfeasible, InvalidInput
from accounting.frontier import frontier
from accounting.plan import CHOICES, Mechanism
from accounting.solver import solve

REPLACE = NeighboringRelation.REPLACE_ONE
Maker = Callable[..., Any]


@pytest.mark.parametrize("c", [1.0, math.inf])
def test_it_is_what_solve_finds_and_never_falls(c: float, make_candidates: Maker) -> None:
    candidates = make_candidates([10.0, 18.0, 34.0], update_lipschitz=c)
    epsilons = [2.0, 0.5, 1.0, 4.0, 1.5, 1.0]
    points = frontier(candidates, 1e-5, REPLACE, list(CHOICES), epsilons)
    assert [point.mechanism for point in points] == [m for m in CHOICES for _ in range(5)]
    for mechanism in CHOICES:
        row = [point for point in points if point.mechanism is mechanism]
        assert [point.budget_epsilon for point in row] == [0.5, 1.0, 1.5, 2.0, 4.0]
        worth = [-math.inf if point.objective is None else point.objective for point in row]
        assert worth == sorted(worth)
        for point in row:
            budget = PrivacyBudget(epsilon=point.budget_epsilon, delta=1e-5)
            try:
                plan = solve(budget, candidates, relation=REPLACE, mechanisms=[mechanism])
            except BudgetInfeasible:
                assert (point.objective, point.epsilon, point.bound_name) == (None, None, None)
                assert dict(point.weights) == {}
                continue
            assert point.objective is not None
            assert point.objective >= plan.objective
            assert point.objective == pytest.approx(plan.objective, rel=1e-3)
            assert point.epsilon is not None
            assert point.epsilon <= point.budget_epsilon
            assert point.expected_utility is None
    mixture, average, draw = (
        {p.budget_epsilon: p.objective for p in points if p.mechanism is m and p.objective is not None}
        for m in (Mechanism.MIXTURE, Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION)
    )
    for epsilon, value in mixture.items():
        assert value >= max(average[epsilon], draw[epsilon]) * (1 + 1e-9)


def test_utilities(make_candidates: Maker) -> None:
    candidates = [
        replace(c, utility=u)
        for c, u in zip(make_candidates([10.0, 18.0, 34.0]), (0.9, 0.8, 0.6), strict=True)
    ]
    points = frontier(candidates, 1e-5, REPLACE, ["random_selection"], [1.0, 2.0, 5.0], selection="stated")
    assert [point.expected_utility for point in points] == [point.objective for point in points]
    assert points[-1].expected_utility == 0.9


def test_fresh_noise_makes_every_budget_a_point(make_candidates: Maker) -> None:
    candidates = make_candidates([10.0, 34.0], update_lipschitz=1.0)
    points = frontier(
        candidates, 1e-5, REPLACE, ["linear_combination"], [0.01, 0.1, 1.0], allow_fresh_noise=True
    )
    assert all(point.objective is not None for point in points)


@pytest.mark.parametrize("epsilons", [[], [0.0], [math.nan], [math.inf], [1.0, -1.0]])
def test_bad_epsilons(epsilons: list[float], make_candidates: Maker) -> None:
    with pytest.raises(InvalidInput, match="epsilon"):
        frontier(make_candidates([10.0, 34.0]), 1e-5, REPLACE, list(CHOICES), epsilons)
