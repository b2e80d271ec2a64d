"""Computed features of rows, kept on disk, so that a network that never changes runs once over them.

Features of private rows are private data. They lie in a folder of mode 0700, in files of mode 0600, and the folder is
as much inside the trust boundary as the private rows themselves: delete it where those must be deleted. File names
are keyed by a random number in the folder: a listing, in a backup for example, lets nobody test a guess of the rows.
"""

from __future__ import annotations

import hmac
import io
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from infra.canonical import keyed_digest
from tasks.data.image_cache import CacheUnusable, cache_folder
from tasks.whole_file import write_whole

_FOLDER = "frozen-features"
_KEY_BYTES = 32
_SEAL_BYTES = 32  # HMAC-SHA-256, before the array


def remembered(of: Callable[[bytes], str], network: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Features from the cache or, where they are not there or damaged, computed and kept.

    Args:
        of: the keyed digest of the rows, such as `Rows.digest`.
        network: a digest of everything else that the features depend on.

    Raises:
        CacheUnusable: the folder cannot be made or written.
    """
    folder = cache_folder() / _FOLDER
    try:
        key = _key(folder)
        file = folder / f"{keyed_digest(f'{network}:{of(key)}'.encode(), key)}.features"
        found = _read(file, key)
    except OSError as error:
        raise CacheUnusable.of(folder, error) from None
    if found is not None:
        return found
    computed = compute()
    try:
        _write(file, computed, key)
    except OSError as error:
        raise CacheUnusable.of(folder, error) from None
    return computed


def _key(folder: Path) -> bytes:
    """The folder's random key, made with the folder; whoever comes first decides it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    file = folder / "key"
    if not file.exists():
        with suppress(FileExistsError):  # another process was first
            write_whole(file, secrets.token_bytes(_KEY_BYTES), os.link)
    key = file.read_bytes()
    if len(key) != _KEY_BYTES:
        write_whole(file, secrets.token_bytes(_KEY_BYTES))
        key = file.read_bytes()
    return key


def _read(file: Path, key: bytes) -> np.ndarray | None:
    """None where the file is not there or not what was once written."""
    try:
        with file.open("rb") as opened:
            seal, content = opened.read(_SEAL_BYTES), opened.read()
    except FileNotFoundError:
        return None
    if not hmac.compare_digest(seal, hmac.digest(key, content, "sha256")):
        return None
    array: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
    return array


def _write(file: Path, features: np.ndarray, key: bytes) -> None:
    buffer = io.BytesIO()
    np.save(buffer, features, allow_pickle=False)
    content = buffer.getvalue()
    write_whole(file, hmac.digest(key, content, "sha256") + content)
