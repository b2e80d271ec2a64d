"""The task_merging flow against the real stack: what stops a group before training, and a killed one that goes on."""

from __future__ import annotations

import sys
import types
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accounting.budget import NeighboringRelation
from accounting.certificate import Certificate
from accounting.joint_release import joint_release, single_run
from flows.train_progress import Look
from infra.canonical import strict_json
from infra.documents import Policy
from tasks.data import Rows, Splits
from tasks.registry import load_all
from tasks.services import Services, open_services
from tasks.task_groups import load_group
from tests.flows.killed import Training
from tests.system.conftest import run_policy

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RECIPE = """
name: NAME
lineage: NAME
neighboring_relation: add_or_remove_one
records: disjoint
trunk: {factory: tasks.models:multilayer_perceptron, arguments: {features: 4, hidden: [5], classes: 3}}
width: 3
feature_radius: 1
n_max: 100
initialisation: {seed: 3}
delta: 1e-5
defaults:
  {steps: 4, max_grad_norm: 1, learning_rate: 0.5, expected_batch_size: 30, noise_multiplier: 6,
   dp_merging: {ascent: same_batch, radius: 0.05, anchor: 0.01}}
tasks:
  left: {data: users_tasks:left, classes: 2, candidates: {one: {}}}
  right: {data: users_tasks:right, classes: 3, candidates: {two: {}, three: {noise_multiplier: 3}}}
"""


@pytest.fixture
def services(stack: Any) -> Services:
    return open_services(stack.settings)


@pytest.fixture
def users_tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Splits]:
    """Data of two tasks; tests change what is in the mapping."""
    numbers = np.random.default_rng(5)

    def rows(count: int, classes: int) -> Rows:
        features = numbers.normal(size=(count, 4)).astype(np.float32)
        return Rows(features=features, labels=np.arange(count) % classes)

    found = {
        task: Splits(
            private=rows(30, classes),
            public_train=rows(10, classes),
            public_gate=rows(10, classes),
            classes=classes,
            split_rule="drawn",
        )
        for task, classes in (("left", 2), ("right", 3))
    }
    module = types.ModuleType("users_tasks")
    module.left = lambda *, with_private: found["left"]  # type: ignore[attr-defined]
    module.right = lambda *, with_private: found["right"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_tasks", module)
    return found


@pytest.fixture
def train(run_here: Callable[..., Any]) -> Callable[..., Any]:
    """Run the flow in this process; returns its final state."""
    from flows.task_merging import task_merging

    return partial(run_here, task_merging)


def test_tasks_that_share_a_record_are_refused_or_released_jointly(
    services: Services, train: Callable[..., Any], users_tasks: dict[str, Splits]
) -> None:
    name = f"pair-{uuid.uuid4().hex[:8]}"
    text = RECIPE.replace("NAME", name)
    assert users_tasks["right"].private is not None
    assert users_tasks["left"].private is not None
    users_tasks["right"].private.features[7] = users_tasks["left"].private.features[3]
    state = train(text)
    assert state.is_failed()
    assert state.message == (
        f"The group {name} says `records: disjoint`, but the private data of the tasks left and right share records: "
        "split the data by a rule that looks at one record at a time, or say `records: shared`, which accounts for a "
        "record in all tasks."
    )
    assert services.manifests.newest(name) is None
    assert services.mlflow.get_experiment_by_name(name) is None  # nothing was trained

    policy = {"region": f"r{uuid.uuid4().hex[:8]}", "epsilon": 50.0, "delta": 1e-5, "author": "test"}
    policy |= {"neighboring_relation": "add_or_remove_one", "selection": "public_twin"}
    state = train(text.replace("records: disjoint", "records: shared\npublic_twins: true"), policy=policy)
    assert state.is_completed(), state.message
    assert state.message == (
        f"Portfolio {name}@1 is ready with 3 candidates of the tasks left and right. Policy 1 of {policy['region']} "
        "was set for it."
    )
    manifest = services.manifests.read(name, 1)
    assert (manifest.records, manifest.tasks) == ("shared", {"one": "left", "two": "right", "three": "right"})
    loaded = load_all(services.mlflow, manifest)
    stored = services.policies.newest(str(policy["region"]))
    assert isinstance(stored, Policy)
    promoted = run_policy(stored)
    assert promoted.succeeded, promoted.sentence
    pointer, _ = services.releases.read_pointer(stored.region)  # type: ignore[misc]
    found = services.releases.read_manifest(pointer.release_id, sha256=pointer.release_manifest_digest)
    content = services.releases.read_file(
        found.release_id, "certificate.json", found.files["certificate.json"]
    )
    certificate = Certificate.from_dict(strict_json(content))
    utilities = {record.name: record.utility for record in manifest.candidates}
    [best] = [one for one, task in certificate.tasks.items() if task == "right"]
    assert certificate.records == "shared"
    assert set(certificate.tasks) == {"one", best}
    assert utilities[best] == max(utilities[one] for one in ("two", "three"))
    both = [loaded[one].trajectory for one in ("one", best)]
    joint = joint_release(both, NeighboringRelation.ADD_OR_REMOVE_ONE).epsilon(1e-5)
    assert certificate.bound == "joint"
    assert joint <= certificate.epsilon <= joint * (1 + 1e-6)
    assert joint > max(single_run(one).epsilon(1e-5) for one in both)
    assert both[0].segments[0].ascent_radius == 0.05


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "n_max: 100",
            "n_max: 60",
            "more private rows together than its n_max 60 allows (with room for one more",
        ),
        (
            "classes: 3, candidates",
            "classes: 4, candidates",
            "says classes: 4, but the loader users_tasks:right",
        ),
        ("features: 4, hidden", "features: 6, hidden", "does not take rows of shape (4,)"),
        ("width: 3", "width: 2", "The trunk must give 2 numbers a row"),
    ],
)
def test_a_group_that_does_not_fit_is_told_before_training(
    services: Services,
    train: Callable[..., Any],
    users_tasks: dict[str, Splits],
    old: str,
    new: str,
    sentence: str,
) -> None:
    letters = str.maketrans("0123456789", "ghijklmnop")
    name = f"pair-{uuid.uuid4().hex[:8].translate(letters)}"
    state = train(RECIPE.replace("NAME", name).replace(old, new))
    assert state.is_failed()
    assert sentence in state.message
    assert "30" not in state.message  # how many private rows there are
    assert services.mlflow.get_experiment_by_name(name) is None


