"""The ledger: everything ever released from a data lineage, append-only and chained by digests."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from accounting.errors import InvalidInput
from infra.documents import LedgerEntry
from infra.numbered import Numbered, NumberedDocuments
from infra.object_store import Changed, Corrupted, ObjectStore

_AT_ONCE = 10  # as many connections as boto3 keeps open


class LedgerStore:
    """ledger/<lineage>/<serial>.json. Each entry holds the digest of the one before it.

    A changed or removed entry breaks the chain for all that follow; only the newest entries can be cut off
    unseen, so keep versioned copies of the newest ones.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.documents = NumberedDocuments(store, LedgerEntry, root="ledger", series_field="lineage")
        self._read: dict[tuple[str, int], Numbered[LedgerEntry]] = {}  # entries never change: read once

    def lineages(self) -> list[str]:
        """Every lineage that has an entry, sorted."""
        return self.documents.series()

    def entries(self, lineage: str) -> list[LedgerEntry]:
        """All entries, oldest first, after checking the whole chain.

        Raises:
            Corrupted: naming the first entry that is missing, or that does not follow from the one before it.
            InvalidInput: an entry is not valid.
        """
        return [numbered.document for numbered in self._chain(lineage)]

    def find(self, lineage: str, release_id: str, kind: str) -> LedgerEntry | None:
        """The newest entry of this kind for a release, or None."""
        return _newest_match(self.entries(lineage), release_id=release_id, kind=kind)

    def append(self, fields: Mapping[str, Any]) -> LedgerEntry:
        """Add an entry.

        Args:
            fields: those of an entry without `serial` and `previous_digest`; `written_at` is now when it is
                left out.

        Raises:
            InvalidInput: the first field at fault; nothing was stored.
        """
        fields = _with_time(fields)

        def build(serial: int, newest: Numbered[LedgerEntry] | None) -> LedgerEntry:
            return _entry(fields, serial, newest)

        return self.documents.append(_entry(fields, 1, None).lineage, build)

    def append_once(
        self, fields: Mapping[str, Any], *, after: int | None = None, again: bool = False
    ) -> LedgerEntry:
        """Add an entry unless the lineage has one of the same release, kind and certificate: then that one.

        What was reserved or consulted may be followed by the same with other outcomes: both count then.

        Args:
            after: the number of entries that the decision to add it was made on; None: any.
            again: add one without a certificate also where the newest of its kind has the same outcomes.

        Raises:
            InvalidInput: the first field at fault, or the release is in the ledger with other outcomes; nothing was
                stored.
            Corrupted: the chain is broken.
            Changed: the ledger has grown since `after` entries, or the release's certificate counts another past
                (another promoter was faster); nothing was stored.
        """
        fields = _with_time(fields)
        wanted = _entry(fields, 1, None)

        def build(serial: int, newest: Numbered[LedgerEntry] | None) -> LedgerEntry:
            # An entry after `newest` needs no look: taking `serial` fails then, and this is called again.
            own = [entry for entry in self.entries(wanted.lineage) if entry.release_id == wanted.release_id]
            certified = [entry for entry in own if entry.certificate_digest is not None]
            if certified and certified[0].counted != wanted.counted:
                raise Changed(
                    f"Release {wanted.release_id[:12]} is in the ledger of {wanted.lineage} already, after another "
                    "past; decide anew."
                )
            if certified and certified[0].outcomes != wanted.outcomes:
                raise InvalidInput(
                    f"Release {wanted.release_id[:12]} is in the ledger of {wanted.lineage} (entry "
                    f"{certified[0].serial}) with another plan, of another version of remerge perhaps; set the policy "
                    "again with `--new`."
                )
            same = _newest_match(own, kind=wanted.kind, certificate_digest=wanted.certificate_digest)
            if same and wanted.certificate_digest is None and (again or same.outcomes != wanted.outcomes):
                same = None
            if same and same.serial < serial:
                return same
            if after is not None and serial != after + 1:
                raise Changed(f"The ledger of {wanted.lineage} has grown meanwhile; decide anew.")
            return _entry(fields, serial, newest)

        return self.documents.append(wanted.lineage, build)

    def _chain(self, lineage: str) -> list[Numbered[LedgerEntry]]:
        etags = dict(enumerate(self.documents.etags(lineage), start=1))
        self._fetch(lineage, etags)
        chain: list[Numbered[LedgerEntry]] = []
        for serial in etags:
            numbered = self._read[lineage, serial]
            expected = chain[-1].sha256 if chain else None
            if numbered.document.previous_digest != expected:
                key = self.documents.key(lineage, serial)
                raise Corrupted(
                    f"The ledger of {lineage} is broken at {key}: the entry before it is not the one "
                    "that it was written after. Restore the ledger from a backup before the next release."
                )
            chain.append(numbered)
        return chain

    def _fetch(self, lineage: str, etags: Mapping[int, str]) -> None:
        """Read what is not known yet, several at a time: of a far store it is the answers that take the time."""

        def read(serial: int) -> None:
            self._read[lineage, serial] = self.documents.read(lineage, serial)

        known = {serial: self._read.get((lineage, serial)) for serial in etags}
        missing = [n for n, found in known.items() if found is None or found.etag != etags[n]]
        if len(missing) < 2:
            for serial in missing:
                read(serial)
            return
        with ThreadPoolExecutor(min(_AT_ONCE, len(missing))) as pool:
            list(pool.map(read, missing))


def _with_time(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"written_at": datetime.now(UTC).isoformat(), **fields}


def _entry(fields: Mapping[str, Any], serial: int, newest: Numbered[LedgerEntry] | None) -> LedgerEntry:
    previous = newest.sha256 if newest else None
    return LedgerEntry.from_fields({**fields, "serial": serial, "previous_digest": previous}, "ledger entry")


def _newest_match(entries: list[LedgerEntry], **wanted: str | None) -> LedgerEntry | None:
    for entry in reversed(entries):
        if all(getattr(entry, name) == value for name, value in wanted.items()):
            return entry
    return None
