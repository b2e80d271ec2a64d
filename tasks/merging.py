"""Merge candidates' parameters: post-processing, so it costs no privacy beyond what the certificate covers.

Two routes, one core and the same bytes: `linear_combination` for models in memory, `merge_files` for files of any
size. Both go through the tensors in pieces of `PIECE` elements, so a merge of files holds a few megabytes however
large the models are. Files are read with plain reads: pages of a memory map count as this process's memory, and a
file that shrinks under a map ends the process.

Types: float16, bfloat16, float32 and float64 are widened to float64 exactly, weighted and added up there in the order
of the weights, and rounded once (to nearest, ties to even) to their own type. That is also how numpy's
`sum(weight * tensor.astype(float64))` rounds, so the bytes depend on nothing but the models and the weights.
Integers and booleans must be equal in all candidates and are copied.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from accounting.errors import IncompatibleCandidates, InvalidInput
from infra.tensor_file import (
    ELEMENT_BYTES,
    FLOATS,
    NotSafetensors,
    Read,
    TensorPlace,
    narrowed,
    new_layout,
    read_layout,
    widened,
)

MERGE_RULE = (
    "each parameter is sum of weight x value over the candidates with non-zero weight, in the portfolio "
    "manifest's order, added up in float64 and rounded once to the candidates' type; tensors that are not "
    "floating point must be equal in all candidates and are copied"
)
# Elements. Half as many cost a third more time in the interpreter; twice as many leave a core's cache.
PIECE = 2**17
WORKERS = 2  # threads: numpy and reads release the interpreter; each holds about 4 MB
SMALL = 2**20  # bytes of the merged file below which one thread is as fast

Write = Callable[[int, memoryview], None]  # (first byte, content)


def linear_combination(models: Mapping[str, bytes], weights: Mapping[str, float]) -> bytes:
    """Merge safetensors files in memory: theta = sum_i weights_i * theta_i.

    Args:
        models: file contents by candidate name, for at least the candidates in `weights`.
        weights: on the simplex, by candidate name, in the order in which to add up; used exactly as they are.

    Returns:
        The contents of a safetensors file without metadata: the same inputs give the same bytes. A single candidate
        comes back as the library would write it.

    Raises:
        IncompatibleCandidates: names, shapes or types of the tensors differ or are not supported, a file is damaged,
            or a parameter is not finite.
        InvalidInput: the weights are not on the simplex.
    """
    used = _used(weights)
    merge = _Merge({name: _Memory(name, models[name]) for name in used}, used)
    merged = bytearray(merge.size)

    def write(start: int, content: memoryview) -> None:
        merged[start : start + len(content)] = content

    merge.run(write)
    return bytes(merged)


def merge_files(paths: Mapping[str, Path], weights: Mapping[str, float], out: Path) -> None:
    """As `linear_combination`, from files to a file, in a few megabytes of memory.

    Args:
        paths: safetensors files by candidate name, for at least the candidates in `weights`.
        weights: as there.
        out: written beside its place, flushed to the disk and renamed: it is there whole or not at all.

    Raises:
        IncompatibleCandidates, InvalidInput: as there; or a file cannot be read or written.
    """
    used = _used(weights)
    with ExitStack() as opened:
        sources = {name: opened.enter_context(_open(name, paths[name])) for name in used}
        merge = _Merge(sources, used)
        try:
            with _replacing(out) as file:
                os.truncate(file, merge.size)
                merge.run(lambda start, content: _write_all(file, start, content))
        except OSError as error:
            raise InvalidInput(
                f"The merge cannot be written to {out} ({error.strerror or error}); choose another place."
            ) from None


class _Source(Protocol):
    """A candidate's model."""

    name: str
    tensors: dict[str, TensorPlace]

    def piece(self, start: int, buffer: memoryview) -> memoryview:
        """As many bytes of the file as the buffer has, perhaps in the buffer."""


class _Memory:
    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self._content = memoryview(content)
        self.tensors = _tensors(name, lambda start, length: content[start : start + length], len(content))

    def piece(self, start: int, buffer: memoryview) -> memoryview:
        return self._content[start : start + len(buffer)]


