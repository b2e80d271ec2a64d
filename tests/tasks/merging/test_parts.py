"""Models split by names and joined again keep every byte."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors

from accounting.errors import IncompatibleCandidates
from tasks.merging.marks import marked
from tasks.merging.parts import joined, split
from tests.tasks.merging.merges import a_model, file_of, public, tensors_of


def test_a_model_is_split_by_names_and_joined_to_the_byte() -> None:
    model = {f"trunk.{name}": value for name, value in a_model(1).items()}
    heads = {"heads.digits.weight": np.float16([[1, -0.0]]), "heads.digits.bias": np.float32([2])}
    whole = file_of({**model, **heads})
    trunk, head = split(whole, "trunk.")
    assert (trunk, head) == (file_of(model), file_of(heads))
    assert joined([trunk, head]) == joined([head, trunk]) == whole


def test_parts_may_be_empty() -> None:
    whole = file_of(a_model(1))
    everything, nothing = split(whole, "")
    assert (everything, tensors_of(nothing)) == (whole, {})
    assert split(whole, "other.") == (nothing, whole)
    assert joined([everything, nothing]) == whole
    assert tensors_of(joined([])) == {}


def test_parts_of_statistics_keep_their_mark() -> None:
    whole = public("fisher", {"trunk.w": np.ones(3), "heads.w": np.ones(2)})
    assert split(whole, "trunk.") == (
        public("fisher", {"trunk.w": np.ones(3)}),
        public("fisher", {"heads.w": np.ones(2)}),
    )


def test_marks_are_read_by_the_library() -> None:
    content = marked(file_of({"w": np.float32([1, 2])}), {"b": "ü", "a": "1"})
    assert tensors_of(content)["w"].tolist() == [1, 2]
    assert (int.from_bytes(content[:8], "little") % 8, b'"a":"1","b"' in content) == (0, True)
    ((name, tensor),) = safetensors.deserialize(content)
    assert (name, tensor["shape"]) == ("w", [2])


def test_what_cannot_be_joined_or_split_is_refused() -> None:
    one = file_of({"w": np.float32([1])})
    with pytest.raises(IncompatibleCandidates, match="Tensor w is in two of the parts"):
        joined([one, one])
    with pytest.raises(IncompatibleCandidates, match=r"^Part 2 of the model cannot be read"):
        joined([one, one[:-1]])
    with pytest.raises(IncompatibleCandidates, match=r"^The model to be split cannot be read"):
        split(b"", "trunk.")
