"""The steps of policy_change: thin shells round plain functions, which Prefect shows and retries one by one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from accounting.certificate import Certificate
from accounting.errors import RemergeError
from accounting.plan import Plan
from accounting.trajectory import Candidate
from infra.documents import (
    Attempt,
    Draw,
    LedgerEntry,
    Pointer,
    Policy,
    PortfolioManifest,
    Provenance,
    ReleaseManifest,
)
from infra.object_store import Changed
from tasks.candidates import LoadedCandidate
from tasks.past import Past
from tasks.services import Services
from tasks.validation import Verdict

if TYPE_CHECKING:
    from tasks.diagnostics import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended, when nothing went wrong with the machinery."""

    kind: str  # as in infra.documents.Attempt.outcome
    sentence: str
    release_id: str | None = None
    portfolio: str | None = None  # name@serial that was tried


def is_transient(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Retry only what may succeed without anybody changing anything."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, RemergeError) and error.retryable


step = task(
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=is_transient,
)


@step
def read_policy(services: Services, region: str, serial: int) -> Policy:
    """The policy named by the event, from the append-only store."""
    return services.policies.read(region, serial)


@step
def read_portfolio(services: Services, policy: Policy) -> PortfolioManifest:
    """The portfolio version that the policy names."""
    return services.manifests.resolve(policy.portfolio)


@step
def import_libraries() -> None:
    """MLflow and torch take seconds to import: here, so that the times of the other steps are their own."""
    import mlflow  # noqa: F401
    import torch  # noqa: F401


@step
def load_candidates(services: Services, manifest: PortfolioManifest) -> dict[str, LoadedCandidate]:
    """Pull every candidate from MLflow and check its digests."""
    from tasks.registry import load_all

    return load_all(services.mlflow, manifest)


@step
def load_public_start(
    services: Services, policy: Policy, manifest: PortfolioManifest, loaded: dict[str, LoadedCandidate]
) -> bytes | None:
    """The public initial parameters, where the policy's merge operator works on what training added to them."""
    from tasks.policy_merges import require_mergeable
    from tasks.release_merging import public_start

    del loaded  # what is wrong with a candidate is told first
    require_mergeable(policy, manifest)
    return public_start(services.mlflow, manifest, policy.merge)


@step
def consult_scores(
    policy: Policy,
    manifest: PortfolioManifest,
    candidates: tuple[Candidate, ...],
    loaded: dict[str, LoadedCandidate],
) -> dict[str, float] | None:
    """Accuracies of private candidates on public rows, where the policy's selection rule looks at them."""
    from tasks.solving import consulted_scores

    return consulted_scores(policy, manifest, candidates, loaded)


@step
def read_past(
    services: Services, policy: Policy, manifest: PortfolioManifest, release_id: str
) -> tuple[Past, Draw | None]:
    """What the lineage's ledger says of all other releases, and this one's draw where it was made before."""
    from tasks.past import past_of

    past = past_of(services.ledger.entries(manifest.lineage), release_id, policy)
    return past, None if past.held is None else services.releases.read_draw(release_id)


@step
def solve_weights(
    policy: Policy,
    candidates: tuple[Candidate, ...],
    scores: dict[str, float] | None,
    past: Past,
    draw: Draw | None,
    manifest: PortfolioManifest,
) -> Plan:
    """The best weights under the policy's budget, from trajectories and what its selection rule looks at."""
    from tasks.scope import solve_in_scope

    return solve_in_scope(policy, candidates, scores, past, draw, manifest)


@step
def reserve(services: Services, fields: dict[str, Any], past: Past) -> Past | None:
    """Take a share of a cumulative budget by an entry in the ledger; None where the ledger has grown meanwhile."""
    try:
        return past.up_to(services.ledger.append_once(fields, after=past.entries, again=past.grown))
    except Changed:
        return None


@step
def make_draw(services: Services, release_id: str, plan: Plan) -> Draw | None:
    """The one draw of a random selection, stored before it is used."""
    from tasks.promotion import draw_if_need_be

    return draw_if_need_be(services.releases, release_id, plan)


@step
def merge_models(
    manifest: PortfolioManifest,
    plan: Plan,
    draw: Draw | None,
    loaded: dict[str, LoadedCandidate],
    start: bytes | None,
) -> bytes:
    """The parameters to release, and before that the statistics on public rows that some operators need."""
    from tasks.promotion import merge
    from tasks.release_merging import Material, public_statistics

    models = {name: candidate.model for name, candidate in loaded.items()}
    statistics = public_statistics(manifest, plan, models)
    return merge(plan, draw, loaded, Material(start=start, statistics=statistics))


@step
def write_ledger(services: Services, fields: dict[str, Any], past: Past | None = None) -> LedgerEntry:
    """Append to the lineage's ledger; the same entry of the same attempt is written once.

    The entry that names a release's certificate, and what comes before it, is written only while the ledger is as
    `past` found it: so that of two releases one counts the other, and a superseded policy is noticed.
    """
    after = past.entries if past is not None and past.is_new else None
    return services.ledger.append_once(fields, after=after)


@step
def check_on_public_rows(
    services: Services, policy: Policy, manifest: PortfolioManifest, model: bytes
) -> tuple[Verdict, int]:
    """The gate: accuracy on the public-gate rows, against the policy's minimum and a compliant live release."""
    from tasks.compliance import fault_of
    from tasks.data import load_public_gate
    from tasks.live_release import read_live
    from tasks.scope import scope_fault
    from tasks.validation import accuracy, gate, task_accuracies

    rows = load_public_gate(manifest)
    live = read_live(services.releases, policy.region)
    entries = services.ledger.entries(manifest.lineage)
    comparable = (
        live is not None
        and fault_of(live[2], policy) is None
        and scope_fault(policy, entries, live[0].release_id) is None
    )
    by_task = task_accuracies(manifest.network, model, rows)
    verdict = gate(
        accuracy=min(by_task.values()) if by_task else accuracy(manifest.network, model, rows),
        min_accuracy=policy.min_accuracy,
        live_accuracy=live[2].manifest.accuracy if live is not None and comparable else None,
        by_task=by_task,
    )
    return verdict, len(rows)


@step
def diagnose_tasks(
    manifest: PortfolioManifest,
    plan: Plan,
    loaded: dict[str, LoadedCandidate],
    model: bytes,
    start: bytes | None,
) -> Diagnosis | None:
    """How the merge of several tasks went, for people; None for a portfolio of one task."""
    if manifest.tasks is None or start is None:
        return None
    from tasks.merge_diagnosis import diagnose_merge

    return diagnose_merge(manifest, {name: loaded[name].model for name in plan.weights}, model, start)


@step
def register(
    services: Services,
    policy: Policy,
    manifest: PortfolioManifest,
    certificate: Certificate,
    verdict: Verdict,
    files: dict[str, bytes],
    sentence: str,
    diagnosis: Diagnosis | None,
) -> int:
    """Make the merged model a version of `<portfolio>-<region>` in MLflow."""
    from tasks.diagnostics import pages
    from tasks.merged_models import register_merge
    from tasks.policy_merges import merge_in_words

    return register_merge(
        services.mlflow,
        portfolio=manifest.name,
        region=policy.region,
        release_id=certificate.release_id,
        files=files if diagnosis is None else {**files, **pages(diagnosis)},
        parameters={
            "policy": f"{policy.region}/{policy.serial}",
            "portfolio": manifest.reference,
            "mechanism": certificate.mechanism,
            **(
                {"merge": merge_in_words(certificate.merge, certificate.merge_options)}
                if certificate.mechanism == "operator"
                else {}
            ),
            "bound": certificate.bound,
            "selection": certificate.selection,
            "budget_epsilon": policy.epsilon,
            "budget_delta": policy.delta,
            **{f"weight_{name}": weight for name, weight in certificate.weights.items()},
        },
        metrics={
            "epsilon": certificate.epsilon,
            "gate_accuracy": verdict.accuracy,
            **{f"gate_accuracy_{task}": share for task, share in verdict.by_task.items()},
            **({} if diagnosis is None else diagnosis.metrics()),
        },
        tags={"remerge.policy_serial": str(policy.serial)},
        description=sentence,
    )


@step
def upload_release(services: Services, release: ReleaseManifest, files: dict[str, bytes]) -> ReleaseManifest:
    """Put the release into the production stage and read it back by digest."""
    from tasks.promotion import upload

    return upload(services.releases, release, files)


@step
def switch_pointer(services: Services, release: ReleaseManifest) -> Pointer:
    """Let production serve this release."""
    from tasks import promotion

    return promotion.switch_pointer(services.releases, release)


@step
def set_alias(services: Services, release: ReleaseManifest) -> None:
    """Let MLflow's alias `production` name the promoted version."""
    from tasks.merged_models import point_alias

    point_alias(services.mlflow, release.registered_model, release.registered_version)


def leave_artifact(region: str, page: str) -> None:
    """Show people in Prefect what was decided and why."""
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact(
        page, key=f"policy-{region}", description=f"What was decided for {region}, and why"
    )


def note_attempt(
    services: Services, region: str, serial: int, outcome: Outcome, provenance: Provenance
) -> None:
    """Leave word of how the attempt ended, for `remerge status`; a store that is down must not hide the cause."""
    attempt = Attempt(
        region=region,
        policy_serial=serial,
        outcome=outcome.kind,
        release_id=outcome.release_id,
        portfolio=outcome.portfolio,
        reason=outcome.sentence,
        at=datetime.now(UTC),
        provenance=provenance,
    )
    try:
        services.releases.write_attempt(attempt)
    except RemergeError as error:
        print(f"The attempt could not be noted: {error.message}")
