"""The layout of a safetensors file, which tensor lies where, as the library itself writes it; and its numbers.

The format: 8 bytes with the header's length (little-endian), the header (JSON: name -> type, shape and the place
of the tensor's bytes), then the bytes of all tensors without gaps. Source: https://github.com/huggingface/safetensors,
"Format". The library offers no way to read or write it piece by piece without memory maps; these functions do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from accounting.errors import RemergeError

# Bytes of an element, in the order in which the library lays tensors out; of one type, they lie in the order of
# their names. Types of less than a byte, and those of one byte that are floating point, are not supported.
ELEMENT_BYTES = {
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
# How numpy sees the floating-point types; it has no bfloat16, whose bits are seen as whole numbers.
FLOATS: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_ORDER = {dtype: position for position, dtype in enumerate(ELEMENT_BYTES)}
_LONGEST_HEADER = 100_000_000  # bytes, the library's own limit

Buffer = bytes | memoryview
Read = Callable[[int, int], bytes]  # (first byte, how many) -> bytes, fewer at the end of the file


class NotSafetensors(RemergeError):
    """The content is not a whole safetensors file of supported types.

    Attributes:
        reason: what is wrong with it, as a part of a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"This is not a whole safetensors file that remerge can read: {reason}.")
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return NotSafetensors, (self.reason,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor's type, shape and place."""

    dtype: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    start: int  # of its first byte in the file
    length: int  # bytes

    @property
    def description(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def read_layout(read: Read, size: int) -> dict[str, TensorPlace]:
    """Where each tensor of a file lies, by name.

    Args:
        read: reads a part of the file.
        size: of the whole file, bytes.

    Raises:
        NotSafetensors: the header is damaged, does not fit the file's size, or names an unsupported type.
    """
    header_length = int.from_bytes(read(0, 8), "little")
    begin = 8 + header_length
    if size < 8 or header_length > _LONGEST_HEADER or begin > size:
        raise NotSafetensors("it is truncated or has no header")
    try:
        header = json.loads(read(8, header_length).decode())
        header.pop("__metadata__", None)
        places = {str(name): _place(str(name), entry, begin) for name, entry in header.items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise NotSafetensors("its header is damaged") from None
    end = begin
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].length)):
        if place.start != end:
            raise NotSafetensors(f"tensor {name} does not begin where the one before it ends")
        end += place.length
    if end != size:
        raise NotSafetensors(f"its header describes {end} bytes, but it has {size}")
    return places


def new_layout(tensors: Mapping[str, TensorPlace]) -> tuple[bytes, dict[str, TensorPlace]]:
    """Lay tensors out for a file of their own, with the very bytes that the library would write.

    Args:
        tensors: types and shapes by name; their places in another file do not matter.

    Returns:
        What the file begins with, and the tensors' places in it, in their order there.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.length],
        }
        offset += tensor.length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    begin = 8 + len(text)
    places = {
        name: TensorPlace(
            dtype=tensor.dtype,
            shape=tensor.shape,
            start=begin + header[name]["data_offsets"][0],
            length=tensor.length,
        )
        for name, tensor in ordered
    }
    return len(text).to_bytes(8, "little") + text, places


def widened(content: Buffer, dtype: str) -> np.ndarray:
    """The numbers of a floating-point tensor or a part of it, in a type that numpy computes with: bfloat16 becomes
    float32, which holds its values exactly, and the others are seen where they lie."""
    stored = np.frombuffer(content, FLOATS[dtype])
    return (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else stored


def narrowed(values: np.ndarray, dtype: str, *, out: np.ndarray) -> np.ndarray:
    """float64 rounded once to a floating-point type, to nearest and ties to even, into an array of that type."""
    if dtype != "BF16":
        out[...] = values
        return out
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    # bfloat16 is the upper half of float32. Where float32's rounding landed on a tie of bfloat16 that the value
    # itself is not on, step back to the value's side of the tie, or it would be rounded twice.
    tied = (bits & 0xFFFF) == 0x8000
    size, rounded = np.abs(values), np.abs(near).astype(np.float64)
    bits = bits + (tied & (size > rounded)).astype(np.uint32) - (tied & (size < rounded)).astype(np.uint32)
    out[...] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return out


def _place(name: str, entry: Mapping[str, Any], begin: int) -> TensorPlace:
    name.encode()  # a lone surrogate is no text
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in ELEMENT_BYTES:
        raise NotSafetensors(f"tensor {name} is of the type {dtype}, which is not supported")
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise NotSafetensors("its header is damaged")
    if stop - start != prod(shape) * ELEMENT_BYTES[dtype]:
        raise NotSafetensors(f"tensor {name} does not have as many bytes as its shape says")
    return TensorPlace(dtype=dtype, shape=shape, start=begin + start, length=stop - start)
