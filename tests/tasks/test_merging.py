"""Merging: exact weights, one rounding, and architectures that must agree."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from accounting.errors import IncompatibleCandidates, InvalidInput
from tasks.merging import linear_combination


def file_of(**tensors: np.ndarray) -> bytes:
    return safetensors.numpy.save(tensors)


def test_the_sum_is_rounded_once() -> None:
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=(3, 5)).astype(np.float32) for name in "abc"}
    weights = {"a": 0.5, "b": 0.125, "c": 0.375}
    merged = safetensors.numpy.load(
        linear_combination({name: file_of(w=value) for name, value in values.items()}, weights)
    )["w"]

    def exact(row: int, column: int) -> float:
        total = sum(Fraction(weights[name]) * Fraction(float(values[name][row, column])) for name in "abc")
        return float(np.float32(float(total)))

    assert merged.dtype == np.float32
    assert merged.tolist() == [[exact(row, column) for column in range(5)] for row in range(3)]


@given(st.floats(0, 1), st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32))
def test_a_merge_lies_between_its_candidates(weight: float, left: float, right: float) -> None:
    weights = {"a": weight, "b": 1 - weight}
    models = {"a": file_of(w=np.float32([left])), "b": file_of(w=np.float32([right]))}
    merged = float(safetensors.numpy.load(linear_combination(models, weights))["w"][0])
    assert min(left, right) <= merged <= max(left, right)


def test_one_hot_returns_the_candidate_to_the_byte() -> None:
    models = {name: file_of(w=np.float32([1, 2]), n=np.int64([7])) for name in "ab"}
    assert linear_combination(models, {"a": 1.0}) == models["a"]
    assert linear_combination(models, {"a": 0.0, "b": 1.0}) == models["b"]


@pytest.mark.parametrize(
    "weights", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": float("nan"), "b": 0.5}, {"a": 0.6, "b": 0.6}]
)
def test_weights_off_the_simplex_are_refused(weights: dict[str, float]) -> None:
    models = {name: file_of(w=np.float32([1])) for name in "ab"}
    with pytest.raises(InvalidInput, match="add up to 1"):
        linear_combination(models, weights)


@pytest.mark.parametrize(
    "other",
    [
        file_of(v=np.float32([1, 2])),
        file_of(w=np.float32([1, 2]), v=np.float32([1])),
        file_of(w=np.float32([[1, 2]])),
        file_of(w=np.float64([1, 2])),
        file_of(w=np.float32([1, 2, 3])),
    ],
)
def test_different_architectures_are_refused(other: bytes) -> None:
    models = {"a": file_of(w=np.float32([1, 2])), "b": other}
    with pytest.raises(IncompatibleCandidates, match="different architectures"):
        linear_combination(models, {"a": 0.5, "b": 0.5})


def test_integers_must_agree() -> None:
    same = {name: file_of(w=np.float32([1]), n=np.int64([3])) for name in "ab"}
    assert safetensors.numpy.load(linear_combination(same, {"a": 0.5, "b": 0.5}))["n"].tolist() == [3]
    differ = {**same, "b": file_of(w=np.float32([1]), n=np.int64([4]))}
    with pytest.raises(IncompatibleCandidates, match="not floating point"):
        linear_combination(differ, {"a": 0.5, "b": 0.5})


def test_a_damaged_file_is_named() -> None:
    with pytest.raises(IncompatibleCandidates, match="candidate b cannot be read"):
        linear_combination({"a": file_of(w=np.float32([1])), "b": b"nothing"}, {"a": 0.5, "b": 0.5})
