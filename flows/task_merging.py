"""Several tasks, each with private data of its own: a model of each, trained from one public start, then merged.

Trains what a group's recipe says into one portfolio version, whose manifest tells which candidate is of which task.
Merging, certifying and promoting is policy_change's, as for any portfolio: where a policy is named, this flow sets it
for the new version, and the event `policy.changed` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from accounting.errors import RemergeError
from flows.task_workshops import GroupWorkshop, prepare_group
from flows.train_portfolio import candidates_table, leave_artifact, manifest_fields, register_all
from flows.train_steps import PortfolioFailed, Trained, train_all
from flows.train_workshop import side_by_side, usable_cores
from infra.documents import Policy, PortfolioManifest
from infra.events import emit_policy_changed
from tasks.recipes import find_recipe
from tasks.services import Services, open_services
from tasks.task_groups import Group, load_group
from tasks.unfinished import OWN_DOING, close_left_over


@flow(name="task_merging", persist_result=False)
def task_merging(
    recipe: str = "infra/portfolios/tasks-digits.yaml",
    fresh: bool = False,
    policy: dict[str, Any] | None = None,
    event_id: str | None = None,
) -> State[Any]:
    """Train every task's candidates of a group and make them a portfolio version.

    Args:
        recipe: path of the group's recipe file.
        fresh: train all anew, even where an interrupted training could be gone on with.
        policy: fields of a policy to set for the new version, without its portfolio; None sets none.
        event_id: of the event that tells of that policy, for whoever waits for it.
    """
    try:
        services = open_services()
        manifest = build_group(services, load_group(find_recipe(recipe)), fresh=fresh)
    except PortfolioFailed as error:
        return Failed(message=error.message, name=OWN_DOING if error.own_doing else None)
    except RemergeError as error:
        return Failed(message=error.message)
    ready = f"Portfolio {manifest.reference} is ready with {len(manifest.candidates)} candidates of {_tasks(manifest)}."
    if policy is None:
        return Completed(message=ready)
    try:
        set_for = announce(services, manifest, policy, event_id)
    except RemergeError as error:
        return Failed(message=f"{ready} But no policy was set: {error.message}")
    return Completed(message=f"{ready} Policy {set_for.serial} of {set_for.region} was set for it.")


def build_group(services: Services, group: Group, *, fresh: bool = False) -> PortfolioManifest:
    """The whole story; the manifest is written only when every candidate of every task has ended well.

    Raises:
        RemergeError: one sentence; there is no new portfolio version.
    """
    prepared = prepare_group(services, group, fresh=fresh)
    workers, _ = side_by_side(group, usable_cores())
    finished, twins = train_all(list(prepared.workshops.values()), workers)
    tables = _tables(prepared, finished, {name: score for name, (_, score) in twins.items()})
    manifest = publish_group(services, prepared, finished, twins)
    leave_artifact(manifest, tables)
    with suppress(RemergeError):  # tidying up; the next training tries again
        close_left_over(services, group.name)
    return manifest


def publish_group(
    services: Services,
    prepared: GroupWorkshop,
    finished: Mapping[str, Trained],
    twins: Mapping[str, tuple[str, float]],
) -> PortfolioManifest:
    """Register the candidates and write the manifest: from here on the portfolio version exists."""
    records = {task: register_all(workshop, finished, twins) for task, workshop in prepared.workshops.items()}
    fields = manifest_fields(
        prepared.group,
        tuple(record for own in records.values() for record in own),
        data=prepared.data,
        network=prepared.network,
        start=prepared.start,
    )
    return services.manifests.append(
        {
            **fields,
            "tasks": {record.name: task for task, own in records.items() for record in own},
            "records": prepared.group.records,
            "task_data": {
                task: workshop.data.model_dump(mode="json") for task, workshop in prepared.workshops.items()
            },
        }
    )


def announce(
    services: Services, manifest: PortfolioManifest, fields: Mapping[str, Any], event_id: str | None = None
) -> Policy:
    """Set a policy for a portfolio version and tell Prefect, which starts policy_change.

    Args:
        fields: of the policy, without its portfolio.

    Raises:
        RemergeError: the policy is not valid or does not fit the portfolio, or could not be stored or told.
    """
    from tasks.candidates import require_relation, require_utilities
    from tasks.policy_merges import require_mergeable, with_checked_options

    whole = {**with_checked_options(fields), "portfolio": manifest.reference}
    asked = Policy.from_fields({"serial": 1, "effective_at": "2000-01-01T00:00:00Z", **whole}, "policy")
    require_utilities(manifest, asked.selection)
    require_relation(manifest, asked.neighboring_relation)
    require_mergeable(asked, manifest)
    policy = services.policies.append(whole)
    emit_policy_changed(services.orchestrator, policy, event_id)
    return policy


def _tables(prepared: GroupWorkshop, finished: Mapping[str, Trained], scores: dict[str, float]) -> list[str]:
    lines = []
    for task, workshop in prepared.workshops.items():
        trained = [
            one for candidate in workshop.recipe.candidates for _, one in finished[candidate.name].candidates
        ]
        lines += [f"## Task {task}", "", *candidates_table(workshop.recipe, trained, scores), ""]
    return lines


def _tasks(manifest: PortfolioManifest) -> str:
    tasks = manifest.tasks or {}
    names = list(dict.fromkeys(tasks[one.name] for one in manifest.candidates))
    return f"the tasks {', '.join(names[:-1])} and {names[-1]}"
