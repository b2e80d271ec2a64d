"""The plan of the experiment: what is run, under which key, and at equal privacy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accounting.budget import NeighboringRelation
from accounting.calibration import TrainingShape
from accounting.joint_release import single_run
from tasks.dp_merging_experiment.calibration import noise_multiplier
from tasks.dp_merging_experiment.families import SETTING
from tasks.dp_merging_experiment.plan import runs, scorings, starts
from tasks.dp_merging_experiment.setting import NAIVE, PAIRED, ZERO_COST, Operator, quick
from tasks.dp_merging_experiment.tuning import SEEDS, tuning
from tasks.merging import OPERATORS, checked_options
from tasks.randomness import executed_probability
from tests.tasks.dp_merging_experiment import small


def test_the_whole_experiment_is_eight_tasks_four_budgets_five_seeds_and_five_methods() -> None:
    planned = list(runs(SETTING))
    assert len(planned) == 8 * 4 * 5 * 5
    assert len({run.key for run in planned}) == len(planned)
    assert len(starts(SETTING)) == 2 * 5
    assert len(scorings(SETTING)) == 2 * 4 * 5 * 5
    assert {run.epsilon for run in planned} == {1.0, 2.0, 4.0, 8.0}
    assert len(list(runs(quick(SETTING)))) == 8 * 2 * 2 * 5


def test_every_operator_for_more_than_two_models_is_there_with_options_that_it_takes() -> None:
    merged = {operator.name for family in SETTING.families for operator in family.operators}
    assert merged == set(OPERATORS) - {"slerp"}
    for family in SETTING.families:
        assert len({operator.name for operator in family.operators}) == len(family.operators)
        for operator in family.operators:
            checked_options(operator.name, operator.options)


def test_no_network_has_more_parameters_than_promised() -> None:
    from tasks.dp_merging_experiment.rows import family_network
    from tasks.models import build

    for family in SETTING.families:
        assert sum(one.numel() for one in build(family_network(family)).parameters()) <= 100_000


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 4},
        {"sampling_probability": 0.2},
        {"max_grad_norm": 2.0},
        {"pretraining_rows": 41},
        {"width": 7},
        {"methods": tuple(replace(one, learning_rate=0.5) for one in small.family().methods)},
        {"tasks": (small.task("low", [0, 1, 2, 3]), small.task("high", [5, 6, 7, 8, 9]))},
    ],
)
def test_a_changed_setting_has_other_keys(changed: dict[str, Any]) -> None:
    before = {run.key for run in runs(small.setting())}
    after = {run.key for run in runs(small.setting(families=(small.family(**changed),)))}
    assert not before & after


def test_another_operator_changes_no_key_of_a_run() -> None:
    more = small.family(operators=(*small.family().operators, Operator(name="wudi")))
    assert [run.key for run in runs(small.setting())] == [
        run.key for run in runs(small.setting(families=(more,)))
    ]
    [first, *_] = scorings(small.setting())
    assert len({first.key(operator) for operator in more.operators}) == len(more.operators)
    half, whole = (Operator(name="ties", options={"density": density}) for density in (0.5, 1.0))
    assert first.key(half) != first.key(whole)


def test_tuning_shares_no_run_with_the_experiment() -> None:
    assert not set(SEEDS) & set(SETTING.seeds)
    assert not {run.key for run in runs(tuning(SETTING))} & {run.key for run in runs(SETTING)}


def test_all_methods_spend_the_same_budget() -> None:
    epsilon, [family, *_] = 2.0, SETTING.families
    noise = {
        name: noise_multiplier(family, family.method(name), epsilon=epsilon, delta=1e-5)
        for name in (NAIVE, PAIRED, ZERO_COST)
    }
    assert noise[ZERO_COST] == noise[NAIVE]
    assert noise[PAIRED] == pytest.approx(2**0.5 * noise[NAIVE], rel=2e-3)
    for name, optimizer in ((NAIVE, "sgd"), (PAIRED, "dp_sam"), (ZERO_COST, "dp_sam_previous_gradient")):
        shape = TrainingShape(
            steps=family.steps,
            relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_probability=executed_probability(family.sampling_probability),
            optimizer=optimizer,
        )
        spent = single_run(shape.run(noise[name])).epsilon(1e-5)
        assert 0.99 * epsilon < spent <= epsilon