class _File:
    def __init__(self, name: str, path: Path, descriptor: int) -> None:
        self.name = name
        self._path = path
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        try:
            self.tensors = _tensors(name, lambda start, length: os.pread(descriptor, length, start), size)
        except OSError as error:  # a folder, say
            raise _unreadable(name, f"{path}: {error.strerror}") from None

    def piece(self, start: int, buffer: memoryview) -> memoryview:
        read = 0
        while read < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[read:]], start + read)
            except OSError as error:
                raise _unreadable(self.name, error.strerror or str(error)) from None
            if count == 0:
                raise _unreadable(self.name, f"{self._path} was cut short meanwhile")
            read += count
        return buffer


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of one tensor."""

    tensor: str
    dtype: str
    offset: int  # into the tensor, bytes
    target: int  # of its first byte in the merged file
    length: int  # bytes


class _Merge:
    """A merge whose candidates are known to fit together."""

    def __init__(self, sources: Mapping[str, _Source], weights: Mapping[str, float]) -> None:
        self._sources = list(sources.values())
        self._weights = [weights[source.name] for source in self._sources]
        first = self._sources[0]
        for other in self._sources[1:]:
            _require_same_architecture(first, other)
        self._head, self._places = new_layout(first.tensors)
        self.size = len(self._head) + sum(place.length for place in self._places.values())

    def run(self, write: Write) -> None:
        """Write the merged file in pieces, in any order and from several threads."""
        write(0, memoryview(self._head))
        if self.size < SMALL:
            self._work(self._pieces(), write)
            return
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="merge") as pool:
            shares = [islice(self._pieces(), k, None, WORKERS) for k in range(WORKERS)]
            for share in [pool.submit(self._work, share, write) for share in shares]:
                share.result()

    def _pieces(self) -> Iterator[_Piece]:
        for name, place in self._places.items():
            step = PIECE * ELEMENT_BYTES[place.dtype]
            for offset in range(0, place.length, step):
                length = min(step, place.length - offset)
                yield _Piece(name, place.dtype, offset, place.start + offset, length)

    def _work(self, pieces: Iterable[_Piece], write: Write) -> None:
        buffer = memoryview(bytearray(PIECE * max(ELEMENT_BYTES.values())))
        total, product = np.empty(PIECE), np.empty(PIECE)
        rounded = {dtype: np.empty(PIECE, numpy_type) for dtype, numpy_type in FLOATS.items()}
        with np.errstate(all="ignore"):  # what is not finite is found and named
            for piece in pieces:
                into = buffer[: piece.length]
                if piece.dtype in FLOATS:
                    count = piece.length // ELEMENT_BYTES[piece.dtype]
                    merged = self._added(piece, into, total[:count], product[:count])
                    narrow = narrowed(merged, piece.dtype, out=rounded[piece.dtype][:count])
                    write(piece.target, narrow.data.cast("B"))
                else:
                    write(piece.target, memoryview(self._agreed(piece, into)))

    def _added(self, piece: _Piece, into: memoryview, total: np.ndarray, product: np.ndarray) -> np.ndarray:
        for k, (source, weight) in enumerate(zip(self._sources, self._weights, strict=True)):
            content = self._read(source, piece, into)
            place = product if k else total  # the first product opens the sum, so that -0.0 stays -0.0
            place[...] = widened(content, piece.dtype)
            np.multiply(place, weight, out=place)
            if k:
                np.add(total, product, out=total)
        if not np.isfinite(total).all():
            self._name_what_is_not_finite(piece, into)
        return total

    def _agreed(self, piece: _Piece, into: memoryview) -> bytes:
        first, *others = self._sources
        content = bytes(self._read(first, piece, into))
        if any(self._read(other, piece, into) != content for other in others):
            raise IncompatibleCandidates(
                f"Tensor {piece.tensor} is not floating point and differs between candidates; it cannot be merged."
            )
        return content

    def _name_what_is_not_finite(self, piece: _Piece, into: memoryview) -> None:
        for source in self._sources:
            if not np.isfinite(widened(self._read(source, piece, into), piece.dtype)).all():
                raise IncompatibleCandidates(
                    f"The model of candidate {source.name} holds values in tensor {piece.tensor} that are infinite "
                    "or not numbers: its training diverged; train it again with a smaller learning rate."
                )
        raise IncompatibleCandidates(
            f"The sum of the candidates' tensor {piece.tensor} is too large for float64."
        )

    def _read(self, source: _Source, piece: _Piece, into: memoryview) -> memoryview:
        return source.piece(source.tensors[piece.tensor].start + piece.offset, into)


def _used(weights: Mapping[str, float]) -> dict[str, float]:
    used = {name: weight for name, weight in weights.items() if weight != 0}
    if not used or any(not weight > 0 for weight in used.values()) or abs(sum(used.values()) - 1) > 1e-12:
        raise InvalidInput(
            f"Merge weights must be non-negative and add up to 1, but they are {dict(weights)}."
        )
    return used


def _tensors(name: str, read: Read, size: int) -> dict[str, TensorPlace]:
    try:
        return read_layout(read, size)
    except NotSafetensors as error:
        raise _unreadable(name, error.reason) from None


def _unreadable(name: str, reason: str) -> IncompatibleCandidates:
    return IncompatibleCandidates(f"The model of candidate {name} cannot be read ({reason}); train it again.")


def _require_same_architecture(first: _Source, other: _Source) -> None:
    missing = sorted(set(first.tensors) ^ set(other.tensors))
    if missing:
        raise IncompatibleCandidates(
            f"Candidates {first.name} and {other.name} have different architectures: tensor {missing[0]} is only in "
            "one of them. Train the portfolio's candidates from one recipe."
        )
    for key, tensor in first.tensors.items():
        found = other.tensors[key]
        if tensor.shape != found.shape or tensor.dtype != found.dtype:
            raise IncompatibleCandidates(
                f"Candidates {first.name} and {other.name} have different architectures: tensor {key} is "
                f"{tensor.description} in one and {found.description} in the other. Train the portfolio's candidates "
                "from one recipe."
            )


@contextmanager
def _open(name: str, path: Path) -> Iterator[_File]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise InvalidInput(
            f"The model file {path} of candidate {name} cannot be opened ({error.strerror}); name another."
        ) from None
    try:
        yield _File(name, path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _replacing(out: Path) -> Iterator[int]:
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


def _write_all(file: int, start: int, content: memoryview) -> None:
    while content:
        written = os.pwrite(file, content, start)
        content, start = content[written:], start + written
