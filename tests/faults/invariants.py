"""What must hold after every fault: one function a sentence, each returning what is wrong, in words.

Read with plain boto3 and hashlib, so that a fault in our own readers cannot hide what they read wrongly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import ClientError

from infra.documents import Policy, PortfolioManifest, release_id_of
from tasks.services import Services

BUCKET = "production"
EXPOSED = ("model.safetensors", "certificate.json", "manifest.json")


@dataclass
class Memory:
    """What was seen earlier and must never be seen otherwise."""

    draws: dict[str, str] = field(default_factory=dict)  # SHA-256 of draw.json by release
    objects: dict[str, str] = field(default_factory=dict)  # ETag of what is never changed, by key
    contents: dict[tuple[str, str], bytes] = field(default_factory=dict)  # as read before, by key and ETag
    served: dict[str, set[str]] = field(default_factory=dict)  # every release that a region's pointer named
    policies: dict[tuple[str, int], Policy] = field(default_factory=dict)
    manifests: dict[tuple[str, int], PortfolioManifest] = field(default_factory=dict)


def fetch(s3: Any, key: str) -> bytes | None:
    try:
        content: bytes = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
            return None
        raise
    return content


def etags(s3: Any, prefix: str) -> dict[str, str]:
    """The MD5 of every object below a prefix, by key, as the store lists them."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return {item["Key"]: item["ETag"] for page in pages for item in page.get("Contents", ())}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def nothing_is_lost(services: Services, s3: Any, memory: Memory, region: str) -> list[str]:
    """What was once acknowledged is still there, byte for byte; a region that was served once still is."""
    wrong = []
    for prefix in (f"policies/{region}/", "portfolios/", "ledger/"):
        now = etags(s3, prefix)
        for key, etag in memory.objects.items():
            if key.startswith(prefix) and now.get(key) != etag:
                wrong.append(f"{key} was changed or is gone")
        memory.objects |= now
    if memory.served.get(region) and fetch(s3, f"regions/{region}/current.json") is None:
        wrong.append(f"{region} was served, and is not any more")
    return wrong


def serves_a_whole_release(services: Services, s3: Any, memory: Memory, region: str) -> list[str]:
    """Production serves nothing yet, or a complete release within the budget of the policy it was made for."""
    content = fetch(s3, f"regions/{region}/current.json")
    if content is None:
        return []
    pointer = json.loads(content)
    release_id = pointer["release_id"]
    memory.served.setdefault(region, set()).add(release_id)
    folder = f"releases/{release_id}"
    sealed = fetch(s3, f"{folder}/manifest.json")
    if sealed is None or sha256(sealed) != pointer["release_manifest_digest"]:
        return [f"{region} points at {release_id[:12]}, whose manifest is not the one that was named"]
    manifest = json.loads(sealed)
    wrong = [
        f"{folder}/{name} is not the file that was sealed"
        for name, digest in manifest["files"].items()
        if sha256(fetch(s3, f"{folder}/{name}") or b"") != digest
    ]
    if not {"model.safetensors", "certificate.json"} <= set(manifest["files"]):
        wrong.append(f"{folder} lacks its model or its certificate")
    if wrong:
        return wrong
    policy = json.loads(fetch(s3, f"policies/{region}/{manifest['policy_serial']:08d}.json") or b"{}")
    certificate = json.loads(fetch(s3, f"{folder}/certificate.json") or b"{}")
    within = certificate["epsilon"] <= policy.get("epsilon", 0) and certificate["delta"] <= policy["delta"]
    if not within:
        wrong.append(
            f"{region} serves epsilon {certificate['epsilon']}, beyond policy {manifest['policy_serial']}"
        )
    named = (manifest["release_id"], certificate["release_id"], manifest["policy_serial"], manifest["region"])
    if named != (release_id, release_id, pointer["policy_serial"], region):
        wrong.append(f"{folder} holds files of another release, policy or region")
    realised = certificate.get("realised")
    if (realised is not None) != ("draw.json" in manifest["files"]):
        wrong.append(f"{folder} has a draw and no realised candidate, or the reverse")
    return wrong


def releases_of(services: Services, memory: Memory, region: str) -> dict[str, PortfolioManifest]:
    """Every release that the region's policies can name, with its portfolio version. Neither ever changes."""
    for name in services.manifests.names():
        for serial in range(1, services.manifests.documents.last_serial(name) + 1):
            if (name, serial) not in memory.manifests:
                memory.manifests[name, serial] = services.manifests.read(name, serial)
    for serial in range(1, services.policies.documents.last_serial(region) + 1):
        if (region, serial) not in memory.policies:
            memory.policies[region, serial] = services.policies.read(region, serial)
    return {
        release_id_of(policy, manifest): manifest
        for (of, _), policy in memory.policies.items()
        if of == region
        for manifest in memory.manifests.values()
    }


