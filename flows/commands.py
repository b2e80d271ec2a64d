"""What the commands do, as plain functions: the command line only reads options and prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from accounting.errors import InvalidInput, RemergeError
from accounting.selection_rules import SCORES_UNACCOUNTED, UNACCOUNTED
from infra.documents import Policy, PortfolioManifest
from infra.events import emit_policy_changed
from infra.orchestrator import FlowRun, RunNotEnded, message_of, state_in_words
from infra.settings import Settings, StackDown
from infra.stack import require_worker, worker_has_ended
from tasks.candidates import require_relation, require_utilities
from tasks.policy_merges import merge_in_words, options_of, require_mergeable, with_checked_options
from tasks.release_merging import public_start
from tasks.scope import SCOPE_WORDS
from tasks.services import Services, open_services

if TYPE_CHECKING:
    from tasks.recipes import Recipe
    from tasks.task_groups import Group

TRAIN_TIMEOUT = 24 * 3600.0
POLICY_TIMEOUT = 600.0


class FlowFailed(RemergeError):
    """A flow run ended without success; its sentence is passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user allowed beforehand, and how to ask for the rest."""

    create_region: bool
    new: bool
    confirm: Callable[[str], bool]


def train_portfolio(
    settings: Settings, recipe: Path, console: Console, *, fresh: bool = False
) -> PortfolioManifest:
    """Train a portfolio in the train_portfolio flow and wait for it.

    Args:
        fresh: train all anew, even where an interrupted training could be gone on with.

    Raises:
        InvalidInput: the recipe is not valid; nothing was started.
        StackDown: Prefect's worker has ended; nothing was started.
        FlowFailed: with the flow's sentence.
    """
    from tasks.recipes import find_recipe, load_recipe

    path = find_recipe(recipe)
    with console.status("Reading the recipe ..."):  # finding the noise for a target takes some seconds
        loaded = load_recipe(path)
    parameters = {"recipe": str(path.absolute()), "fresh": fresh}
    return run_training(
        settings,
        console,
        loaded,
        deployment="train-portfolio",
        parameters=parameters,
        command="remerge train",
    )


def run_training(
    settings: Settings,
    console: Console,
    planned: Recipe | Group,
    *,
    deployment: str,
    parameters: Mapping[str, Any],
    command: str,
) -> PortfolioManifest:
    """Run a flow that trains, show how far each candidate is, and wait for the portfolio version that it makes.

    Args:
        planned: what it trains.
        deployment: of the flow.
        command: that people run to go on with what was interrupted.

    Raises:
        StackDown: Prefect's worker has ended.
        FlowFailed: with the flow's sentence.
    """
    services = open_services(settings)
    require_worker(settings)
    run = services.orchestrator.create_flow_run(deployment, parameters)
    ended = _wait_for_training(settings, services, run, console, planned, command)
    if ended.get("state_type") == "CRASHED":
        raise FlowFailed(
            f"The training's process ended before it was done (it was killed, or memory ran out): run `{command}` "
            "again, which goes on with what was not finished."
        )
    _require_success(ended)
    trained = services.manifests.of_flow_run(planned.name, str(run["id"]))
    if trained is None:
        raise FlowFailed(
            f"The run {run['name']} ended well but left no portfolio; look at it in Prefect's pages."
        )
    return trained


def _wait_for_training(
    settings: Settings,
    services: Services,
    run: FlowRun,
    console: Console,
    planned: Recipe | Group,
    command: str,
) -> FlowRun:
    from flows.train_progress import Bars, Look

    look = Look(services.connections.mlflow_url, planned.name, str(run["id"]))
    told = False

    def see() -> None:
        nonlocal told
        look.again()
        bars.show(look.candidates)
        if look.resumed and not told:
            told = True
            console.print(escape(look.resumed), highlight=False, soft_wrap=True)

    def watch(seen: FlowRun) -> None:
        then = f"run `remerge up` and `{command}` again, which goes on with what was not finished."
        _watch_worker(settings, seen, then)
        see()

    with Bars(console, planned) as bars:
        try:
            ended = services.orchestrator.wait(
                run["id"], timeout=TRAIN_TIMEOUT, progress=bars.state, watch=watch, watch_every=1.0
            )
            see()
        except KeyboardInterrupt:
            raise _no_longer_waiting(run) from None
        finally:
            look.close()
    return ended


def set_policy(settings: Settings, fields: Mapping[str, Any], *, asked: Asked, console: Console) -> Policy:
    """Validate and store a policy.

    Raises:
        InvalidInput: a field is wrong, the region is new and was not confirmed, or there is no portfolio, or none
            with the utilities that the selection rule goes by, or that the merge operator can merge.
        StackDown: Prefect's worker has ended; nothing was stored.
    """
    fields = with_checked_options(fields)
    checked = Policy.from_fields(
        {
            "serial": 1,
            "effective_at": "2000-01-01T00:00:00Z",
            **fields,
            "portfolio": fields["portfolio"] or "any@1",
        },
        "policy",
    )
    services = open_services(settings)
    require_worker(settings)
    manifest = _portfolio(services, fields["portfolio"])
    require_utilities(manifest, checked.selection)
    require_relation(manifest, checked.neighboring_relation)
    require_mergeable(checked, manifest)
    public_start(
        services.mlflow, manifest, checked.merge
    )  # lest every attempt at the policy fails for want of it
    reference = fields["portfolio"] or manifest.reference
    if manifest.n_max is not None and checked.delta >= 1 / manifest.n_max:
        console.print(
            f"[yellow]Warning:[/] delta {checked.delta:g} is not below 1 / n_max = {1 / manifest.n_max:.3g}; a "
            "mechanism that publishes one person's record outright satisfies such a policy.",
            highlight=False,
            soft_wrap=True,
        )
    if checked.selection == UNACCOUNTED:
        console.print(
            "[yellow]Warning:[/] the weights will be chosen by scores of private models, which the certificate does "
            "not cover: its epsilon will not be a guarantee. `--selection validation` covers the same look.",
            highlight=False,
            soft_wrap=True,
        )
    region = checked.region
    require_region(services, region, asked)
    policy = services.policies.append({**fields, "portfolio": reference}, new=asked.new)
    console.print(
        f"Policy {policy.serial} of {region}: epsilon {policy.epsilon:g} at delta {policy.delta:g} "
        f"({policy.neighboring_relation}) for {SCOPE_WORDS[policy.scope]}, from {policy.portfolio}"
        f"{'' if policy.selection == 'noise' else f', weights chosen by {policy.selection}'}"
        f"{'' if policy.merge == 'linear' else f', merged by {merge_in_words(policy.merge, options_of(policy))}'}.",
        highlight=False,
        soft_wrap=True,
    )
    return policy


def require_region(services: Services, region: str, asked: Asked) -> None:
    """Ask before a region gets its first policy.

    Raises:
        InvalidInput: it is new, and the answer was no.
    """
    if services.policies.newest(region) is None and not asked.create_region:
        known = ", ".join(services.policies.regions()) or "none yet"
        if not asked.confirm(f"Region {region} is new (known regions: {known}). Create it?"):
            raise InvalidInput(f"Region {region} was not created; nothing was stored.")


def announce_policy(settings: Settings, policy: Policy, *, wait: bool, console: Console) -> FlowRun | None:
    """Emit `policy.changed` and, if asked to, wait for the run that it starts.

    Raises:
        FlowFailed: with the flow's sentence.
    """
    services = open_services(settings)
    if policy.effective_at > datetime.now(UTC):
        console.print(
            f"It takes effect at {policy.effective_at:%Y-%m-%d %H:%M:%S} UTC; the flow reconcile starts it then.",
            highlight=False,
        )
        return None
    event_id = emit_policy_changed(services.orchestrator, policy)
    if not wait:
        console.print(f"Event {event_id} is on its way; see `remerge status`.", highlight=False)
        return None
    ended = wait_for_policy(settings, services, policy, event_id, console)
    _require_success(ended)
    return ended


def reconcile_now(settings: Settings, *, wait: bool, console: Console) -> bool:
    """One round of reconcile in this process; the runs that it starts are Prefect's.

    Returns:
        Whether every region could be judged, and every run that was waited for ended well.

    Raises:
        StackDown: S3 does not answer, or Prefect's worker has ended.
    """
    from tasks.reconciling import reconcile_all

    services = open_services(settings)
    require_worker(settings)
    reports = reconcile_all(services, datetime.now(UTC))
    well = True
    for report in reports:
        well = well and not report.failed
        console.print(escape(report.sentence), highlight=False, soft_wrap=True)
    if not reports:
        console.print("No region has a policy yet, so there is nothing to reconcile.")
    for report in reports if wait else []:
        if report.flow_run_id is not None:
            run = services.orchestrator.read_flow_run(report.flow_run_id)
            ended = _wait(settings, services, run, console, f"Re-merging for {report.region}", POLICY_TIMEOUT)
            console.print(escape(message_of(ended)), highlight=False, soft_wrap=True)
            well = well and ended.get("state_type") == "COMPLETED"
    return well


def wait_for_policy(
    settings: Settings, services: Services, policy: Policy, event_id: str, console: Console
) -> FlowRun:
    """Wait for the policy_change run that an event started, to its end, well or not."""
    with console.status(f"Waiting for Prefect to start policy_change for {policy.region} ..."):
        run = services.orchestrator.wait_for_event(event_id, timeout=60)
    return _wait(settings, services, run, console, f"Re-merging for {policy.region}", POLICY_TIMEOUT)


def pull_release(settings: Settings, region: str, to: Path, console: Console) -> list[Path]:
    """Fetch a region's live release into a folder, with a warning where only a grace period allows it, or where
    its certificate does not cover how its weights were chosen."""
    from tasks.compliance import State
    from tasks.live_release import pull

    compliance, paths = pull(open_services(settings), region, to)
    if compliance.state is State.NON_COMPLIANT or SCORES_UNACCOUNTED in compliance.reason:
        console.print(f"[yellow]Warning:[/] {escape(compliance.reason)}", highlight=False, soft_wrap=True)
    return paths


def _portfolio(services: Services, reference: str | None) -> PortfolioManifest:
    if reference is not None:
        return services.manifests.resolve(reference)
    names = services.manifests.names()
    if not names:
        raise InvalidInput("No portfolio has been trained yet: run `remerge train` first.")
    if len(names) > 1:
        raise InvalidInput(
            f"There are several portfolios ({', '.join(names)}); name one with `--portfolio NAME@latest`."
        )
    return services.manifests.resolve(f"{names[0]}@latest")


def _wait(
    settings: Settings, services: Services, run: FlowRun, console: Console, what: str, timeout: float
) -> FlowRun:
    then = (
        "run `remerge up`; reconcile then starts again what was not finished, and finds what had been done."
    )
    try:
        with console.status(f"{escape(what)} ...") as spinner:
            return services.orchestrator.wait(
                run["id"],
                timeout=timeout,
                progress=lambda seen: spinner.update(f"{escape(what)}: {state_in_words(seen)} ..."),
                watch=lambda seen: _watch_worker(settings, seen, then),
            )
    except KeyboardInterrupt:
        raise _no_longer_waiting(run) from None


def _watch_worker(settings: Settings, seen: FlowRun, then: str) -> None:
    if worker_has_ended(settings):
        raise StackDown(
            f"Prefect's worker has ended while the flow run {seen.get('name')} was "
            f"{state_in_words(seen)}: {then}"
        )


def _no_longer_waiting(run: FlowRun) -> RunNotEnded:
    return RunNotEnded(
        f"No longer waiting; the flow run {run.get('name')} goes on. See `remerge status` or Prefect's pages."
    )


def _require_success(run: FlowRun) -> None:
    if run.get("state_type") != "COMPLETED":
        raise FlowFailed(
            message_of(run)
            or f"The flow run {run.get('name')} ended as {run.get('state_name')}; see Prefect's pages."
        )