def test_a_killed_group_goes_on(stack: Any, services: Services, tmp_path: Path) -> None:
    name = f"killed-{uuid.uuid4().hex[:8]}"
    path = tmp_path / "group.yaml"
    data = "{loader: tasks.data:digits, arguments: {classes: CLASSES}}"
    text = (
        RECIPE.replace("NAME", name)
        .replace("features: 4", "features: 65")
        .replace("n_max: 100", "n_max: 1300")
    )
    text = text.replace("users_tasks:left, classes: 2", data.replace("CLASSES", "[3, 8]") + ", classes: 2")
    text = text.replace(
        "users_tasks:right, classes: 3", data.replace("CLASSES", "[1, 4, 7]") + ", classes: 3"
    )
    text = text.replace("two: {}, three: {noise_multiplier: 3}", "two: {steps: 3000}")
    path.write_text(
        text
        + "execution: {parallel_candidates: 1, monitor_every: 100, checkpoint_every: 20, grad_sample_mode: hooks}\n"
    )
    training = Training(
        stack.settings, services, path, load_group(path), command="merge-tasks", deployment="task-merging"
    )
    _, error = training.kill_flow(lambda flow_run_id: training.has_checkpoint("two", flow_run_id))
    assert f"run `remerge merge-tasks {path}` again, which goes on" in error
    assert services.manifests.newest(name) is None
    left = training.runs()

    shown = training.train()
    assert "1 of 2 candidates is done, 1 goes on from step" in shown
    assert "`remerge merge-tasks --fresh` trains all anew." in shown
    manifest = services.manifests.read(name, 1)
    assert manifest.tasks == {"one": "left", "two": "right"}
    runs = training.runs()
    assert runs["one"] == left["one"]  # not trained again
    assert len(runs["two"]) == 2
    trajectories = training.trajectories(manifest)
    first, second = trajectories["two"].segments
    assert first.steps + second.steps == 3000
    assert trajectories["one"].steps == 4
    assert {one.initialisation_digest for one in trajectories.values()} == {manifest.initialisation_digest}

    look = Look(services.connections.mlflow_url, name, str(manifest.flow_run_id))
    look.again()
    look.close()
    assert {seen: one.ended_well for seen, one in look.candidates.items()} == {"one": True, "two": True}
