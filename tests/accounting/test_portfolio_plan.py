"""Planned portfolios: every foreseen budget is served, and what is said of the budgets between is true."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import gaussian
from accounting.budget import NeighboringRelation
from accounting.calibration import TrainingShape
from accounting.errors import InvalidInput
from accounting.plan import Mechanism
from accounting.portfolio_plan import SINGLE, PortfolioPlan, ServedBudget, name_of, plan_portfolio

DRAW, AVERAGE = Mechanism.RANDOM_SELECTION, Mechanism.LINEAR_COMBINATION
FULL_BATCH = TrainingShape(steps=160, relation=NeighboringRelation.REPLACE_ONE)
DELTA = 1e-5


def planned(*budgets: float, lipschitz: float = math.inf) -> PortfolioPlan:
    return plan_portfolio(FULL_BATCH, DELTA, budgets, records=1200, update_lipschitz=lipschitz)


def between(plan: PortfolioPlan) -> list[ServedBudget]:
    largest = plan.candidates[-1].target_epsilon
    return [one for one in plan.served if not one.foreseen and one.budget_epsilon < largest]


@settings(max_examples=10)
@given(
    budgets=st.lists(st.floats(0.05, 100).map(lambda x: float(f"{x:.2g}")), min_size=1, max_size=4),
    steps=st.integers(1, 10_000),
    lipschitz=st.sampled_from([math.inf, 1.0]),
    relation=st.sampled_from(NeighboringRelation),
)
def test_every_foreseen_budget_is_served_within_it(
    budgets: list[float], steps: int, lipschitz: float, relation: NeighboringRelation
) -> None:
    shape = TrainingShape(steps=steps, relation=relation)
    plan = plan_portfolio(shape, DELTA, budgets, records=1200, update_lipschitz=lipschitz)
    named = sorted(set(budgets))
    assert [one.target_epsilon for one in plan.candidates] == named
    assert all(0.99 * one.target_epsilon < one.epsilon <= one.target_epsilon for one in plan.candidates)
    assert [one.budget_epsilon for one in plan.served if one.foreseen] == named
    assert [one.budget_epsilon for one in plan.served] == sorted(one.budget_epsilon for one in plan.served)
    for one in plan.served:
        assert one.epsilon <= one.budget_epsilon
        assert 0 <= one.gain < 1
        assert one.gain >= max(one.gains.values()) - 2e-3  # a draw must gain a thousandth to be preferred
        assert (one.served_by == SINGLE) == (len(one.weights) == 1)
        assert set(one.weights) <= {candidate.name for candidate in plan.candidates}


@pytest.mark.parametrize("lipschitz", [math.inf, 1.0])
def test_gains_are_those_of_the_weights(lipschitz: float) -> None:
    plan = planned(1, 1.3, 2, 4, lipschitz=lipschitz)
    noise = {one.name: one.noise_multiplier for one in plan.candidates}
    seen = set()
    for one in plan.served:
        fitting = [c.noise_multiplier for c in plan.candidates if c.epsilon <= one.budget_epsilon]
        share = 1 if one.served_by == "random_selection" else 2  # the expected variance, or the average's
        variance = sum(weight**share * noise[name] ** 2 for name, weight in one.weights.items())
        assert one.gain == pytest.approx(1 - variance / min(fitting) ** 2, abs=1e-9)
        seen.add(one.served_by)
        if one.bound_name == "joint":
            mu = math.sqrt(sum(160 * (2 / noise[name]) ** 2 for name in one.weights))
            assert one.epsilon == pytest.approx(gaussian.epsilon(mu, DELTA), rel=1e-9)
    assert seen == {SINGLE, "random_selection", "linear_combination"}


def test_a_doubling_ladder_makes_random_selection_nearly_invisible() -> None:
    doubling = between(planned(0.5, 1, 2, 4, 8))
    assert all(one.gains[DRAW] < 0.08 for one in doubling)
    drawn = [one for one in doubling if one.served_by == DRAW]
    assert drawn
    chances = [min(one.weights.values()) for one in drawn]
    assert max(chances) < 0.12
    assert sorted(chances)[len(chances) // 2] < 0.03
    # Half-way between close neighbours the less private one is drawn far more often.
    middle = between(planned(1, 1.1))[1]
    assert middle.served_by == DRAW
    assert min(middle.weights.values()) > 0.3


def test_linear_combination_gains_most_from_close_neighbours() -> None:
    gains = [planned(1, ratio).served[-1].gains[AVERAGE] for ratio in (1.05, 1.3, 2.0, 4.0)]
    assert gains == sorted(gains, reverse=True)
    assert 0.45 < gains[0] < 0.5  # two equally noisy models: half the noise
    assert gains[-1] < 0.1


def test_known_lipschitz_constants_let_averages_serve_budgets_between() -> None:
    unknown, known = planned(1, 2), planned(1, 2, lipschitz=1.0)
    assert all(one.gains[AVERAGE] == 0 for one in between(unknown))
    assert all(one.served_by == AVERAGE and one.bound_name == "shifted" for one in between(known))


def test_budgets_between_are_short_decimals_and_one_lies_beyond() -> None:
    plan = planned(1, 2)
    assert [one.budget_epsilon for one in plan.served] == [1, 1.19, 1.41, 1.68, 2, 3]
    assert [one.foreseen for one in plan.served] == [True, False, False, False, True, False]
    assert [one.budget_epsilon for one in planned(2).served] == [2, 3]
    assert [one.budget_epsilon for one in planned(1, 1.001).served] == [1, 1.001, 1.5]


def test_poisson_sampling_is_planned_too() -> None:
    shape = TrainingShape(steps=50, relation=NeighboringRelation.REPLACE_ONE, sampling_probability=0.25)
    plan = plan_portfolio(shape, DELTA, [2, 1, 2.0], records=400)
    assert [one.name for one in plan.candidates] == ["eps-1", "eps-2"]
    for one in plan.candidates:
        assert one.epsilon <= one.target_epsilon < shape.bound(one.noise_multiplier * 0.999).epsilon(DELTA)
        assert one.average_noise == pytest.approx(one.noise_multiplier / 100)
    assert plan.served[-1].served_by == AVERAGE


@pytest.mark.parametrize(("records", "warned"), [(99_999, False), (100_000, True), (10**7, True)])
def test_a_delta_not_below_one_over_n_is_warned_of(records: int, warned: bool) -> None:
    plan = plan_portfolio(FULL_BATCH, DELTA, [1.0], records=records)
    assert bool(plan.warnings) == warned
    assert all("far below" in sentence and str(records) in sentence for sentence in plan.warnings)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budgets": []}, "Name 1 to 16 different budgets"),
        ({"budgets": range(1, 18)}, "but 17 were given"),
        ({"budgets": [1.0, -1.0]}, "epsilon must be a finite number above 0"),
        ({"budgets": [math.nan]}, "epsilon must be a number"),
        ({"budgets": [math.inf]}, "epsilon must be a finite number"),
        ({"delta": 1.0}, "delta must lie strictly between 0 and 1"),
        ({"records": 0}, "records must be a whole number"),
        ({"update_lipschitz": 0.0}, "update_lipschitz must be above 0"),
        ({"update_lipschitz": math.nan}, "update_lipschitz must be above 0"),
        (
            {
                "update_lipschitz": 1.0,
                "shape": TrainingShape(
                    steps=2, relation=NeighboringRelation.REPLACE_ONE, sampling_probability=0.5
                ),
            },
            "for full-batch training only",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(changes: dict[str, object], sentence: str) -> None:
    values = {"shape": FULL_BATCH, "delta": DELTA, "budgets": [1.0], "records": 1200} | changes
    with pytest.raises(InvalidInput, match=sentence) as caught:
        plan_portfolio(**values)  # type: ignore[arg-type]
    assert caught.value.message.count(".\n") == 0


@given(epsilon=st.floats(1e-12, 1e6))
def test_names_are_what_recipes_accept(epsilon: float) -> None:
    assert re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", name_of(epsilon))
    assert name_of(epsilon) != name_of(math.nextafter(epsilon, math.inf))
