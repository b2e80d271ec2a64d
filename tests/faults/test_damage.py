"""Truncated and bit-flipped objects, aliases and versions changed by hand: nothing wrong is served or promoted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accounting.errors import RemergeError
from infra.documents import release_id_of
from infra.production import load
from tasks.live_release import pull
from tests.faults.harness import Chain, Field, Row
from tests.faults.invariants import BUCKET, fetch
from tests.faults.promoter import Moment, die

pytestmark = pytest.mark.system

SEED = 20261129
FLIPS = 40


def flipped(content: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(8 * len(content))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def truncated(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content))]


HOW = {"bit-flipped": flipped, "truncated": truncated}


@contextmanager
def damaged(s3: Any, key: str, content: bytes) -> Iterator[None]:
    """Replace an object of the production bucket, and restore it."""
    before = fetch(s3, key)
    s3.put_object(Bucket=BUCKET, Key=key, Body=content)
    try:
        yield
    finally:
        s3.put_object(Bucket=BUCKET, Key=key, Body=before)


def live_folder(field: Field, region: str) -> tuple[str, dict[str, bytes]]:
    """The folder of the live release, and its files as they are now."""
    pointer = json.loads(fetch(field.s3, f"regions/{region}/current.json") or b"{}")
    folder = f"releases/{pointer['release_id']}"
    names = ("model.safetensors", "certificate.json", "draw.json", "manifest.json")
    return folder, {name: fetch(field.s3, f"{folder}/{name}") or b"" for name in names}


def readings(field: Field, region: str, to: Path) -> list[dict[str, bytes] | str]:
    """What `remerge pull` and a serving process make of the region: files, or a sentence."""
    answers: list[dict[str, bytes] | str] = []
    try:
        _, paths = pull(field.services, region, to)
        answers.append({path.name: path.read_bytes() for path in paths})
    except RemergeError as error:
        answers.append(error.message)
    try:
        release = load(region, store=field.services.store, poll_seconds=None).release
        answers.append({**release.files, "manifest.json": release.manifest.content()})
    except RemergeError as error:
        answers.append(error.message)
    return answers


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "name",
    [
        "pointer",
        "model.safetensors",
        *(
            pytest.param(f"{part}.json", marks=pytest.mark.faults)
            for part in ("certificate", "draw", "manifest")
        ),
    ],
)
def test_what_is_served_is_right_or_refused(
    chain: Chain, row: Row, tmp_path: Path, name: str, how: str
) -> None:
    row.fault = f"{'the pointer' if name == 'pointer' else name} of the live release {how}"
    dice = random.Random(SEED)
    field, region = chain.field, chain.region
    folder, whole = live_folder(field, region)
    key = f"regions/{region}/current.json" if name == "pointer" else f"{folder}/{name}"
    before = fetch(field.s3, key) or b""
    refused, tries = 0, FLIPS if name == "pointer" else 5
    for _ in range(tries):
        with damaged(field.s3, key, HOW[how](before, dice)):
            for answer in readings(field, region, tmp_path):
                if isinstance(answer, str):
                    refused += 1
                    assert key in answer or "releases/" in answer, answer
                else:
                    assert name == "pointer", f"a damaged {name} was handed out"
                    assert answer == whole
    assert refused > 0
    row.remark = f"damaged {tries} times: {refused} of {2 * tries} readings refused, the others right"
    chain.field.survived(region, row)


@pytest.mark.faults
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "name", ["pointer", "certificate.json", "manifest.json", "policy", "portfolio", "ledger"]
)
def test_nothing_is_promoted_over_damage(chain: Chain, row: Row, name: str, how: str) -> None:
    row.fault = f"{name} damaged while a new policy comes"
    dice = random.Random(SEED)
    field, region = chain.field, chain.region
    folder, _ = live_folder(field, region)
    policy = chain.policy()
    portfolio, serial = field.portfolio.name, field.portfolio.serial
    keys = {
        "pointer": f"regions/{region}/current.json",
        "policy": f"policies/{region}/{policy.serial:08d}.json",
        "portfolio": f"portfolios/{portfolio}/{serial:08d}.json",
        "ledger": f"ledger/{field.portfolio.lineage}/00000001.json",
    }
    key = keys.get(name, f"{folder}/{name}")
    content = fetch(field.s3, key) or b""
    # A flipped bit in the white space of JSON, or in a field that decides nothing, may pass: flip what matters.
    places = {"pointer": b'"release_manifest_digest":"', "ledger": b'"certificate_digest":"'}
    mark = places.get(name, b'"schema":"')
    place = content.index(mark) + len(mark)
    changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    # A pointer's digest and the manifest contradict each other, and either may be the damaged one.
    blamed = [key, {"pointer": f"{folder}/manifest.json", "ledger": "ledger/"}.get(name, key)]
    pointer = fetch(field.s3, f"regions/{region}/current.json")
    with damaged(field.s3, key, changed if how == "bit-flipped" else truncated(content, dice)):
        ended = field.promotion(policy).wait()
        assert not ended.completed
        assert any(each in ended.sentence for each in blamed), ended.sentence
        report, sentence = field.reconcile(region)
        assert report.failed or report.changed
        assert any(each in sentence for each in blamed), sentence
    assert fetch(field.s3, f"regions/{region}/current.json") == pointer
    field.survived(region, row)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["policy", "portfolio"])
def test_a_document_that_a_live_release_was_made_from_is_edited(chain: Chain, row: Row, name: str) -> None:
    """One flipped bit makes epsilon 2 from 3, or 7; the document stays valid, and nothing is released under it."""
    row.fault = "the live release's policy or portfolio manifest edited, and still valid"
    field, region = chain.field, chain.region
    policy = chain.policy()
    field.promote(policy)
    pointer = fetch(field.s3, f"regions/{region}/current.json")
    key, mark = {
        "policy": (f"policies/{region}/{policy.serial:08d}.json", b'"epsilon":'),
        "portfolio": (f"portfolios/{field.portfolio.reference.replace('@1', '/00000001.json')}", b'"n_max":'),
    }[name]
    content = fetch(field.s3, key) or b""
    place = content.index(mark) + len(mark)
    with damaged(field.s3, key, content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]):
        report, sentence = field.reconcile(region)
        assert report.failed
        assert f"{key} was changed" in sentence
        ended = field.promotion(policy).wait()
        assert not ended.completed
        assert f"{key} was changed" in ended.sentence
        assert fetch(field.s3, f"regions/{region}/current.json") == pointer
    field.survived(region, row)


@pytest.mark.faults
@pytest.mark.parametrize("how", HOW)
def test_a_damaged_draw_is_not_drawn_again(chain: Chain, row: Row, how: str) -> None:
    row.fault = "the draw damaged between its drawing and its use"
    dice = random.Random(SEED)
    field, region = chain.field, chain.region
    policy = chain.policy()
    assert field.promotion(policy, (Moment("flows.policy_change:make_draw", "after"), die)).wait().killed
    release_id = release_id_of(policy, field.portfolio)
    key = f"releases/{release_id}/draw.json"
    content = fetch(field.s3, key) or b""
    field.look(region, row)
    place = content.index(b'"drawn":"eps-') + len(b'"drawn":"eps-')
    other = (
        content[:place] + bytes([content[place] ^ 6]) + content[place + 1 :]
    )  # eps-4 for eps-2, and the reverse
    with damaged(field.s3, key, other if how == "bit-flipped" else truncated(content, dice)):
        ended = field.promotion(policy).wait()
        assert not ended.completed
        assert key in ended.sentence or release_id[:12] in ended.sentence, ended.sentence
        assert fetch(field.s3, f"releases/{release_id}/manifest.json") is None
    field.survived(region, row)


def test_an_alias_that_was_changed_by_hand(chain: Chain, row: Row) -> None:
    row.fault = "the alias set to another version by hand, or removed"
    field, region = chain.field, chain.region
    name = f"{field.portfolio.name}-{region}"
    field.promote(chain.policy())
    client = field.services.mlflow
    client.set_registered_model_alias(name, "production", "1")
    field.survived(region, row)
    client.delete_registered_model_alias(name, "production")
    field.survived(region, row)


@pytest.mark.faults
def test_the_live_version_deleted_from_the_registry(chain: Chain, row: Row, tmp_path: Path) -> None:
    row.fault = (
        "the live release's registry version deleted; one reconcile registers it again from production"
    )
    field, region = chain.field, chain.region
    name = f"{field.portfolio.name}-{region}"
    client = field.services.mlflow
    version = client.get_model_version_by_alias(name, "production").version
    folder, whole = live_folder(field, region)
    client.delete_model_version(name, version)
    report, sentence = field.reconcile(region)
    assert report.changed
    assert f"version of {name} was gone" in sentence
    again = client.get_model_version_by_alias(name, "production")
    assert again.tags["remerge.release_id"] == folder.removeprefix("releases/")
    assert readings(field, region, tmp_path) == [whole, whole]  # production needs no MLflow
    field.look(region, row)
    chain.policy()
    field.survived(region, row)


@pytest.mark.faults
def test_a_candidates_version_deleted_from_the_registry(shared: Field, chain: Chain, row: Row) -> None:
    row.fault = "a candidate's registry version deleted; a portfolio version without it heals it"
    field, region = chain.field, chain.region
    client = field.services.mlflow
    record = field.portfolio.candidates[0]
    doubled = client.create_model_version(
        record.registered_model, client.get_model_version(record.registered_model, str(record.version)).source,
        record.run_id,
    )  # fmt: skip
    known = field.portfolio.model_dump(mode="json", exclude={"serial"})
    known["candidates"][0]["version"] = int(doubled.version)
    copied = field.services.manifests.append(known)
    client.delete_model_version(record.registered_model, doubled.version)
    policy = field.policy(region, 3.0, portfolio=copied.reference)
    ended = field.promotion(policy).wait()
    assert not ended.completed
    assert f"Version {doubled.version} of registered model {record.registered_model}" in ended.sentence
    field.look(region, row)
    chain.policy()
    field.survived(region, row)
