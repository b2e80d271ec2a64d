"""Writing a small file so that it is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, content: bytes, put: Callable[[str, Path], None] = os.replace) -> None:
    """Write beside the place, flush to the disk and put it there; readable by its owner alone.

    Args:
        put: `os.replace`, or `os.link`, which leaves a file that is there already.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:  # mode 0600
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            put(file.name, path)
        except FileExistsError:  # linked by another process first
            pass
        finally:
            Path(file.name).unlink(missing_ok=True)
