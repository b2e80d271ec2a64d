"""A candidate of each task becomes one model: the operator sees the trunks, and heads are kept to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from accounting.errors import IncompatibleCandidates, InvalidInput
from tasks.merging import OPERATORS, merge_models, needs
from tasks.merging.statistics import fisher_statistics, gram_statistics
from tasks.models import build, initial_state, state_bytes, state_from_bytes
from tasks.task_groups import merge_tasks, rows_of_task, task_network_of
from tasks.task_groups.rows import joined_splits
from tasks.task_groups.starts import start_of
from tests.tasks.task_groups.groups import NETWORK, splits

WEIGHTS = {"l": 0.5, "r": 0.5}
TASKS = {"l": "left", "r": "right"}
PUBLIC = joined_splits({"left": splits(1), "right": splits(2, classes=2)}).public_train


@pytest.fixture
def start() -> dict[str, torch.Tensor]:
    return initial_state(NETWORK, 3)


@pytest.fixture
def models(start: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Beside the start, as training would leave them."""
    numbers = torch.Generator().manual_seed(1)
    return {
        name: state_bytes(
            {
                key: tensor + 0.1 * torch.randn(tensor.shape, generator=numbers)
                for key, tensor in start_of(task, start).items()
            }
        )
        for name, task in TASKS.items()
    }


def trunk_of(content: bytes) -> dict[str, np.ndarray]:
    return {k: v for k, v in safetensors.numpy.load(content).items() if k.startswith("trunk.")}


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_merges_the_trunk_and_keeps_the_heads(
    operator: str, models: dict[str, bytes], start: dict[str, torch.Tensor]
) -> None:
    kind = needs(operator).statistics
    make = fisher_statistics if kind == "fisher" else gram_statistics
    statistics = kind and {
        name: make(task_network_of(NETWORK, task), models[name], rows_of_task(PUBLIC, NETWORK, task))
        for name, task in TASKS.items()
    }
    given: dict[str, Any] = {"base": state_bytes(start), "statistics": statistics}
    if not needs(operator).base:
        given["base"] = None
    merged = merge_tasks(operator, models, WEIGHTS, **given)
    build(NETWORK).load_state_dict(state_from_bytes(merged))  # exactly the group's keys
    found = safetensors.numpy.load(merged)
    for name, task in TASKS.items():
        own = safetensors.numpy.load(models[name])
        for key in (f"heads.{task}.weight", f"heads.{task}.bias"):
            assert np.array_equal(found[key], own[key])
    if kind is None:
        base = {key: tensor.numpy() for key, tensor in start.items() if key.startswith("trunk.")}
        alone = merge_models(
            operator,
            {name: safetensors.numpy.save(trunk_of(content)) for name, content in models.items()},
            WEIGHTS,
            options={},
            base=safetensors.numpy.save(base) if needs(operator).base else None,
        )
        assert safetensors.numpy.save(trunk_of(merged)) == safetensors.numpy.save(trunk_of(alone))


def test_linear_by_hand_with_the_exact_weights(models: dict[str, bytes]) -> None:
    merged = trunk_of(merge_tasks("linear", models, {"l": 0.25, "r": 0.75}))
    left, right = trunk_of(models["l"]), trunk_of(models["r"])
    for key, tensor in merged.items():
        expected = 0.25 * left[key].astype(np.float64) + 0.75 * right[key].astype(np.float64)
        assert np.array_equal(tensor, expected.astype(np.float32))


def test_two_candidates_of_one_task_are_refused(models: dict[str, bytes]) -> None:
    with pytest.raises(IncompatibleCandidates, match=r"Tensor heads\.left\.\w+ is in two of the parts"):
        merge_tasks("linear", {**models, "r": models["l"]}, WEIGHTS)


def test_what_an_operator_needs_is_asked_for(models: dict[str, bytes]) -> None:
    with pytest.raises(InvalidInput):
        merge_tasks("ties", models, WEIGHTS)
    with pytest.raises(InvalidInput):
        merge_tasks("fisher", models, WEIGHTS)
