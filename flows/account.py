"""`remerge account`: a calculator for people without a portfolio or a stack. It starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

account_app = typer.Typer(
    help="A privacy calculator for runs in a YAML or JSON file. Starts no service.",
    no_args_is_help=True,
)

File = Annotated[Path, typer.Argument(help="YAML or JSON; see docs/accounting-calculator.md")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead of tables")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="OUT.png", help="draw the privacy profile, and epsilon over the weights"),
]

Frontier = Annotated[
    bool, typer.Option("--frontier", help="also what a quarter to four times the budget would give; slower")
]

out = Console()
err = Console(stderr=True)


@account_app.command()
def bounds(file: File, as_json: Json = False, plot: Plot = None) -> None:
    """Show every bound that applies to the file's release. Side by side, with the one that can be certified."""
    with _progress("Accounting ..."):
        from tasks.account_bounds import account_of
        from tasks.account_documents import bounds_document
        from tasks.account_file import load_account_file
        from tasks.account_plot import draw_account, require_plot_path
        from tasks.account_report import bounds_sentences, bounds_table
        from tasks.account_runs import release_of, runs_of

        if plot is not None:
            require_plot_path(plot)
        content = load_account_file(file)
        release = release_of(content, runs_of(content, str(file)), str(file))
        account = account_of(release, content.delta)
        best = account.certified
    if plot is not None:
        with _progress("Drawing ..."):
            draw_account(account, plot, certified=None if best is None else best.name)
    if as_json:
        _print_json(bounds_document(account))
        return
    out.print(bounds_table(account, None if best is None else best.name))
    _print_sentences(bounds_sentences(account), plot)


@account_app.command()
def solve(file: File, as_json: Json = False, plot: Plot = None, frontier: Frontier = False) -> None:
    """Find the plan for the file's budget. Which runs, with which weights, and the bound that certifies it."""
    with _progress("Solving ..."):
        from tasks.account_documents import answer_document
        from tasks.account_file import load_account_file
        from tasks.account_plot import draw_account, require_plot_path
        from tasks.account_report import (
            answer_sentences,
            bounds_table,
            frontier_table,
            options_table,
        )
        from tasks.account_runs import runs_of
        from tasks.account_solve import answer_of

        if plot is not None:
            require_plot_path(plot)
        content = load_account_file(file)
        answer = answer_of(content, runs_of(content, str(file)), str(file), with_frontier=frontier)
    if plot is not None:
        with _progress("Drawing ..."):
            draw_account(
                answer.account,
                plot,
                certified=answer.best.bound,
                budget=answer.budget,
                frontier=answer.frontier,
            )
    if as_json:
        _print_json(answer_document(answer))
        return
    out.print(options_table(answer))
    out.print(bounds_table(answer.account, answer.best.bound))
    if answer.frontier:
        out.print(frontier_table(answer))
    _print_sentences(answer_sentences(answer), plot)


@account_app.command()
def ledger(file: File, as_json: Json = False) -> None:
    """Account many releases from the same records together. By region, over all regions, and each alone."""
    with _progress("Accounting ..."):
        from tasks.account_file import load_account_file
        from tasks.account_ledger import ledger_of
        from tasks.account_ledger_report import (
            ledger_document,
            ledger_sentences,
            regions_table,
            releases_table,
        )
        from tasks.account_runs import runs_of

        content = load_account_file(file)
        account = ledger_of(content, runs_of(content, str(file)), str(file))
    if as_json:
        _print_json(ledger_document(account))
        return
    out.print(releases_table(account))
    out.print(regions_table(account))
    _print_sentences(ledger_sentences(account), None)


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """On stderr, so that stdout stays a document; nothing where nobody watches."""
    with err.status(text):
        yield


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def _print_sentences(sentences: list[str], plot: Path | None) -> None:
    for sentence in sentences:
        out.print(sentence, highlight=False, soft_wrap=True)
    if plot is not None:
        out.print(f"wrote {plot}", highlight=False, soft_wrap=True, markup=False)
