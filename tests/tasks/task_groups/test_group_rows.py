"""Rows of all tasks beside one another, and back; and the public start that is made of them."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord, PortfolioManifest
from tasks.data import Rows, Splits, data_record, load_public_gate, load_public_train, load_splits
from tasks.models import build, initial_state, state_bytes
from tasks.recipes import DataRecipe
from tasks.task_groups import Pretrain, Start, load_tasks, rows_of_task, task_network_of
from tasks.task_groups.rows import LOADER, joined_splits, require_one_shape
from tasks.task_groups.starts import public_start, start_of
from tasks.validation import accuracy, task_accuracies
from tests.tasks.task_groups.groups import NETWORK, rows, splits

SOURCES = {"right": {"loader": "users_tasks:right"}, "left": {"loader": "users_tasks:left"}}


@pytest.fixture
def users_tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Splits]:
    found = {"left": splits(1), "right": splits(2, classes=2)}
    module = types.ModuleType("users_tasks")
    for name, one in found.items():
        setattr(module, name, lambda *, with_private, one=one: one)
    monkeypatch.setitem(sys.modules, "users_tasks", module)
    return found


def test_rows_go_side_by_side_and_come_back(users_tasks: dict[str, Splits]) -> None:
    whole = load_tasks(with_private=True, tasks=SOURCES, feature_radius=None)
    assert whole.classes == 5
    for part in ("private", "public_train", "public_gate"):
        joined = getattr(whole, part)
        assert joined.features.shape == (24, 6)
        assert joined.features[:, 0].tolist() == [0] * 12 + [1] * 12  # left before right, as names go
        for task, one in users_tasks.items():
            own = rows_of_task(joined, NETWORK, task)
            assert np.array_equal(own.features, getattr(one, part).features)
            assert np.array_equal(own.labels, getattr(one, part).labels)
    assert "task left: drawn from seed 1; task right: drawn from seed 2" in whole.split_rule
    assert load_tasks(with_private=False, tasks=SOURCES, feature_radius=None).private is None


def test_every_tasks_rows_are_projected_and_their_number_is_not(users_tasks: dict[str, Splits]) -> None:
    whole = load_tasks(with_private=False, tasks=SOURCES, feature_radius=0.5)
    assert set(whole.public_gate.features[:, 0]) == {0.0, 1.0}
    lengths = np.linalg.norm(whole.public_gate.features[:, 1:].astype(np.float64), axis=1)
    assert lengths.max() <= 0.5 < lengths.max() + 1e-6


def test_a_groups_manifest_finds_its_public_rows_again(users_tasks: dict[str, Splits]) -> None:
    """With a feature radius: the loader of the group projects, and nobody does it again on rows with a number."""
    source = DataRecipe(loader=LOADER, arguments={"tasks": SOURCES, "feature_radius": 0.5})
    limits: dict[str, Any] = {"feature_radius": None, "n_max": 99, "neighboring_relation": "replace_one"}
    data = data_record(source, load_splits(source, **limits), b"key").model_dump(mode="json")
    manifest = PortfolioManifest.from_fields(
        {
            "name": "pair",
            "serial": 1,
            "created_at": "2026-01-01T00:00:00Z",
            "lineage": "people",
            "unit": "record",
            "neighboring_relation": "replace_one",
            "recipe_digest": "2" * 64,
            "data": data,
            "network": NETWORK.model_dump(mode="json"),
            "initialisation_digest": "e" * 64,
            "feature_radius": 0.5,
            "n_max": 99,
            "flow_run_id": None,
            "candidates": [
                {
                    "name": name,
                    "registered_model": "pair",
                    "version": 1,
                    "run_id": name,
                    "model_sha256": "3" * 64,
                    "trajectory_sha256": "4" * 64,
                }
                for name in ("a", "b")
            ],
            "tasks": {"a": "left", "b": "right"},
            "records": "disjoint",
            "task_data": {
                task: {**data, "private": {"rows": None, "digest": digest * 64}}
                for task, digest in (("left", "b"), ("right", "c"))
            },
        },
        "manifest",
    )
    for found in (load_public_gate(manifest), load_public_train(manifest)):
        assert set(found.features[:, 0]) == {0.0, 1.0}
    assert rows_of_task(load_public_gate(manifest), NETWORK, "right").labels.max() == 1


def test_images_keep_their_shape() -> None:
    found = {"left": splits(1, shape=(1, 2, 3)), "right": splits(2, shape=(1, 2, 3), classes=2)}
    assert require_one_shape(found) == (1, 2, 3)
    arguments = {**NETWORK.arguments, "shape": [1, 2, 3]}
    own = rows_of_task(
        joined_splits(found).public_gate, NetworkRecord(factory=NETWORK.factory, arguments=arguments), "right"
    )
    assert np.array_equal(own.features, found["right"].public_gate.features)


def test_tasks_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"left and right have rows of different shapes, \[5\] and \[1, 5\]"
    ):
        joined_splits({"left": splits(1), "right": splits(2, shape=(1, 5))})
    with pytest.raises(InvalidInput, match="Task left must name a loader"):
        load_tasks(with_private=False, tasks={"left": {"data": "x"}}, feature_radius=None)
    flat = joined_splits({"left": splits(1), "right": splits(2)}).public_gate
    with pytest.raises(InvalidInput, match="has no head of a task middle"):
        rows_of_task(flat, NETWORK, "middle")
    with pytest.raises(InvalidInput, match="has no head of a task left"):
        task_network_of(NetworkRecord(factory="tasks.models:softmax_regression"), "left")


def test_the_gates_accuracy_is_the_lowest_of_the_tasks(users_tasks: dict[str, Splits]) -> None:
    gate = load_tasks(with_private=False, tasks=SOURCES, feature_radius=None).public_gate
    model = state_bytes(initial_state(NETWORK, 3))
    by_task = task_accuracies(NETWORK, model, gate)
    for task, share in by_task.items():
        module = build(task_network_of(NETWORK, task))
        start = start_of(task, initial_state(NETWORK, 3))
        module.load_state_dict(start)
        own = rows_of_task(gate, NETWORK, task)
        found = module(torch.tensor(own.features)).argmax(dim=1).numpy()
        assert share == np.mean(found == own.labels)
    assert accuracy(NETWORK, model, gate) == min(by_task.values())
    assert list(by_task) == ["left", "right"]
    left = gate.features[:, 0] == 0
    with pytest.raises(InvalidInput, match="no row of task right"):
        accuracy(NETWORK, model, Rows(features=gate.features[left], labels=gate.labels[left]))
    alone = task_network_of(NETWORK, "left")
    assert task_accuracies(alone, b"", gate) == {}


def test_a_seed_names_one_start_of_trunk_and_heads() -> None:
    public = joined_splits({"left": splits(1), "right": splits(2, classes=2)}).public_train
    start = public_start(Start(seed=5), NETWORK, public)
    assert state_bytes(start) == state_bytes(initial_state(NETWORK, 5))
    for task in ("left", "right"):
        build(task_network_of(NETWORK, task)).load_state_dict(start_of(task, start))  # exactly its keys


def test_pretraining_learns_from_public_rows_and_is_repeatable() -> None:
    pretrain = Pretrain(steps=80, learning_rate=0.05, batch_size=24, seed=5)
    data = {"left": splits(1), "right": splits(2, classes=2)}
    public = joined_splits(data).public_train
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    seen: list[int] = []
    start = public_start(Start(pretrain=pretrain), NETWORK, public, on_step=seen.append)
    assert torch.equal(torch.rand(2), expected)  # it disturbs nobody's random numbers
    assert seen == list(range(1, 81))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert state_bytes(public_start(Start(pretrain=pretrain), NETWORK, public)) == state_bytes(start)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert min(task_accuracies(NETWORK, state_bytes(start), public).values()) > 0.8
    assert max(task_accuracies(NETWORK, state_bytes(initial_state(NETWORK, 5)), public).values()) < 0.8

    other = joined_splits({"left": splits(1, private=rows(99)), "right": data["right"]}).public_train
    assert state_bytes(public_start(Start(pretrain=pretrain), NETWORK, other)) == state_bytes(start)
    wild = pretrain.model_copy(update={"learning_rate": 1e30})
    with pytest.raises(InvalidInput, match=r"diverged.*lower pretrain\.learning_rate"):
        public_start(Start(pretrain=wild), NETWORK, public)


def failing_trunk(width: int) -> torch.nn.Module:
    """A user's trunk with a mistake in it."""

    class Trunk(torch.nn.Module):
        def forward(self, rows_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("shapes do not fit")

    return Trunk()


def test_a_trunk_that_fails_is_named() -> None:
    public = joined_splits({"left": splits(1), "right": splits(2, classes=2)}).public_train
    trunk = {"factory": f"{__name__}:failing_trunk", "arguments": {"width": 3}}
    network = NETWORK.model_copy(update={"arguments": {**NETWORK.arguments, "trunk": trunk}})
    pretrain = Pretrain(steps=1, learning_rate=0.05, batch_size=4, seed=5)
    with pytest.raises(
        InvalidInput, match=r"The trunk .*failing_trunk failed on public rows with RuntimeError"
    ):
        public_start(Start(pretrain=pretrain), network, public)
