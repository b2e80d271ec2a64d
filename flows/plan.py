"""`remerge plan`: which candidates to train for the budgets that are foreseen. It starts nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.tables import plain_table

if TYPE_CHECKING:
    from accounting.portfolio_plan import PortfolioPlan, ServedBudget

SERVED_BY = {
    "single_candidate": "one candidate",
    "random_selection": "random selection",
    "linear_combination": "linear combination",
}

out = Console()
err = Console(stderr=True)


def plan(
    records: Annotated[int, typer.Option(help="how many private records take part")],
    steps: Annotated[int, typer.Option(help="steps of every candidate")],
    budgets: Annotated[
        str, typer.Option(help="foreseen epsilons of regions, separated by commas: 1,2,4", metavar="LIST")
    ],
    delta: Annotated[float, typer.Option(help="of all budgets; far below 1 / records")],
    sampling_probability: Annotated[
        float, typer.Option(help="of a record in a step, for Poisson sampling; 1 is full batch")
    ] = 1.0,
    neighboring_relation: Annotated[
        str, typer.Option(help="replace_one, add_or_remove_one or replace_special")
    ] = "replace_one",
    update_lipschitz: Annotated[
        float | None,
        typer.Option(help="proven Lipschitz constant of every update, full batch only; default: not known"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document instead of tables")
    ] = False,
) -> None:
    """Propose a portfolio for foreseen budgets, and a recipe for it. Starts no service.

    Shows what would serve the budgets between, by the product's own solver. A ladder that doubles makes random
    selection nearly invisible; linear combination gains most from close neighbours. See docs/planning.md.
    """
    with err.status("Looking for the noise, and solving ..."):
        from tasks.portfolio_planning import LESSONS, budgets_of, plan_document, portfolio_for, recipe_snippet

        proposed = portfolio_for(
            records=records,
            steps=steps,
            delta=delta,
            budgets=budgets_of(budgets),
            sampling_probability=sampling_probability,
            neighboring_relation=neighboring_relation,
            update_lipschitz=update_lipschitz,
        )
    if as_json:
        typer.echo(json.dumps(plan_document(proposed, sampling_probability), indent=2, allow_nan=False))
        return
    out.print(candidates_table(proposed))
    out.print(budgets_table(proposed))
    for sentence in (*LESSONS, f"Nothing serves a budget below {proposed.candidates[0].target_epsilon:g}."):
        out.print(sentence, highlight=False, soft_wrap=True)
    for warning in proposed.warnings:
        out.print(f"[bold red]Warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    out.print("\nFor the recipe:\n", highlight=False)
    typer.echo(recipe_snippet(proposed, sampling_probability), nl=False)


def candidates_table(proposed: PortfolioPlan) -> Table:
    """What to train."""
    from accounting.words import rounded_up

    table = plain_table(
        f"Candidates, at delta {proposed.delta:g} under {proposed.shape.relation}",
        "candidate",
        ">target epsilon",
        ">noise multiplier",
        ">noise in a step's average",
    )
    for one in proposed.candidates:
        table.add_row(
            one.name,
            f"{one.target_epsilon:g}",
            f"{one.noise_multiplier:.6g}",
            f"{rounded_up(one.average_noise, 3)} norms",
        )
    return table


def budgets_table(proposed: PortfolioPlan) -> Table:
    """What serves each budget, and the gain over the best single candidate by both mechanisms."""
    from accounting.words import rounded_up

    table = plain_table(
        "What serves each budget (* foreseen), and noise variance saved",
        ">budget",
        "served by",
        "weights",
        ">epsilon",
        ">by draw",
        ">by average",
    )
    for one in proposed.served:
        table.add_row(
            f"{'* ' if one.foreseen else ''}{one.budget_epsilon:g}",
            SERVED_BY[one.served_by],
            _weights(one),
            rounded_up(one.epsilon),
            *(_percent(one.gains.get(m)) for m in ("random_selection", "linear_combination")),
        )
    return table


def _weights(one: ServedBudget) -> str:
    if len(one.weights) == 1:
        return next(iter(one.weights))
    return " + ".join(f"{weight:.3g} {name}" for name, weight in one.weights.items())


def _percent(share: float | None) -> str:
    """Rounded down: never a gain that is not there."""
    return "" if share is None else f"{int(1000 * share) / 10:g} %"
