"""Small models as files, and each operator called with all that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tasks.merging import merge_model_files, merge_models, needs
from tasks.merging.marks import KIND, PUBLIC, ROWS, marked


def file_of(tensors: Mapping[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save({name: np.asarray(value) for name, value in tensors.items()})


def tensors_of(content: bytes) -> dict[str, np.ndarray]:
    return safetensors.numpy.load(content)


def a_model(seed: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """A layer, a convolution, a bias, a scalar, nothing, and a counter."""
    rng = np.random.default_rng(seed)
    return {
        "layer.weight": rng.normal(size=(4, 6)).astype(dtype),
        "conv.weight": rng.normal(size=(3, 2, 2, 2)).astype(dtype),
        "layer.bias": rng.normal(size=4).astype(dtype),
        "gain": np.array(rng.normal(), dtype),
        "none": np.zeros((0, 3), dtype),
        "count": np.int64([7]),
    }


def fisher_of(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    model = a_model(seed)
    return public("fisher", {name: rng.random(model[name].shape) for name in ("layer.weight", "gain")})


def gram_of(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    grams = {}
    for name, inputs in (("layer.weight", 6), ("conv.weight", 8)):
        rows = rng.normal(size=(30, inputs))
        gram = rows.T @ rows / 30
        grams[name] = (gram + gram.T) / 2
    return public("gram", grams)


def public(kind: str, tensors: Mapping[str, np.ndarray], rows: str = PUBLIC) -> bytes:
    return marked(file_of(tensors), {KIND: kind, ROWS: rows})


def statistics_for(operator: str, names: str) -> dict[str, bytes] | None:
    kind = needs(operator).statistics
    if kind is None:
        return None
    return {name: (fisher_of if kind == "fisher" else gram_of)(100 + ord(name)) for name in names}


def merge(operator: str, models: Mapping[str, bytes], weights: Mapping[str, float], **more: Any) -> bytes:
    """`merge_models` with a public start and statistics where the operator needs them."""
    more.setdefault("base", file_of(a_model(99)))
    more.setdefault("statistics", statistics_for(operator, "".join(models)))
    return merge_models(operator, models, weights, **more)


def merge_on_disk(
    folder: Path, operator: str, models: Mapping[str, bytes], weights: Mapping[str, float], **more: Any
) -> bytes:
    """The same by files."""
    for name, content in models.items():
        (folder / name).write_bytes(content)
    (folder / "base").write_bytes(more.pop("base", None) or file_of(a_model(99)))
    statistics = statistics_for(operator, "".join(models))
    for name, content in (statistics or {}).items():
        (folder / f"{name}.statistics").write_bytes(content)
    merge_model_files(
        operator,
        {name: folder / name for name in models},
        weights,
        folder / "merged",
        base=folder / "base",
        statistics={name: folder / f"{name}.statistics" for name in statistics} if statistics else None,
        **more,
    )
    return (folder / "merged").read_bytes()


def weights_for(operator: str) -> dict[str, float]:
    return {"a": 0.25, "b": 0.75} if operator == "slerp" else {"a": 0.5, "b": 0.2, "c": 0.3}


def models_for(operator: str, dtype: Any = np.float32) -> dict[str, bytes]:
    return {name: file_of(a_model(ord(name), dtype)) for name in weights_for(operator)}
