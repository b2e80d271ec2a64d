"""Releases, draws and pointers on a real S3."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from infra.documents import Attempt, Draw, Pointer, ReleaseManifest
from infra.object_store import Changed, Corrupted, Missing, ObjectStore
from infra.releases import ReleaseStore

Fields = Callable[..., dict[str, Any]]


@pytest.fixture
def releases(object_store: ObjectStore) -> ReleaseStore:
    return ReleaseStore(object_store)


def _sealed(releases: ReleaseStore, fields: dict[str, Any]) -> ReleaseManifest:
    sha256 = releases.write_file(fields["release_id"], "model.safetensors", b"weights")
    fields = {**fields, "files": {"model.safetensors": sha256}}
    return releases.create_manifest(ReleaseManifest.from_fields(fields, "release"))


def _pointer(manifest: ReleaseManifest, previous: str | None = None) -> Pointer:
    return Pointer(
        region=manifest.region,
        release_id=manifest.release_id,
        release_manifest_digest=manifest.sha256(),
        policy_serial=manifest.policy_serial,
        previous_release_id=previous,
        switched_at=datetime.now(UTC),
    )


def _draw(release_id: str, index: int) -> Draw:
    return Draw(
        release_id=release_id,
        weights={"a": 0.5, "b": 0.5},
        point=f"{index:064x}",
        drawn_index=index % 2,
        drawn="ab"[index % 2],
        drawn_at=datetime.now(UTC),
        entropy_source="test",
    )


def test_a_draw_is_made_once(releases: ReleaseStore, release_fields: Fields) -> None:
    release_id = release_fields()["release_id"]
    assert releases.read_draw(release_id) is None
    first = _draw(release_id, 0)
    assert releases.create_draw(first) == first
    assert releases.create_draw(_draw(release_id, 1)) == first
    assert releases.read_draw(release_id) == first


def test_many_drawers_agree(releases: ReleaseStore, release_fields: Fields) -> None:
    release_id = release_fields()["release_id"]
    with ThreadPoolExecutor(8) as pool:
        draws = list(pool.map(lambda n: releases.create_draw(_draw(release_id, n)), range(8)))
    assert len({draw.point for draw in draws}) == 1


def test_a_sealed_release_does_not_change(releases: ReleaseStore, release_fields: Fields) -> None:
    fields = release_fields()
    releases.write_file(fields["release_id"], "model.safetensors", b"from an attempt that crashed")
    manifest = _sealed(releases, fields)
    assert _sealed(releases, {**fields, "registered_version": 2}) == manifest  # the first seal counts
    with pytest.raises(Changed, match="is sealed"):
        releases.write_file(manifest.release_id, "model.safetensors", b"other weights")
    read = releases.read_file(manifest.release_id, "model.safetensors", manifest.files["model.safetensors"])
    assert read == b"weights"


def test_reads_verify(releases: ReleaseStore, release_fields: Fields) -> None:
    manifest = _sealed(releases, release_fields())
    folder = f"releases/{manifest.release_id}"
    releases.store.put(f"{folder}/model.safetensors", b"replaced")
    with pytest.raises(Corrupted):
        releases.read_file(manifest.release_id, "model.safetensors", manifest.files["model.safetensors"])
    changed = {**manifest.model_dump(mode="json"), "accuracy": 1.0}
    releases.store.put(f"{folder}/manifest.json", ReleaseManifest.from_fields(changed, "release").content())
    with pytest.raises(Corrupted):
        releases.read_manifest(manifest.release_id, sha256=manifest.sha256())
    assert releases.find_manifest("0" * 64) is None
    with pytest.raises(Missing):
        releases.read_manifest("0" * 64)


def test_another_releases_documents_are_refused(releases: ReleaseStore, release_fields: Fields) -> None:
    manifest = _sealed(releases, release_fields())
    other = release_fields()["release_id"]
    releases.store.put(f"releases/{other}/manifest.json", manifest.content())
    releases.store.put(f"releases/{other}/draw.json", _draw(manifest.release_id, 1).content())
    for read in (releases.read_manifest, releases.read_draw):
        with pytest.raises(Corrupted, match="another release"):
            read(other)


def test_the_pointer_is_switched_on_what_was_read(releases: ReleaseStore, release_fields: Fields) -> None:
    first, second = _sealed(releases, release_fields()), _sealed(releases, release_fields(policy_serial=2))
    region = first.region
    assert releases.read_pointer(region) is None
    releases.switch(_pointer(first), None)
    with pytest.raises(Changed, match="meanwhile"):
        releases.switch(_pointer(second), None)
    pointer, etag = releases.read_pointer(region)
    assert pointer.release_id == first.release_id
    releases.switch(_pointer(second, first.release_id), etag)
    with pytest.raises(Changed):
        releases.switch(_pointer(first), etag)
    assert releases.read_pointer(region)[0].release_id == second.release_id


def test_a_pointer_names_only_sealed_releases(releases: ReleaseStore, release_fields: Fields) -> None:
    unsealed = ReleaseManifest.from_fields(release_fields(files={"model.safetensors": "0" * 64}), "release")
    with pytest.raises(Missing):
        releases.switch(_pointer(unsealed), None)
    assert releases.read_pointer(unsealed.region) is None


def test_another_regions_pointer_is_refused(releases: ReleaseStore, release_fields: Fields) -> None:
    manifest = _sealed(releases, release_fields())
    releases.store.put("regions/elsewhere/current.json", _pointer(manifest).content())
    with pytest.raises(Corrupted, match=manifest.region):
        releases.read_pointer("elsewhere")


def test_the_last_attempt_is_kept(releases: ReleaseStore, name: str) -> None:
    assert releases.read_attempt(name) is None
    for outcome in ("infeasible", "promoted"):
        fields = {
            "region": name,
            "policy_serial": 1,
            "outcome": outcome,
            "release_id": None,
            "reason": "a reason",
            "at": "2026-01-01T00:00:00Z",
            "provenance": {"started_by": "hand"},
        }
        attempt = Attempt.from_fields(fields, "attempt")
        releases.write_attempt(attempt)
        assert releases.read_attempt(name) == attempt
