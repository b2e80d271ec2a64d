"""The production bucket: conditional writes, and reads that check digests. Any S3 will do."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from accounting.errors import RemergeError
from infra.canonical import sha256_hex
from infra.settings import LOOPBACK, S3Access, StackDown

Keys = list[str]  # inside ObjectStore, `list` is its method


class Missing(RemergeError):
    """There is no such object."""


class AlreadyExists(RemergeError):
    """Somebody else created the object first; nothing was written."""


class Changed(RemergeError):
    """The object is no longer the one that was read; nothing was written."""


class Corrupted(RemergeError):
    """An object is not what its digest or its key says."""


class AccessRefused(RemergeError):
    """The store knows us, but not with these keys or not with these rights."""


class StoreRefused(RemergeError):
    """Any other answer of the store that is not a success."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as read."""

    content: bytes
    etag: str  # for `replace`

    @property
    def sha256(self) -> str:
        return sha256_hex(self.content)


_UNREACHABLE = {
    "RequestTimeout",
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "500",
    "502",
    "503",
    "504",
}
_KEYS_REFUSED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "InvalidToken", "401", "403"}


class ObjectStore:
    """One bucket. Safe to share between threads.

    Every method may raise:
        StackDown: the store cannot be reached, or is overloaded; trying again later helps.
        AccessRefused: the access key, the secret key or its rights are wrong.
        StoreRefused: another answer, quoted.
    """

    def __init__(self, connections: S3Access, *, bucket: str | None = None) -> None:
        self.endpoint = connections.s3_endpoint
        self.bucket = bucket or connections.production_bucket
        self._client = s3_client(connections)

    def close(self) -> None:
        """Give back the connections; the store may still be used afterwards."""
        self._client.close()

    def create(self, key: str, content: bytes) -> None:
        """Write an object that must not exist yet.

        Raises:
            AlreadyExists: it does (or is being written by somebody else).
        """
        with self._speaking_of(key) as answer:
            self._put(key, content, IfNoneMatch="*")
        if answer.conflict and not (answer.retried and self._holds(key, content)):
            raise AlreadyExists(f"{self._where(key)} exists already and is never overwritten.")

    def replace(self, key: str, content: bytes, etag: str) -> None:
        """Write over an object that must still be the one whose `etag` was read.

        Raises:
            Changed: it is not.
        """
        with self._speaking_of(key) as answer:
            self._put(key, content, IfMatch=etag)
        gone = answer.conflict or answer.missing
        if gone and not (answer.retried and self._holds(key, content)):
            raise Changed(f"{self._where(key)} was changed by somebody else; read it again and decide anew.")

    def put(self, key: str, content: bytes) -> None:
        """Write an object, whatever was there."""
        with self._speaking_of(key) as answer:
            self._put(key, content)
        if answer.conflict:
            raise Changed(f"{self._where(key)} is being written by somebody else; try again.")

    def read(self, key: str) -> Stored:
        """Read an object whole.

        Raises:
            Missing: there is none.
        """
        with self._speaking_of(key) as answer:
            response = self._client.get_object(Bucket=self.bucket, Key=key)
            return Stored(content=response["Body"].read(), etag=response["ETag"])
        assert answer.missing
        raise Missing(f"{self._where(key)} does not exist.")

    def read_if_changed(self, key: str, etag: str) -> Stored | None:
        """Read an object whole, unless it is still the one whose `etag` was read: then one request without a body.

        Returns:
            None where it is unchanged.

        Raises:
            Missing: there is none.
        """
        with self._speaking_of(key) as answer:
            response = self._client.get_object(Bucket=self.bucket, Key=key, IfNoneMatch=etag)
            return Stored(content=response["Body"].read(), etag=response["ETag"])
        if answer.unchanged:
            return None
        raise Missing(f"{self._where(key)} does not exist.")

    def read_verified(self, key: str, sha256: str) -> bytes:
        """Read an object whose digest is known.

        Raises:
            Missing: there is none.
            Corrupted: its SHA-256 is another.
        """
        stored = self.read(key)
        if stored.sha256 != sha256:
            raise Corrupted(
                f"{self._where(key)} has SHA-256 {stored.sha256[:12]}..., but {sha256[:12]}... was recorded: "
                "it was damaged or replaced; restore it from a backup."
            )
        return stored.content

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        with self._speaking_of(key):
            self._client.head_object(Bucket=self.bucket, Key=key)
            return True
        return False

    def list(self, prefix: str) -> Keys:
        """All keys that begin with `prefix`, sorted."""
        return sorted(self.etags(prefix))

    def etags(self, prefix: str) -> dict[str, str]:
        """The etag of every object whose key begins with `prefix`, by key: an unchanged one need not be read again."""
        pages = self._pages(Prefix=prefix)
        return {item["Key"]: item["ETag"] for page in pages for item in page.get("Contents", ())}

    def list_folders(self, prefix: str) -> Keys:
        """The names between `prefix` and the next slash, sorted."""
        pages = self._pages(Prefix=prefix, Delimiter="/")
        folders = (item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ()))
        return sorted(folder.removeprefix(prefix).rstrip("/") for folder in folders)

    def create_bucket(self) -> None:
        """Make the bucket, unless it is there."""
        if self._bucket_exists():
            return
        with self._speaking_of(""):
            self._client.create_bucket(Bucket=self.bucket)

    def _bucket_exists(self) -> bool:
        with self._speaking_of(""):
            self._client.head_bucket(Bucket=self.bucket)
            return True
        return False

    def _pages(self, **query: str) -> Iterator[dict[str, Any]]:
        with self._speaking_of(query["Prefix"]):
            yield from self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, **query)

    def _put(self, key: str, content: bytes, **condition: str) -> None:
        checksum = base64.b64encode(hashlib.sha256(content).digest()).decode()
        self._client.put_object(
            Bucket=self.bucket, Key=key, Body=content, ChecksumSHA256=checksum, **condition
        )

    def _holds(self, key: str, content: bytes) -> bool:
        """Whether the object is exactly this: then a retried write had succeeded the first time."""
        try:
            return self.read(key).content == content
        except Missing:
            return False

    def _where(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    @contextmanager
    def _speaking_of(self, key: str) -> Iterator[_Answer]:
        """Turn botocore's errors into ours; a missing object or a failed condition only marks the answer."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
        from botocore.exceptions import ConnectionError as NoConnection

        answer = _Answer()
        try:
            yield answer
        except ClientError as error:
            answer.read(error.response)
            code = answer.code
            if code == "NoSuchBucket":
                raise StoreRefused(
                    f"The store at {self.endpoint} has no bucket {self.bucket}: run `remerge up`."
                ) from None
            if answer.missing or answer.conflict or answer.unchanged:
                return
            if code in _KEYS_REFUSED:
                raise AccessRefused(
                    f"The store at {self.endpoint} refused the keys ({code}) for {self._where(key)}: check "
                    "REMERGE_S3_ACCESS_KEY and REMERGE_S3_SECRET_KEY, or the stack's credentials.json."
                ) from None
            if code in _UNREACHABLE or answer.status >= 500:
                raise StackDown(f"The store at {self.endpoint} is not ready ({code}); try again.") from None
            if code == "BadDigest":
                raise Corrupted(
                    f"{self._where(key)} was damaged on its way to the store; try again."
                ) from None
            raise StoreRefused(f"The store refused {self._where(key)}: {answer.message} ({code}).") from None
        except (NoConnection, HTTPClientError, IncompleteReadError, OSError) as error:
            raise StackDown(
                f"The store at {self.endpoint} cannot be reached ({type(error).__name__}): "
                "run `remerge up`, or check REMERGE_S3_ENDPOINT."
            ) from None
        except BotoCoreError as error:
            raise StoreRefused(f"The store at {self.endpoint} could not be used: {error}") from None


class _Answer:
    """What the store said when it did not do as asked."""

    def __init__(self) -> None:
        self.code = ""
        self.message = ""
        self.status = 0
        self.retried = False

    def read(self, response: dict[str, Any]) -> None:
        error, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
        self.code = str(error.get("Code", ""))
        self.message = str(error.get("Message", "")).rstrip(".")
        self.status = int(metadata.get("HTTPStatusCode", 0))
        self.retried = metadata.get("RetryAttempts", 0) > 0

    @property
    def missing(self) -> bool:
        return self.status == 404

    @property
    def unchanged(self) -> bool:
        return self.status == 304

    @property
    def conflict(self) -> bool:
        return self.status in {409, 412}


def s3_client(connections: S3Access) -> Any:
    """A boto3 client with short time-outs and few retries.

    Checksums: every write here names its SHA-256, which the store compares with what arrived. botocore's own
    default (since 1.36) adds a CRC-32 in a trailer to every other request, which many S3 stores do not know;
    `when_required` leaves it out and loses nothing, on AWS neither.
    """
    import boto3
    import botocore.session
    from botocore.config import Config

    amazon = connections.s3_endpoint.rstrip("/").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    # The keys are given, so a profile that AWS_PROFILE names is not asked for, not even whether it exists.
    without_profile = botocore.session.Session(session_vars={"profile": (None, [], None, None)})
    return boto3.session.Session(botocore_session=without_profile).client(
        "s3",
        endpoint_url=connections.s3_endpoint,
        region_name=connections.s3_region,
        aws_access_key_id=connections.s3_access_key.get_secret_value(),
        aws_secret_access_key=connections.s3_secret_key.get_secret_value(),
        config=Config(
            connect_timeout=2,
            read_timeout=30,
            retries={"mode": "standard", "total_max_attempts": 3},
            s3={"addressing_style": "virtual" if amazon else "path"},
            request_checksum_calculation="when_required",
            proxies={} if urlsplit(connections.s3_endpoint).hostname in LOOPBACK else None,
        ),
    )
