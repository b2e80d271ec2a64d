"""`remerge merge-tasks`: train a group of tasks, and merge and promote them where a region is named."""

from __future__ import annotations

import getpass
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from accounting.errors import InvalidInput
from flows.options import OPERATORS, MergeOptions
from infra.settings import Settings

COMMAND = "remerge merge-tasks"
DEPLOYMENT = "task-merging"
# Without any option of a policy: epsilon, delta, merge and its options, selection, scope and min_accuracy.
UNASKED = (None, None, "linear", None, "noise", "release", 0.0)

out = Console()


def merge_tasks(
    recipe: Annotated[Path, typer.Argument(help="the group's recipe file")] = Path(
        "infra/portfolios/tasks-digits.yaml"
    ),
    region: Annotated[
        str | None, typer.Option(help="whose policy to set for what is trained; default: none is set")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="allowed epsilon, nats; with --region")] = None,
    delta: Annotated[float | None, typer.Option(help="allowed delta, below 1 / n_max; with --region")] = None,
    merge: Annotated[str, typer.Option(help=f"how the shared trunk is merged: {OPERATORS}")] = "linear",
    merge_option: MergeOptions = None,
    selection: Annotated[
        str, typer.Option(help="what the choice of each task's candidate goes by, as for `policy set`")
    ] = "noise",
    scope: Annotated[str, typer.Option(help="what the budget covers, as for `policy set`")] = "release",
    min_accuracy: Annotated[
        float, typer.Option(help="needed on every task's public-gate rows, 0 to 1")
    ] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", help="create a new region without asking")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="train all anew, even where an interrupted training could go on")
    ] = False,
) -> None:
    """Train a group of tasks and merge them for a region. What was interrupted is gone on with.

    Each task has private data of its own; models of all start from one public start and share a trunk. With --region,
    --epsilon and --delta a policy is set for the new portfolio version, and one candidate of each task is merged over
    the trunk, certified and promoted. See docs/task-merging.md.
    """
    from flows.commands import FlowFailed, run_training, wait_for_policy
    from flows.views import print_outcome
    from infra.orchestrator import message_of
    from tasks.recipes import find_recipe
    from tasks.services import open_services
    from tasks.task_groups import load_group

    settings = Settings()
    path = find_recipe(recipe)
    with out.status("Reading the recipe ..."):  # finding the noise for a target takes some seconds
        group = load_group(path)
    parameters: dict[str, Any] = {"recipe": str(path.absolute()), "fresh": fresh}
    event_id = str(uuid.uuid4())
    if region is not None:
        fields = {"region": region, "epsilon": epsilon, "delta": delta, "merge": merge, "scope": scope}
        fields |= {"selection": selection, "min_accuracy": min_accuracy}
        parameters |= {
            "policy": _checked_policy(settings, group, fields, merge_option, yes),
            "event_id": event_id,
        }
    elif (epsilon, delta, merge, merge_option or None, selection, scope, min_accuracy) != UNASKED:
        raise InvalidInput(
            "A budget, a merge and what else a policy says belong to a region: add `--region NAME`, or leave these "
            "options out."
        )
    manifest = run_training(
        settings, out, group, deployment=DEPLOYMENT, parameters=parameters, command=f"{COMMAND} {recipe}"
    )
    tasks = manifest.tasks or {}
    names = [f"{one.name} ({tasks[one.name]})" for one in manifest.candidates]
    out.print(
        f"Portfolio [bold]{manifest.reference}[/] is ready with {len(names)} candidates: {', '.join(names)}."
    )
    if region is None:
        return
    services = open_services(settings)
    policy = services.policies.newest(region)
    assert policy is not None  # the flow has set it
    out.print(f"Policy {policy.serial} of {policy.region} was set for it.", highlight=False)
    run = wait_for_policy(settings, services, policy, event_id, out)
    if run.get("state_type") != "COMPLETED":
        raise FlowFailed(message_of(run) or f"The flow run {run.get('name')} failed; see Prefect's pages.")
    print_outcome(out, settings, policy, run)


def _checked_policy(
    settings: Settings, group: Any, fields: dict[str, Any], merge_option: list[str] | None, yes: bool
) -> dict[str, Any]:
    """The policy's fields without its portfolio: refused now rather than after the training."""
    from flows.commands import Asked, require_region
    from infra.documents import Policy
    from tasks.merging import needs
    from tasks.policy_merges import parsed_options, with_checked_options
    from tasks.services import open_services
    from tasks.task_groups.reachable import require_reachable

    missing = [name for name in ("epsilon", "delta") if fields[name] is None]
    if missing:
        raise InvalidInput(f"A policy for a region needs a budget: give --{missing[0]}.")
    whole = with_checked_options(
        {
            **fields,
            "merge_options": parsed_options(merge_option or []),
            "neighboring_relation": group.neighboring_relation,
            "author": getpass.getuser(),
            "reason": f"set by {COMMAND}",
        }
    )
    placeholders = {"serial": 1, "effective_at": "2000-01-01T00:00:00Z", "portfolio": f"{group.name}@1"}
    policy = Policy.from_fields({**whole, **placeholders}, "policy")
    exactly = needs(policy.merge).models
    if exactly is not None and exactly != len(group.tasks):
        raise InvalidInput(
            f"{policy.merge} merges exactly {exactly} models, but {group.name} has {len(group.tasks)} tasks; choose "
            "another --merge."
        )
    stated = all(one.utility is not None and not one.keep_checkpoints for one in group.candidates)
    if {"stated": not stated, "public_twin": not group.public_twins}.get(policy.selection, False):
        remedy = {"stated": "state a `utility` for each", "public_twin": "set `public_twins: true`"}
        raise InvalidInput(
            f"Selection {policy.selection} compares candidates by utilities, which not all candidates of {group.name} "
            f"have: {remedy[policy.selection]} in its recipe, or choose `--selection noise`."
        )
    require_reachable(group, policy)
    if policy.delta >= 1 / group.n_max:
        out.print(
            f"[yellow]Warning:[/] delta {policy.delta:g} is not below 1 / n_max = {1 / group.n_max:.3g}; a mechanism "
            "that publishes one person's record outright satisfies such a policy.",
            highlight=False,
            soft_wrap=True,
        )
    require_region(
        open_services(settings), policy.region, Asked(create_region=yes, new=False, confirm=_confirm)
    )
    return whole


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidInput(f"{escape(question)} Add --yes to create it.")
    return typer.confirm(question)
