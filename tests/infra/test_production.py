"""The reader of serving processes, on a real S3: whole releases, cheap looks, and no harm from what goes wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from accounting.certificate import SCHEMA
from accounting.errors import InvalidInput
from infra import stack as embedded
from infra.canonical import canonical_json, sha256_hex
from infra.documents import Draw, Pointer, ReleaseManifest
from infra.object_store import Corrupted, Missing, ObjectStore
from infra.production import NotPromoted, Production, load
from infra.releases import ReleaseStore, pointer_key, release_key
from infra.settings import Connections, Settings, StackDown, connections
from infra.stack_services import S3

Fields = Callable[..., dict[str, Any]]
SWITCHES = 200


@pytest.fixture
def releases(object_store: ObjectStore) -> ReleaseStore:
    return ReleaseStore(object_store)


def _model(number: int, size: int = 1000) -> bytes:
    """Every parameter says which release it is of."""
    return safetensors.numpy.save({"w": np.full(size, number, np.float32), "n": np.int64([number])})


def _certificate(fields: dict[str, Any]) -> bytes:
    return canonical_json(
        {
            "schema": SCHEMA,
            **{name: fields[name] for name in ("release_id", "region", "policy_digest", "policy_serial")},
            "manifest_digest": fields["manifest_digest"],
            "portfolio": fields["portfolio"],
            "lineage": "digits",
            "unit": "record",
            "neighboring_relation": "replace_one",
            "mechanism": "random_selection",
            "weights": {"a": 0.5, "b": 0.5},
            "candidates": {
                name: {
                    "registered_model": "digits",
                    "version": "1",
                    "model_sha256": "4" * 64,
                    "trajectory_sha256": "5" * 64,
                }
                for name in "ab"
            },
            "merge_rule": "a rule",
            "bound": "random_selection_pld",
            "assumptions": ["An assumption."],
            "source": "a theorem",
            "budget": {"epsilon": 3.0, "delta": 1e-5},
            "epsilon": 2.5,
            "delta": 1e-5,
            "mu": None,
            "profile": [[2.5, 1e-5]],
            "other_bounds": {},
            "selection": "noise",
            "realised": {"candidate": "a", "epsilon": 3.5, "delta": 1e-5},
            "fresh_noise": 0.0,
            "consulted": [],
            "components": [],
            "versions": {"remerge": "0.1.0"},
        }
    )


def _draw(release_id: str) -> bytes:
    return Draw(
        release_id=release_id,
        weights={"a": 0.5, "b": 0.5},
        point="0" * 64,
        drawn_index=0,
        drawn="a",
        drawn_at=datetime.now(UTC),
        entropy_source="test",
    ).content()


def _sealed(
    releases: ReleaseStore, fields: dict[str, Any], number: int, **replaced: bytes | None
) -> ReleaseManifest:
    """A release whose model, policy and accuracy all say its number; None leaves a file out."""
    fields = {**fields, "policy_serial": number, "accuracy": number / 1000}
    files = {
        "model.safetensors": _model(number),
        "certificate.json": _certificate(fields),
        "draw.json": _draw(fields["release_id"]),
    }
    files |= {f"{name}.safetensors" if name == "model" else f"{name}.json": c for name, c in replaced.items()}
    digests = {
        name: releases.write_file(fields["release_id"], name, content)
        for name, content in files.items()
        if content is not None
    }
    return releases.create_manifest(ReleaseManifest.from_fields({**fields, "files": digests}, "release"))


def _switch(releases: ReleaseStore, manifest: ReleaseManifest) -> None:
    found = releases.read_pointer(manifest.region)
    releases.switch(_pointer(manifest), found[1] if found else None)


def _pointer(manifest: ReleaseManifest, **changes: Any) -> Pointer:
    fields = {
        "region": manifest.region,
        "release_id": manifest.release_id,
        "release_manifest_digest": manifest.sha256(),
        "policy_serial": manifest.policy_serial,
        "previous_release_id": None,
        "switched_at": datetime.now(UTC),
    }
    return Pointer(**(fields | changes))


@pytest.fixture
def two(releases: ReleaseStore, release_fields: Fields) -> list[ReleaseManifest]:
    """Two releases of one region, the first of them live."""
    made = [_sealed(releases, release_fields(), number) for number in (1, 2)]
    _switch(releases, made[0])
    return made


@pytest.fixture
def production(releases: ReleaseStore, two: list[ReleaseManifest]) -> Production:
    """Without a thread: looks are made by hand."""
    return load(two[0].region, store=releases.store, poll_seconds=None)


class Requests:
    """What a store is asked, by way of botocore's own events."""

    def __init__(self, store: ObjectStore) -> None:
        self.answers: list[tuple[str, int, int]] = []  # operation, status, bytes of the body
        store._client.meta.events.register("response-received.s3", self._received)
        store._client.meta.events.register("after-call.s3", self._answered)

    def _received(self, response_dict: dict[str, Any], **event: Any) -> None:
        self._body = int(response_dict["headers"].get("content-length", 0))

    def _answered(self, http_response: Any, model: Any, **event: Any) -> None:
        self.answers.append((model.name, http_response.status_code, self._body))


