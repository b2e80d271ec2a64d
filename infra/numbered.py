"""Numbered, append-only documents: the one mechanism under policies, portfolio manifests and the ledger.

A series is a folder of documents 00000001.json, 00000002.json, ... Each is created by a conditional write, so
two writers can never take the same number, nothing is ever overwritten, and there are no gaps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from accounting.errors import InvalidInput
from infra.documents import DocumentT
from infra.object_store import AlreadyExists, Corrupted, ObjectStore
from infra.settings import StackDown

_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Numbered(Generic[DocumentT]):
    """A document with its number and the digest of the bytes that are stored."""

    serial: int
    document: DocumentT
    sha256: str
    etag: str


class NumberedDocuments(Generic[DocumentT]):
    """All series of one kind of document.

    Args:
        root: the folder, for example "policies".
        series_field: the document's field that repeats the name of its series, for example "region".
    """

    def __init__(self, store: ObjectStore, kind: type[DocumentT], *, root: str, series_field: str) -> None:
        self.store = store
        self.kind = kind
        self.root = root
        self.series_field = series_field

    def key(self, series: str, serial: int) -> str:
        return f"{self.root}/{series}/{serial:08d}.json"

    def series(self) -> list[str]:
        """The names of all series, sorted."""
        return self.store.list_folders(f"{self.root}/")

    def last_serial(self, series: str) -> int:
        """The newest number; 0 for a series that does not exist; raises as `etags`."""
        return len(self.etags(series))

    def etags(self, series: str) -> list[str]:
        """The etags of all documents of a series, by number, from one listing.

        Raises:
            Corrupted: a number is missing or an object is named otherwise, so somebody has deleted or added.
        """
        prefix = f"{self.root}/{series}/"
        found = sorted(self.store.etags(prefix).items())
        for serial, (key, _) in enumerate(found, start=1):
            if key != self.key(series, serial):
                raise Corrupted(
                    f"s3://{self.store.bucket}/{prefix} should hold {serial:08d}.json next, but holds "
                    f"{key.removeprefix(prefix)}: a document was removed or added by hand; restore it."
                )
        return [etag for _, etag in found]

    def read(self, series: str, serial: int) -> Numbered[DocumentT]:
        """Read one document and check that it is the one its key says.

        Raises:
            Missing: there is no such number.
            InvalidInput: the stored document is not valid.
            Corrupted: it is valid, but another document's.
        """
        key = self.key(series, serial)
        stored = self.store.read(key)
        content = stored.content
        where = f"s3://{self.store.bucket}/{key}"
        document = self.kind.from_content(content, where)
        inside = (getattr(document, self.series_field), document.serial)  # type: ignore[attr-defined]
        if inside != (series, serial):
            raise Corrupted(f"{where} holds number {inside[1]} of {inside[0]}: restore it from a backup.")
        return Numbered(serial, document, stored.sha256, stored.etag)

    def newest(self, series: str) -> Numbered[DocumentT] | None:
        """The document with the highest number, or None for a series that does not exist."""
        serial = self.last_serial(series)
        return self.read(series, serial) if serial else None

    def append(self, series: str, build: Callable[[int, Numbered[DocumentT] | None], DocumentT]) -> DocumentT:
        """Add a document under the next number.

        Args:
            build: called with the next number and the newest document. It returns the document to add, or one
                that is stored already (with a lower number), and then nothing is added. It is called again
                when another writer was faster, so it must decide from its arguments and fresh reads alone.

        Raises:
            StackDown: others kept being faster, a hundred times over; trying again helps.
            and whatever `build` raises.
        """
        for attempt in range(_ATTEMPTS):
            newest = self.newest(series)
            serial = newest.serial + 1 if newest else 1
            document = build(serial, newest)
            if document.serial != serial:  # type: ignore[attr-defined]
                return document
            try:
                self.store.create(self.key(series, serial), document.content())
            except AlreadyExists:
                time.sleep(random.uniform(0, 0.01 * min(attempt + 1, 10)))
                continue
            return document
        raise StackDown(f"Too many writers add to {self.root}/{series} at once; try again.")


def parse_reference(reference: str, what: str) -> tuple[str, int | None]:
    """Split `name@7` or `name@latest` (None).

    Raises:
        InvalidInput: it is neither.
    """
    name, at, serial = reference.partition("@")
    if name and at and serial == "latest":
        return name, None
    if name and at and serial.isascii() and serial.isdigit() and int(serial) > 0:
        return name, int(serial)
    raise InvalidInput(f"{what} must be written name@number or name@latest, but {reference!r} was given.")
