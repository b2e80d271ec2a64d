"""How a tuning looks on a terminal: a bar while it runs, a table for each stage, and the lines for the recipe."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from flows.tables import plain_table
from tasks.tuning.search import BATCH_AND_RATE, CLIPPING, NOISE, Stage
from tasks.tuning.trials import Setting, Trial
from tasks.tuning.tuning import NOTHING_PRIVATE, Tuning, cautions, snippet, verdict

WIDTH = 80  # of the text that is kept in MLflow

_COLUMNS: dict[str, dict[str, Callable[[Setting], str]]] = {
    CLIPPING: {
        "clipping norm": lambda s: f"{s.max_grad_norm:g}",
        "learning rate": lambda s: f"{s.learning_rate:g}",
    },
    NOISE: {
        "epsilon": lambda s: "no noise" if s.epsilon is None else f"{s.epsilon:g}",
        "noise multiplier": lambda s: "" if s.epsilon is None else f"{s.noise_multiplier:.6g}",
    },
    BATCH_AND_RATE: {
        "sampling": lambda s: f"{s.sampling_probability:g}",
        "learning rate": lambda s: f"{s.learning_rate:g}",
        "noise multiplier": lambda s: f"{s.noise_multiplier:.6g}",
    },
}


def print_tuning(console: Console, tuning: Tuning) -> None:
    """Everything that a tuning found."""
    print_stages(console, tuning)
    console.print("\nFor the recipe, in place of the candidate's own lines:\n", highlight=False)
    typer.echo(snippet(tuning))
    console.print(NOTHING_PRIVATE, highlight=False, soft_wrap=True)


def print_stages(console: Console, tuning: Tuning) -> None:
    """A table for each stage, its choice in a sentence, and what to be careful about."""
    bench = tuning.prepared.bench
    console.print(
        f"Candidate {bench.candidate.name} of {bench.recipe.name}, for epsilon {tuning.prepared.epsilon:g} at delta "
        f"{bench.recipe.delta:g}: {len(bench.fitting)} public rows fitted, {len(bench.scoring)} scored, "
        f"{bench.seeds} seed{'s' if bench.seeds > 1 else ''}.",
        highlight=False,
        soft_wrap=True,
    )
    for number, stage in enumerate(tuning.found.stages, start=1):
        console.print(stage_table(number, stage))
        console.print(stage.because, highlight=False, soft_wrap=True, markup=False)
        _warn(console, stage.warnings)
    console.print(verdict(tuning), highlight=False, soft_wrap=True, markup=False)
    _warn(console, cautions(tuning))


def _warn(console: Console, warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(f"[bold red]Warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def stage_table(number: int, stage: Stage) -> Table:
    """One stage; a star marks the trial that it ends with."""
    columns = _COLUMNS[stage.name]
    table = plain_table(
        f"Stage {number}, {stage.name} (* chosen)", *(f">{column}" for column in columns), ">accuracy"
    )
    for trial in stage.trials:
        first, *others = (show(trial.setting) for show in columns.values())
        table.add_row(
            f"{'* ' if trial is stage.chosen else ''}{first}",
            *others,
            "diverged" if trial.diverged else f"{trial.accuracy:.3f} ± {trial.standard_error:.3f}",
        )
    return table


def tuning_text(tuning: Tuning) -> str:
    """The stages as plain text of 80 columns, to be kept."""
    text = io.StringIO()
    print_stages(Console(file=text, width=WIDTH), tuning)
    return text.getvalue()


def _trials(count: int) -> str:
    return f"{count} trial{'' if count == 1 else 's'}"


class ShownProgress:
    """An onlooker that moves a bar on a terminal, and prints one line for each stage elsewhere."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar
        self._task: TaskID | None = None
        self._ended = 0

    def stage_begins(self, name: str, trials: int) -> None:
        self._ended = 0
        if self._console.is_terminal:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(f"Tuning: {name}, {_trials(trials)}", total=trials)
        else:
            self._console.print(f"Tuning: {name}, {_trials(trials)} ...", highlight=False)

    def trial_progresses(self, share: float) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=self._ended + share)

    def trial_ended(self, stage: str, trial: Trial) -> None:
        self._ended += 1
        self.trial_progresses(0)

    def stage_ended(self, stage: Stage) -> None:
        """The table comes at the end."""


@contextmanager
def progress(console: Console) -> Iterator[ShownProgress]:
    """Show how a tuning goes for as long as the block lasts."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield ShownProgress(console, bar)
