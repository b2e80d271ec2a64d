"""What a serving process reads: the current release of a region, verified whole, swapped whole.

    with load("eu") as production:
        release = production.release          # take it once per request
        answer(release.tensors(), release.certificate)

Every digest is checked on the way in: the pointer names its release's manifest by digest, and the manifest names
each file by digest. Releases never change once they are sealed, so a pointer that is switched between the reading
of the pointer and of the files does no harm: the release just left behind is still whole, and the next look at the
pointer finds the new one.

`Production.release` is one reference to one frozen value. Readers in any number of threads see the old release or
the new one, never a mixture, as long as each takes `production.release` once and then works with what it took.

A look at an unchanged pointer is one conditional request that is answered without a body. A new release that cannot
be read and verified whole, or a store that does not answer, leaves the old release in place: the problem is logged
and kept in `Production.problem`, and the next look tries again. While a new release is taken in, both are in memory.

What this does not do: it does not ask whether the release still satisfies its region's current policy, and goes on
serving one that no longer does. `tasks/compliance.py` computes that from the policy, `remerge status` shows it, and
whoever must stop serving a non-compliant release has to ask there.

The process needs no more than the right to get objects under `regions/` and `releases/` of the production bucket.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from accounting.errors import InvalidInput, RemergeError
from infra.canonical import strict_json
from infra.documents import Draw, Pointer, ReleaseManifest
from infra.object_store import Corrupted, Missing, ObjectStore
from infra.releases import CERTIFICATE, DRAW, MODEL, ReleaseStore, release_key
from infra.settings import Settings, s3_access
from infra.strict_document import NAME
from infra.tensor_file import FLOATS, NotSafetensors, TensorPlace, read_layout, widened

if TYPE_CHECKING:
    import numpy as np

    from accounting.certificate import Certificate

POLL_SECONDS = 5.0
SLOWEST_POLL_SECONDS = 60.0  # while looks keep failing, unless the usual interval is longer
CLOSE_SECONDS = 10.0

_log = logging.getLogger(__name__)


class NotPromoted(RemergeError):
    """The region has no release yet."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Release:
    """One release, whole: its files belong together and have the digests that production's pointer leads to.

    Equal only to itself, so it can key a cache of what a serving process builds from it.
    """

    pointer: Pointer
    manifest: ReleaseManifest
    files: Mapping[str, bytes]  # by name, as in the manifest
    certificate: Certificate
    draw: Draw | None  # of a random selection or a mixture
    layout: Mapping[str, TensorPlace]  # of the model's tensors

    @property
    def release_id(self) -> str:
        return self.manifest.release_id

    @property
    def model(self) -> bytes:
        """The model's parameters, a safetensors file."""
        return self.files[MODEL]

    def tensors(self) -> dict[str, np.ndarray]:
        """The parameters as read-only numpy arrays on the release's own bytes; bfloat16 is widened to float32."""
        import numpy as np

        whole = memoryview(self.model)
        arrays = {}
        for name, place in self.layout.items():
            content = whole[place.start : place.start + place.length]
            array = (
                widened(content, place.dtype)
                if place.dtype in FLOATS
                else np.frombuffer(content, _NUMPY_NAMES[place.dtype])
            )
            array.flags.writeable = False
            arrays[name] = array.reshape(place.shape)
        return arrays

    def torch_tensors(self) -> dict[str, Any]:
        """The parameters as torch tensors in memory of their own, for `load_state_dict`."""
        from safetensors.torch import load as load_tensors

        return load_tensors(self.model)


_NUMPY_NAMES = {
    "BOOL": "?",
    "U8": "<u1",
    "I8": "<i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "C64": "<c8",
}


def load(
    region: str,
    *,
    settings: Settings | None = None,
    store: ObjectStore | None = None,
    poll_seconds: float | None = POLL_SECONDS,
) -> Production:
    """Read what production serves in a region, and keep it current.

    Args:
        settings: where the production bucket is; by default what the environment says. A serving process elsewhere
            needs REMERGE_S3_ENDPOINT, REMERGE_S3_ACCESS_KEY and REMERGE_S3_SECRET_KEY and nothing else.
        store: the production bucket itself, instead of `settings`.
        poll_seconds: how often a thread looks at the pointer, or None for no thread: call `refresh` then. A server
            that forks its workers must load after the fork, for threads do not survive it.

    Raises:
        NotPromoted: the region has no release yet.
        infra.settings.StackDown: the store cannot be reached.
        RemergeError: the release cannot be read and verified; the sentence says what to do.
    """
    if poll_seconds is not None and not 0 < poll_seconds < float("inf"):
        raise InvalidInput(
            f"poll_seconds must be positive and finite, or None, but {poll_seconds!r} was given."
        )
    if not re.fullmatch(NAME, region):
        raise InvalidInput(
            f"{region!r} is no region's name: those are lower-case letters, digits and hyphens."
        )
    production = Production(region, store or ObjectStore(s3_access(settings)))
    if poll_seconds is not None:
        production.start(poll_seconds)
    return production


