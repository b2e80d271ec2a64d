"""Training a small network with several parameters is DP-SGD as written by hand, in every mode, noise included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.models import initial_state, state_from_bytes
from tasks.training import TrainedCandidate, train_candidate
from tasks.training.noise import SeededNoise
from tests.tasks.training.by_hand import seeded, train_by_hand

Build = Callable[..., Any]
HERE = "tests.tasks.training.networks"
POISSON = {"sampling_probability": 0.3, "expected_batch_size": 12}
RARE = {"sampling_probability": 0.02, "expected_batch_size": 1, "steps": 20}  # 45 of 100 batches are empty


def network(name: str) -> dict[str, str]:
    return {"network": f"{{factory: {HERE}:{name}}}"}


def train(small: Any, **changes: Any) -> TrainedCandidate:
    arguments = {
        "recipe": small.recipe,
        "splits": small.splits,
        "initial": initial_state(small.recipe.network, small.recipe.initialisation_seed),
        "run_id": "run",
        "data_digest": "0" * 64,
        "noise_generator": seeded(1),
        "sampling_generator": seeded(2),
    }
    return train_candidate(small.recipe.candidate("only"), **{**arguments, **changes})


def require_equal(model: bytes, expected: dict[str, Tensor], atol: float) -> None:
    """Within float32's rounding; the expected parameters are float64."""
    found = state_from_bytes(model)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert np.allclose(found[name].double().numpy(), tensor.numpy(), rtol=0, atol=atol), name


CASES: dict[str, dict[str, Any]] = {
    "full batch": {},
    "full batch, clipped, nearly no noise": {"max_grad_norm": 0.1, "noise_multiplier": 1e-6},
    "full batch, half of the rows clipped": {"max_grad_norm": 0.5, "noise_multiplier": 0.1},
    "full batch, momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.05},
    "fewer rows than the public constants say": {"rows": 17},
    "Adam": {"optimizer": "adam", "learning_rate": 0.05},
    "Adam, weight decay": {"optimizer": "adam", "learning_rate": 0.05, "weight_decay": 0.1},
    "AdamW": {"optimizer": "adamw", "learning_rate": 0.05, "weight_decay": 0.1, **POISSON},
    "Poisson": POISSON,
    "Poisson, clipped, momentum": {**POISSON, "max_grad_norm": 0.2, "momentum": 0.5},
    "Poisson, nearly always everybody": {"sampling_probability": 0.9, "expected_batch_size": 36},
    "Poisson, some empty batches": RARE,
    "Poisson, only empty batches": {**RARE, "sampling_probability": 1e-9, "steps": 3},
    "Poisson, empty batches, Adam": {**RARE, "optimizer": "adam", "learning_rate": 0.05},
}


@pytest.mark.parametrize(
    ("name", "case"),
    [("perceptron", case) for case in CASES]
    + [("convolutions", case) for case in CASES if "Poisson" in case or "half" in case],
)
def test_flat_clipping_in_every_mode(small_portfolio: Build, name: str, case: str) -> None:
    expected: dict[str, Tensor] = {}
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(**network(name), **CASES[case], execution={"grad_sample_mode": mode})
        expected = expected or train_by_hand(small)
        trained = train(small)
        require_equal(trained.model, expected, atol=1e-4 if "Adam" in case else 2e-5)
        assert trained.trajectory.steps == small.recipe.candidate("only").steps
        assert trained.trajectory.notes["grad_sample_mode"].startswith(mode)


@pytest.mark.parametrize(
    "case",
    [
        "full batch",
        "full batch, half of the rows clipped",
        "Poisson, clipped, momentum",
        "Poisson, some empty batches",
    ],
)
@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_clipping_per_layer_in_every_mode(small_portfolio: Build, name: str, case: str) -> None:
    expected: dict[str, Tensor] = {}
    for mode in ("hooks", "functorch"):
        small = small_portfolio(
            **network(name), **CASES[case], clipping="per_layer", execution={"grad_sample_mode": mode}
        )
        expected = expected or train_by_hand(small)
        trained = train(small)
        require_equal(trained.model, expected, atol=2e-5)
        assert {segment.clipping for segment in trained.trajectory.segments} == {"per_layer"}


@pytest.mark.parametrize("name", ["sequence", "users_own_layer"])
def test_layers_without_an_own_rule_and_layers_that_see_a_record_at_many_places(
    small_portfolio: Build, name: str
) -> None:
    expected: dict[str, Tensor] = {}
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(
            **network(name), **POISSON, max_grad_norm=0.1, execution={"grad_sample_mode": mode}
        )
        expected = expected or train_by_hand(small)
        require_equal(train(small).model, expected, atol=2e-5)


def test_one_score_for_two_classes(small_portfolio: Build) -> None:
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(
            **network("one_score"), classes=2, max_grad_norm=0.2, execution={"grad_sample_mode": mode}
        )
        require_equal(train(small).model, train_by_hand(small), atol=2e-5)


