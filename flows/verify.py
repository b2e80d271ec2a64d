"""`remerge verify`: gather the evidence, compare, print a table."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accounting.checks import Check
from accounting.errors import InvalidInput
from infra.settings import Settings, StackDown
from tasks.evidence import Progress, of_file, of_region
from tasks.services import Services, open_services
from tasks.verifying import Evidence, verify

RESULTS = {True: "[green]ok[/]", False: "[bold red]FAILED[/]", None: "[yellow]not compared[/]"}


def verify_and_print(settings: Settings, target: str, trajectories: Path | None, console: Console) -> bool:
    """Verify a region's live release or a certificate's file, and print every comparison.

    Args:
        target: a region's name, or a path to a certificate.
        trajectories: a folder of NAME.json; the stack is not asked then.

    Returns:
        Whether nothing failed.

    Raises:
        InvalidInput: no such file, or a folder of trajectories that is not one.
        StackDown: for a region, the stack is not up; for either, a service stopped answering.
    """
    if trajectories is not None and not trajectories.is_dir():
        raise InvalidInput(f"{trajectories} is not a folder; name the one that holds NAME.json by candidate.")
    with console.status("Reading ...") as spinner:
        evidence = _gather(settings, target, trajectories, lambda what: spinner.update(f"{escape(what)} ..."))
        spinner.update("Recomputing ...")
        checks = list(verify(evidence))
    _print(console, checks)
    return not any(check.holds is False for check in checks)


def _gather(settings: Settings, target: str, trajectories: Path | None, progress: Progress) -> Evidence:
    if not target.strip():
        raise InvalidInput("Name a region, or a certificate's file or folder.")
    path = Path(target)
    is_file = path.is_file() or path.is_dir() or path.suffix == ".json" or len(path.parts) > 1
    if not is_file:
        if trajectories is not None:
            raise InvalidInput(
                "--trajectories goes with a certificate's file; a region is verified on the stack."
            )
        return of_region(open_services(settings), target, progress)
    services: Services | None = None
    if trajectories is None:
        with suppress(StackDown):
            services = open_services(settings)
    certificate = path / "certificate.json" if path.is_dir() else path
    return of_file(certificate, services, trajectories, progress)


def _print(console: Console, checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False)
    for column, ratio in (("compared", 5), ("stated", 2), ("found", 2), ("result", None)):
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=ratio)
    table.expand = True
    for check in checks:
        table.add_row(escape(check.what), escape(check.stated), escape(check.found), RESULTS[check.holds])
    console.print(table)
    failed = [check for check in checks if check.holds is False]
    missing = [check for check in checks if check.holds is None]
    for check in missing + failed:
        word = "FAILED" if check.holds is False else "Not compared"
        colour = "bold red" if check.holds is False else "yellow"
        console.print(
            f"[{colour}]{word}:[/] {escape(check.what)}: {escape(check.note)}",
            highlight=False,
            soft_wrap=True,
        )
    held = sum(check.holds is True for check in checks)
    if failed:
        all_made = held + len(failed)
        sentence = (
            f"[bold red]{len(failed)} of {all_made} comparisons failed:[/] do not rely on this release."
        )
    else:
        sentence = (
            f"[green]All {held} comparisons that could be made hold.[/]"
            if missing
            else (f"[green]All {held} comparisons hold.[/]")
        )
        if missing:
            sentence += f" [yellow]Not compared: {escape(', '.join(check.what for check in missing))}.[/]"
    console.print(sentence, highlight=False, soft_wrap=True)
