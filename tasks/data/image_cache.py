"""The cache folder: published data sets in three parts, as idx files whose checksums are verified at every load.

Private and public parts are files of their own, so that public rows can be had where private ones do not exist.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accounting.errors import InvalidInput, RemergeError
from tasks.data.idx import idx_header, read_idx
from tasks.data.image_sets import PARTS, ImageSet, Pictures
from tasks.whole_file import whole_file


class CacheUnusable(RemergeError):
    """The cache folder cannot be made or written."""

    @classmethod
    def of(cls, folder: Path, error: OSError) -> CacheUnusable:
        return cls(
            f"The cache folder {folder} cannot be used ({error.strerror}): let REMERGE_CACHE name a folder that you "
            "can write to."
        )


def cache_folder() -> Path:
    """Where fetched data lie: REMERGE_CACHE, or `~/.cache/remerge`."""
    from infra.settings import Settings

    return Settings().cache.expanduser().absolute()


def files_of(one: ImageSet, part: str, cache: Path) -> tuple[Path, Path]:
    """Images and labels of a part."""
    name = part.replace("_", "-")
    return cache / one.name / f"{name}-images.idx", cache / one.name / f"{name}-labels.idx"


def cached_bytes(one: ImageSet, cache: Path) -> int | None:
    """How much a data set takes in the cache; None where not all of it is there."""
    files = [file for part in PARTS for file in files_of(one, part, cache)]
    return sum(file.stat().st_size for file in files) if all(file.is_file() for file in files) else None


def load_part(one: ImageSet, part: str, cache: Path) -> Pictures | None:
    """A part from the cache; None where it is not there, or not what was once stored."""
    images, labels = files_of(one, part, cache)
    if not (images.is_file() and labels.is_file()):
        return None
    try:
        found = Pictures(read_idx(images), read_idx(labels))
    except InvalidInput:
        return None
    return found if found.checksums() == one.parts[part] else None


def store(one: ImageSet, train: Pictures, test: Pictures, cache: Path) -> None:
    """Split and write all parts; each file appears whole or not at all.

    Raises:
        CacheUnusable: the folder cannot be written.
    """
    folder = cache / one.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part, pictures in one.split(train, test):
            for path, array in zip(
                files_of(one, part, cache), (pictures.images, pictures.labels), strict=True
            ):
                with whole_file(path, mode=0o644) as file:  # everybody may read what is public anyway
                    file.write(idx_header(array))
                    file.write(array.data)
    except OSError as error:
        raise CacheUnusable.of(folder, error) from None


@contextmanager
def one_at_a_time(one: ImageSet, cache: Path) -> Iterator[None]:
    """Wait for whoever else fetches the same data set into the same cache."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f".{one.name}.lock").open("w")
    except OSError as error:
        raise CacheUnusable.of(cache, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
