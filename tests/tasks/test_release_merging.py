"""What an operator merges with beside the models, made again with the same bytes; and models compared."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy
import torch

from accounting.plan import Mechanism
from infra.documents import NetworkRecord
from tasks.data import data_record, load_splits
from tasks.merging import merge_models
from tasks.models import initial_state, state_bytes
from tasks.recipes import DataRecipe
from tasks.release_merging import (
    ROUNDING,
    Material,
    merged,
    public_start,
    public_statistics,
    relative_difference,
    rounds_alike,
)

NETWORK = NetworkRecord(factory="tasks.models:softmax_regression", arguments={"features": 65, "classes": 10})


def claim_of(operator: str, **options: Any) -> Any:
    return SimpleNamespace(
        mechanism=Mechanism.OPERATOR,
        merge=operator,
        merge_options=options,
        weights={"a": 0.5, "b": 0.5},
        tasks={},
    )


@pytest.fixture(scope="module")
def digits() -> Any:
    """As much of a manifest as the public rows need."""
    source = DataRecipe(loader="tasks.data:digits", arguments={})
    splits = load_splits(source, feature_radius=1.0, n_max=1200, neighboring_relation="replace_one")
    return SimpleNamespace(
        reference="digits@1",
        data=data_record(source, splits, b"key"),
        network=NETWORK,
        feature_radius=1.0,
        n_max=1200,
        neighboring_relation="replace_one",
        tasks=None,
    )


@pytest.fixture(scope="module")
def models() -> dict[str, bytes]:
    return {name: state_bytes(initial_state(NETWORK, seed)) for seed, name in enumerate("ab")}


@pytest.mark.parametrize("operator", ["fisher", "regmean"])
def test_statistics_are_those_of_public_rows_whatever_the_threads(
    digits: Any, models: dict[str, bytes], operator: str
) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(public_statistics(digits, claim_of(operator), models))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    assert found[0] is not None
    assert set(found[0]) == {"a", "b"}
    assert found[0]["a"] != found[0]["b"] or operator == "regmean"  # of one layer: its inputs are the rows
    model = merged(claim_of(operator), {"a": 0.5, "b": 0.5}, models, Material(statistics=found[0]))
    assert model == merge_models(operator, models, {"a": 0.5, "b": 0.5}, statistics=found[0])


def test_only_what_an_operator_needs_is_gathered(digits: Any, models: dict[str, bytes]) -> None:
    assert public_statistics(digits, claim_of("ties"), models) is None
    averaged = claim_of("linear")
    averaged.mechanism = Mechanism.LINEAR_COMBINATION
    assert public_statistics(digits, averaged, models) is None
    nowhere = cast(Any, None)  # MLflow is not asked
    assert public_start(nowhere, digits, "average") is None


def test_an_operator_merges_with_its_options_and_the_public_start(models: dict[str, bytes]) -> None:
    start = state_bytes(initial_state(NETWORK, 7))
    weights = {"a": 0.5, "b": 0.5}
    claim = claim_of("ties", density=0.3)
    model = merged(claim, weights, models, Material(start=start))
    assert model == merge_models("ties", models, weights, options={"density": 0.3}, base=start)
    assert model != merged(claim_of("ties", density=0.9), weights, models, Material(start=start))


def weights_of(*values: float, dtype: Any = np.float32) -> bytes:
    return safetensors.numpy.save({"count": np.array([3]), "weight": np.array(values, dtype=dtype)})


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (weights_of(1.0, -2.0), weights_of(1.0, -2.0), 0.0),
        (weights_of(1.0, -2.0), weights_of(1.5, -2.0), 0.25),
        (weights_of(0.0), weights_of(0.0), 0.0),
        (weights_of(1e-30), weights_of(0.0), math.inf),
        (weights_of(math.nan), weights_of(math.nan), math.inf),
        (weights_of(math.inf), weights_of(math.inf), math.inf),
        (weights_of(1.0), weights_of(1.0, 1.0), math.inf),
        (weights_of(1.0), weights_of(1.0, dtype=np.float64), math.inf),
        (weights_of(1.0), b"no model", math.inf),
        (
            safetensors.numpy.save({"count": np.array([3])}),
            safetensors.numpy.save({"count": np.array([4])}),
            math.inf,
        ),
    ],
)
def test_models_are_compared_by_their_parameters(one: bytes, other: bytes, difference: float) -> None:
    assert relative_difference(one, other) == difference
    assert (relative_difference(other, one) <= ROUNDING) == (difference <= ROUNDING)


def test_operators_with_statistics_may_round_otherwise_elsewhere() -> None:
    assert rounds_alike("ties")
    assert not rounds_alike("fisher")
    assert not rounds_alike("regmean")
