"""The order of a promotion: [draw]; ledger entry; check; upload and read back; pointer; alias.

Where weights depend on scores of private models and something is drawn, a ledger entry of kind `consulted` comes
even before the draw, which is stored with those weights.

A crash anywhere leaves the old model live, or the new one fully. The worst that it may leave behind is a
ledger entry for a model that never went live: over-counting is safe, under-counting is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from accounting.errors import InvalidInput
from accounting.plan import Mechanism, Plan
from accounting.trajectory import Candidate, segment_to_dict, union_of_segments
from infra.documents import Draw, LedgerEntry, Pointer, Policy, PortfolioManifest, ReleaseManifest
from infra.ledger_store import LedgerStore
from infra.object_store import Changed, Corrupted
from infra.releases import DRAW, ReleaseStore
from tasks import drawing
from tasks.candidates import LoadedCandidate
from tasks.past import tasks_of
from tasks.release_merging import Material, merged

POINTER_TRIES = 20


class Superseded(Exception):
    """A newer policy of the region has already been promoted; this release must not replace it."""


def draw_if_need_be(releases: ReleaseStore, release_id: str, plan: Plan) -> Draw | None:
    """The one draw of a random selection or a mixture: stored before it is used; every retry reads it back.

    Returns:
        None where nothing is random: a linear combination, or a draw of a single outcome.
    """
    if len(plan.outcomes) < 2:
        return None
    stored = releases.create_draw(drawing.draw(release_id, plan.outcomes))
    drawing.check_draw(stored, release_id, plan.outcomes)
    return stored


def merge(
    plan: Plan,
    draw: Draw | None,
    loaded: Mapping[str, LoadedCandidate],
    material: Material = Material(),  # noqa: B008
) -> bytes:
    """The parameters to release: the drawn candidate or merge, or what the plan's operator makes of the candidates.

    Args:
        material: what the operator needs beside the candidates' models.

    Raises:
        InvalidInput: the plan asks for fresh noise, which a retry would draw anew: two noisy releases of one
            merge cost more privacy than the certificate states.
    """
    if plan.fresh_noise > 0 or any(component.fresh_noise > 0 for component in plan.components):
        raise InvalidInput("Policies cannot release merges with fresh noise; solve without it.")
    (outcome,) = [draw.drawn] if draw is not None else plan.outcomes
    weights = plan.merged_weights(outcome)
    return merged(plan, weights, {name: loaded[name].model for name in weights}, material)


def ledger_fields(
    *,
    kind: str,
    release_id: str,
    policy: Policy,
    manifest: PortfolioManifest,
    plan: Plan,
    candidates: Sequence[Candidate],
    draw: Draw | None,
    certificate_sha256: str | None,
    counted: int,
    consulted: Collection[str] = (),
) -> dict[str, Any]:
    """A ledger entry without its serial and chain: the executed steps that the release stands for.

    A linear combination stands for the union of its support's steps; so does what another operator makes, of which
    everything about its candidates counts as known; a random selection or a mixture for one union for each
    candidate or component, with its probability, and the name drawn. Every outcome stands for the
    consulted candidates' steps too: whoever sees the weights sees something of every model that was looked at,
    whether or not the certificate covers that.

    Args:
        consulted: names of all candidates whose scores were looked at, from `tasks.solving.consulted_scores`.
        certificate_sha256: None for the kinds `consulted` and `reserved`, written before there is a certificate.
        counted: how many entries of the ledger the release's cumulative figures count.
    """
    trajectories = {candidate.name: candidate.trajectory for candidate in candidates}
    looked_at = [*consulted, *(name for name in plan.consulted if name not in consulted)]

    def outcome(name: str, weight: float) -> dict[str, Any]:
        weights = plan.merged_weights(name)
        names = list(dict.fromkeys([*weights, *looked_at]))
        tasks = tasks_of(plan, names)
        data = {candidate: trajectories[candidate].data_digest for candidate in names}
        segments = union_of_segments(tuple(trajectories[candidate] for candidate in names))
        return {
            "name": name,
            "weight": weight,
            "candidates": names,
            "segments": [segment_to_dict(segment) for segment in segments],
            "paths": {
                candidate: [[segment.id, segment.steps] for segment in trajectories[candidate].segments]
                for candidate in names
            },
            "coefficients": None if looked_at or plan.mechanism is Mechanism.OPERATOR else weights,
            **({} if tasks is None else {"tasks": tasks, "data_digests": data}),
        }

    return {
        "lineage": manifest.lineage,
        "release_id": release_id,
        "region": policy.region,
        "kind": kind,
        "written_at": datetime.now(UTC).isoformat(),
        "neighboring_relation": manifest.neighboring_relation,
        "unit": manifest.unit,
        "outcomes": [outcome(name, weight) for name, weight in plan.outcomes.items()],
        "drawn": draw.drawn if draw else None,
        "selection": policy.selection,
        "certificate_digest": certificate_sha256,
        "counted": counted,
    }


def failed_before(ledger: LedgerStore, manifest: PortfolioManifest, release_id: str) -> LedgerEntry | None:
    """The entry of an earlier failed check of this very release, which ended the attempt for good."""
    return ledger.find(manifest.lineage, release_id, "failed_check")


def sealed_before(
    releases: ReleaseStore, ledger: LedgerStore, manifest: PortfolioManifest, release_id: str
) -> ReleaseManifest | None:
    """A release that an earlier attempt sealed, after its check, with every file as its manifest says; or None.

    Raises:
        Corrupted, Missing: the store has lost or changed one of its files.
        InvalidInput: the ledger does not know it, which no promotion leaves behind.
    """
    sealed = releases.find_manifest(release_id)
    if sealed is None:
        return None
    for name, sha256 in sealed.files.items():
        releases.read_file(release_id, name, sha256)
    live_fields(ledger, manifest.lineage, sealed)
    return sealed


def require_unchanged(live: ReleaseManifest, policy: Policy, manifest: PortfolioManifest) -> None:
    """The policy and the portfolio version that a live release was made from must be what they were then.

    Raises:
        Corrupted: naming the document; nothing may be released under what it says now.
    """
    if live.policy_serial == policy.serial and live.policy_digest != policy.sha256():
        key = f"policies/{policy.region}/{policy.serial:08d}.json"
    elif live.portfolio == manifest.reference and live.manifest_digest != manifest.sha256():
        key = f"portfolios/{manifest.name}/{manifest.serial:08d}.json"
    else:
        return
    raise Corrupted(
        f"{key} was changed after the live release of {live.region} was made from it: restore it from a backup. A "
        "change is a new document, never an edit."
    )


def live_fields(ledger: LedgerStore, lineage: str, release: ReleaseManifest) -> dict[str, Any]:
    """The ledger's note that a release went live: the intended entry again, under the kind `live`.

    Raises:
        InvalidInput: the ledger holds no intended entry, which no promotion leaves behind.
    """
    intended = ledger.find(lineage, release.release_id, "intended")
    if intended is None:
        raise InvalidInput(
            f"Release {release.release_id[:12]} is live, but the ledger of {lineage} does not know it: restore the "
            "ledger from a backup before anything else is released."
        )
    fields = intended.model_dump(
        mode="json", exclude={"serial", "previous_digest", "written_at", "kind", "schema_"}
    )
    return {**fields, "kind": "live"}


def upload(releases: ReleaseStore, manifest: ReleaseManifest, files: Mapping[str, bytes]) -> ReleaseManifest:
    """Put a release's files, read each back by digest, and write its manifest last.

    Returns:
        The manifest that the release has now: the first one written, where an earlier attempt got this far.
    """
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != manifest.files[name]:
            raise AssertionError(f"the manifest names another digest for {name}")
        if name != DRAW:  # stored already, before it was used
            releases.write_file(manifest.release_id, name, content)
        releases.read_file(manifest.release_id, name, manifest.files[name])
    return releases.create_manifest(manifest)


def switch_pointer(releases: ReleaseStore, manifest: ReleaseManifest) -> Pointer:
    """Let the region's pointer name this release, by a conditional write on the pointer that was read.

    Raises:
        Superseded: the pointer already names a release of a newer policy.
    """
    for _ in range(POINTER_TRIES):
        found = releases.read_pointer(manifest.region)
        live, etag = found if found else (None, None)
        if live is not None and live.release_id == manifest.release_id:
            return live
        if live is not None and live.policy_serial > manifest.policy_serial:
            raise Superseded
        pointer = Pointer(
            region=manifest.region,
            release_id=manifest.release_id,
            release_manifest_digest=manifest.sha256(),
            policy_serial=manifest.policy_serial,
            previous_release_id=live.release_id if live else None,
            switched_at=datetime.now(UTC),
        )
        try:
            releases.switch(pointer, etag)
        except Changed:
            continue
        return pointer
    raise Changed(
        f"The pointer of region {manifest.region} kept changing under {POINTER_TRIES} tries; run the policy again."
    )
