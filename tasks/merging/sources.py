"""Models to be merged: where their tensors lie, in memory or in files, and whether they fit together.

Files are read with plain reads: pages of a memory map count as this process's memory, and a file that shrinks under
a map ends the process.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from accounting.errors import IncompatibleCandidates, InvalidInput
from infra.tensor_file import NotSafetensors, Read, TensorPlace, read_layout


class Source(Protocol):
    """A candidate's model, the public start, or a candidate's statistics."""

    name: str
    called: str  # as the subject of a sentence, "The model of candidate a"
    remedy: str  # what to do if it is damaged, "train it again"
    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]

    def piece(self, start: int, buffer: memoryview) -> memoryview:
        """As many bytes of the file as the buffer has, perhaps in the buffer."""


class _Titled:
    def __init__(self, name: str, called: str | None, remedy: str) -> None:
        self.name = name
        self.called = called or f"The model of candidate {name}"
        self.remedy = remedy
        self.tensors: dict[str, TensorPlace] = {}
        self.metadata: dict[str, str] = {}

    def _read_layout(self, read: Read, size: int) -> None:
        try:
            self.tensors = read_layout(read, size)
            self.metadata = _metadata(read)
        except NotSafetensors as error:
            raise self._unreadable(error.reason) from None

    def _unreadable(self, reason: str) -> IncompatibleCandidates:
        return IncompatibleCandidates(f"{self.called} cannot be read ({reason}); {self.remedy}.")


def _metadata(read: Read) -> dict[str, str]:
    """What a file whose layout has been read says about itself."""
    header = json.loads(read(8, int.from_bytes(read(0, 8), "little")))
    found = header.get("__metadata__")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


class Memory(_Titled):
    """A file's contents in memory."""

    def __init__(
        self, name: str, content: bytes, called: str | None = None, remedy: str = "train it again"
    ) -> None:
        super().__init__(name, called, remedy)
        self._content = memoryview(content)
        self._read_layout(lambda start, length: content[start : start + length], len(content))

    def piece(self, start: int, buffer: memoryview) -> memoryview:
        return self._content[start : start + len(buffer)]


class File(_Titled):
    """An open file."""

    def __init__(self, name: str, path: Path, descriptor: int, called: str | None, remedy: str) -> None:
        super().__init__(name, called, remedy)
        self._path = path
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        try:
            self._read_layout(lambda start, length: os.pread(descriptor, length, start), size)
        except OSError as error:  # a folder, say
            raise self._unreadable(f"{path}: {error.strerror}") from None

    def piece(self, start: int, buffer: memoryview) -> memoryview:
        read = 0
        while read < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[read:]], start + read)
            except OSError as error:
                raise self._unreadable(error.strerror or str(error)) from None
            if count == 0:
                raise self._unreadable(f"{self._path} was cut short meanwhile")
            read += count
        return buffer


@contextmanager
def opened(
    name: str, path: Path, called: str | None = None, remedy: str = "train it again"
) -> Iterator[File]:
    """A file of tensors, closed at the end."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        whose = f"of candidate {name}" if called is None else f"({called[0].lower()}{called[1:]})"
        raise InvalidInput(
            f"The model file {path} {whose} cannot be opened ({error.strerror}); name another."
        ) from None
    try:
        yield File(name, path, descriptor, called, remedy)
    finally:
        os.close(descriptor)


def require_same_architecture(first: Source, other: Source) -> None:
    """Names, shapes and types of all tensors must be the same."""
    between = f"Candidates {first.name} and {other.name} have"
    if other.called != f"The model of candidate {other.name}":
        between = f"{other.called} and candidate {first.name} have"
    missing = sorted(set(first.tensors) ^ set(other.tensors))
    if missing:
        raise IncompatibleCandidates(
            f"{between} different architectures: tensor {missing[0]} is only in "
            "one of them. Train the portfolio's candidates from one recipe."
        )
    for key, tensor in first.tensors.items():
        found = other.tensors[key]
        if tensor.shape != found.shape or tensor.dtype != found.dtype:
            raise IncompatibleCandidates(
                f"{between} different architectures: tensor {key} is "
                f"{tensor.description} in one and {found.description} in the other. Train the portfolio's candidates "
                "from one recipe."
            )


@contextmanager
def replacing(out: Path) -> Iterator[int]:
    """A new file's descriptor; at the end, and only without an error, it takes the place of `out`."""
    staged = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    file = os.open(staged, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(staged, out)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(staged)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name survives a power cut too
    finally:
        os.close(folder)


def write_to(out: Path, size: int, run: Callable[[Callable[[int, memoryview], None]], None]) -> None:
    """A merged file of so many bytes, written in any order by `run`, which is given what writes at a place.

    Raises:
        InvalidInput: it cannot be written.
    """
    try:
        with replacing(out) as file:
            os.truncate(file, size)
            run(lambda start, content: write_all(file, start, content))
    except OSError as error:
        raise InvalidInput(
            f"The merge cannot be written to {out} ({error.strerror or error}); choose another place."
        ) from None


def write_all(file: int, start: int, content: memoryview) -> None:
    """Write all of the content at a place of an open file."""
    while content:
        written = os.pwrite(file, content, start)
        content, start = content[written:], start + written
