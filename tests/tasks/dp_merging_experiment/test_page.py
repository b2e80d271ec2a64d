"""The page from fixed numbers: its tables are their means and spreads, and its words follow from them."""

from __future__ import annotations

import math
import re

import pytest

from tasks.dp_merging_experiment.figures import draw_merges, draw_shape, png
from tasks.dp_merging_experiment.page import experiment_page
from tasks.dp_merging_experiment.results import GroupResult, Results, StartResult, TaskResult
from tasks.dp_merging_experiment.setting import (
    NAIVE,
    NO_ANCHOR,
    NO_FLATNESS,
    PAIRED,
    ZERO_COST,
    Method,
    Operator,
    Setting,
)
from tasks.dp_merging_experiment.summary import Difference, Spread, Tally
from tests.tasks.dp_merging_experiment import small

METHODS = (
    Method(name=NAIVE, title="naive DP-SGD", learning_rate=1.0),
    Method(
        name=PAIRED, title="the paired one", learning_rate=1.0, ascent="same_batch", radius=0.1, anchor=0.01
    ),
    Method(
        name=ZERO_COST,
        title="the zero-cost one",
        learning_rate=1.0,
        ascent="previous_gradient",
        radius=0.1,
        anchor=0.01,
    ),
    Method(name=NO_ANCHOR, title="no anchor", learning_rate=1.0, ascent="same_batch", radius=0.1),
    Method(name=NO_FLATNESS, title="anchor alone", learning_rate=1.0, anchor=0.01),
)
SETTING: Setting = small.setting(
    families=(
        small.family(methods=METHODS, operators=(Operator(name="average"), Operator(name="task_arithmetic"))),
    ),
    epsilons=(1.0, 4.0),
    seeds=(1, 2, 3),
)


def results(advantage: dict[str, float], scatter: float = 0.002) -> Results:
    """Merged accuracy is .6 and `advantage` more, .7 before the merge; seeds differ by `scatter`, methods' too."""
    groups = {}
    for number, method in enumerate(METHODS):
        for epsilon in SETTING.epsilons:
            for seed in SETTING.seeds:
                shift = scatter * ((seed + number) % 3 - 1)
                merged = 0.6 + advantage.get(method.name, 0.0) + shift
                own = TaskResult(
                    accuracy=0.7,
                    loss=0.9,
                    sharpness=0.2 - 0.1 * (method.name == PAIRED),
                    drift=2.0,
                    noise_multiplier=1.0,
                    epsilon=0.9999 * epsilon,
                    seconds=2.0,
                )
                groups["digits", method.name, epsilon, seed] = GroupResult(
                    own={"low": own, "high": own},
                    merged={
                        name: {"low": merged - 0.1, "high": merged + 0.1}
                        for name in ("average", "task_arithmetic")
                    },
                    cosine=0.25,
                    seconds=0.5,
                )
    start = StartResult(
        accuracy={"low": 0.4, "high": 0.5}, parameters=1234, trunk_parameters=1000, seconds=1.0
    )
    return Results(starts={("digits", seed): start for seed in SETTING.seeds}, groups=groups)


def page(found: Results) -> str:
    return experiment_page(
        SETTING,
        found,
        command="the command",
        split_rules={("digits", "low"): "rule of low", ("digits", "high"): "rule of high"},
        figures={"digits": ("one.png", "two.png")},
        versions={"torch": "1.2.3"},
    )


def below(heading: str, text: str) -> list[list[str]]:
    table = text.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_tables_hold_means_spreads_and_differences_of_the_fixed_numbers() -> None:
    text = page(results({PAIRED: 0.05, ZERO_COST: -0.05}))
    merges = below("Merges", text)
    assert [row[:2] for row in merges] == [
        [operator, epsilon] for operator in ("average", "task_arithmetic") for epsilon in ("1", "4")
    ]
    for row in merges:
        assert row[2:5] == ["60.0 ± 0.2", "65.0 ± 0.2", "55.0 ± 0.2"]
        assert re.fullmatch(r"\*\*\+5\.0 ± 0\.\d\*\*", row[5])
        assert re.fullmatch(r"\*\*-5\.0 ± 0\.\d\*\*", row[6])
    for row in below("Merge gap", text):
        assert row[2:5] == ["10.0 ± 0.2", "5.0 ± 0.2", "15.0 ± 0.2"]
    own = below("Each task's own model", text)
    assert [row[0] for row in own] == [method.title for method in METHODS]
    assert all(row[1:] == ["70.0 ± 0.0", "70.0 ± 0.0"] for row in own)
    assert below("Task by task, epsilon 1, averaged, %", text)[0][1:] == [
        *(["70.0 ± 0.0"] * 3),
        "50.0 ± 0.2",
        "55.0 ± 0.2",
        "45.0 ± 0.2",
    ]
    for said in ("`the command`", "torch 1.2.3", "1,234 parameters", "rule of low", "one.png", "two.png"):
        assert said in text
    assert "60 private runs, 2.0 s each" in text
    assert "0.9999 times its target" in text
    assert "nan" not in text


def test_words_say_where_there_is_a_gain_a_loss_or_neither() -> None:
    text = page(results({PAIRED: 0.05, ZERO_COST: -0.05}))
    assert "the paired one: a gain over naive DP-SGD: its merges are better in 4 of 4" in text
    assert "the zero-cost one: a loss over naive DP-SGD: its merges are better in 0 of 4" in text
    assert (
        "the paper's gains appear for the paired one on two halves of the digits, and not otherwise" in text
    )
    assert "it is clearly better in 4 of all 8 comparisons" in text
    assert "in points: average +5.0, task_arithmetic +5.0." in text
    assert "(-5.0 points on average: own models +0.0, merges +5.0)" in text
    assert "the paired one: sharpness is lower at every budget and drift does not differ" in text
    assert "the anchor added to the paired method changes merged accuracy by +5.0 points" in text
    assert "the paired one 65.0 % (average)" in text

    nothing = page(results({PAIRED: 0.0005}, scatter=0.01))
    assert "the paired one: no clear gain or loss over naive DP-SGD" in nothing
    assert "undecided in 4, by +0.0 points" in nothing or "undecided in 4, by +0.1 points" in nothing
    assert (
        "DP-Merging is clearly better in 0 of 8 comparisons, clearly worse in 0, and 8 are undecided"
        in nothing
    )
    assert "**+" not in nothing.partition("### Merges")[2].partition("### Merge gap")[0]


def test_a_spread_and_an_interval_are_students() -> None:
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(mean=2.0, deviation=1.0)
    found = Difference.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t of 2 degrees of freedom
    assert found.sign == 0
    assert Difference.of([1.0, 1.1, 1.2]).sign == 1
    assert Difference.of([-1.0, -1.1, -1.2]).sign == -1
    assert Difference.of([1.0]).sign == 0  # one seed decides nothing
    assert Tally.of([found, Difference.of([1.0, 1.1, 1.2])]) == Tally(
        better=1, worse=0, undecided=1, mean=pytest.approx(1.55)
    )


def test_figures_have_a_panel_for_each_operator_and_are_the_same_bytes_again() -> None:
    found, [family] = results({PAIRED: 0.05}), SETTING.families
    figure = draw_merges(found, SETTING, family)
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == [
        "own models",
        "average",
        "task arithmetic",
    ]
    assert png(figure).startswith(b"\x89PNG")
    shape = draw_shape(found, SETTING, family)
    assert len(shape.axes) == 3
    assert png(shape) == png(draw_shape(found, SETTING, family))
