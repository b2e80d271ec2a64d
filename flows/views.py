"""What the commands print: tables and sentences that a privacy officer could read."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accounting.errors import RemergeError
from accounting.selection_rules import UNACCOUNTED
from accounting.words import rounded_up
from flows.tables import plain_table
from infra.documents import Policy, Provenance
from infra.orchestrator import FlowRun, message_of
from infra.settings import Settings, connections
from tasks.compliance import LiveRelease, State
from tasks.live_release import current_policy, region_compliance
from tasks.report import provenance_in_words, release_in_words
from tasks.scope import SCOPE_WORDS
from tasks.services import Services, open_services

COLOURS = {State.COMPLIANT: "green", State.NON_COMPLIANT: "bold red", State.NO_RELEASE: "yellow"}


def print_addresses(console: Console, settings: Settings | None = None) -> None:
    """Where people look."""
    found = connections(settings)
    console.print(f"MLflow pages:   {found.mlflow_url}", highlight=False)
    console.print(f"Prefect pages:  {found.prefect_ui_url}", highlight=False)
    console.print(
        f"S3 endpoint:    {found.s3_endpoint} (keys in REMERGE_HOME's credentials.json)", highlight=False
    )


def print_status(console: Console, settings: Settings) -> tuple[bool, bool]:
    """Print services, portfolios and regions.

    Returns:
        Whether every service works, and whether every region complies with its policy.
    """
    services = open_services(settings)
    print_addresses(console, settings)
    healthy = _print_health(console, settings, services)
    _print_portfolios(console, services)
    regions = services.policies.regions()
    if not regions:
        console.print(
            "No region has a policy yet: `remerge policy set --region eu --epsilon 2 --delta 1e-5`."
        )
        return healthy, True
    table = plain_table("Regions", "region", ">policy", "budget", "release", ">epsilon", ">accuracy", "state")
    sentences = []
    compliant = True
    for region in regions:
        try:
            policy, live, verdict = region_compliance(services, region)
        except RemergeError as error:
            table.add_row(region, "", "", "", "", "", "[bold red]damaged[/]")
            sentences.append(f"[bold red]{region}[/]: {escape(error.message)}")
            compliant = False
            continue
        compliant = compliant and verdict.state is State.COMPLIANT
        colour = COLOURS[verdict.state]
        table.add_row(
            region,
            str(policy.serial),
            f"({policy.epsilon:g}, {policy.delta:g}){_scope(policy)}{_merge(policy)}",
            live.manifest.release_id[:12] if live else "none",
            epsilon_in_words(live) if live else "",
            f"{live.manifest.accuracy:.3f}" if live else "",
            f"[{colour}]{verdict.state.value}[/]",
        )
        sentences += _region_sentences(services, policy, verdict.state, verdict.reason, colour)
    console.print(table)
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)
    return healthy, compliant


def print_policy(console: Console, settings: Settings, region: str) -> None:
    """Print a region's current policy, field by field."""
    policy = current_policy(open_services(settings), region)
    table = Table(title=f"Policy {policy.serial} of {region}", show_header=False, title_justify="left")
    for name, value in policy.model_dump(mode="json").items():
        if name == "mechanisms" and policy.merge != "linear":
            value = f"not asked: {policy.merge} merges several candidates"
        if isinstance(value, dict):
            value = ", ".join(f"{option}={setting}" for option, setting in sorted(value.items()))
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    console.print(table)


def print_outcome(console: Console, settings: Settings, policy: Policy, run: FlowRun) -> None:
    """Print how a policy_change run ended."""
    console.print(escape(message_of(run)), highlight=False, soft_wrap=True)
    services = open_services(settings)
    _, live, _ = region_compliance(services, policy.region)
    if live is not None:
        weights = release_in_words(live.certificate)
        how = "" if live.certificate.mechanism == "operator" else f"{live.certificate.mechanism} of "
        console.print(
            f"Live in {policy.region}: {how}{weights}; started by "
            f"{started_by(live.manifest.provenance)}. Fetch it with `remerge pull {policy.region} --to DIR`.",
            highlight=False,
            soft_wrap=True,
        )


def epsilon_in_words(live: LiveRelease) -> str:
    covered = live.certificate.selection != UNACCOUNTED
    return f"{rounded_up(live.certificate.epsilon)}{'' if covered else ' (NOT COVERED)'}"


def _scope(policy: Policy) -> str:
    return "" if policy.scope == "release" else f", {SCOPE_WORDS[policy.scope]}"


def _merge(policy: Policy) -> str:
    return "" if policy.merge == "linear" else f", merged by {policy.merge}"


def started_by(provenance: Provenance) -> str:
    return provenance_in_words(provenance)


def _print_health(console: Console, settings: Settings, services: Services) -> bool:
    """Which services work, asked now, and whether all do; of the embedded ones also whether their processes live."""
    from infra import stack
    from infra.stack_services import WORK_POOL
    from tasks.mlflow_server import healthy

    if settings.own_services():
        workers = services.orchestrator.online_workers(WORK_POOL)
        faults = [] if workers else [f"Prefect has no online worker in its work pool {WORK_POOL}"]
        if not healthy(services.connections.mlflow_url):
            faults.append(f"MLflow does not answer at {services.connections.mlflow_url}")
    else:
        faults = [
            f"{service.title} {'does not answer' if service.running else 'has ended'}: run `remerge up` "
            f"(its log is {service.log})"
            for service in stack.status(settings).services
            if not service.answering
        ]
    for fault in faults:
        console.print(f"[bold red]{escape(fault)}[/]", highlight=False, soft_wrap=True)
    if not faults:
        console.print("Services:       all up, Prefect's worker online", highlight=False)
    return not faults


def _print_portfolios(console: Console, services: Services) -> None:
    names = services.manifests.names()
    if not names:
        console.print("No portfolio has been trained yet: `remerge train`.")
    for name in names:
        try:
            manifest = services.manifests.newest(name)
        except RemergeError as error:
            console.print(f"[bold red]Portfolio {name}[/]: {escape(error.message)}", soft_wrap=True)
            continue
        if manifest is not None:
            candidates = ", ".join(candidate.name for candidate in manifest.candidates)
            console.print(f"Portfolio {manifest.reference}: {candidates}", highlight=False, soft_wrap=True)


def _region_sentences(
    services: Services, policy: Policy, state: State, reason: str, colour: str
) -> list[str]:
    """Why a region is not compliant, and how the last attempt at its policy ended if that was not well."""
    sentences = []
    if state is not State.COMPLIANT or policy.selection == UNACCOUNTED:
        sentences.append(f"[{colour}]{policy.region}[/]: {escape(reason)}")
    try:
        attempt = services.releases.read_attempt(policy.region)
    except RemergeError as error:
        return [*sentences, f"{policy.region}, last attempt: {escape(error.message)}"]
    if attempt is not None and attempt.policy_serial == policy.serial and attempt.outcome != "promoted":
        sentences.append(f"{policy.region}, last attempt ({attempt.outcome}): {escape(attempt.reason)}")
    return sentences
