"""What an operator sees: the numbers of candidates, public start and statistics, in float64 and part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from accounting.errors import IncompatibleCandidates
from infra.tensor_file import ELEMENT_BYTES, FLOATS, TensorPlace, widened
from tasks.merging.sources import Source

PIECE = 2**16  # elements of each candidate at a time; a multiple of 4, which DARE's random numbers come in


class Inputs:
    """Candidates in the order of their names, so that the order in which they were given cannot matter.

    Attributes:
        names: of the candidates.
        weights: in their order, none of them zero.
        options: checked.
        shapes: of the tensors that are floating point, by name, in the merged file's order.
    """

    def __init__(
        self,
        candidates: Sequence[Source],
        weights: Sequence[float],
        options: Mapping[str, Any],
        *,
        places: Mapping[str, TensorPlace],
        base: Source | None,
        statistics: Sequence[Source],
    ) -> None:
        self.names = [candidate.name for candidate in candidates]
        self.weights = list(weights)
        self.options = options
        self._candidates = candidates
        self._base = base
        self._statistics = statistics
        self.shapes = {name: place.shape for name, place in places.items() if place.dtype in FLOATS}

    @property
    def size(self) -> int:
        """Floating-point parameters of one model."""
        return sum(prod(shape) for shape in self.shapes.values())

    def spans(self, tensor: str) -> Iterator[slice]:
        """Consecutive parts of a flattened tensor."""
        count = prod(self.shapes[tensor])
        for start in range(0, count, PIECE):
            yield slice(start, min(start + PIECE, count))

    def all_spans(self) -> Iterator[tuple[str, slice]]:
        for tensor in self.shapes:
            for span in self.spans(tensor):
                yield tensor, span

    def candidate(self, k: int, tensor: str, span: slice | None = None) -> np.ndarray:
        """A candidate's values, flattened, a copy."""
        return _numbers(self._candidates[k], tensor, span)

    def base(self, tensor: str, span: slice | None = None) -> np.ndarray:
        """The public start's values, flattened, a copy."""
        assert self._base is not None
        return _numbers(self._base, tensor, span)

    def task_vectors(self, tensor: str, span: slice | None = None) -> np.ndarray:
        """What each candidate's training added to the public start, shape (candidates, elements)."""
        start = self.base(tensor, span)
        vectors = np.empty((len(self.names), len(start)))
        for k in range(len(self.names)):
            np.subtract(self.candidate(k, tensor, span), start, out=vectors[k])
        return vectors

    def has_statistic(self, tensor: str) -> bool:
        return tensor in self._statistics[0].tensors

    def statistic(self, k: int, tensor: str, span: slice | None = None) -> np.ndarray:
        """A candidate's statistic for a tensor, flattened, a copy."""
        return _numbers(self._statistics[k], tensor, span)


def _numbers(source: Source, tensor: str, span: slice | None) -> np.ndarray:
    place = source.tensors[tensor]
    width = ELEMENT_BYTES[place.dtype]
    part = span or slice(0, place.length // width)
    buffer = memoryview(bytearray((part.stop - part.start) * width))
    content = source.piece(place.start + part.start * width, buffer)
    numbers = np.array(widened(content, place.dtype), np.float64)
    if not np.isfinite(numbers).all():
        raise IncompatibleCandidates(
            f"{source.called} holds values in tensor {tensor} that are infinite or not numbers; {source.remedy}."
        )
    return numbers
