"""What a file of statistics says about itself: of which kind they are, and that they come from public rows.

The mark is what a merge goes by: statistics from private rows would make the merge more than post-processing, and the
joint release would not cover it. Only `tasks.merging.statistics` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod

from accounting.errors import IncompatibleCandidates
from infra.tensor_file import FLOATS, TensorPlace
from tasks.merging.sources import Source

KIND, ROWS, ROWS_SHA256, MODEL_SHA256 = "remerge.statistics", "rows", "rows_sha256", "model_sha256"
PUBLIC = "public"


def marked(content: bytes, metadata: Mapping[str, str]) -> bytes:
    """A safetensors file without metadata, with some; the same inputs give the same bytes, unlike the library's."""
    if not metadata:
        return content
    begin = 8 + int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(content[8:begin])}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors' places count from the header's end, so they stay
    return len(text).to_bytes(8, "little") + text + content[begin:]


def require_public_statistics(
    kind: str, statistics: Sequence[Source], places: Mapping[str, TensorPlace]
) -> None:
    """Refuse statistics of another kind, not marked as public, or that do not fit the candidates' tensors."""
    for source in statistics:
        if source.metadata.get(KIND) != kind or source.metadata.get(ROWS) != PUBLIC:
            raise IncompatibleCandidates(
                f"{source.called} is not marked as {kind} statistics from public rows, and a merge may read no "
                f"private ones; {source.remedy}."
            )
        if not source.tensors or set(source.tensors) != set(statistics[0].tensors):
            raise IncompatibleCandidates(
                f"{source.called} holds statistics of no tensors or of other ones than another candidate's; make "
                "all of them again from public rows."
            )
        for tensor, found in source.tensors.items():
            place = places.get(tensor)
            if (
                place is None
                or place.dtype not in FLOATS
                or found.dtype not in FLOATS
                or found.shape != _shape(kind, place)
            ):
                raise IncompatibleCandidates(
                    f"{source.called} does not fit the candidates: tensor {tensor} is {found.description} in it and "
                    f"{place.description if place else 'missing'} in them; {source.remedy}."
                )


def _shape(kind: str, place: TensorPlace) -> tuple[int, ...] | None:
    if kind == "fisher":
        return place.shape
    return (prod(place.shape[1:]),) * 2 if len(place.shape) in (2, 4) else None