# What is read


def test_everything_that_belongs_to_a_release(production: Production, two: list[ReleaseManifest]) -> None:
    release = production.release
    assert (release.manifest, release.release_id) == (two[0], two[0].release_id)
    assert release.pointer.release_manifest_digest == two[0].sha256()
    assert release.model == _model(1)
    assert release.certificate.release_id == release.draw.release_id == two[0].release_id
    assert release.certificate.epsilon == 2.5
    assert {name: sha256_hex(content) for name, content in release.files.items()} == two[0].files
    assert production.problem is None


def test_tensors_of_every_type(releases: ReleaseStore, release_fields: Fields) -> None:
    import torch
    from safetensors.torch import save

    state = {
        "bfloat16": torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16),
        **{str(t).split(".")[1]: torch.tensor([[1, 0]], dtype=t) for t in (torch.float16, torch.float64)},
        **{
            str(t).split(".")[1]: torch.tensor([1, 0], dtype=t)
            for t in (torch.bool, torch.int64, torch.uint8)
        },
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 3),
    }
    manifest = _sealed(releases, release_fields(), 1, model=save(state))
    _switch(releases, manifest)
    release = load(manifest.region, store=releases.store, poll_seconds=None).release
    arrays, tensors = release.tensors(), release.torch_tensors()
    assert set(arrays) == set(tensors) == set(state)
    for name, expected in state.items():
        assert torch.equal(tensors[name], expected)
        assert tensors[name].dtype == expected.dtype
        wide = expected.to(torch.float32) if name == "bfloat16" else expected
        assert arrays[name].dtype == wide.numpy().dtype
        assert arrays[name].shape == tuple(expected.shape)
        assert arrays[name].tobytes() == wide.numpy().tobytes()
        with pytest.raises(ValueError, match="read-only"):
            arrays[name][...] = 0


def test_reading_imports_no_torch_and_contacts_nothing_at_import(lone_s3: Connections) -> None:
    program = "import sys, infra.production; print({'torch', 'boto3', 'scipy', 'mlflow'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_the_example_in_the_readme(
    lone_s3: Connections, release_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"test-{uuid.uuid4().hex}"
    for name, value in lone_s3.model_copy(update={"production_bucket": bucket}).model_dump().items():
        if name.startswith("s3_") or name == "production_bucket":
            monkeypatch.setenv(
                f"REMERGE_{name.upper()}", value if isinstance(value, str) else value.get_secret_value()
            )
    store = ObjectStore(lone_s3, bucket=bucket)
    store.create_bucket()
    _switch(ReleaseStore(store), _sealed(ReleaseStore(store), release_fields(region="eu"), 1))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = readme.partition("## A serving process")[2].partition("```python\n")[2].partition("```")[0]
    answers: list[Any] = []
    exec(example, {"requests": ["one", "two"], "answer": lambda *given: answers.append(given)})
    assert [(request, epsilon) for request, _, epsilon in answers] == [("one", 2.5), ("two", 2.5)]
    assert answers[0][1]["w"][0] == 1


def test_a_region_without_a_release(releases: ReleaseStore, name: str) -> None:
    with pytest.raises(NotPromoted, match=name):
        load(name, store=releases.store)


@pytest.mark.parametrize("name", ["", "../eu", "EU", "\ud800", "eu/current"])
def test_a_name_that_no_region_can_have(releases: ReleaseStore, name: str) -> None:
    with pytest.raises(InvalidInput, match="is no region's name"):
        load(name, store=releases.store)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_none(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="poll_seconds"):
        load("eu", poll_seconds=seconds)


