"""Split a model into the part that tasks share and the rest, and join parts again; the tensors' bytes are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accounting.errors import IncompatibleCandidates
from infra.tensor_file import TensorPlace, new_layout
from tasks.merging.marks import marked
from tasks.merging.sources import Memory


def split(content: bytes, shared_prefix: str) -> tuple[bytes, bytes]:
    """The tensors whose names begin with a prefix, and the others, as two safetensors files; names are kept.

    Args:
        content: of a safetensors file; a part may be empty. What its metadata say (that statistics come from public
            rows, say) is said of both parts.
        shared_prefix: for example "trunk.".

    Raises:
        IncompatibleCandidates: the content is not a whole safetensors file.
    """
    source = Memory("", content, "The model to be split", "store it again")
    shared = {name: place for name, place in source.tensors.items() if name.startswith(shared_prefix)}
    others = {name: place for name, place in source.tensors.items() if name not in shared}
    return tuple(
        _written({name: (content, place) for name, place in part.items()}, source.metadata)
        for part in (shared, others)
    )  # type: ignore[return-value]


def joined(parts: Sequence[bytes]) -> bytes:
    """One safetensors file, without metadata, with the tensors of several whose names do not meet.

    Raises:
        IncompatibleCandidates: a tensor is in two parts, or a part is not a whole safetensors file.
    """
    tensors: dict[str, tuple[bytes, TensorPlace]] = {}
    for number, content in enumerate(parts):
        for name, place in Memory(
            "", content, f"Part {number + 1} of the model", "store it again"
        ).tensors.items():
            if name in tensors:
                raise IncompatibleCandidates(
                    f"Tensor {name} is in two of the parts to be joined; give each part names of its own."
                )
            tensors[name] = (content, place)
    return _written(tensors, {})


def _written(tensors: Mapping[str, tuple[bytes, TensorPlace]], metadata: Mapping[str, str]) -> bytes:
    head, places = new_layout({name: place for name, (_, place) in tensors.items()})
    pieces = [marked(head, metadata)]
    for name in places:
        content, place = tensors[name]
        pieces.append(content[place.start : place.start + place.length])
    return b"".join(pieces)
