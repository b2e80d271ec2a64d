"""Fisher information and second moments against the definitions, and from there into a merge."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from accounting.errors import IncompatibleCandidates, InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows
from tasks.merging import merge_models
from tasks.merging.statistics import fisher_statistics, gram_statistics
from tasks.models import state_bytes, state_from_bytes
from tests.tasks.merging.merges import tensors_of

HERE = "tests.tasks.merging.test_statistics"


class Small(nn.Module):
    """A convolution, a norm, an activation, a frozen layer, and two layers, one with a name that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(self.norm(self.conv(rows))).flatten(1) + self.shift
        scores = self.head(self.twice(torch.relu(self.twice(self.frozen(seen)))))
        return torch.cat([scores, torch.full_like(scores[:, :1], -math.inf)], dim=1)  # a class that never is


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows.sum(1) * self.weight[0], rows.sum(1) * float(rows[0, 0].item())], dim=1)


def small() -> nn.Module:
    return Small()


def counting() -> nn.Module:
    return Counting()


NETWORK = NetworkRecord(factory=f"{HERE}:small")
LOGISTIC = NetworkRecord(factory="tasks.models:logistic_regression", arguments={"features": 5})


def rows_of(seed: int, *shape: int) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(
        features=rng.normal(size=shape).astype(np.float32), labels=np.zeros(len(rng.normal(size=shape)), int)
    )


def a_small_model(seed: int) -> bytes:
    torch.manual_seed(seed)
    return state_bytes(Small().state_dict())


def loaded(model: bytes) -> nn.Module:
    module = Small()
    module.load_state_dict(state_from_bytes(model))
    return module.double().eval()


def test_fisher_is_its_definition_row_by_row_and_class_by_class() -> None:
    model, rows = a_small_model(1), rows_of(1, 7, 1, 4, 4)
    found = tensors_of(fisher_statistics(NETWORK, model, rows))
    module = loaded(model)
    expected = {name: torch.zeros_like(p) for name, p in module.named_parameters() if p.requires_grad}
    for row in torch.tensor(rows.features, dtype=torch.float64):
        for answer in range(3):  # the fourth has no probability
            module.zero_grad()
            chances = torch.softmax(module(row[None])[0, :3], dim=0)
            torch.log(chances[answer]).backward()
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    expected[name] += chances[answer].item() * parameter.grad**2 / len(rows)
    assert set(found) == set(expected)
    assert not any(name.startswith("frozen") for name in found)
    for name, value in expected.items():
        assert found[name].dtype == np.float64
        assert np.allclose(found[name], value.detach().numpy(), rtol=1e-9, atol=1e-15), name
        assert value.abs().max() > 0


def test_fisher_of_a_logistic_regression_is_known() -> None:
    """One score: the mean of p (1 - p) x^2."""
    weight = torch.tensor([[0.5, -1.0, 0.25, 0.0, 2.0]])
    rows = rows_of(2, 300, 5)  # more rows than go at once
    found = tensors_of(fisher_statistics(LOGISTIC, state_bytes({"weight": weight}), rows))["weight"]
    x = rows.features.astype(np.float64)
    p = 1 / (1 + np.exp(-x @ weight.numpy().astype(np.float64)[0]))
    assert np.allclose(found[0], np.mean((p * (1 - p))[:, None] * x**2, axis=0), rtol=1e-12)


def test_grams_are_the_second_moments_of_what_the_layers_see() -> None:
    model, rows = a_small_model(3), rows_of(3, 40, 1, 4, 4)
    found = tensors_of(gram_statistics(NETWORK, model, rows))
    assert set(found) == {"conv.weight", "twice.weight", "head.weight"}
    module = loaded(model)
    x = torch.tensor(rows.features, dtype=torch.float64)
    padded = np.pad(x.numpy()[:, 0], ((0, 0), (1, 1), (1, 1)))
    patches = np.stack(
        [padded[:, i : i + 3, j : j + 3].reshape(40, 9) for i in (0, 2) for j in (0, 2)], axis=1
    ).reshape(-1, 9)
    with torch.no_grad():
        into = module.frozen(torch.tanh(module.norm(module.conv(x))).flatten(1) + 0.5)
        again = torch.relu(module.twice(into))
        last = module.twice(again)
        out = (module.conv(x) - module.conv.bias[:, None, None]).permute(0, 2, 3, 1).reshape(-1, 2).numpy()
    assert np.allclose(
        patches @ module.conv.weight.detach().numpy().reshape(2, 9).T, out
    )  # the order of a patch
    both = np.concatenate([into.numpy(), again.numpy()])
    for name, seen in (("conv.weight", patches), ("twice.weight", both), ("head.weight", last.numpy())):
        assert np.allclose(found[name], seen.T @ seen / len(seen), rtol=1e-12, atol=1e-14), name
        assert np.array_equal(found[name], found[name].T)


