"""Rows of a data set, in memory: what a loader returns and what training gets."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from infra.canonical import canonical_json

BLOCK = 2**20  # numbers worked on at once, so that no whole copy of a large data set is made on the way


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one split. Their values are never part of a repr, so that they do not end up in a log."""

    features: np.ndarray = field(
        repr=False
    )  # shape (rows, ...), float32; images: (rows, channels, height, width)
    labels: np.ndarray = field(repr=False)  # shape (rows,), int64
    # A loader may say so: nobody else uses these arrays, so they may be changed instead of copied.
    handed_over: bool = field(default=False, repr=False)
    # `record_digests` of the records as they were before they were prepared in a way that another loader, or this one
    # with other arguments, may not share: so that a record is known again in another task. None: nothing to add.
    records: frozenset[bytes] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.labels)

    def content(self) -> bytes:
        """What a digest of these rows covers: shape, features and labels, in a fixed byte order."""
        return b"".join(self._pieces())

    def digest(self, key: bytes | None = None) -> str:
        """SHA-256 of the content, or with a key its HMAC-SHA-256; without a second copy of the rows in memory."""
        running = hashlib.sha256() if key is None else hmac.new(key, digestmod=hashlib.sha256)
        for piece in self._pieces():
            running.update(piece)
        return running.hexdigest()

    def _pieces(self) -> Iterator[bytes]:
        yield canonical_json(list(self.features.shape))
        for block in blocks(self.features):
            yield self.features[block].astype("<f4").tobytes()
        yield self.labels.astype("<i8").tobytes()


def record_digests(records: np.ndarray) -> frozenset[bytes]:
    """Digests of the exact bytes of each row, 16 bytes each: equal for equal rows, and but for a miracle no others."""
    return frozenset(
        hashlib.blake2b(memoryview(np.ascontiguousarray(row)).cast("B"), digest_size=16).digest()
        for row in records
    )


def blocks(features: np.ndarray) -> Iterator[slice]:
    """Consecutive slices of rows that hold about BLOCK numbers each."""
    rows = max(1, BLOCK // max(1, features[:1].size))
    for start in range(0, len(features), rows):
        yield slice(start, start + rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforced:
    """What `load_splits` made sure of, for every data set that it lets through."""

    feature_radius: float | None  # R: the L2 norm of each row is at most this; None: rows were not projected
    n_max: int  # the number of private rows is at most this, in both neighbours
    neighboring_relation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """A data set in three parts."""

    private: Rows | None = field(repr=False)  # None where private rows were not asked for
    public_train: Rows
    public_gate: Rows  # held out: only ever used to check a finished model
    classes: int
    split_rule: str  # the rule in words, recorded in the portfolio manifest
    enforced: Enforced | None = None  # set by load_splits only; a loader leaves it out
