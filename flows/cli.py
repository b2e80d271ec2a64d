"""The `remerge` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from accounting.errors import InvalidInput, RemergeError
from flows.account import account_app
from flows.data import data_app
from flows.experiment import app as experiment_app
from flows.merge_tasks import merge_tasks
from flows.options import OPERATORS, MergeOptions
from flows.plan import plan
from flows.tune import tune
from infra.settings import Settings

app = typer.Typer(
    help="Re-merge privately trained models when the privacy rules change: no retraining, no private data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # rich's tables cut long option names at 80 columns
)
policy_app = typer.Typer(help="Regions' privacy policies: append-only documents.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
app.add_typer(account_app, name="account")
app.add_typer(data_app, name="data")
app.add_typer(experiment_app, name="experiment")

out = Console()
err = Console(stderr=True)


def main() -> None:
    """Run a command; an error on purpose is one sentence and exit status 1."""
    try:
        app()
    except RemergeError as error:
        err.print(f"[bold red]Error:[/] {escape(error.message)}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def up() -> None:
    """Start the embedded stack: S3, MLflow, Prefect and its worker."""
    from flows.views import print_addresses
    from infra import stack

    with out.status("Starting the stack ...") as spinner:
        stack.start(Settings(), progress=lambda text: spinner.update(escape(text)))
    print_addresses(out)


@app.command()
def down() -> None:
    """Stop the embedded stack; its data stays in REMERGE_HOME."""
    from infra import stack

    with out.status("Stopping the stack ...") as spinner:
        stopped = stack.stop(Settings(), progress=lambda text: spinner.update(escape(text)))
    out.print("The stack is down." if stopped else "The stack was not up.")


@app.command()
def status() -> None:
    """Show services, portfolios and each region's compliance.

    The exit status is 2 while a region does not comply, else 1 while a service does not work.
    """
    from flows.views import print_status

    healthy, compliant = print_status(out, Settings())
    if not (healthy and compliant):
        raise typer.Exit(1 if compliant else 2)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="the portfolio's recipe file")] = Path(
        "infra/portfolios/digits.yaml"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="train all anew, even where an interrupted training could go on")
    ] = False,
) -> None:
    """Train a portfolio from a recipe, in the train_portfolio flow. One that was interrupted is gone on with."""
    from flows.commands import train_portfolio

    manifest = train_portfolio(Settings(), recipe, out, fresh=fresh)
    names = [candidate.name for candidate in manifest.candidates]
    out.print(
        f"Portfolio [bold]{manifest.reference}[/] is ready with {len(names)} candidate{'s' if len(names) > 1 else ''}: "
        f"{', '.join(names)}."
    )


app.command("merge-tasks")(merge_tasks)
app.command()(plan)
app.command()(tune)


@policy_app.command("set")
def policy_set(
    region: Annotated[str, typer.Option(help="lower-case name of the region, for example eu")],
    epsilon: Annotated[float, typer.Option(help="allowed epsilon, nats")],
    delta: Annotated[float, typer.Option(help="allowed delta, below 1 / n_max")],
    portfolio: Annotated[
        str | None, typer.Option(help="name@serial or name@latest; default: the newest portfolio now")
    ] = None,
    selection: Annotated[
        str,
        typer.Option(
            help="what the weights may depend on: noise, stated, public_twin, validation or validation_unaccounted"
        ),
    ] = "noise",
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="linear_combination, random_selection or mixture; repeat for several; default the first two"
        ),
    ] = None,
    merge: Annotated[str, typer.Option(help=f"how the candidates become one model: {OPERATORS}")] = "linear",
    merge_option: MergeOptions = None,
    scope: Annotated[
        str,
        typer.Option(help="what the budget covers: release, region (all of its releases) or all_regions"),
    ] = "release",
    min_accuracy: Annotated[float, typer.Option(help="needed on the public-gate rows, 0 to 1")] = 0.0,
    realised_epsilon_cap: Annotated[
        float | None, typer.Option(help="largest epsilon of a drawn candidate itself; default 4 x epsilon")
    ] = None,
    neighboring_relation: Annotated[
        str, typer.Option(help="replace_one, add_or_remove_one or replace_special")
    ] = "replace_one",
    effective_at: Annotated[
        str | None,
        typer.Option(help="when it takes effect, for example 2027-01-01T00:00:00Z; default: now"),
    ] = None,
    grace_hours: Annotated[float, typer.Option(help="how long the old model may still be read")] = 0.0,
    author: Annotated[str | None, typer.Option(help="who sets it; default: your user name")] = None,
    reason: Annotated[str, typer.Option(help="why, for the record")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="create a new region without asking")] = False,
    new: Annotated[
        bool, typer.Option("--new", help="a new policy even where the terms are the same")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="wait for the policy_change run to end")
    ] = True,
) -> None:
    """Store a region's new policy and start the re-merge. The event policy.changed starts the flow policy_change."""
    from flows.commands import Asked, announce_policy, set_policy
    from flows.views import print_outcome
    from tasks.policy_merges import parsed_options

    fields: dict[str, object] = {
        "region": region,
        "epsilon": epsilon,
        "delta": delta,
        "portfolio": portfolio,
        "selection": selection,
        "merge": merge,
        "merge_options": parsed_options(merge_option or []),
        "scope": scope,
        "min_accuracy": min_accuracy,
        "realised_epsilon_cap": realised_epsilon_cap,
        "neighboring_relation": neighboring_relation,
        "grace_seconds": grace_hours * 3600,
        "author": getpass.getuser() if author is None else author,
        "reason": reason,
    }
    if effective_at is not None:
        fields["effective_at"] = effective_at
    if mechanism:
        fields["mechanisms"] = mechanism
    policy = set_policy(
        Settings(), fields, asked=Asked(create_region=yes, new=new, confirm=_confirm), console=out
    )
    run = announce_policy(Settings(), policy, wait=wait, console=out)
    if run is not None:
        print_outcome(out, Settings(), policy, run)


