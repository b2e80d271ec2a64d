"""Progress of a long fetch on standard error: a bar on a terminal, plain lines elsewhere (a worker's log)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    def reached(self, size: int) -> None:
        """So many bytes are there."""

    def say(self, text: str) -> None:
        """What happens next."""


@contextmanager
def reporting(what: str, size: int) -> Iterator[Report]:
    """Show progress of fetching `what`, about `size` bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console.print, what, size)
        console.print(f"Fetched {what}.", highlight=False, soft_wrap=True, markup=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, progress.add_task(what, total=size), what, size)


class _Bar:
    def __init__(self, progress, task, what: str, size: int) -> None:  # type: ignore[no-untyped-def]
        self._progress, self._task, self._what, self._size = progress, task, what, size

    def reached(self, size: int) -> None:
        self._progress.update(self._task, completed=min(size, self._size))

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=f"{self._what}: {text}", completed=self._size)


class _Lines:
    def __init__(self, write, what: str, size: int) -> None:  # type: ignore[no-untyped-def]
        self._write, self._what, self._size = write, what, size
        self._tenths = 0
        self.say(f"fetching about {size / 1e6:.0f} MB")

    def reached(self, size: int) -> None:
        tenths = min(10, 10 * size // self._size)
        if tenths >= self._tenths + 3:  # a few lines, however slow the line
            self._tenths = tenths
            self.say(f"{tenths * 10} %")

    def say(self, text: str) -> None:
        self._write(f"{self._what}: {text}", highlight=False, soft_wrap=True, markup=False)