def test_a_serving_process_needs_only_the_three_variables_of_s3(
    lone_s3: Connections, release_fields: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"test-{uuid.uuid4().hex}"
    store = ObjectStore(lone_s3, bucket=bucket)
    store.create_bucket()
    manifest = _sealed(ReleaseStore(store), release_fields(), 1)
    _switch(ReleaseStore(store), manifest)
    monkeypatch.setenv("REMERGE_HOME", str(tmp_path / "no stack here"))
    with pytest.raises(StackDown, match="remerge up"):
        load(manifest.region)
    monkeypatch.setenv("REMERGE_PRODUCTION_BUCKET", bucket)
    monkeypatch.setenv("REMERGE_S3_ENDPOINT", lone_s3.s3_endpoint)
    monkeypatch.setenv("REMERGE_S3_ACCESS_KEY", lone_s3.s3_access_key.get_secret_value())
    with pytest.raises(StackDown, match="REMERGE_S3_SECRET_KEY"):
        load(manifest.region)
    monkeypatch.setenv("REMERGE_S3_SECRET_KEY", lone_s3.s3_secret_key.get_secret_value())
    with load(manifest.region) as production:
        assert production.release.manifest == manifest


# Looks and switches


def test_an_unchanged_pointer_costs_one_request_without_a_body(
    production: Production, releases: ReleaseStore
) -> None:
    before, confirmed = production.release, production.confirmed_at
    requests = Requests(releases.store)
    for _ in range(3):
        assert not production.refresh()
    assert requests.answers == [("GetObject", 304, 0)] * 3
    assert production.release is before
    assert production.confirmed_at > confirmed


def test_a_switched_pointer_is_followed(
    production: Production, releases: ReleaseStore, two: list[ReleaseManifest]
) -> None:
    before = production.release
    _switch(releases, two[1])
    requests = Requests(releases.store)
    assert production.refresh()
    assert [(operation, status) for operation, status, _ in requests.answers] == [("GetObject", 200)] * 5
    assert production.release.manifest == two[1]
    assert production.release.tensors()["w"][0] == 2
    assert before.manifest == two[0]  # whoever works with the old one still has it whole
    assert before.tensors()["w"][0] == 1
    assert not production.refresh()


def test_a_pointer_written_anew_for_the_same_release_costs_its_own_bytes_only(
    production: Production, releases: ReleaseStore, two: list[ReleaseManifest]
) -> None:
    model = production.release.model
    _switch(releases, two[1])
    _switch(releases, two[0])
    requests = Requests(releases.store)
    assert not production.refresh()
    assert [(operation, status) for operation, status, _ in requests.answers] == [("GetObject", 200)]
    assert production.release.model is model
    assert production.release.pointer == releases.read_pointer(two[0].region)[0]


def test_readers_see_whole_releases_while_the_pointer_switches(
    releases: ReleaseStore, two: list[ReleaseManifest]
) -> None:
    """Hundreds of switches under four readers and a fast poller: whatever is seen belongs together."""
    faults: list[str] = []
    seen: list[set[int]] = [set() for _ in range(4)]
    done = threading.Event()

    def read(numbers: set[int]) -> None:
        while not done.wait(0.001):
            release = production.release
            number = release.manifest.policy_serial
            parts = {
                number,
                *np.unique(release.tensors()["w"]).tolist(),
                int(release.tensors()["n"][0]),
                release.pointer.policy_serial,
                release.certificate.policy_serial,
                round(release.manifest.accuracy * 1000),
            }
            ids = {release.release_id, release.certificate.release_id, release.pointer.release_id}
            if len(parts) != 1 or ids != {two[number - 1].release_id, release.draw.release_id}:
                faults.append(f"{parts} {ids}")
            numbers.add(number)

    with load(two[0].region, store=releases.store, poll_seconds=0.001) as production:
        threads = [threading.Thread(target=read, args=(numbers,)) for numbers in seen]
        for thread in threads:
            thread.start()
        for count in range(SWITCHES):
            _switch(releases, two[(count + 1) % 2])
        _switch(releases, two[1])
        _until(lambda: production.release.manifest == two[1])
        done.set()
        for thread in threads:
            thread.join()
        assert production.problem is None
    assert not faults
    assert seen == [{1, 2}] * 4


def test_the_thread_ends_when_it_is_closed(releases: ReleaseStore, two: list[ReleaseManifest]) -> None:
    with load(two[0].region, store=releases.store, poll_seconds=0.01) as production:
        (thread,) = [t for t in threading.enumerate() if t.name == f"production-{two[0].region}"]
        with pytest.raises(InvalidInput, match="polled already"):
            production.start(1.0)
    assert not thread.is_alive()
    _switch(releases, two[1])
    assert production.release.manifest == two[0]  # nobody looks any more
    production.close()
    production.start(0.01)
    _until(lambda: production.release.manifest == two[1])
    production.close()


# What goes wrong


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "the first bit": lambda content: _flipped(content, 0),
    "a middle bit": lambda content: _flipped(content, len(content) // 2),
    "the last bit": lambda content: _flipped(content, len(content) - 1),
    "the last byte lost": lambda content: content[:-1],
    "half lost": lambda content: content[: len(content) // 2],
    "all lost": lambda content: b"",
    "one byte more": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_release_leaves_the_old_one_until_it_is_repaired(
    damage: str,
    production: Production,
    releases: ReleaseStore,
    two: list[ReleaseManifest],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, old = releases.store, production.release
    _switch(releases, two[1])
    for name in (*two[1].files, "manifest.json"):
        key = release_key(two[1].release_id, name)
        whole = store.read(key).content
        store.put(key, DAMAGE[damage](whole))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "infra.production"):
            for _ in range(2):  # every look tries again
                assert not production.refresh()
        assert production.release is old
        assert name in production.problem
        assert [record.levelname for record in caplog.records] == ["WARNING"]  # said once
        assert name in caplog.text
        with pytest.raises(Corrupted, match=name):  # and a process that starts now does not serve it
            load(two[1].region, store=store)
        store.put(key, whole)
    confirmed = production.confirmed_at
    assert production.refresh()
    assert production.release.manifest == two[1]
    assert production.problem is None
    assert production.confirmed_at > confirmed


def test_a_lost_file_or_pointer_leaves_the_old_release(
    production: Production, releases: ReleaseStore, two: list[ReleaseManifest]
) -> None:
    store, old = releases.store, production.release
    _switch(releases, two[1])
    for key in (release_key(two[1].release_id, "certificate.json"), pointer_key(old.manifest.region)):
        content = store.read(key).content
        store._client.delete_object(Bucket=store.bucket, Key=key)
        assert not production.refresh()
        assert production.release is old
        assert key in production.problem
        store.put(key, content)
    assert production.refresh()


def _of_another_release(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "release_id": uuid.uuid4().hex * 2}


UNFIT: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no model": (lambda fields: {"model": None}, "has no model.safetensors"),
    "no certificate": (lambda fields: {"certificate": None}, "has no certificate.json"),
    "a model that is none": (lambda fields: {"model": b"weights"}, "model.safetensors cannot be read"),
    "a model cut short before it was sealed": (lambda fields: {"model": _model(3)[:-4]}, "cannot be read"),
    "a certificate that is no JSON": (lambda fields: {"certificate": b"{"}, "is not JSON"),
    "a certificate that is none": (lambda fields: {"certificate": b"{}"}, "certificate"),
    "another release's certificate": (
        lambda fields: {"certificate": _certificate({**_of_another_release(fields), "policy_serial": 3})},
        "certificate.json belongs to another release",
    ),
    "another region's certificate": (
        lambda fields: {"certificate": _certificate({**fields, "region": "elsewhere"})},
        "certificate.json belongs to another region",
    ),
    "another release's draw": (
        lambda fields: {"draw": _draw("0" * 64)},
        "draw.json belongs to another release",
    ),
    "a draw that is none": (lambda fields: {"draw": b"{}"}, r"draw\.json"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_release_that_is_not_what_it_should_be_leaves_the_old_one(
    case: str, production: Production, releases: ReleaseStore, release_fields: Fields
) -> None:
    change, message = UNFIT[case]
    old, fields = production.release, release_fields()
    _switch(releases, _sealed(releases, fields, 3, **change(fields)))
    assert not production.refresh()
    assert production.release is old
    with pytest.raises((Corrupted, InvalidInput, Missing), match=message) as caught:
        load(fields["region"], store=releases.store)
    assert caught.value.message == production.problem


def test_pointers_that_lie_are_refused(
    production: Production, releases: ReleaseStore, two: list[ReleaseManifest], release_fields: Fields
) -> None:
    region, store = two[0].region, releases.store
    foreign = _sealed(releases, release_fields(region="elsewhere"), 1)
    lies = {
        "is the pointer of region elsewhere": _pointer(two[1], region="elsewhere").content(),
        "of region elsewhere": _pointer(foreign, region=region).content(),
        "belongs to another release": None,
        "was damaged or replaced": _pointer(two[1], release_manifest_digest=two[0].sha256()).content(),
        "does not exist": _pointer(two[1], release_id="0" * 64).content(),
        "is not JSON": _pointer(two[1]).content()[:-1],
        "current.json": b"{}",
    }
    elsewhere = uuid.uuid4().hex * 2  # a folder that holds the manifest of another release
    store.put(release_key(elsewhere, "manifest.json"), two[1].content())
    lies["belongs to another release"] = _pointer(two[1], release_id=elsewhere).content()
    old = production.release
    for message, content in lies.items():
        store.put(pointer_key(region), content)
        assert not production.refresh()
        assert message in production.problem
        assert production.release is old
    store.put(pointer_key(region), _pointer(two[1]).content())
    assert production.refresh()


def test_an_unforeseen_error_is_a_problem_too(
    production: Production, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("unforeseen")

    old = production.release
    monkeypatch.setattr(ReleaseStore, "poll_pointer", fail)
    assert not production.refresh()
    assert "unforeseen" in production.problem
    assert production.release is old


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Settings]:
    """A stack of the test's own, S3 alone, which it may stop."""
    settings = Settings(home=tmp_path / "home")
    try:
        embedded.start(settings, _quiet, names=(S3,))
        yield settings
    finally:
        embedded.stop(settings, _quiet)


def _quiet(message: str) -> None:
    del message


def test_while_the_store_is_down_the_old_release_is_served(
    mortal: Settings, release_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while a thread polls, and started again, with a new release: also `load` by the running stack alone."""
    monkeypatch.setenv("REMERGE_HOME", str(mortal.home))
    releases = ReleaseStore(ObjectStore(connections(mortal)))
    first, second = (_sealed(releases, release_fields(), number) for number in (1, 2))
    _switch(releases, first)
    with load(first.region, poll_seconds=0.05) as production:
        old, confirmed = production.release, production.confirmed_at
        _until(lambda: production.confirmed_at > confirmed)
        embedded.stop(mortal, _quiet)
        _until(lambda: production.problem is not None)
        assert "cannot be reached" in production.problem
        assert production.release is old
        assert production.release.tensors()["w"][0] == 1
        embedded.start(mortal, _quiet, names=(S3,))
        assert connections(mortal).s3_endpoint == releases.store.endpoint
        _switch(releases, second)
        _until(lambda: production.release.manifest == second)
        _until(lambda: production.problem is None)


def test_a_store_that_falls_silent_between_two_files_leaves_the_old_release(
    production: Production,
    releases: ReleaseStore,
    two: list[ReleaseManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pointer, the manifest and one file are read, then nothing any more; the next look starts over."""
    read, count = ObjectStore.read_verified, iter(range(100))

    def fall_silent(store: ObjectStore, key: str, sha256: str) -> bytes:
        if next(count) >= 2:
            raise StackDown("The store cannot be reached.")
        return read(store, key, sha256)

    old = production.release
    _switch(releases, two[1])
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "read_verified", fall_silent)
        assert not production.refresh()
    assert production.release is old
    assert production.problem == "The store cannot be reached."
    assert production.refresh()
    assert production.release.manifest == two[1]


def test_the_pointer_moves_on_while_a_release_is_read(
    production: Production,
    releases: ReleaseStore,
    two: list[ReleaseManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Releases never change, so the one just left behind is taken in whole, and the next look finds the newer one."""
    read = ObjectStore.read_verified

    def move_on(store: ObjectStore, key: str, sha256: str) -> bytes:
        patch.undo()
        _switch(releases, two[0])
        return read(store, key, sha256)

    _switch(releases, two[1])
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "read_verified", move_on)
        assert production.refresh()
    assert production.release.manifest == two[1]
    assert production.release.model == _model(2)
    assert production.refresh()
    assert production.release.manifest == two[0]


def _until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)