@app.command()
def reconcile(
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="wait for the runs that it starts to end")
    ] = True,
) -> None:
    """Make production agree with the policy documents now. Prefect does it every five minutes."""
    from flows.commands import reconcile_now

    if not reconcile_now(Settings(), wait=wait, console=out):
        raise typer.Exit(1)


@app.command()
def ledger(
    lineage: Annotated[str | None, typer.Argument(help="the data lineage; default: all of them")] = None,
    delta: Annotated[float, typer.Option(help="where the cumulative epsilon is taken")] = 1e-5,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document instead of tables")
    ] = False,
) -> None:
    """Show everything ever released from a lineage. Also what it costs together, by region and over all."""
    from flows.ledger_views import print_ledger

    print_ledger(out, Settings(), lineage, delta, as_json=as_json)


@policy_app.command("show")
def policy_show(region: str) -> None:
    """Show a region's current policy."""
    from flows.views import print_policy

    print_policy(out, Settings(), region)


@app.command()
def pull(
    region: Annotated[str, typer.Argument(help="the region whose production model to fetch")],
    to: Annotated[Path, typer.Option("--to", help="folder to write to")],
) -> None:
    """Fetch a region's production model and its certificate. Every digest is checked."""
    from flows.commands import pull_release

    for path in pull_release(Settings(), region, to, out):
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command()
def verify(
    target: Annotated[
        str, typer.Argument(metavar="CERTIFICATE|REGION", help="a certificate's file or folder, or a region")
    ],
    trajectories: Annotated[
        Path | None, typer.Option(help="folder of NAME.json by candidate; the stack is not asked then")
    ] = None,
) -> None:
    """Recompute a certificate from its runs, weights and documents. The exit status is 1 if anything differs."""
    from flows.verify import verify_and_print

    if not verify_and_print(Settings(), target, trajectories, out):
        raise typer.Exit(1)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="leave the stack up at the end")] = False,
) -> None:
    """Run the main job end to end. Train a portfolio, change two regions' policies, show what was promoted."""
    from flows.demo import run_demo

    run_demo(Settings(), out, keep=keep)


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question} Add --yes to create it.")
    return typer.confirm(question)


if __name__ == "__main__":
    main()