class CountingNoise:
    """The seeded noise, and how often it was asked for."""

    def __init__(self) -> None:
        self.source = SeededNoise(seeded(1))
        self.description = "counted, for a test"
        self.drawn: list[tuple[int, ...]] = []
        self.deviations: set[float] = set()

    def added(self, total: Tensor, deviation: float) -> Tensor:
        self.drawn.append(tuple(total.shape))
        self.deviations.add(deviation)
        return self.source.added(total, deviation)


PARTS = {
    "full batch": {"rows": 20, "momentum": 0.5, "max_grad_norm": 0.3},
    "full batch of 23, a prime number": {"rows": 23, "steps": 5, "max_grad_norm": 0.3},
    "Poisson": {**POISSON, "max_grad_norm": 0.3},
    "Poisson, some empty batches": {**RARE, "max_grad_norm": 0.3},
    "Poisson, per layer": {**POISSON, "max_grad_norm": 0.3, "clipping": "per_layer"},
    "Poisson, Adam": {**POISSON, "optimizer": "adam", "learning_rate": 0.05},
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_a_batch_in_parts_is_one_step_with_one_noise(small_portfolio: Build, mode: str, case: str) -> None:
    per_layer = PARTS[case].get("clipping") == "per_layer"
    expected: dict[str, Tensor] = {}
    for at_once in (1, 7, 10):  # 10 of 20 rows: a multiple
        small = small_portfolio(
            **network("perceptron"),
            **PARTS[case],
            # ghost clipping knows a record's whole gradient only
            execution={"grad_sample_mode": "hooks" if per_layer else mode, "physical_batch_size": at_once},
        )
        expected = expected or train_by_hand(small)
        candidate, noise = small.recipe.candidate("only"), CountingNoise()
        trained = train(small, noise=noise)
        require_equal(trained.model, expected, atol=1e-4 if "Adam" in case else 2e-5)
        assert trained.trajectory.steps == candidate.steps
        assert noise.drawn == [(4, 5), (4,), (3, 4), (3,)] * candidate.steps
        assert noise.deviations == {candidate.noise_multiplier * candidate.max_grad_norm}
        (segment,) = trained.trajectory.segments
        assert segment.expected_batch_size == candidate.expected_batch_size


def test_a_regression_s_batch_in_parts_in_closed_form(small_portfolio: Build) -> None:
    for changes in ({}, POISSON, RARE):
        expected: dict[str, Tensor] = {}
        for at_once in (1, 7, 20):
            execution = {"grad_sample_mode": "closed_form", "physical_batch_size": at_once}
            small = small_portfolio(max_grad_norm=0.3, **changes, execution=execution)
            expected = expected or train_by_hand(small)
            noise = CountingNoise()
            trained = train(small, noise=noise)
            require_equal(trained.model, expected, atol=2e-5)
            assert len(noise.drawn) == trained.trajectory.steps == small.recipe.candidate("only").steps


SCHEDULES: dict[str, tuple[dict[str, Any], list[float]]] = {
    # warm-up plateaus end at the highest rate; a schedule's plateaus stand at their middles
    "linear in two stages after a warm-up in two": (
        {"learning_rate_schedule": "linear", "warmup_steps": 4, "schedule_stages": 2},
        [0.25] * 2 + [0.5] * 2 + [0.5 * 0.75] * 4 + [0.5 * 0.25] * 4,
    ),
    "cosine in three stages": (
        {"learning_rate_schedule": "cosine", "schedule_stages": 3},
        [0.5 * (1 + math.cos(math.pi * (stage + 0.5) / 3)) / 2 for stage in range(3) for _ in range(4)],
    ),
    "a warm-up alone": ({"warmup_steps": 3}, [0.5 / 3, 1.0 / 3, 0.5] + [0.5] * 9),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_warm_up(small_portfolio: Build, schedule: str) -> None:
    changes, rates = SCHEDULES[schedule]
    for more in ({"momentum": 0.9}, {"optimizer": "adam"}):
        small = small_portfolio(
            **network("perceptron"), **changes, **more, execution={"grad_sample_mode": "hooks"}
        )
        trained = train(small)
        require_equal(trained.model, train_by_hand(small, rates=rates), atol=2e-4)
        recorded = [s.learning_rate for s in trained.trajectory.segments for _ in range(s.steps)]
        assert recorded == pytest.approx(rates, rel=1e-15)


def test_the_reference_is_sharp(small_portfolio: Build) -> None:
    """A step more, an other divisor or another limit is seen by the comparison."""
    small = small_portfolio(
        **network("perceptron"), max_grad_norm=0.3, execution={"grad_sample_mode": "hooks"}
    )
    model = train(small).model
    require_equal(model, train_by_hand(small), atol=2e-5)
    candidate = small.recipe.candidate("only")
    for change in ({"steps": 11}, {"expected_batch_size": 40.1}, {"max_grad_norm": 0.301}):
        recipe = small.recipe.model_copy(update={"candidates": (candidate.model_copy(update=change),)})
        other = type(small)(recipe=recipe, splits=small.splits)
        with pytest.raises(AssertionError):
            require_equal(model, train_by_hand(other), atol=2e-5)
