"""Writing a file so that it is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(
    path: Path, *, mode: int = 0o600, put: Callable[[str, Path], None] = os.replace
) -> Iterator[IO[bytes]]:
    """A file beside the place, flushed to the disk and put there at the end, and only without an error.

    Args:
        mode: who may read it; by default its owner alone.
        put: `os.replace`, or `os.link`, which raises FileExistsError where there is a file already.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            put(file.name, path)
        finally:
            Path(file.name).unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, put: Callable[[str, Path], None] = os.replace) -> None:
    """`whole_file` with this content, for its owner alone."""
    with whole_file(path, put=put) as file:
        file.write(content)
