"""`remerge experiment dp-merging`: DP-Merging against plain DP-SGD on real tasks, resumable, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from accounting.errors import InvalidInput

if TYPE_CHECKING:
    from tasks.dp_merging_experiment.setting import Family, Setting
    from tasks.dp_merging_experiment.store import Store

COMMAND = "remerge experiment dp-merging"
LIBRARIES = ("numpy", "opacus", "torch")


def run_experiment(
    out: Console, *, page: Path | None, is_quick: bool, seeds: int | None, only: str | None
) -> None:
    """Do what is left of the experiment, and write its page with figures beside it.

    Args:
        page: None for the usual place.
        is_quick: two seeds and two budgets.
        seeds: so many of the setting's, at least 2; None for all.
        only: the name of one family; None for all.

    Raises:
        InvalidInput: there are not so many seeds, or there is no such family.
        RemergeError: data cannot be had, or a worker process was killed: run the command again.
    """
    from tasks.dp_merging_experiment.setting import quick
    from tasks.dp_merging_experiment.store import Store

    setting = _chosen(seeds, only)
    said = COMMAND
    if is_quick:
        setting, said = quick(setting), f"{said} --quick"
    if seeds is not None:
        said += f" --seeds {seeds}"
    if only is not None:
        said += f" --only {only}"
    usual = "docs/experiments/dp-merging.md" if not is_quick else "dp-merging-quick.md"
    store = Store.in_cache()
    _prepare(setting, out)
    _do(setting, store, out)
    written = _write(setting, store, page or Path(usual), said)
    out.print(f"wrote {written}", highlight=False, soft_wrap=True)


def run_tuning(out: Console, *, only: str | None) -> None:
    """Do what is left of the trial runs that the setting's numbers were chosen by, and print them."""
    from rich.table import Table

    from tasks.dp_merging_experiment.store import Store
    from tasks.dp_merging_experiment.tuning import chosen, chosen_options, found, score, tuning

    setting = tuning(_chosen(None, only))
    store = Store.in_cache()
    _prepare(setting, out)
    _do(setting, store, out)
    rows = found(setting, store)
    for family in setting.families:
        shown = Table("method", "mean over operators", title=family.title)
        for method in sorted(family.methods, key=lambda one: -score(rows, family.name, one)):
            shown.add_row(method.name, f"{score(rows, family.name, method):.4f}")
        out.print(shown)
        for method in chosen(rows, family.name).values():
            out.print(f"{method.title}: {method.name}", highlight=False)
        for operator in chosen_options(rows, family.name).values():
            options = ", ".join(f"{name} {value:g}" for name, value in operator.options.items())
            out.print(f"{operator.name} {options}".rstrip(), highlight=False)


def _chosen(seeds: int | None, only: str | None) -> Setting:
    from dataclasses import replace

    from tasks.dp_merging_experiment.families import SETTING

    setting = SETTING
    if seeds is not None:
        if not 2 <= seeds <= len(setting.seeds):
            raise InvalidInput(
                f"The experiment has seeds for 2 to {len(setting.seeds)}, but {seeds} were asked for."
            )
        setting = replace(setting, seeds=setting.seeds[:seeds])
    if only is not None:
        names = [family.name for family in setting.families]
        if only not in names:
            raise InvalidInput(f"There are the tasks {' and '.join(names)}, but {only!r} was asked for.")
        setting = replace(setting, families=(setting.family(only),))
    return setting


def _prepare(setting: Setting, out: Console) -> None:
    """Have all rows in the cache before processes ask for them, their features computed, and see that no record is
    in two tasks or two parts: so the merge of a family is as private as its least private task."""
    from tasks.dp_merging_experiment.rows import task_rows
    from tasks.task_groups.disjointness import require_disjoint, require_public_apart

    for family in setting.families:
        splits = {
            task.name: task_rows(family, task, test_rows=setting.test_rows).splits for task in family.tasks
        }
        require_disjoint(splits, COMMAND)
        require_public_apart(splits, COMMAND)
        out.print(f"rows of {family.name} are there, and no record is in two tasks", highlight=False)


def _do(setting: Setting, store: Store, out: Console) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tasks.dp_merging_experiment.workers import do_all, left_to_do

    stages = left_to_do(setting, store)
    total = sum(len(stage) for stage in stages)
    if not total:
        return
    if not out.is_terminal:
        done = 0

        def tell(job: object) -> None:
            nonlocal done
            done += 1
            if 20 * done // total > 20 * (done - 1) // total:  # a line each twentieth, for a log
                out.print(f"{done} of {total} starts, runs and scorings", highlight=False)

        do_all(stages, store, tell)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out) as progress:
        task = progress.add_task("starts, runs and scorings", total=total)
        do_all(stages, store, lambda job: progress.update(task, advance=1))


def _write(setting: Setting, store: Store, page: Path, command: str) -> Path:
    from tasks.dp_merging_experiment.figures import draw_merges, draw_shape, png
    from tasks.dp_merging_experiment.page import experiment_page
    from tasks.dp_merging_experiment.results import gathered

    results = gathered(setting, store)
    page.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, tuple[str, str]] = {}
    for family in setting.families:
        names = tuple(f"{page.stem}-{family.name}-{what}.png" for what in ("merges", "models"))
        for name, draw in zip(names, (draw_merges, draw_shape), strict=True):
            (page.parent / name).write_bytes(png(draw(results, setting, family)))
        figures[family.name] = (names[0], names[1])
    text = experiment_page(
        setting,
        results,
        command=command,
        split_rules=_split_rules(setting.families, setting.test_rows),
        figures=figures,
        versions={name: version(name) for name in LIBRARIES},
    )
    page.write_text(text, encoding="utf-8")
    return page


def _split_rules(families: Sequence[Family], test_rows: int) -> dict[tuple[str, str], str]:
    from tasks.dp_merging_experiment.rows import task_rows

    return {
        (family.name, task.name): task_rows(family, task, test_rows=test_rows).splits.split_rule
        for family in families
        for task in family.tasks
    }
