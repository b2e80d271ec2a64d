"""Releases and what production serves: draws, sealed releases, pointers, attempts."""

from __future__ import annotations

from contextlib import suppress

from infra.canonical import sha256_hex
from infra.documents import Attempt, DocumentT, Draw, Pointer, ReleaseManifest
from infra.object_store import AlreadyExists, Changed, Corrupted, Missing, ObjectStore, Stored

MODEL = "model.safetensors"
CERTIFICATE = "certificate.json"
DRAW = "draw.json"
MANIFEST = "manifest.json"


class ReleaseStore:
    """releases/<release_id>/ and regions/<region>/.

    A release is sealed by its manifest, which is written last; from then on its files never change. The
    pointer of a region says which sealed release production serves there.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    # A release

    def write_file(self, release_id: str, name: str, content: bytes) -> str:
        """Write a file of a release that is not sealed yet; return its SHA-256.

        Raises:
            Changed: the release is sealed with another content of this file; nothing was written.
        """
        sha256 = sha256_hex(content)
        manifest = self.find_manifest(release_id)
        if manifest is None:
            self.store.put(release_key(release_id, name), content)
        elif manifest.files.get(name) != sha256:
            raise Changed(f"Release {release_id[:12]} is sealed with another {name}; nothing was written.")
        return sha256

    def read_file(self, release_id: str, name: str, sha256: str) -> bytes:
        """Read a file of a release and verify its digest.

        Raises:
            Missing, Corrupted: the store has lost or changed it.
        """
        return self.store.read_verified(release_key(release_id, name), sha256)

    def create_draw(self, draw: Draw) -> Draw:
        """Store the draw, or read back the one that this release has already: a draw is made once.

        Raises:
            InvalidInput, Corrupted: what is stored is not a draw, or another release's.
        """
        with suppress(AlreadyExists):
            self.store.create(release_key(draw.release_id, DRAW), draw.content())
        return self._release_document(Draw, draw.release_id, DRAW)

    def read_draw(self, release_id: str) -> Draw | None:
        """The stored draw, or None where none was made.

        Raises:
            InvalidInput, Corrupted: what is stored is not a draw, or another release's.
        """
        try:
            return self._release_document(Draw, release_id, DRAW)
        except Missing:
            return None

    def create_manifest(self, manifest: ReleaseManifest) -> ReleaseManifest:
        """Seal a release by its manifest, or read back the one it has: the first seal counts.

        Raises:
            InvalidInput, Corrupted: what is stored is not a manifest, or another release's.
        """
        with suppress(AlreadyExists):
            self.store.create(release_key(manifest.release_id, MANIFEST), manifest.content())
        return self.read_manifest(manifest.release_id)

    def read_manifest(self, release_id: str, *, sha256: str | None = None) -> ReleaseManifest:
        """The manifest of a sealed release.

        Args:
            sha256: its digest, where somebody (a pointer) has named it.

        Raises:
            Missing: the release is not sealed.
            InvalidInput, Corrupted: what is stored is no manifest, another release's, or of another digest.
        """
        return self._release_document(ReleaseManifest, release_id, MANIFEST, sha256)

    def find_manifest(self, release_id: str) -> ReleaseManifest | None:
        """As `read_manifest`, but None for a release that is not sealed."""
        try:
            return self.read_manifest(release_id)
        except Missing:
            return None

    # What production serves

    def read_pointer(self, region: str) -> tuple[Pointer, str] | None:
        """The pointer of a region and its etag for `switch`; None where nothing was ever promoted.

        Raises:
            InvalidInput, Corrupted: what is stored is not a pointer, or another region's.
        """
        try:
            stored = self.store.read(pointer_key(region))
        except Missing:
            return None
        return self._pointer_of(region, stored), stored.etag

    def poll_pointer(self, region: str, etag: str) -> tuple[Pointer, str] | None:
        """As `read_pointer`, but None while the pointer is still the one of this etag: one request without a body.

        Raises:
            Missing: the region has no pointer any more.
            InvalidInput, Corrupted: as for `read_pointer`.
        """
        stored = self.store.read_if_changed(pointer_key(region), etag)
        return None if stored is None else (self._pointer_of(region, stored), stored.etag)

    def _pointer_of(self, region: str, stored: Stored) -> Pointer:
        key = pointer_key(region)
        pointer = Pointer.from_content(stored.content, self._where(key))
        if pointer.region != region:
            raise Corrupted(f"{self._where(key)} is the pointer of region {pointer.region}: restore it.")
        return pointer

    def switch(self, pointer: Pointer, etag: str | None) -> None:
        """Point a region at a release: the one moment at which production changes.

        Args:
            pointer: what to serve from now on; its release must be sealed.
            etag: of the pointer that the decision was made on; None where there was none.

        Raises:
            Changed: somebody else switched the pointer meanwhile; nothing was written.
            Missing, Corrupted: the release is not sealed, or is another; nothing was written.
        """
        self.read_manifest(pointer.release_id, sha256=pointer.release_manifest_digest)
        key = pointer_key(pointer.region)
        if etag is not None:
            self.store.replace(key, pointer.content(), etag)
            return
        try:
            self.store.create(key, pointer.content())
        except AlreadyExists:
            raise Changed(
                f"Region {pointer.region} got its first release meanwhile; "
                "read the pointer again and decide anew."
            ) from None

    # How attempts ended

    def write_attempt(self, attempt: Attempt) -> None:
        """Note how the last attempt at a region's policy ended, over the note before it."""
        self.store.put(attempt_key(attempt.region), attempt.content())

    def read_attempt(self, region: str) -> Attempt | None:
        """The last attempt's note, or None.

        Raises:
            InvalidInput: what is stored is not one.
        """
        key = attempt_key(region)
        try:
            return Attempt.from_content(self.store.read(key).content, self._where(key))
        except Missing:
            return None

    def _release_document(
        self, kind: type[DocumentT], release_id: str, name: str, sha256: str | None = None
    ) -> DocumentT:
        key = release_key(release_id, name)
        content = self.store.read_verified(key, sha256) if sha256 else self.store.read(key).content
        document = kind.from_content(content, self._where(key))
        if document.release_id != release_id:  # type: ignore[attr-defined]
            raise Corrupted(f"{self._where(key)} belongs to another release: restore it from a backup.")
        return document

    def _where(self, key: str) -> str:
        return f"s3://{self.store.bucket}/{key}"


def release_key(release_id: str, name: str) -> str:
    return f"releases/{release_id}/{name}"


def pointer_key(region: str) -> str:
    return f"regions/{region}/current.json"


def attempt_key(region: str) -> str:
    return f"regions/{region}/last_attempt.json"
