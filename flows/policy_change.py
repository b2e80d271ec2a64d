"""A region's policy changed: re-merge what exists under the new budget, and promote the result.

Started by the event `policy.changed` (prefect.yaml). The event is only a hint; the policy document in S3 is
the truth, and every step finds what an earlier attempt at the same release left behind.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from accounting.errors import BudgetInfeasible, RemergeError
from flows.policy_steps import (
    Outcome,
    check_on_public_rows,
    consult_scores,
    diagnose_tasks,
    import_libraries,
    leave_artifact,
    load_candidates,
    load_public_start,
    make_draw,
    merge_models,
    note_attempt,
    read_past,
    read_policy,
    read_portfolio,
    register,
    reserve,
    set_alias,
    solve_weights,
    switch_pointer,
    upload_release,
    write_ledger,
)
from infra.canonical import sha256_hex
from infra.documents import (
    Draw,
    Policy,
    PortfolioManifest,
    Provenance,
    ReleaseManifest,
    release_id_of,
)
from infra.object_store import Changed
from infra.releases import CERTIFICATE
from tasks.coalescing import end_superseded, superseded_sentence
from tasks.services import Services, open_services

RESERVATION_TRIES = 20


@flow(
    name="policy_change",
    flow_run_name="{region}-policy-{serial}",
    persist_result=False,
    validate_parameters=True,
)
def policy_change(region: str, serial: int, event_id: str | None = None) -> State[Any]:
    """Re-merge what exists under a region's new policy and promote the result.

    Args:
        region: whose policy changed.
        serial: of the policy document in S3.
        event_id: of the event that the automation heard, for the record.
    """
    from tasks.provenance import provenance_of

    services = open_services()
    end_superseded(services, datetime.now(UTC))
    provenance = provenance_of(services.orchestrator, flow_run.get_id(), event_id)
    try:
        outcome = promote(services, region, serial, provenance)
    except RemergeError as error:
        outcome = Outcome(kind="error", sentence=error.message)
    note_attempt(services, region, serial, outcome, provenance)
    if outcome.kind in {"promoted", "superseded", "not_in_effect"}:
        return Completed(message=outcome.sentence)
    return Failed(message=outcome.sentence)


def promote(services: Services, region: str, serial: int, provenance: Provenance) -> Outcome:
    """The whole story of one attempt, in the order that a crash anywhere can bear.

    Raises:
        RemergeError: with one sentence; production is as it was.
    """
    from tasks import decision_page, promotion, report
    from tasks.candidates import accountable
    from tasks.certifying import certify
    from tasks.cumulative import figures_after
    from tasks.diagnostics import section
    from tasks.live_release import read_live

    policy = read_policy(services, region, serial)
    current = services.policies.in_effect(region, datetime.now(UTC))
    if current is None or current.serial < serial:
        return Outcome(
            kind="not_in_effect",
            sentence=f"Policy {serial} of {region} takes effect at {policy.effective_at:%Y-%m-%d %H:%M:%S} UTC; "
            "reconcile starts it then.",
        )
    newer = superseded_by(services, policy)
    if newer is not None:
        return newer
    manifest = read_portfolio(services, policy)
    release_id = release_id_of(policy, manifest)

    live = read_live(services.releases, region)
    if live is not None:
        promotion.require_unchanged(live[2].manifest, policy, manifest)
    if live is not None and live[0].release_id == release_id:
        return finish(
            services, manifest, live[2].manifest, f"{region} already serves release {release_id[:12]}."
        )
    sealed = promotion.sealed_before(services.releases, services.ledger, manifest, release_id)
    if sealed is not None:  # an earlier attempt got this far and passed its check
        return over_budget(services, policy, manifest, release_id) or go_live(
            services, manifest, sealed, f"{region} serves release {release_id[:12]}, sealed earlier."
        )
    earlier = promotion.failed_before(services.ledger, manifest, release_id)
    if earlier is not None:
        return Outcome(
            kind="failed_check",
            release_id=release_id,
            portfolio=manifest.reference,
            sentence=f"Policy {serial} of {region} already failed its check on public rows (ledger entry "
            f"{earlier.serial} of {manifest.lineage}), and the same release is never tried again: set a policy "
            "with other terms.",
        )

    import_libraries()
    loaded = load_candidates(services, manifest)
    candidates = accountable(manifest, policy, loaded)
    start = load_public_start(services, policy, manifest, loaded)
    scores = consult_scores(policy, manifest, candidates, loaded)

    def entry(kind: str, draw: Draw | None = None, certificate: bytes | None = None) -> dict[str, Any]:
        return promotion.ledger_fields(
            kind=kind,
            release_id=release_id,
            policy=policy,
            manifest=manifest,
            plan=plan,
            candidates=candidates,
            draw=draw,
            certificate_sha256=None if certificate is None else sha256_hex(certificate),
            counted=past.entries,
            consulted=tuple(scores or ()),
        )

    for _ in range(RESERVATION_TRIES):
        past, stored = read_past(services, policy, manifest, release_id)
        newer = superseded_by(services, policy)
        if newer is not None:
            return newer
        try:
            plan = solve_weights(policy, candidates, scores, past, stored, manifest)
        except BudgetInfeasible as error:
            leave_artifact(region, decision_page.infeasible_page(policy, manifest, error.message, provenance))
            return Outcome(kind="infeasible", portfolio=manifest.reference, sentence=error.message)
        # A budget of many releases is taken before anything is drawn or shown, lest two regions take the same rest.
        if policy.scope != "release" and past.is_new and stored is None:
            reserved = reserve(services, entry("reserved"), past)
            if reserved is None:
                continue
            past = reserved
        try:
            # A stored draw shows the weights, which may depend on private scores.
            if scores and len(plan.outcomes) > 1 and past.is_new:
                past = past.up_to(write_ledger(services, entry("consulted"), past))
            draw = make_draw(services, release_id, plan)
            model = merge_models(manifest, plan, draw, loaded, start)
            after = figures_after(past, policy, plan, draw, candidates, tuple(scores or ()))
            certificate = certify(release_id, policy, manifest, plan, draw, after)
            files = report.release_files(model, certificate, draw)
            write_ledger(services, entry("intended", draw, files[CERTIFICATE]), past)
        except Changed:
            continue  # another promoter of this release was faster, after another past: theirs counts
        break
    else:
        raise Changed(f"The ledger of {manifest.lineage} kept growing; reconcile will try again.")

    verdict, gate_rows = check_on_public_rows(services, policy, manifest, model)
    page = decision_page.decision_page(policy, manifest, plan, certificate, draw, verdict, provenance)
    if not verdict.passed:
        write_ledger(services, entry("failed_check", draw, files[CERTIFICATE]))
        leave_artifact(region, page)
        return Outcome(
            kind="failed_check", release_id=release_id, portfolio=manifest.reference, sentence=verdict.reason
        )

    overtaken = superseded_by(services, policy) or over_budget(services, policy, manifest, release_id)
    if overtaken is not None:  # what has not been shown yet need not be shown any more
        return overtaken
    sentence = report.one_sentence(policy, certificate, draw, verdict)
    diagnosis = diagnose_tasks(manifest, plan, loaded, model, start)
    if diagnosis is not None:
        page += "\n" + section(diagnosis)
    shown = {**files, "report.md": page.encode()}
    version = register(services, policy, manifest, certificate, verdict, shown, sentence, diagnosis)
    release = report.release_manifest(
        policy,
        manifest,
        release_id,
        files,
        verdict,
        gate_rows=gate_rows,
        version=version,
        provenance=provenance,
    )
    release = upload_release(services, release, files)
    return go_live(services, manifest, release, sentence, page)


def superseded_by(services: Services, policy: Policy) -> Outcome | None:
    """How an attempt ends whose policy a newer one has replaced by now; None where none has."""
    current = services.policies.in_effect(policy.region, datetime.now(UTC))
    if current is None or current.serial <= policy.serial:
        return None
    sentence = superseded_sentence(policy.region, policy.serial, current.serial)
    return Outcome(kind="superseded", sentence=sentence)


def over_budget(
    services: Services, policy: Policy, manifest: PortfolioManifest, release_id: str
) -> Outcome | None:
    """How an attempt ends where what came out since it was written down has used up the budget; None: it has not."""
    from tasks.scope import scope_fault

    fault = scope_fault(policy, services.ledger.entries(manifest.lineage), release_id)
    if fault is None:
        return None
    return Outcome(
        kind="infeasible",
        release_id=release_id,
        portfolio=manifest.reference,
        sentence=f"{fault} Other releases came first, so this one does not go live: set a policy with other terms.",
    )


def go_live(
    services: Services,
    manifest: PortfolioManifest,
    release: ReleaseManifest,
    sentence: str,
    page: str | None = None,
) -> Outcome:
    """Switch the pointer to a sealed release, unless production has gone on to a newer policy."""
    from tasks import promotion

    try:
        switch_pointer(services, release)
    except promotion.Superseded:
        return Outcome(
            kind="superseded",
            release_id=release.release_id,
            portfolio=manifest.reference,
            sentence=f"{release.region} already serves a release of a newer policy; this one was not promoted.",
        )
    if page is not None:
        leave_artifact(release.region, page)
    return finish(services, manifest, release, sentence)


def finish(
    services: Services, manifest: PortfolioManifest, release: ReleaseManifest, sentence: str
) -> Outcome:
    """What follows the pointer: the alias, and the ledger's note that the release is live."""
    from tasks.promotion import live_fields

    set_alias(services, release)
    write_ledger(services, live_fields(services.ledger, manifest.lineage, release))
    return Outcome(
        kind="promoted", release_id=release.release_id, portfolio=manifest.reference, sentence=sentence
    )
