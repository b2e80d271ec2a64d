"""What production serves in a region: read it with every digest checked, and copy it out."""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from accounting.certificate import Certificate
from accounting.errors import InvalidInput, RemergeError
from infra.canonical import strict_json
from infra.documents import Pointer, Policy
from infra.object_store import Corrupted
from infra.releases import ReleaseStore
from tasks.compliance import Compliance, LiveRelease, assess
from tasks.scope import scope_fault
from tasks.services import Services


class NotServable(RemergeError):
    """The region has no model that its current policy allows to be read."""


def read_live(releases: ReleaseStore, region: str) -> tuple[Pointer, str, LiveRelease] | None:
    """The pointer, its ETag and the release that it names; None before the first promotion.

    Raises:
        infra.object_store.Corrupted: an object does not have the digest that names it.
    """
    found = releases.read_pointer(region)
    if found is None:
        return None
    pointer, etag = found
    manifest = releases.read_manifest(pointer.release_id, sha256=pointer.release_manifest_digest)
    if (manifest.region, manifest.policy_serial) != (region, pointer.policy_serial):
        raise Corrupted(
            f"The pointer regions/{region}/current.json names policy {pointer.policy_serial}, but its release was made "
            f"for policy {manifest.policy_serial} of {manifest.region}: restore it from a backup."
        )
    content = releases.read_file(pointer.release_id, "certificate.json", manifest.files["certificate.json"])
    return (
        pointer,
        etag,
        LiveRelease(manifest=manifest, certificate=Certificate.from_dict(strict_json(content))),
    )


def current_policy(services: Services, region: str, now: datetime | None = None) -> Policy:
    """The policy in effect in a region; before its first one takes effect, that first one to come.

    Raises:
        InvalidInput: the region is unknown; the sentence names the known ones.
    """
    now = now or datetime.now(UTC)
    policy = services.policies.in_effect(region, now) or services.policies.next_to_come(region, now)
    if policy is None:
        known = ", ".join(services.policies.regions()) or "none yet"
        raise InvalidInput(
            f"Region {region!r} has no policy (known regions: {known}); set one with "
            f"`remerge policy set --region {region} --epsilon E --delta D`."
        )
    return policy


def region_compliance(services: Services, region: str) -> tuple[Policy, LiveRelease | None, Compliance]:
    """A region's current policy, its live release, and whether the one satisfies the other."""
    policy = current_policy(services, region)
    found = read_live(services.releases, region)
    live = found[2] if found else None
    fault = None
    if live is not None and policy.scope != "release":
        entries = services.ledger.entries(live.certificate.lineage)
        fault = scope_fault(policy, entries, live.manifest.release_id)
    return policy, live, assess(policy, live, scope_fault=fault)


def pull(services: Services, region: str, to: Path) -> tuple[Compliance, list[Path]]:
    """Copy a region's live release into a folder; all of it or nothing.

    Returns:
        The region's compliance, and the paths written: the release's files and its manifest.

    Raises:
        NotServable: nothing was promoted, or the live release violates the current policy.
    """
    policy, live, compliance = region_compliance(services, region)
    if live is None:
        raise NotServable(f"Region {region} has no model yet: {compliance.reason} See `remerge status`.")
    if not compliance.readable:
        raise NotServable(
            f"Region {region} is non-compliant with its policy {policy.serial}, so its model is not handed out. "
            f"{compliance.reason}"
        )
    release_id = live.manifest.release_id
    contents = {
        name: services.releases.read_file(release_id, name, sha256)
        for name, sha256 in live.manifest.files.items()
    }
    contents["manifest.json"] = live.manifest.content()
    return compliance, _write_together(contents, to)


def _write_together(contents: dict[str, bytes], to: Path) -> list[Path]:
    """Stage all files beside their places, then rename them: a full disk leaves the old files."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to, prefix=".pull-") as staging:
            for name, content in contents.items():
                (Path(staging) / name).write_bytes(content)
            for name in contents:
                os.replace(Path(staging) / name, to / name)
    except OSError as error:
        raise InvalidInput(
            f"Cannot write to {to}: {error.strerror or error}; choose another folder."
        ) from None
    return [to / name for name in contents]