class Production:
    """The current release of a region, made by `load`. Safe to share between threads.

    Attributes:
        region: whose release it is.
    """

    def __init__(self, region: str, store: ObjectStore) -> None:
        self.region = region
        self._releases = ReleaseStore(store)
        self._looking = threading.Lock()  # one look at a time
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        found = self._releases.read_pointer(region)
        if found is None:
            raise NotPromoted(
                f"Region {region} has no release yet; see `remerge status`, then load it again."
            )
        pointer, self._etag = found
        self._release = read_release(self._releases, pointer)
        self._confirmed_at = datetime.now(UTC)
        self._problem: str | None = None

    @property
    def release(self) -> Release:
        """The newest release that could be read and verified whole. Take it once per request."""
        return self._release

    @property
    def problem(self) -> str | None:
        """Why the last look could not confirm or take in what production serves, in a sentence; None if it could."""
        return self._problem

    @property
    def confirmed_at(self) -> datetime:
        """When the store last confirmed that `release` is what production serves: raise an alarm if this is old."""
        return self._confirmed_at

    def refresh(self) -> bool:
        """Look at the pointer, and take in the release that it names if it is another.

        Returns:
            Whether `release` is another one now. A problem is no error here: see `problem`.
        """
        with self._looking:
            try:
                switched = self._look()
            except RemergeError as error:
                self._note(error.message)
                return False
            except Exception as error:  # noqa: BLE001 - nothing may end the thread or reach the serving path
                self._note(
                    f"The release of {self.region} could not be read: {error!r}. Report this as a bug."
                )
                return False
            self._note(None)
            self._confirmed_at = datetime.now(UTC)
            return switched

    def start(self, poll_seconds: float = POLL_SECONDS) -> None:
        """Have a thread call `refresh` every so many seconds; less often while it fails."""
        if self._thread is not None:
            raise InvalidInput(f"The pointer of {self.region} is being polled already; close it first.")
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._poll, args=(poll_seconds, self._stop), name=f"production-{self.region}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. `release` stays what it is. A look under way is waited for, but not for ever."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _poll(self, seconds: float, stop: threading.Event) -> None:
        wait = seconds
        while not stop.wait(wait):
            self.refresh()
            wait = seconds if self._problem is None else min(2 * wait, max(seconds, SLOWEST_POLL_SECONDS))

    def _look(self) -> bool:
        found = self._releases.poll_pointer(self.region, self._etag)
        if found is None:
            return False
        pointer, etag = found
        live = self._release
        known = (live.pointer.release_id, live.pointer.release_manifest_digest)
        if (pointer.release_id, pointer.release_manifest_digest) == known:  # and so all its files
            self._release, switched = replace(live, pointer=pointer), False
        else:
            self._release, switched = read_release(self._releases, pointer), True
        self._etag = etag  # last: until the release is in, every look finds the pointer changed
        if switched:
            _log.info("Region %s is served release %s now.", self.region, pointer.release_id[:12])
        return switched

    def _note(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            _log.warning("Still serving release %s: %s", self._release.release_id[:12], problem)
        elif problem is None and self._problem is not None:
            _log.info("Region %s is being followed again.", self.region)
        self._problem = problem


def read_release(releases: ReleaseStore, pointer: Pointer) -> Release:
    """The release that a pointer names, verified whole.

    Raises:
        infra.object_store.Missing, Corrupted: an object is lost, or not what its digest says.
        InvalidInput: a document is not what its schema says.
    """
    from accounting.certificate import Certificate

    manifest = releases.read_manifest(pointer.release_id, sha256=pointer.release_manifest_digest)
    if (manifest.region, manifest.policy_serial) != (pointer.region, pointer.policy_serial):
        raise Corrupted(
            f"The pointer of region {pointer.region} (policy {pointer.policy_serial}) leads to release "
            f"{manifest.release_id[:12]} of region {manifest.region} (policy {manifest.policy_serial}): switch the "
            "region to a release of its own."
        )

    def where(name: str) -> str:
        return f"s3://{releases.store.bucket}/{release_key(manifest.release_id, name)}"

    for name in (MODEL, CERTIFICATE):
        if name not in manifest.files:
            raise Missing(f"Release {manifest.release_id[:12]} has no {name}; roll the region back.")
    files = {
        name: releases.read_file(manifest.release_id, name, sha256) for name, sha256 in manifest.files.items()
    }
    try:
        certificate = Certificate.from_dict(strict_json(files[CERTIFICATE]))
    except ValueError:
        raise InvalidInput(f"{where(CERTIFICATE)} is not JSON; roll the region back.") from None
    draw = Draw.from_content(files[DRAW], where(DRAW)) if DRAW in files else None
    for name, found in ((CERTIFICATE, certificate), (DRAW, draw)):
        if found is not None and found.release_id != manifest.release_id:
            raise Corrupted(f"{where(name)} belongs to another release; roll the region back.")
    if (certificate.region, certificate.policy_digest) != (manifest.region, manifest.policy_digest):
        raise Corrupted(f"{where(CERTIFICATE)} belongs to another region or policy; roll the region back.")
    model = files[MODEL]
    try:
        layout = read_layout(lambda start, length: model[start : start + length], len(model))
    except NotSafetensors as error:
        raise InvalidInput(f"{where(MODEL)} cannot be read ({error.reason}); roll the region back.") from None
    return Release(
        pointer=pointer,
        manifest=manifest,
        files=MappingProxyType(files),
        certificate=certificate,
        draw=draw,
        layout=MappingProxyType(layout),
    )
