"""Linear: theta = sum_i weights_i * theta_i, for weights on the simplex or any finite ones.

Two routes, one core and the same bytes: one for models in memory, one for files of any size. Both go through the
tensors in pieces of `PIECE` elements, so a merge of files holds a few megabytes however large the models are.

Types: float16, bfloat16, float32 and float64 are widened to float64 exactly, weighted and added up there in the order
of the weights, and rounded once (to nearest, ties to even) to their own type. That is also how numpy's
`sum(weight * tensor.astype(float64))` rounds, so the bytes depend on nothing but the models and the weights.
Another order of the weights moves the sum by a few units of float64, so float32 parameters by one of theirs at most
(where large products cancel each other, by as many as float64 moved). Integers and booleans must be equal in all
candidates and are copied.

mergekit's `linear` divides by the sum of the weights unless told `normalize: false`, and adds up in float32; here the
weights are used exactly as they are. Source of averaging: Wortsman et al. 2022, arXiv 2203.05482.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path

import numpy as np

from accounting.errors import IncompatibleCandidates, InvalidInput
from infra.tensor_file import ELEMENT_BYTES, FLOATS, narrowed, new_layout, widened
from tasks.merging.sources import Memory, Source, opened, require_same_architecture, write_to

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
    return _in_memory(models, _on_the_simplex(weights))


def merge_files(paths: Mapping[str, Path], weights: Mapping[str, float], out: Path) -> None:
    """As `linear_combination`, from files to a file, in a few megabytes of memory.

    Args:
        paths: safetensors files by candidate name, for at least the candidates in `weights`.
        weights: as there.
        out: written beside its place, flushed to the disk and renamed: it is there whole or not at all.

    Raises:
        IncompatibleCandidates, InvalidInput: as there; or a file cannot be read or written.
    """
    _in_files(paths, _on_the_simplex(weights), out)


def any_combination(models: Mapping[str, bytes], weights: Mapping[str, float]) -> bytes:
    """As `linear_combination`, for any finite weights of which one is not zero.

    Raises:
        IncompatibleCandidates: as there; or a merged parameter is too large for its type.
        InvalidInput: a weight is not finite, or all are zero.
    """
    return _in_memory(models, finite(weights))


def merge_files_by_any(paths: Mapping[str, Path], weights: Mapping[str, float], out: Path) -> None:
    """As `merge_files`, for any finite weights of which one is not zero."""
    _in_files(paths, finite(weights), out)


def _in_memory(models: Mapping[str, bytes], used: Mapping[str, float]) -> bytes:
    merge = _Merge({name: Memory(name, models[name]) for name in used}, used)
    merged = bytearray(merge.size)

    def write(start: int, content: memoryview) -> None:
        merged[start : start + len(content)] = content

    merge.run(write)
    return bytes(merged)


def _in_files(paths: Mapping[str, Path], used: Mapping[str, float], out: Path) -> None:
    with ExitStack() as stack:
        sources = {name: stack.enter_context(opened(name, paths[name])) for name in used}
        merge = _Merge(sources, used)
        write_to(out, merge.size, merge.run)


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

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float]) -> None:
        self._sources = list(sources.values())
        self._weights = [weights[source.name] for source in self._sources]
        self._convex = on_the_simplex(weights)  # then no sum is larger than all it is made of
        first = self._sources[0]
        for other in self._sources[1:]:
            require_same_architecture(first, other)
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
                    if (
                        not self._convex
                        and not np.isfinite(widened(narrow.data.cast("B"), piece.dtype)).all()
                    ):
                        raise too_large(piece.tensor, piece.dtype)
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
            raise differs(piece.tensor)
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

    def _read(self, source: Source, piece: _Piece, into: memoryview) -> memoryview:
        return source.piece(source.tensors[piece.tensor].start + piece.offset, into)


def differs(tensor: str) -> IncompatibleCandidates:
    """The error of a tensor that cannot be merged."""
    return IncompatibleCandidates(
        f"Tensor {tensor} is not floating point and differs between candidates; it cannot be merged."
    )


def too_large(tensor: str, dtype: str) -> IncompatibleCandidates:
    """The error of a merged parameter that its type cannot hold."""
    return IncompatibleCandidates(
        f"A merged value of tensor {tensor} is too large for its type {dtype}; use smaller weights or a smaller scale."
    )


def finite(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights that are not zero, in their order; finite, and at least one."""
    used = {name: weight for name, weight in weights.items() if weight != 0}
    if not used or not all(isfinite(weight) for weight in used.values()):
        raise InvalidInput(
            f"Merge weights must be finite numbers, and one of them not zero, but they are {dict(weights)}."
        )
    return used


def _on_the_simplex(weights: Mapping[str, float]) -> dict[str, float]:
    used = {name: weight for name, weight in weights.items() if weight != 0}
    if not on_the_simplex(used):
        raise InvalidInput(
            f"Merge weights must be non-negative and add up to 1, but they are {dict(weights)}."
        )
    return used


def on_the_simplex(used: Mapping[str, float]) -> bool:
    """Whether weights that are not zero are positive and add up to 1."""
    return bool(used) and all(weight > 0 for weight in used.values()) and abs(sum(used.values()) - 1) <= 1e-12
