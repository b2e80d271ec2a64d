"""The object store on a real S3: conditional writes, digests, and errors that say what to do."""

from __future__ import annotations

import threading
import uuid

import pytest
from pydantic import SecretStr

from infra.canonical import sha256_hex
from infra.object_store import (
    AccessRefused,
    AlreadyExists,
    Changed,
    Corrupted,
    Missing,
    ObjectStore,
    StoreRefused,
    s3_client,
)
from infra.settings import Connections, StackDown


@pytest.fixture
def key() -> str:
    return f"{uuid.uuid4().hex}/object"


def test_create_writes_once(object_store: ObjectStore, key: str) -> None:
    object_store.create(key, b"first")
    with pytest.raises(AlreadyExists, match=key):
        object_store.create(key, b"second")
    assert object_store.read(key).content == b"first"


def test_one_of_many_creators_wins(object_store: ObjectStore, key: str) -> None:
    barrier, won = threading.Barrier(8), []

    def create(number: int) -> None:
        barrier.wait()
        try:
            object_store.create(key, str(number).encode())
            won.append(number)
        except AlreadyExists:
            pass

    _run_all([threading.Thread(target=create, args=(number,)) for number in range(8)])
    assert len(won) == 1
    assert object_store.read(key).content == str(won[0]).encode()


def test_replace_needs_the_object_that_was_read(object_store: ObjectStore, key: str) -> None:
    object_store.put(key, b"one")
    etag = object_store.read(key).etag
    object_store.replace(key, b"two", etag)
    with pytest.raises(Changed, match=key):
        object_store.replace(key, b"three", etag)
    assert object_store.read(key).content == b"two"


def test_replace_of_nothing_is_refused(object_store: ObjectStore, key: str) -> None:
    with pytest.raises(Changed):
        object_store.replace(key, b"", '"0123"')
    assert not object_store.exists(key)


def test_one_of_many_replacers_wins(object_store: ObjectStore, key: str) -> None:
    object_store.put(key, b"old")
    etag = object_store.read(key).etag
    barrier, won = threading.Barrier(8), []

    def replace(number: int) -> None:
        barrier.wait()
        try:
            object_store.replace(key, str(number).encode(), etag)
            won.append(number)
        except Changed:
            pass

    _run_all([threading.Thread(target=replace, args=(number,)) for number in range(8)])
    assert len(won) == 1
    assert object_store.read(key).content == str(won[0]).encode()


def test_a_retried_write_that_had_succeeded_is_no_conflict(object_store: ObjectStore, key: str) -> None:
    """The answer to the first try is lost on the way; botocore sends the write again and meets its own."""
    store = ObjectStore.__new__(ObjectStore)
    store.endpoint, store.bucket, store._client = (
        object_store.endpoint,
        object_store.bucket,
        _Losing(object_store),
    )
    store.create(key, b"mine")
    assert object_store.read(key).content == b"mine"
    with pytest.raises(AlreadyExists):
        store.create(key, b"another's")


class _Losing:
    """A client whose conditional writes answer as after a retry."""

    def __init__(self, store: ObjectStore) -> None:
        self.client = store._client
        self.get_object = store._client.get_object

    def put_object(self, **request: object) -> None:
        from botocore.exceptions import ClientError

        if not self._exists(request):
            self.client.put_object(**request)
        metadata = {"HTTPStatusCode": 412, "RetryAttempts": 1}
        raise ClientError(
            {"Error": {"Code": "PreconditionFailed"}, "ResponseMetadata": metadata}, "PutObject"
        )

    def _exists(self, request: dict[str, object]) -> bool:
        found = self.client.list_objects_v2(Bucket=request["Bucket"], Prefix=request["Key"])
        return bool(found["KeyCount"])


def test_read_verified(object_store: ObjectStore, key: str) -> None:
    object_store.put(key, b"model")
    assert object_store.read_verified(key, sha256_hex(b"model")) == b"model"
    object_store.put(key, b"another model")
    with pytest.raises(Corrupted, match="damaged or replaced"):
        object_store.read_verified(key, sha256_hex(b"model"))


def test_read_if_changed(object_store: ObjectStore, key: str) -> None:
    object_store.put(key, b"one")
    etag = object_store.read(key).etag
    assert object_store.read_if_changed(key, etag) is None
    object_store.put(key, b"two")
    assert object_store.read_if_changed(key, etag) == object_store.read(key)
    with pytest.raises(Missing, match="nothing-here"):
        object_store.read_if_changed("nothing-here", etag)


def test_missing(object_store: ObjectStore, key: str) -> None:
    with pytest.raises(Missing, match=key):
        object_store.read(key)
    with pytest.raises(Missing):
        object_store.read_verified(key, "0" * 64)
    assert not object_store.exists(key)


def test_list_is_complete_over_pages(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = uuid.uuid4().hex
    keys = [f"{folder}/{number:02d}" for number in range(7)]
    for key in reversed(keys):
        object_store.put(key, b"")
    object_store.put(f"{folder}/below/one", b"")
    paginate = object_store._client.get_paginator("list_objects_v2").paginate

    class _Paginator:
        def paginate(self, **query: object) -> object:
            return paginate(**query, PaginationConfig={"PageSize": 3})

    monkeypatch.setattr(object_store._client, "get_paginator", lambda name: _Paginator())
    assert object_store.list(f"{folder}/") == [*keys, f"{folder}/below/one"]
    assert object_store.list_folders(f"{folder}/") == ["below"]
    assert object_store.list(f"{folder}-none/") == []


def test_every_write_names_its_sha256(object_store: ObjectStore, key: str) -> None:
    """The store compares the digest with what arrived: a damaged write is refused, not stored."""
    with pytest.raises(Exception, match="BadDigest"):
        object_store._client.put_object(
            Bucket=object_store.bucket, Key=key, Body=b"x", ChecksumSHA256="A" * 43 + "="
        )
    assert not object_store.exists(key)


def test_no_store_there(lone_s3: Connections) -> None:
    store = ObjectStore(lone_s3.model_copy(update={"s3_endpoint": "http://127.0.0.1:9"}))
    with pytest.raises(StackDown, match="remerge up") as caught:
        store.read("x")
    assert caught.value.retryable


@pytest.mark.parametrize("secret", ["s3_access_key", "s3_secret_key"])
def test_wrong_keys(lone_s3: Connections, secret: str) -> None:
    store = ObjectStore(lone_s3.model_copy(update={secret: SecretStr("wrong")}))
    for call in (lambda: store.read("x"), lambda: store.create("x", b""), lambda: store.list("x")):
        with pytest.raises(AccessRefused, match="REMERGE_S3_SECRET_KEY"):
            call()


def test_no_bucket(lone_s3: Connections) -> None:
    store = ObjectStore(lone_s3, bucket="nobody-made-this")
    for call in (lambda: store.read("x"), lambda: store.create("x", b""), lambda: store.list("x")):
        with pytest.raises(StoreRefused, match="nobody-made-this"):
            call()


def test_amazon_gets_its_own_addressing(lone_s3: Connections) -> None:
    amazon = lone_s3.model_copy(update={"s3_endpoint": "https://s3.eu-west-1.amazonaws.com"})
    assert s3_client(amazon).meta.config.s3["addressing_style"] == "virtual"
    assert s3_client(lone_s3).meta.config.s3["addressing_style"] == "path"


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