def read_ledger(s3: Any, memory: Memory, lineage: str) -> tuple[list[dict[str, Any]], list[str]]:
    """All entries, and what is wrong with their chain."""
    entries: list[dict[str, Any]] = []
    wrong: list[str] = []
    before: str | None = None
    for serial, (key, etag) in enumerate(sorted(etags(s3, f"ledger/{lineage}/").items()), start=1):
        content = memory.contents.get((key, etag)) or fetch(s3, key) or b"{}"
        memory.contents[key, etag] = content
        entry = json.loads(content)
        if entry.get("serial") != serial or entry.get("previous_digest") != before:
            wrong.append(f"{key} does not follow from the entry before it")
        before = sha256(content)
        entries.append(entry)
    return entries, wrong


def ledger_covers_everything(services: Services, s3: Any, memory: Memory, region: str) -> list[str]:
    """The chain is whole; what was ever exposed or named by the pointer has exactly one `intended` entry."""
    wrong: list[str] = []
    content = fetch(s3, f"regions/{region}/current.json")
    pointer = json.loads(content) if content else {}
    named = {
        pointer.get("release_id"),
        pointer.get("previous_release_id"),
        *memory.served.get(region, ()),
    } - {None}
    possible = releases_of(services, memory, region)
    ledgers = {
        lineage: read_ledger(s3, memory, lineage) for lineage in {m.lineage for m in possible.values()}
    }
    for release_id in {*named, *possible}:
        folder = f"releases/{release_id}/"
        exposed = [name for name in EXPOSED if folder + name in etags(s3, folder)]
        if not exposed and release_id not in named:
            continue
        lineage = possible[release_id].lineage if release_id in possible else "none"
        entries, broken = ledgers.get(lineage, ([], []))
        wrong += [line for line in broken if line not in wrong]
        intended = [e for e in entries if e["release_id"] == release_id and e["kind"] == "intended"]
        if len(intended) != 1:
            wrong.append(f"release {release_id[:12]} ({exposed}) has {len(intended)} intended entries")
    return wrong


def is_drawn_once(services: Services, s3: Any, memory: Memory, region: str) -> list[str]:
    """A draw never changes, and everything that knows of it names the same outcome."""
    wrong: list[str] = []
    ledgers: dict[str, list[dict[str, Any]]] = {}
    for release_id, manifest in releases_of(services, memory, region).items():
        content = fetch(s3, f"releases/{release_id}/draw.json")
        if content is None:
            if release_id in memory.draws:
                wrong.append(f"the draw of {release_id[:12]} is gone")
            continue
        if memory.draws.setdefault(release_id, sha256(content)) != sha256(content):
            wrong.append(f"the draw of {release_id[:12]} has changed")
        drawn = json.loads(content)["drawn"]
        if manifest.lineage not in ledgers:
            ledgers[manifest.lineage] = read_ledger(s3, memory, manifest.lineage)[0]
        told = {
            entry["drawn"]
            for entry in ledgers[manifest.lineage]
            if entry["release_id"] == release_id and entry["kind"] != "consulted"
        }
        certificate = fetch(s3, f"releases/{release_id}/certificate.json")
        if certificate is not None:
            told.add(json.loads(certificate)["realised"]["candidate"])
        if told - {drawn}:
            wrong.append(f"{release_id[:12]} drew {drawn}, but its ledger or certificate says {sorted(told)}")
    return wrong


def is_settled(services: Services, s3: Any, memory: Memory, region: str) -> list[str]:
    """The newest policy in effect is live, or has ended for good; alias and ledger say what the pointer says."""
    policy = services.policies.in_effect(region, datetime.now(UTC))
    if policy is None:
        return []
    manifest = services.manifests.resolve(policy.portfolio)
    wanted = release_id_of(policy, manifest)
    content = fetch(s3, f"regions/{region}/current.json")
    live = json.loads(content) if content else {}
    entries, _ = read_ledger(s3, memory, manifest.lineage)
    ended = any(e["release_id"] == wanted and e["kind"] == "failed_check" for e in entries)
    if live.get("release_id") != wanted and not ended:
        return [f"policy {policy.serial} of {region} is neither live nor ended for good"]
    if not live:
        return []
    wrong = []
    if not any(e["release_id"] == live["release_id"] and e["kind"] == "live" for e in entries):
        wrong.append(f"the ledger does not say that {live['release_id'][:12]} is live")
    sealed = json.loads(fetch(s3, f"releases/{live['release_id']}/manifest.json") or b"{}")
    alias = services.mlflow.get_model_version_by_alias(sealed["registered_model"], "production")
    if alias.tags.get("remerge.release_id") != live["release_id"]:
        wrong.append(f"the alias of {region} names version {alias.version}, which is another release")
    return wrong


def exposed_without_entry(s3: Any, memory: Memory, lineages: Iterable[str]) -> list[str]:
    """Over the whole bucket, whatever region: every release with an exposed file has an `intended` entry."""
    known = {
        entry["release_id"]
        for lineage in lineages
        for entry in read_ledger(s3, memory, lineage)[0]
        if entry["kind"] == "intended"
    }
    exposed = {key.split("/")[1] for key in etags(s3, "releases/") if key.rsplit("/")[-1] in EXPOSED}
    return [
        f"release {release_id[:12]} is exposed and in no ledger" for release_id in sorted(exposed - known)
    ]
