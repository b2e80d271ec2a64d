"""Networks: public starts and deterministic bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.models import build, initial_state, is_regression, state_bytes, state_from_bytes

SOFTMAX = NetworkRecord(factory="tasks.models:softmax_regression", arguments={"features": 5, "classes": 3})
LOGISTIC = NetworkRecord(factory="tasks.models:logistic_regression", arguments={"features": 5})


def test_a_seed_names_one_public_start_and_disturbs_nothing() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = initial_state(SOFTMAX, 7)
    assert torch.equal(torch.rand(3), expected)
    torch.rand(10)
    assert state_bytes(initial_state(SOFTMAX, 7)) == state_bytes(first)
    assert state_bytes(initial_state(SOFTMAX, 8)) != state_bytes(first)


def test_bytes_depend_on_the_tensors_alone() -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.float64)
    content = state_bytes({"a": a, "b": b})
    assert content == state_bytes({"b": b.clone(), "a": a.t().contiguous().t()})
    read = state_from_bytes(content)
    assert torch.equal(read["a"], a)
    assert torch.equal(read["b"], b)
    assert b"__metadata__" not in content


def test_tied_tensors_can_be_written() -> None:
    shared = torch.ones(3)
    assert set(state_from_bytes(state_bytes({"a": shared, "b": shared}))) == {"a", "b"}


def test_what_counts_as_a_regression() -> None:
    assert is_regression(build(SOFTMAX))
    assert is_regression(build(LOGISTIC))
    assert not is_regression(torch.nn.Linear(5, 3))  # its own bias is not projected
    assert not is_regression(torch.nn.Sequential(torch.nn.Linear(5, 3, bias=False)))
    frozen = torch.nn.Linear(5, 3, bias=False)
    frozen.weight.requires_grad_(False)
    assert not is_regression(frozen)


def test_logistic_regression_gives_the_inner_product_with_one_weight_vector() -> None:
    module = build(LOGISTIC)
    module.load_state_dict({"weight": torch.tensor([[1.0, -2.0, 0.5, 0.0, 3.0]])})
    assert torch.equal(
        module(torch.tensor([[2.0, 1, 4, 9, 1], [0, 1, 0, 0, 0]])), torch.tensor([[5.0], [-2]])
    )


def test_a_layer_that_computes_something_else_is_no_regression() -> None:
    def changed(change: Callable[[torch.nn.Module], object]) -> torch.nn.Module:
        module = build(LOGISTIC)
        assert is_regression(module)
        change(module)
        return module

    for change in (
        lambda module: module.register_forward_pre_hook(lambda _, rows: (100 * rows[0],)),
        lambda module: module.register_forward_hook(lambda _, rows, scores: scores**3),
        lambda module: module.register_full_backward_hook(lambda _, before, after: None),
        lambda module: module.weight.register_hook(lambda gradient: 2 * gradient),
        lambda module: setattr(module, "forward", lambda rows: rows[:, :1] ** 2),
        lambda module: torch.nn.utils.spectral_norm(module),
        lambda module: torch.nn.utils.parametrizations.weight_norm(module),
        lambda module: module.register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
    ):
        assert not is_regression(changed(change))


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        ({"factory": "softmax_regression"}, "must be an import path such as"),
        ({"factory": "users_lost:network"}, "no module named users_lost"),
        ({"factory": "tasks.models:perceptron"}, "has no function perceptron"),
        ({"factory": "tasks.models:softmax_regression"}, "does not accept its arguments"),
        ({"factory": "builtins:dict"}, "must return a torch.nn.Module, but it returned dict"),
    ],
)
def test_a_factory_that_goes_wrong_is_told_how(network: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        build(NetworkRecord(**network))