@pytest.mark.parametrize(("operator", "make"), [("fisher", fisher_statistics), ("regmean", gram_statistics)])
def test_statistics_serve_a_merge_and_say_where_they_come_from(operator: str, make: object) -> None:
    assert callable(make)
    rows = rows_of(4, 30, 1, 4, 4)
    models = {name: a_small_model(seed) for seed, name in enumerate("ab")}
    frozen = {k: v for k, v in state_from_bytes(models["a"]).items() if k.startswith("frozen")}
    models["b"] = state_bytes({**state_from_bytes(models["b"]), **frozen})
    statistics = {name: make(NETWORK, model, rows) for name, model in models.items()}
    length = int.from_bytes(statistics["a"][:8], "little")
    assert json.loads(statistics["a"][8 : 8 + length])["__metadata__"] == {
        "remerge.statistics": {"fisher": "fisher", "regmean": "gram"}[operator],
        "rows": "public",
        "rows_sha256": rows.digest(),
        "model_sha256": hashlib.sha256(models["a"]).hexdigest(),
    }
    assert make(NETWORK, models["a"], rows) == statistics["a"]
    weights = {"a": 0.5, "b": 0.5}
    merged = tensors_of(merge_models(operator, models, weights, statistics=statistics))
    mean = tensors_of(merge_models("average", models, weights))
    assert np.allclose(merged["frozen.weight"], mean["frozen.weight"], rtol=1e-7)
    assert not np.allclose(merged["head.weight"], mean["head.weight"], atol=1e-3)


def test_regmean_serves_its_candidates_outputs_better_than_the_average() -> None:
    """What it is for, on a layer of its own and new rows."""
    network = NetworkRecord(
        factory="tasks.models:softmax_regression", arguments={"features": 6, "classes": 3}
    )
    rng = np.random.default_rng(8)
    # each candidate moved along what its own rows have: two inputs of its own, and the bias
    scales = {"a": np.array([3, 3, 0.1, 0.1, 0.1, 1.0]), "b": np.array([0.1, 0.1, 0.1, 3, 3, 1.0])}
    weights = {name: rng.normal(size=(3, 6)).astype(np.float32) for name in scales}
    models = {name: state_bytes({"weight": torch.tensor(value)}) for name, value in weights.items()}
    seen = {name: (rng.normal(size=(200, 6)) * scale).astype(np.float32) for name, scale in scales.items()}
    statistics = {
        name: gram_statistics(network, models[name], Rows(features=x, labels=np.zeros(200, int)))
        for name, x in seen.items()
    }
    even = {"a": 0.5, "b": 0.5}

    def missed(content: bytes) -> float:
        merged = tensors_of(content)["weight"]
        return sum(float(np.mean((seen[name] @ (merged - weights[name]).T) ** 2)) for name in seen)

    regmean = merge_models("regmean", models, even, statistics=statistics)
    assert missed(regmean) < 0.5 * missed(merge_models("average", models, even))


def test_what_cannot_be_used_costs_one_sentence() -> None:
    model, rows = a_small_model(1), rows_of(1, 5, 1, 4, 4)
    none = Rows(features=rows.features[:0], labels=rows.labels[:0])
    for make in (fisher_statistics, gram_statistics):
        with pytest.raises(InvalidInput, match="need public rows, but there are none"):
            make(NETWORK, model, none)
        with pytest.raises(IncompatibleCandidates, match="parameters do not fit the network"):
            make(NETWORK, state_bytes({"w": torch.ones(1)}), rows)
        bad = state_from_bytes(model)
        bad["conv.weight"][0] = math.nan
        with pytest.raises(IncompatibleCandidates, match=r"statistics of tensor .* are not finite"):
            make(NETWORK, state_bytes(bad), rows)
    network = NetworkRecord(factory=f"{HERE}:counting")
    other = state_bytes({"weight": torch.ones(2)})
    with pytest.raises(
        InvalidInput, match=r"cannot be differentiated row by row.*choose another merge operator"
    ):
        fisher_statistics(network, other, rows_of(1, 5, 4))
    with pytest.raises(InvalidInput, match="no linear layer whose inputs could be looked at"):
        gram_statistics(network, other, rows_of(1, 5, 4))
