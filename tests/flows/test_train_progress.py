"""What a terminal shows of a training, and what is shown elsewhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from flows.train_progress import Bars, Look, Seen
from tasks.recipes import load_recipe

DIGITS = Path(__file__).parents[2] / "infra/portfolios/digits.yaml"
SEEN = {
    "eps-half": Seen(steps=160, ended_well=True, accuracy=0.4567, epsilon=0.49999),
    "eps-1": Seen(steps=48, ended_well=False, accuracy=0.25, epsilon=0.51239),
    "eps-2": Seen(steps=0, ended_well=False, accuracy=None, epsilon=None),
}


def shown(*, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110)
    with Bars(console, load_recipe(DIGITS)) as bars:
        bars.state({"state_name": "AwaitingConcurrencySlot"})
        console.print("Another sentence.")
        bars.state({"state_name": "Running"})
        bars.show(SEEN)
        console.print("A sentence.")
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_a_terminal_shows_a_bar_for_each_candidate() -> None:
    lines = shown(terminal=True).splitlines()
    assert "A sentence." in lines
    last = {line.split()[0]: line for line in lines if " of 160 steps" in line}
    assert list(last) == ["eps-half", "eps-1", "eps-2", "eps-4", "eps-8", "poisson-4"]
    assert "160 of 160 steps accuracy 0.457, epsilon 0.5 " in last["eps-half"]
    assert "48 of 160 steps  accuracy 0.250, epsilon 0.5124 so far" in last["eps-1"]  # never less than it is
    assert last["eps-2"].rstrip().endswith("0 of 160 steps")
    assert any("Training 6 candidates: waiting for another training to end ..." in line for line in lines)
    assert any("Training 6 candidates: running ..." in line for line in lines)


def test_elsewhere_only_sentences_are_printed() -> None:
    waits = "Training 6 candidates: waiting for another training to end ...\n"
    assert shown(terminal=False) == f"{waits}Another sentence.\nA sentence.\n"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/"])
def test_a_look_bears_that_mlflow_does_not_answer(url: str) -> None:
    look = Look(url, "digits", "a-flow-run")
    look.again()
    look.close()
    assert look.candidates == {}
    assert look.resumed is None
