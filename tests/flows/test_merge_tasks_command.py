"""`remerge merge-tasks`: what it refuses before anything is trained, with no stack up."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from accounting.errors import InvalidInput
from flows.cli import app

RECIPE = Path(__file__).parents[2] / "infra/portfolios/tasks-digits.yaml"
BUDGET = ("--region", "eu", "--epsilon", "4", "--delta", "1e-5")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--epsilon", "4"), "add `--region NAME`"),
        (("--merge", "ties"), "add `--region NAME`"),
        (("--merge-option", "density=0.3"), "add `--region NAME`"),
        (("--min-accuracy", "0.5"), "add `--region NAME`"),
        (("--scope", "region"), "add `--region NAME`"),
        (("--region", "eu", "--delta", "1e-5"), "needs a budget: give --epsilon"),
        (("--region", "eu", "--epsilon", "4"), "needs a budget: give --delta"),
        ((*BUDGET, "--merge", "blend"), "policy: merge"),
        ((*BUDGET, "--merge", "ties", "--merge-option", "depth=3"), "has no option depth"),
        ((*BUDGET, "--merge-option", "density"), "NAME=VALUE"),
        ((*BUDGET, "--selection", "public_twin"), "set `public_twins: true` in its recipe"),
        ((*BUDGET, "--selection", "stated"), "state a `utility` for each in its recipe"),
        ((*BUDGET, "--min-accuracy", "1.5"), "policy: min_accuracy"),
        (("--region", "EU", *BUDGET[2:]), "policy: region: should be lower-case letters"),
        (
            ("--region", "eu", "--epsilon", "0.9", "--delta", "1e-5"),
            "No candidate of task low will reach epsilon 0.9",
        ),
    ],
)
def test_a_policy_that_will_not_do_is_refused_first(options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        CliRunner().invoke(app, ["merge-tasks", str(RECIPE), *options], catch_exceptions=False)
    assert sentence in refused.value.message
    assert "\n" not in refused.value.message


def test_an_operator_for_two_is_not_for_three_tasks(tmp_path: Path) -> None:
    third = (
        "  third:\n    data: tasks.data:digits\n    classes: 10\n    candidates: {t: {noise_multiplier: 9}}\n"
    )
    (tmp_path / "three.yaml").write_text(RECIPE.read_text() + third)
    asked = ["merge-tasks", str(tmp_path / "three.yaml"), *BUDGET, "--merge", "slerp"]
    with pytest.raises(InvalidInput, match="slerp merges exactly 2 models, but tasks-digits has 3 tasks"):
        CliRunner().invoke(app, asked, catch_exceptions=False)


def test_a_portfolios_recipe_is_no_groups() -> None:
    with pytest.raises(InvalidInput, match="names no tasks"):
        CliRunner().invoke(app, ["merge-tasks", str(RECIPE.with_name("digits.yaml"))], catch_exceptions=False)
