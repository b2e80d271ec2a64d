"""The idx format of MNIST: a magic number, the lengths of the dimensions, then the bytes of the array."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from accounting.errors import InvalidInput

_BYTES = 0x08  # the type code of unsigned bytes, the only one that these data sets use


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array in a file, read-only; a name that ends in `.gz` is decompressed.

    Raises:
        InvalidInput: it cannot be read, or is not whole.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is not a whole gzip file"
        raise InvalidInput(f"{path} cannot be read: {reason}.") from None
    damaged = InvalidInput(f"{path} is not a whole idx file of bytes; fetch or unpack it again.")
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _BYTES:
        raise damaged
    start = 4 + 4 * content[3]
    if content[3] == 0 or len(content) < start:
        raise damaged
    shape = tuple(int(length) for length in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != math.prod(shape):
        raise damaged
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def idx_header(array: np.ndarray) -> bytes:
    """What stands before the bytes of a uint8 array in an idx file."""
    return bytes([0, 0, _BYTES, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()


def idx_digest(array: np.ndarray) -> str:
    """SHA-256 of the idx file that holds a uint8 array."""
    running = hashlib.sha256(idx_header(array))
    running.update(np.ascontiguousarray(array).data)
    return running.hexdigest()
