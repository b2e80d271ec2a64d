"""The command of the DP-Merging experiment, on a small setting: its page, its figures and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from accounting.errors import InvalidInput
from flows.cli import app
from tasks.dp_merging_experiment import families
from tasks.dp_merging_experiment.store import FOLDER, Store
from tasks.dp_merging_experiment.workers import do, left_to_do
from tasks.task_groups.disjointness import NotDisjoint
from tests.tasks.dp_merging_experiment import small
from tests.tasks.dp_merging_experiment.test_page import METHODS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def experiment(*options: str) -> str:
    ended = CliRunner().invoke(app, ["experiment", "dp-merging", *options], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_the_page_and_its_figures_are_written_from_finished_runs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = small.family().operators
    setting = small.setting(
        families=(
            small.family(methods=METHODS, operators=(*operators, small.Operator(name="task_arithmetic"))),
        )
    )
    monkeypatch.setattr(families, "SETTING", setting)
    store = Store(cache / FOLDER)
    for stage in left_to_do(setting, store):
        for job in stage:
            do(job, store)
    page = tmp_path / "pages" / "page.md"
    said = experiment("--page", str(page), "--seeds", "2")
    assert f"wrote {page}" in said
    text = page.read_text(encoding="utf-8")
    assert "Made by `remerge experiment dp-merging --seeds 2` on " in text
    assert "that of the digits" in text  # the loader's rule
    for name in ("page-digits-merges.png", "page-digits-models.png"):
        assert f"({name})" in text
        with Image.open(page.parent / name) as figure:
            assert figure.width > 500
    assert "nan" not in text


def test_data_of_two_tasks_that_share_records_are_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (small.task("low", [0, 1, 2]), small.task("high", [2, 3, 4]))
    monkeypatch.setattr(families, "SETTING", small.setting(families=(small.family(tasks=both),)))
    with pytest.raises(NotDisjoint, match="the tasks low and high share records"):
        experiment()
    assert not (cache / FOLDER).exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "9"), "has seeds for 2 to 5, but 9 were asked for"),
        (("--seeds", "1"), "has seeds for 2 to 5, but 1 were asked for"),
        (("--only", "sounds"), "There are the tasks images and texts, but 'sounds' was asked for"),
    ],
)
def test_what_there_is_not_is_said_in_a_sentence(options: tuple[str, ...], said: str, cache: Path) -> None:
    with pytest.raises(InvalidInput, match=said):
        experiment(*options)
