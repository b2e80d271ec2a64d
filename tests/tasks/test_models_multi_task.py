"""Networks for several tasks: their keys, their scores, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.grad_sample import wrap_model

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.models import build, initial_state

TRUNK = {
    "factory": "tasks.models:multilayer_perceptron",
    "arguments": {"features": 6, "classes": 4, "hidden": [5]},
}
HEADS = {"upper": 3, "lower": 2}


def one_task(**changes: Any) -> NetworkRecord:
    arguments = {"trunk": TRUNK, "task": "lower", "classes": 2, "width": 4} | changes
    return NetworkRecord(factory="tasks.models:task_network", arguments=arguments)


def all_tasks(**changes: Any) -> NetworkRecord:
    arguments = {"trunk": TRUNK, "heads": HEADS, "width": 4, "shape": [6]} | changes
    return NetworkRecord(factory="tasks.models:multi_task_network", arguments=arguments)


def test_the_keys_say_what_is_shared_and_whose_head_it_is() -> None:
    trunk = {"trunk.1.weight", "trunk.1.bias", "trunk.3.weight", "trunk.3.bias"}
    assert set(initial_state(one_task(), 1)) == trunk | {"heads.lower.weight", "heads.lower.bias"}
    assert set(initial_state(all_tasks(), 1)) == trunk | {
        f"heads.{task}.{kind}" for task in HEADS for kind in ("weight", "bias")
    }


def test_each_rows_scores_are_those_of_its_own_tasks_network() -> None:
    states = {task: initial_state(one_task(task=task, classes=labels), 1) for task, labels in HEADS.items()}
    shared = {key: value for key, value in states["upper"].items() if key.startswith("trunk.")}
    whole = build(all_tasks())
    whole.load_state_dict(states["lower"] | states["upper"] | shared)
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    number = torch.tensor([0.0, 1, 1, 0, 1])  # in the order of the names: lower, upper
    scores = whole(torch.cat([number[:, None], rows], dim=1))
    assert scores.shape == (5, 5)
    for position, (task, columns) in enumerate((("lower", slice(0, 2)), ("upper", slice(2, 5)))):
        alone = build(one_task(task=task, classes=HEADS[task]))
        alone.load_state_dict(states[task] | shared)
        own = number == position
        torch.testing.assert_close(scores[own, columns], alone(rows[own]))
        assert bool((scores[~own, columns] == -torch.inf).all())
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2, 4, 1, 3]))
    loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in whole.parameters())


def test_images_reach_the_trunk_in_their_shape() -> None:
    trunk = {
        "factory": "tasks.models:small_cnn",
        "arguments": {"channels": 1, "size": 14, "classes": 4},
    }
    images = torch.randn(3, 1, 14, 14, generator=torch.Generator().manual_seed(1))
    whole = build(all_tasks(trunk=trunk, shape=[1, 14, 14]))
    alone = build(one_task(trunk=trunk))
    alone.load_state_dict({key: value for key, value in whole.state_dict().items() if "upper" not in key})
    scores = whole(torch.cat([torch.zeros(3, 1), images.flatten(1)], dim=1))
    torch.testing.assert_close(scores[:, :2], alone(images))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_tasks_network_is_trained_privately(mode: str) -> None:
    torch.manual_seed(1)
    module = build(one_task())
    rows, labels = torch.randn(3, 6), torch.tensor([0, 1, 1])
    norms = []
    for row, label in zip(rows, labels, strict=True):
        loss = torch.nn.functional.cross_entropy(module(row[None]), label[None])
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        norms.append(torch.stack([gradient.norm() for gradient in gradients]).norm())
    wrapped = wrap_model(module, grad_sample_mode=mode).train()
    torch.nn.functional.cross_entropy(wrapped(rows), labels).backward()
    found = (
        wrapped.get_norm_sample()
        if mode == "ghost"
        else torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in wrapped.parameters()]).norm(dim=0)
    )
    torch.testing.assert_close(found, torch.stack(norms), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (one_task(classes=1), "task lower of .* must have at least two labels, but 1"),
        (one_task(task="Lower.Case"), "cannot name a task"),
        (one_task(task="values"), "cannot name a task .* such as train or values"),
        (one_task(width=0), "argument width of tasks.models:task_network"),
        (one_task(trunk={"arguments": {}}), "argument trunk of .* must be a factory with its arguments"),
        (one_task(trunk=TRUNK | {"seed": 1}), "argument trunk of .* must be a factory with its arguments"),
        (one_task(trunk={"factory": "tasks.models:softmax_regression"}), "does not accept its arguments"),
        (all_tasks(heads={}), "argument heads of .* must give the number of labels of each task"),
        (all_tasks(heads={"lower": True}), "at least two labels, but True"),
        (all_tasks(shape=6), r"such as \[64\] or \[1, 28, 28\], but 6"),
        (all_tasks(shape=[6, 0]), "argument shape of .* but 0 was given"),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(network: NetworkRecord, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as refused:
        build(network)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("number", [2.0, -1.0, 0.5, float("nan")])
def test_a_row_of_no_task_is_refused(number: float) -> None:
    with pytest.raises(InvalidInput, match="Column 0 of a row must hold the number of its task"):
        build(all_tasks())(torch.tensor([[number, 1, 2, 3, 4, 5, 6]]))


def test_wrong_shapes_are_told() -> None:
    with pytest.raises(InvalidInput, match=r"flat rows of 1 \+ 6 numbers"):
        build(all_tasks())(torch.ones(2, 6))
    with pytest.raises(InvalidInput, match=r"trunk must give 3 numbers a row.* gave shape \[4\]"):
        build(one_task(width=3))(torch.ones(2, 6))
