"""What reconcile finds and does: production is made to agree with the policy documents, whatever was lost.

Events are at most once, processes die, aliases are changed by hand. The documents in S3 are the truth, so a look at
them tells, for each region, what should be live now and whether anything has to be started or mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from accounting.errors import RemergeError
from infra.documents import Attempt, LedgerEntry, Policy, PortfolioManifest, release_id_of
from infra.orchestrator import RECONCILE_TAG, FlowRun
from tasks.coalescing import POLICY_CHANGE, end_superseded
from tasks.live_release import read_live
from tasks.promotion import require_unchanged
from tasks.services import Services

GIVEN_UP = timedelta(
    minutes=2
)  # a run that began so long ago may be dead; another one beside it does no harm
ENDED_FOR_GOOD = ("failed_check", "infeasible")  # trying again can only end in the same way


class Action(StrEnum):
    NOTHING = "nothing"
    WAIT = "wait"  # a run is at it, or the policy is not in effect yet
    START = "start"  # the flow policy_change
    MEND = "mend"  # the pointer is right; what follows it may not be


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the documents and Prefect say of one region."""

    policy: Policy | None  # in effect now
    upcoming: Policy | None  # newer, not in effect yet
    manifest: PortfolioManifest | None  # that the policy in effect names
    live_release_id: str | None
    failed_check: LedgerEntry | None  # of the release that the policy asks for
    attempt: Attempt | None
    unended: FlowRun | None  # a run of policy_change for this policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do for one region, and why."""

    region: str
    action: Action
    reason: str
    serial: int | None = None  # of the policy in effect


def decide(region: str, found: Found) -> Decision:
    """What is to be done, from values alone."""
    policy, manifest = found.policy, found.manifest
    if policy is None or manifest is None:
        due = found.upcoming.effective_at if found.upcoming else None
        reason = f"No policy is in effect before {due:%Y-%m-%d %H:%M:%S} UTC." if due else "It has no policy."
        return Decision(region=region, action=Action.WAIT, reason=reason)
    release_id = release_id_of(policy, manifest)

    def decision(action: Action, reason: str) -> Decision:
        return Decision(region=region, action=action, reason=reason, serial=policy.serial)

    if found.live_release_id == release_id:
        return decision(Action.MEND, f"Policy {policy.serial} is served by release {release_id[:12]}.")
    if found.unended is not None:
        state = str(found.unended.get("state_name")).lower()
        return decision(Action.WAIT, f"The run {found.unended.get('name')} is {state}.")
    if found.failed_check is not None:
        return decision(
            Action.NOTHING,
            f"Policy {policy.serial} failed its check on public rows; it takes a policy with other terms.",
        )
    attempt = found.attempt
    if (
        attempt is not None
        and attempt.policy_serial == policy.serial
        and attempt.outcome in ENDED_FOR_GOOD
        and attempt.portfolio == manifest.reference
    ):
        return decision(Action.NOTHING, f"Policy {policy.serial} ended: {attempt.reason}")
    return decision(Action.START, f"Policy {policy.serial} is in effect, and its release is not live.")


def look(services: Services, region: str, now: datetime) -> Found:
    """Gather what `decide` needs.

    Raises:
        RemergeError: a document is damaged, or a service does not answer.
    """
    policy = services.policies.in_effect(region, now)
    upcoming = services.policies.next_to_come(region, now)
    if policy is None:
        return Found(
            policy=None,
            upcoming=upcoming,
            manifest=None,
            live_release_id=None,
            failed_check=None,
            attempt=None,
            unended=None,
        )
    manifest = services.manifests.resolve(policy.portfolio)
    release_id = release_id_of(policy, manifest)
    live = read_live(services.releases, region)
    if live is not None:
        require_unchanged(live[2].manifest, policy, manifest)
    return Found(
        policy=policy,
        upcoming=upcoming,
        manifest=manifest,
        live_release_id=live[0].release_id if live else None,
        failed_check=services.ledger.find(manifest.lineage, release_id, "failed_check"),
        attempt=_attempt(services, region),
        unended=unended_run(services, region, policy.serial, now),
    )


def unended_run(services: Services, region: str, serial: int, now: datetime) -> FlowRun | None:
    """The newest run of policy_change for this policy that waits for its turn or began lately; None: there is none.

    A run whose worker died with it stays "Running" in Prefect for good, and "Pending" where it died just before.
    """
    for run in services.orchestrator.unended_runs(POLICY_CHANGE):
        wanted = run.get("parameters") or {}
        if (wanted.get("region"), wanted.get("serial")) != (region, serial):
            continue
        begun = run.get("start_time")
        if begun is None and run.get("state_type") != "SCHEDULED":
            begun = (run.get("state") or {}).get("timestamp")
        if begun is None or now - datetime.fromisoformat(str(begun)).astimezone(UTC) < GIVEN_UP:
            return run
    return None


def mend(services: Services, region: str, now: datetime) -> list[str]:
    """Repair what follows the pointer: the ledger's note that the release is live, and MLflow's alias.

    Returns:
        A sentence for each thing that was mended.

    Raises:
        RemergeError: a document is damaged, or a service does not answer.
    """
    from tasks.merged_models import register_again, restore_alias
    from tasks.promotion import live_fields

    policy = services.policies.in_effect(region, now)
    live = read_live(services.releases, region)
    if policy is None or live is None:
        return []
    release = live[2].manifest
    lineage = services.manifests.resolve(release.portfolio).lineage
    done = []
    if services.ledger.find(lineage, release.release_id, "live") is None:
        services.ledger.append_once(live_fields(services.ledger, lineage, release))
        done.append(
            f"The ledger of {lineage} now says that release {release.release_id[:12]} is live in {region}."
        )
    done += register_again(services.mlflow, services.releases, release)
    done += restore_alias(services.mlflow, release)
    return done


def _attempt(services: Services, region: str) -> Attempt | None:
    """The note on the last attempt; it only saves a run, so a damaged one counts as none."""
    try:
        return services.releases.read_attempt(region)
    except RemergeError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a round did for one region."""

    region: str
    action: Action
    sentence: str
    changed: bool = False  # something was started or mended
    failed: bool = False
    flow_run_id: str | None = None  # that was started


def reconcile_all(services: Services, now: datetime) -> list[Report]:
    """One round over all regions; what is wrong with one does not keep the others from being mended.

    Args:
        now: which policies are in effect is judged at this time (UTC).

    Raises:
        RemergeError: S3 does not answer, so no region can be judged.
    """
    end_superseded(services, now)
    return [reconcile_region(services, region, now) for region in services.policies.regions()]


def reconcile_region(services: Services, region: str, now: datetime) -> Report:
    """One round for one region. Nothing is raised: what is wrong is in the report."""
    try:
        decision = decide(region, look(services, region, now))
        if decision.action is Action.START:
            run = services.orchestrator.create_flow_run(
                POLICY_CHANGE, {"region": region, "serial": decision.serial}, tags=[RECONCILE_TAG]
            )
            sentence = f"{region}: {decision.reason} Started the run {run.get('name')}."
            return Report(
                region=region,
                action=decision.action,
                sentence=sentence,
                changed=True,
                flow_run_id=str(run["id"]),
            )
        mended = mend(services, region, now) if decision.action is Action.MEND else []
    except RemergeError as error:
        return Report(
            region=region, action=Action.NOTHING, sentence=f"{region}: {error.message}", failed=True
        )
    sentence = " ".join([f"{region}: {decision.reason}", *mended])
    return Report(region=region, action=decision.action, sentence=sentence, changed=bool(mended))
