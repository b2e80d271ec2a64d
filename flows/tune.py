"""`remerge tune`: hyper-parameters for a candidate, found on public rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from infra.settings import Settings, StackDown

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.tuning.tuning import Onlooker, Prepared, Tuning

out = Console()
err = Console(stderr=True)


def tune(
    recipe: Annotated[Path, typer.Argument(help="the portfolio's recipe file")] = Path(
        "infra/portfolios/digits.yaml"
    ),
    candidate: Annotated[
        str | None, typer.Option(help="which candidate to tune; default: the recipe's first")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="target, nats, at the recipe's delta; default: the candidate's own")
    ] = None,
    seeds: Annotated[int, typer.Option(help="how often a trial is trained, each time with other noise")] = 2,
    budget_trials: Annotated[
        int | None, typer.Option(help="at most so many trials, at least 4; default: the whole search")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="log nothing in MLflow; needs no stack")] = False,
) -> None:
    """Tune a candidate on public rows. No private row is read.

    First the clipping norm, without noise; then what the noise costs; then batch size and learning rate at the
    target epsilon. Prints lines for the recipe and logs each trial in MLflow, in the experiment PORTFOLIO-tuning.
    See docs/tuning.md.
    """
    client = None if offline else _mlflow()
    with err.status("Reading the recipe and the public rows ..."):
        import torch

        from flows.tuning_views import print_tuning, tuning_text
        from tasks.recipes import find_recipe, load_recipe
        from tasks.tuning.tuning import prepare

        torch.set_num_threads(1)  # a trial is small: more threads would only wait for each other
        prepared = prepare(
            load_recipe(find_recipe(recipe)),
            candidate=candidate,
            epsilon=epsilon,
            seeds=seeds,
            budget_trials=budget_trials,
        )
    if client is None:
        tuning = _tune(prepared)
        where = "Nothing was logged in MLflow (--offline): what is printed here is kept nowhere else."
    else:
        from tasks.tuning.runs import logged

        with logged(client, prepared) as log:
            tuning = _tune(prepared, log)
            log.finish(tuning, tuning_text(tuning))
        where = f"Logged in MLflow: experiment {prepared.bench.recipe.name}-tuning, run {log.run_id}."
    print_tuning(out, tuning)
    out.print(where, highlight=False, soft_wrap=True)


def _tune(prepared: Prepared, *others: Onlooker) -> Tuning:
    from flows.tuning_views import progress
    from tasks.tuning.tuning import tune_candidate

    with progress(err) as shown:
        return tune_candidate(prepared, (shown, *others))


def _mlflow() -> MlflowClient:
    """Found before anything is trained."""
    from tasks.mlflow_server import require_up
    from tasks.services import open_services

    try:
        client = open_services(Settings()).mlflow
        require_up(client)
    except StackDown as error:
        raise StackDown(f"{error.message} With --offline, tuning needs no stack and logs nothing.") from None
    return client
