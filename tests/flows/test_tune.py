"""`remerge tune` end to end: as the documentation shows it, without a stack, and one-sentence errors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.flows.shown import is_as_shown

PAGE = Path(__file__).parent.parent.parent / "docs" / "tuning.md"
SCORE = r"\d\.\d{3} ± \d\.\d{3}"  # a row more or less is right on another processor
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tune(remerge_here: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """`remerge tune`: (exit status, stdout, stderr)."""
    return partial(remerge_here, "tune")


def test_the_documented_example_prints_what_is_shown(tune: Run) -> None:
    blocks = re.findall(
        r"```console\n\$ remerge tune (.*?)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(blocks) == 1
    (arguments, shown), *_ = blocks
    status, printed, told = tune(*shlex.split(arguments))
    assert status == 0
    assert is_as_shown(*(re.sub(SCORE, "score", text) for text in (shown, printed)))
    lines = [line for line in printed.splitlines() if re.search(rf"{SCORE}$", line)]
    assert len(lines) > 15
    assert all(len(line) <= 80 for line in lines)
    assert told.splitlines() == [
        "Tuning: clipping, 7 trials ...",
        "Tuning: noise, 5 trials ...",
        "Tuning: batch and learning rate, 10 trials ...",
        "Tuning: the recipe's own values, 1 trial ...",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--offline", "--candidate", "eps-3"),
            "The recipe digits has no candidate eps-3; it has eps-half, eps-1",
        ),
        (("--offline", "--epsilon", "0"), "epsilon must be a finite number above 0"),
        (("--offline", "--seeds", "21"), "--seeds must be from 1 to 20, but 21 was given"),
        (("--offline", "--budget-trials", "2"), "--budget-trials must be from 4"),
        (("--offline", "no-such.yaml"), "There is no recipe file no-such.yaml"),
    ],
)
def test_errors_are_one_sentence(tune: Run, arguments: tuple[str, ...], sentence: str) -> None:
    status, shown, error = tune(*arguments)
    assert (status, shown) == (1, "")
    assert error.startswith("Error: ")
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_without_a_stack_it_says_what_works_without_one(
    tune: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REMERGE_HOME", str(tmp_path))
    status, shown, error = tune()
    assert (status, shown) == (1, "")
    assert "remerge up" in error
    assert "With --offline, tuning needs no stack and logs nothing." in error
    assert len(error.splitlines()) == 1
