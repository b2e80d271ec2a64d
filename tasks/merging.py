"""Merge candidates' parameters: post-processing, so it costs no privacy beyond what the certificate covers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from accounting.errors import IncompatibleCandidates, InvalidInput

Tensors = dict[str, np.ndarray]

MERGE_RULE = (
    "each parameter is sum of weight x value over the candidates with non-zero weight, in the portfolio "
    "manifest's order, added up in float64 and rounded once to the candidates' type; tensors that are not "
    "floating point must be equal in all candidates and are copied"
)


def linear_combination(models: Mapping[str, bytes], weights: Mapping[str, float]) -> bytes:
    """Merge safetensors files: theta = sum_i weights_i * theta_i.

    Args:
        models: file contents by candidate name, for at least the candidates in `weights`.
        weights: on the simplex, by candidate name, in the order in which to add up.

    Returns:
        The contents of a safetensors file without metadata: the same inputs give the same bytes.

    Raises:
        IncompatibleCandidates: names, shapes or types of the tensors differ, or are not supported.
        InvalidInput: the weights are not on the simplex.
    """
    used = {name: weight for name, weight in weights.items() if weight != 0}
    if not used or any(not weight > 0 for weight in used.values()) or abs(sum(used.values()) - 1) > 1e-12:
        raise InvalidInput(
            f"Merge weights must be non-negative and add up to 1, but they are {dict(weights)}."
        )
    loaded = {name: load_tensors(models[name], name) for name in used}
    first_name = next(iter(used))
    first = loaded[first_name]
    for name, tensors in loaded.items():
        _require_same_architecture(first_name, first, name, tensors)
    merged: Tensors = {}
    for key, reference in first.items():
        if not np.issubdtype(reference.dtype, np.floating):
            if any(not np.array_equal(tensors[key], reference) for tensors in loaded.values()):
                raise IncompatibleCandidates(
                    f"Tensor {key} is not floating point and differs between candidates; it cannot be merged."
                )
            merged[key] = reference
            continue
        total = np.zeros(reference.shape, dtype=np.float64)
        for name, weight in used.items():
            total += weight * loaded[name][key].astype(np.float64)
        merged[key] = total.astype(reference.dtype)
    return safetensors.numpy.save(merged)


def load_tensors(content: bytes, name: str) -> Tensors:
    """Read a safetensors file.

    Raises:
        IncompatibleCandidates: it is not one, or uses a type that cannot be merged.
    """
    try:
        return safetensors.numpy.load(content)
    except (safetensors.SafetensorError, KeyError, TypeError) as error:
        raise IncompatibleCandidates(
            f"The model of candidate {name} cannot be read ({error}); train it again."
        ) from None


def _require_same_architecture(first_name: str, first: Tensors, name: str, other: Tensors) -> None:
    missing = sorted(set(first) ^ set(other))
    if missing:
        raise IncompatibleCandidates(
            f"Candidates {first_name} and {name} have different architectures: tensor {missing[0]} is only in "
            "one of them. Train the portfolio's candidates from one recipe."
        )
    for key, tensor in first.items():
        if tensor.shape != other[key].shape or tensor.dtype != other[key].dtype:
            raise IncompatibleCandidates(
                f"Candidates {first_name} and {name} have different architectures: tensor {key} is "
                f"{tensor.dtype}{list(tensor.shape)} in one and {other[key].dtype}{list(other[key].shape)} in the "
                "other. Train the portfolio's candidates from one recipe."
            )
