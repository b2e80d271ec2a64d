"""`remerge experiment ...`: portfolios on published data, and the pages that they are written up in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infra.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Train on published data and write up what came out.")
out = Console()

MNIST_RECIPE = Path("infra/portfolios/mnist.yaml")
MNIST_BUDGETS = (0.045, 0.09, 0.18, 0.35, 0.7, 1.5, 3.0)


@app.command()
def mnist(
    page: Annotated[Path, typer.Option(help="the page to write")] = Path("docs/experiments/mnist.md"),
    keep: Annotated[bool, typer.Option("--keep", help="leave the stack up at the end")] = False,
) -> None:
    """Train eight candidates on MNIST and write a page of them. The data are fetched by package, once."""
    from flows.commands import train_portfolio
    from flows.with_stack import running_stack, timed
    from tasks.experiment_page import portfolio_page
    from tasks.recipes import find_recipe, load_recipe
    from tasks.registry import load_all
    from tasks.services import open_services

    settings = Settings()
    delta = load_recipe(find_recipe(MNIST_RECIPE)).delta
    with running_stack(settings, out, keep=keep, command="remerge experiment mnist"):
        with timed(out, "Training eight candidates on MNIST"):
            manifest = train_portfolio(settings, MNIST_RECIPE, out)
        with timed(out, "Scoring the candidates and what would be merged of them"):
            text = portfolio_page(
                manifest,
                load_all(open_services(settings).mlflow, manifest),
                title="A portfolio of eight MNIST models",
                command="remerge experiment mnist",
                delta=delta,
                budgets=MNIST_BUDGETS,
            )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    out.print(f"wrote {page}", highlight=False, soft_wrap=True)


@app.command("dp-merging")
def dp_merging(
    page: Annotated[Path | None, typer.Option(help="the page to write, figures beside it")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="two seeds and two budgets: a few minutes")] = False,
    seeds: Annotated[int | None, typer.Option(help="fewer seeds than five, at least two")] = None,
    only: Annotated[str | None, typer.Option(help="images or texts alone")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="show how the settings were chosen instead")] = False,
) -> None:
    """DP-Merging against plain DP-SGD, and a page of it.

    It needs no services. Killed, it goes on when it is run again: every finished run is kept in the cache folder.
    """
    from flows.experiment_dp_merging import run_experiment, run_tuning

    if tune:
        run_tuning(out, only=only)
    else:
        run_experiment(out, page=page, is_quick=quick, seeds=seeds, only=only)
