"""The networks that come along: their shapes and sizes, and that Opacus's gradients are each record's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.grad_sample import wrap_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.models import build, initial_state, state_bytes

SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {  # arguments, shape of a row, parameters
    "softmax_regression": ({"features": 6, "classes": 3}, (6,), 18),
    "logistic_regression": ({"features": 6}, (6,), 6),
    "multilayer_perceptron": (
        {"features": 12, "classes": 3, "hidden": [5, 4], "activation": "elu"},
        (3, 2, 2),
        12 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3,
    ),
    "small_cnn": ({"channels": 1, "size": 28, "classes": 10}, (1, 28, 28), 26_010),
    "resnet18": ({"channels": 3, "classes": 10}, (3, 8, 8), 11_173_962),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def network(name: str, **arguments: Any) -> NetworkRecord:
    return NetworkRecord(factory=f"tasks.models:{name}", arguments=arguments)


@pytest.mark.parametrize("name", SHAPES)
def test_each_gives_its_scores_with_as_many_parameters_as_it_says(name: str) -> None:
    arguments, shape, parameters = SHAPES[name]
    module = build(network(name, **arguments))
    with torch.no_grad():
        scores = module(torch.ones(2, *shape))
    assert scores.shape == (2, arguments.get("classes", 1))
    assert sum(tensor.numel() for tensor in module.parameters()) == parameters
    assert not list(module.buffers())
    assert not any(
        isinstance(layer, _BatchNorm) or getattr(layer, "inplace", False) for layer in module.modules()
    )


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "resnet18"])
def test_a_seed_names_one_public_start(name: str) -> None:
    one = network(name, **SHAPES[name][0])
    assert state_bytes(initial_state(one, 1)) == state_bytes(initial_state(one, 1))
    assert state_bytes(initial_state(one, 1)) != state_bytes(initial_state(one, 2))


def test_resnet18_for_large_images_is_the_published_one_but_for_its_norms() -> None:
    module = build(network("resnet18", channels=3, classes=1000, groups=8, small_images=False))
    assert sum(tensor.numel() for tensor in module.parameters()) == 11_689_512  # as torchvision's
    with torch.no_grad():
        assert module(torch.ones(1, 3, 33, 47)).shape == (1, 1000)
    assert {layer.num_groups for layer in module.modules() if isinstance(layer, nn.GroupNorm)} == {8}
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 17 + 3  # and three shortcuts


def records_own(
    module: nn.Module, rows: torch.Tensor, loss: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Each record's gradient by plain autograd, one record at a time: name -> (rows, ...)."""
    found = []
    for position in range(len(rows)):
        gradients = torch.autograd.grad(
            loss(module(rows[position : position + 1]), torch.tensor([position])), list(module.parameters())
        )
        found.append(gradients)
    names = [name for name, _ in module.named_parameters()]
    return {name: torch.stack(parts) for name, parts in zip(names, zip(*found, strict=True), strict=True)}


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("name", [*(name for name in SHAPES if name != "logistic_regression")])
def test_opacus_finds_each_records_own_gradient(name: str, mode: str) -> None:
    arguments, shape, _ = SHAPES[name]
    torch.manual_seed(1)
    module = build(network(name, **arguments))
    rows, labels = torch.randn(2, *shape), torch.tensor([0, 1])
    loss = nn.functional.cross_entropy
    expected = records_own(module, rows, loss)
    wrapped = wrap_model(copy.deepcopy(module), grad_sample_mode=mode).train()
    loss(wrapped(rows), labels).backward()
    inner = dict(wrapped._module.named_parameters())
    assert inner.keys() == expected.keys()
    if mode == "ghost":
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in expected.values()]).norm(dim=0)
        torch.testing.assert_close(wrapped.get_norm_sample(), norms, rtol=1e-3, atol=1e-5)
        return
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for parameter, gradient in expected.items():
        torch.testing.assert_close(
            inner[parameter].grad_sample, gradient, rtol=1e-3, atol=1e-5 * max(largest, 1)
        )


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "small_cnn",
            {"size": 13},
            "at least 14 pixels, but 13 was given.*tasks.models:multilayer_perceptron",
        ),
        ("small_cnn", {"channels": 0}, "argument channels of tasks.models:small_cnn must be a whole number"),
        ("small_cnn", {"activation": "sigmoid"}, "one of tanh, relu, elu, but 'sigmoid' was given"),
        ("resnet18", {"groups": 3}, "groups of tasks.models:resnet18 must divide 64.*but 3 was given"),
        ("resnet18", {"groups": True}, "groups .* must be a whole number of at least 1, but True"),
        ("resnet18", {"small_images": 1}, "must be true or false"),
        (
            "multilayer_perceptron",
            {"hidden": []},
            "without hidden layers, name tasks.models:softmax_regression",
        ),
        ("multilayer_perceptron", {"hidden": 5}, r"such as \[128, 64\], but 5 was given"),
        ("multilayer_perceptron", {"hidden": [5, 2.5]}, "argument hidden .* but 2.5 was given"),
        ("multilayer_perceptron", {"classes": "ten"}, "argument classes .* but 'ten' was given"),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as refused:
        build(network(name, **(SHAPES[name][0] | changes)))
    assert "\n" not in refused.value.message


def test_the_smallest_image_of_the_small_cnn() -> None:
    for size in range(14, 20):
        with torch.no_grad():
            assert build(network("small_cnn", channels=3, size=size, classes=2))(
                torch.ones(1, 3, size, size)
            ).shape == (1, 2)
