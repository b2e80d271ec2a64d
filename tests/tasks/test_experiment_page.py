"""The page of a portfolio experiment: its numbers are those of the candidates, and of merges that really fit."""

from __future__ import annotations

import re

import pytest

from accounting.joint_release import single_run
from accounting.words import rounded_up
from tasks.experiment_page import portfolio_page
from tasks.recipes import find_recipe, load_recipe
from tasks.validation import accuracy
from tests.tasks.test_selection import Case, case

__all__ = ["case"]  # a fixture


def rows_below(heading: str, page: str) -> list[list[str]]:
    table = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_says_what_was_trained_and_what_merges_would_reach(case: Case) -> None:
    epsilons = {name: single_run(one.trajectory).epsilon(1e-5) for name, one in case.loaded.items()}
    least, most = min(epsilons.values()), max(epsilons.values())
    page = portfolio_page(
        case.manifest,
        case.loaded,
        title="A title",
        command="the command",
        delta=1e-5,
        budgets=(least / 10, 1.01 * most),
    )
    assert page.startswith("# A title\n\nMade by `the command` on ")
    found = {row[0]: row for row in rows_below("The candidates", page)}
    assert list(found) == list(case.loaded)
    for name, one in case.loaded.items():
        assert found[name][1] == str(one.trajectory.steps)
        assert found[name][3] == "closed form"
        assert found[name][4] == rounded_up(epsilons[name])
        assert found[name][5] == f"{accuracy(case.manifest.network, one.model, case.splits.public_gate):.4f}"
    too_little, enough = rows_below("Budgets between them", page)
    assert too_little[1:] == ["none", "none", "", "", "", ""]
    assert enough[1].startswith(f"{max(epsilons, key=lambda name: epsilons[name])}: ")
    assert float(enough[3]) <= 1.01 * most
    assert re.fullmatch(r"[+-]\d+\.\d points", enough[6])


def test_the_mnist_portfolio_is_eight_candidates_that_keep_their_epsilons() -> None:
    recipe = load_recipe(find_recipe("infra/portfolios/mnist.yaml"))
    assert len(recipe.candidates) == 8
    page = find_recipe("docs/experiments/mnist.md").read_text(encoding="utf-8")
    shown = {row[0]: float(row[2]) for row in rows_below("The candidates", page)}
    assert shown == {one.name: pytest.approx(one.noise_multiplier, rel=1e-5) for one in recipe.candidates}
