"""`remerge data`: what it prints, of what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from accounting.errors import InvalidInput
from flows.cli import app
from tasks.data.image_sets import IMAGE_SETS

ROOT = Path(__file__).parents[2]


def printed(*arguments: str) -> str:
    ended = CliRunner().invoke(app, ["data", *arguments], catch_exceptions=False)
    assert ended.exit_code == 0
    return ended.output


def test_what_is_built_in_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMERGE_CACHE", str(tmp_path))
    shown = printed("list")
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("tasks.data:")}
    assert lines["tasks.data:mnist"][1:] == ["(1,", "28,", "28)", "11.5", "MB", "no"]
    assert {"digits", "fashion_mnist", "cifar10", "csv", "parquet"} <= {name[11:] for name in lines}
    assert str(tmp_path) in shown


def test_what_is_fetched_already_is_not_fetched_again() -> None:
    printed("fetch", "mnist")
    assert "MNIST was already in" in printed("fetch", "mnist")
    with pytest.raises(
        InvalidInput, match="There is no data set emnist to fetch; there are mnist, fashion-mnist,"
    ):
        printed("fetch", "emnist")
    assert set(IMAGE_SETS) == {"mnist", "fashion-mnist", "cifar10"}


def test_a_recipes_data_are_shown_without_a_word_on_private_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs/examples/own")
    shown = printed("check", str(ROOT / "docs/examples/own/recipe.yaml"))
    assert "not told" in shown
    assert "353" not in shown  # so many private rows there are
    assert "109  (30,)" in shown
    assert "14.86" in shown  # the longest row
    assert "Split rule: each row by the last digit of the SHA-256" in shown
    assert "from 0 to 1" in shown


def test_data_that_training_would_refuse_are_refused(tmp_path: Path) -> None:
    recipe = (ROOT / "infra/portfolios/digits.yaml").read_text().replace("n_max: 1200", "n_max: 1000")
    (tmp_path / "small.yaml").write_text(recipe)
    with pytest.raises(InvalidInput, match="more private rows than the recipe's n_max 1000 allows"):
        printed("check", str(tmp_path / "small.yaml"))


def test_a_groups_data_are_shown_task_by_task_and_compared(tmp_path: Path) -> None:
    recipe = ROOT / "infra/portfolios/tasks-digits.yaml"
    shown = printed("check", str(recipe))
    assert shown.index("Task low") < shown.index("Task high")
    assert shown.count("not told") == 4
    assert "614" not in shown  # so many private rows of low there are
    assert "No two tasks share a private record, as the recipe says (records: disjoint)" in shown.replace(
        "\n", " "
    )
    both = tmp_path / "both.yaml"
    both.write_text(recipe.read_text().replace("[5, 6, 7, 8, 9]", "[0, 1, 2, 3, 4]"))
    with pytest.raises(InvalidInput, match="the tasks low and high share records"):
        printed("check", str(both))
