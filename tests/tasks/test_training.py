"""DP-SGD: the steps are Opacus's own, the constants are the recipe's, the trajectory is what was executed."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

from accounting.errors import InvalidInput
from accounting.joint_release import single_run
from tasks.data import Rows
from tasks.models import build, initial_state, state_bytes, state_from_bytes
from tasks.training.clippers import MODES
from tasks.training.recording import TrainingFailed
from tests.tasks.training.by_hand import seeded
from tests.tasks.training.test_reference import train

Build = Callable[..., Any]


def batches(small: Any) -> Iterator[list[int]]:
    """The rows of each step, drawn from the same coins."""
    candidate, coins, count = small.recipe.candidate("only"), seeded(2), len(small.splits.private)
    if candidate.is_full_batch:
        while True:
            yield list(range(count))
    while True:
        torch.empty((), dtype=torch.int64).random_(generator=coins)  # torch's loader draws a seed a pass
        for _ in range(int(1 / candidate.sampling_probability)):
            yield (
                (torch.rand(count, generator=coins) < candidate.sampling_probability)
                .nonzero()
                .flatten()
                .tolist()
            )


def by_hand(small: Any) -> np.ndarray:
    """The update written out in float64: clip, sum, add noise, divide by the constant, step."""
    candidate, noise = small.recipe.candidate("only"), seeded(1)
    features = small.splits.private.features.astype(np.float64)
    labels = small.splits.private.labels
    weights = initial_state(small.recipe.network, small.recipe.initialisation_seed)["weight"].double().numpy()
    velocity = np.zeros_like(weights)
    logistic = len(weights) == 1
    targets = labels[:, None].astype(float) if logistic else np.eye(small.splits.classes)[labels]
    for _, chosen in zip(range(candidate.steps), batches(small), strict=False):
        x, y = features[chosen], targets[chosen]
        scores = x @ weights.T
        if logistic:
            chances = 1 / (1 + np.exp(-scores))
        else:
            chances = np.exp(scores - scores.max(axis=1, keepdims=True)) if len(x) else scores
            chances = chances / chances.sum(axis=1, keepdims=True)
        gradients = (chances - y)[:, :, None] * x[:, None, :]
        norms = np.sqrt((gradients**2).sum(axis=(1, 2)))
        clipped = np.minimum(1, candidate.max_grad_norm / (norms + 1e-6))[:, None, None] * gradients
        deviation = candidate.noise_multiplier * candidate.max_grad_norm
        added = torch.normal(0, deviation, weights.shape, generator=noise).double().numpy()
        direction = (clipped.sum(axis=0) + added) / candidate.expected_batch_size
        velocity = candidate.momentum * velocity + direction + candidate.weight_decay * weights
        weights = weights - candidate.learning_rate * velocity
    return weights


def by_opacus(small: Any) -> torch.Tensor:
    """Opacus's own optimizer and gradients, put together without `make_private`."""
    candidate = small.recipe.candidate("only")
    module = build(small.recipe.network)
    module.load_state_dict(initial_state(small.recipe.network, small.recipe.initialisation_seed))
    network = GradSampleModule(module)
    optimizer = DPOptimizer(
        torch.optim.SGD(
            network.parameters(),
            lr=candidate.learning_rate,
            momentum=candidate.momentum,
            weight_decay=candidate.weight_decay,
        ),
        noise_multiplier=candidate.noise_multiplier,
        max_grad_norm=candidate.max_grad_norm,
        expected_batch_size=candidate.expected_batch_size,
        generator=seeded(1),
    )
    features = torch.tensor(small.splits.private.features)
    labels = torch.tensor(small.splits.private.labels)
    for _, chosen in zip(range(candidate.steps), batches(small), strict=False):
        optimizer.zero_grad()
        scores, targets = network(features[chosen]), labels[chosen]
        if scores.shape[1] == 1:
            losses = torch.nn.BCEWithLogitsLoss(reduction="none")(scores[:, 0], targets.float())
        else:
            losses = torch.nn.CrossEntropyLoss(reduction="none")(scores, targets)
        losses.mean().backward()
        optimizer.step()
    return module.weight.detach()


LOGISTIC = {
    "classes": 2,
    "network": "{factory: tasks.models:logistic_regression, arguments: {features: 5}}",
}
CASES = {
    "full batch": {},
    "full batch, clipped": {"max_grad_norm": 0.3},
    "full batch, momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.01},
    "Poisson": {"sampling_probability": 0.3, "expected_batch_size": 12},
    "Poisson, clipped": {"sampling_probability": 0.25, "expected_batch_size": 10, "max_grad_norm": 0.3},
    "Poisson, nearly always everybody": {"sampling_probability": 0.9, "expected_batch_size": 36},
    "Poisson, some empty batches": {"sampling_probability": 0.01, "expected_batch_size": 1},
    "fewer rows than the public constants say": {"rows": 17, "expected_batch_size": 40},
    "hardly any noise": {"noise_multiplier": 1e-6},
    "logistic regression": {**LOGISTIC, "noise_multiplier": 1e-6, "max_grad_norm": 1.00001},
    "logistic regression, clipped": {**LOGISTIC, "noise_multiplier": 1e-6, "max_grad_norm": 0.2},
    "logistic regression, noise, momentum and weight decay": {
        **LOGISTIC,
        "momentum": 0.9,
        "weight_decay": 0.01,
    },
    "logistic regression, Poisson, some empty batches": {
        **LOGISTIC,
        "sampling_probability": 0.02,
        "expected_batch_size": 1,
    },
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("case", CASES)
def test_the_steps_are_opacus_own_and_as_written_by_hand(small_portfolio: Build, case: str) -> None:
    """Opacus's rules to the last bit, the other ways to the same sum up to rounding."""
    by_mode = {}
    for mode in (
        MODES if "some empty batches" in case or case.endswith("clipped") else ("hooks", "closed_form")
    ):
        small = small_portfolio(**CASES[case], execution={"grad_sample_mode": mode})
        trained = train(small)
        assert trained.trajectory.notes["grad_sample_mode"] == f"{mode}: as the recipe says"
        by_mode[mode] = state_from_bytes(trained.model)["weight"]
    assert torch.equal(by_mode["hooks"], by_opacus(small))
    expected = by_hand(small)
    for weight in by_mode.values():
        assert np.allclose(weight.double().numpy(), expected, rtol=0, atol=2e-5)


def test_a_record_s_gradient_is_its_own(small_portfolio: Build) -> None:
    """Logistic regression, one step: what a record adds does not depend on the others in the batch.

    With max_grad_norm above every norm, no noise worth mentioning and B = 1, the step is the sum of
    (p - y) x; taking one row away takes exactly its share away.
    """
    small = small_portfolio(
        **LOGISTIC, noise_multiplier=1e-12, max_grad_norm=1.00001, steps=1, expected_batch_size=1
    )
    initial = initial_state(small.recipe.network, small.recipe.initialisation_seed)
    weights = initial["weight"].double().numpy()[0]

    def moved(private: Rows) -> np.ndarray:
        trained = train(small, splits=replace(small.splits, private=private))
        return (weights - state_from_bytes(trained.model)["weight"].double().numpy()[0]) / 0.5

    everybody = small.splits.private
    together = moved(everybody)
    for row in (0, 7, 39):
        x, y = everybody.features[row].astype(np.float64), everybody.labels[row]
        own = (1 / (1 + math.exp(-float(weights @ x))) - y) * x
        rest = Rows(
            features=np.delete(everybody.features, row, axis=0), labels=np.delete(everybody.labels, row)
        )
        assert np.allclose(together - moved(rest), own, rtol=0, atol=5e-6)
        assert np.linalg.norm(own) < 1


def test_what_is_proven_for_logistic_regression_is_recorded(small_portfolio: Build) -> None:
    for changes, known in (
        ({"max_grad_norm": 1.00001}, True),
        ({"max_grad_norm": 0.9}, True),
        ({"max_grad_norm": 1.00001, "momentum": 0.5}, False),
        ({"max_grad_norm": 1.00001, "sampling_probability": 0.5}, False),
    ):
        (segment,) = train(small_portfolio(**LOGISTIC, **changes)).trajectory.segments
        assert math.isfinite(segment.update_lipschitz) is known
        assert segment.update_lipschitz_reason.startswith("unknown") is not known
    two_scores = "{factory: tasks.models:softmax_regression, arguments: {features: 5, classes: 2}}"
    (segment,) = train(small_portfolio(classes=2, network=two_scores)).trajectory.segments
    assert "softmax regression" in segment.update_lipschitz_reason


def test_an_empty_batch_is_a_noisy_step_that_counts(small_portfolio: Build) -> None:
    small = small_portfolio(sampling_probability=1e-9, expected_batch_size=8)
    candidate = small.recipe.candidate("only")
    trained = train(small)
    weights = initial_state(small.recipe.network, small.recipe.initialisation_seed)["weight"]
    noise = seeded(1)
    for _ in range(candidate.steps):
        added = torch.normal(0, candidate.noise_multiplier * candidate.max_grad_norm, (3, 5), generator=noise)
        weights = weights - candidate.learning_rate * added / 8
    assert torch.allclose(state_from_bytes(trained.model)["weight"], weights, atol=1e-6)
    assert trained.trajectory.steps == candidate.steps
    assert all(step["private/batch_size"] == 0 and "private/loss" not in step for step in trained.metrics)


def test_the_trajectory_says_what_was_executed(small_portfolio: Build) -> None:
    small = small_portfolio(rows=17, sampling_probability=0.3, expected_batch_size=12, weight_decay=0.5)
    trajectory = train(small, run_id="abc").trajectory
    (segment,) = trajectory.segments
    assert (segment.steps, segment.parent) == (12, None)
    assert re.fullmatch(r"abc:[0-9a-f]{16}:0", segment.id)
    assert (segment.noise_multiplier, segment.max_grad_norm, segment.learning_rate) == (2.0, 1.4143, 0.5)
    assert (segment.expected_batch_size, segment.sampling_probability, segment.sampler) == (
        12,
        math.ceil(float(np.float32(0.3)) * 2**24) / 2**24,  # as the coins really fall
        "poisson",
    )
    assert (segment.weight_decay, segment.optimizer, segment.schedule) == (0.5, "sgd", "fixed")
    assert (trajectory.feature_radius, trajectory.n_max, trajectory.portfolio) == (1.0, 50, "small")
    assert trajectory.library_versions["opacus"] == "1.6.0"


def test_what_was_not_private_says_so(small_portfolio: Build) -> None:
    small = small_portfolio()
    injected = train(small).trajectory.notes
    assert injected["noise_source"] == injected["sampling_coins"] == "INJECTED FOR A TEST: NOT PRIVATE"
    fresh = train(small, noise_generator=None, sampling_generator=None).trajectory.notes
    assert "operating system" in fresh["noise_source"]
    assert "AES-256" in fresh["noise_source"]
    assert "no proof against attacks on floating-point rounding" in fresh["noise_source"]


def test_noise_and_coins_differ_between_runs_and_from_each_other(small_portfolio: Build) -> None:
    small = small_portfolio(sampling_probability=0.5, expected_batch_size=20)
    noisy = [train(small, noise_generator=None).model for _ in range(2)]
    coins = [train(small, sampling_generator=None).metrics for _ in range(2)]
    sizes = [[step["private/batch_size"] for step in metrics] for metrics in coins]
    assert noisy[0] != noisy[1]
    assert sizes[0] != sizes[1]


def test_noise_differs_between_two_fresh_processes() -> None:
    """Even with everything seeded that a script can seed: nothing of torch's global state is used."""
    script = """
import hashlib, torch
from tasks.data import load_splits
from tasks.models import initial_state
from tasks.recipes import find_recipe, load_recipe
from tasks.training import train_candidate
torch.manual_seed(0)
recipe = load_recipe(find_recipe("infra/portfolios/digits.yaml"))
splits = load_splits(recipe.data, feature_radius=1.0, n_max=1200, neighboring_relation="replace_one")
candidate = recipe.candidate("eps-8").model_copy(update={"steps": 2})
initial = initial_state(recipe.network, 1)
trained = train_candidate(
    candidate, recipe=recipe, splits=splits, initial=initial, run_id="run", data_digest="0" * 64
)
print(hashlib.sha256(trained.model).hexdigest(), trained.trajectory.initialisation_digest)
"""
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    one, other = (process.communicate(timeout=120)[0].split() for process in running)
    assert one[1] == other[1]
    assert one[0] != other[0]


def test_private_metrics_are_marked(small_portfolio: Build) -> None:
    trained = train(small_portfolio(max_grad_norm=0.3))
    assert len(trained.metrics) == 12
    names = set().union(*trained.metrics)
    assert {name for name in names if not name.startswith("private/")} == {
        "step",
        "public_train_accuracy",
        "learning_rate",
        "steps_per_second",
    }
    secret = train(small_portfolio(max_grad_norm=0.3), noise_generator=None)
    epsilons = [step["epsilon_so_far"] for step in secret.metrics if "epsilon_so_far" in step]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == single_run(secret.trajectory).epsilon(1e-5)
    assert trained.metrics[-1]["private/clipping_rate"] > 0.5
    assert trained.metrics[-1]["private/gradient_norm_max"] <= 2**0.5 + 1e-6
    assert trained.public_train_accuracy == trained.metrics[-1]["public_train_accuracy"]
    assert "model" not in repr(trained)
    assert "private/" not in repr(trained)


def test_a_diverged_run_is_no_candidate(small_portfolio: Build) -> None:
    small = small_portfolio(learning_rate=1e38, noise_multiplier=1e30)
    with pytest.raises(TrainingFailed, match="Candidate only diverged"):
        train(small)


def test_rows_must_come_checked(small_portfolio: Build) -> None:
    small = small_portfolio()
    for splits in (replace(small.splits, enforced=None), replace(small.splits, private=None)):
        with pytest.raises(InvalidInput, match=r"tasks\.data\.load_splits"):
            train(small, splits=splits)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"features": 6, "classes": 3}, r"does not take rows of shape \(5,\)"),
        ({"features": 5, "classes": 4}, r"gives scores of shape \(4,\), but the data have 3 classes"),
        ({"features": 5, "classes": 1}, r"gives scores of shape \(1,\), but the data have 3 classes"),
    ],
)
def test_a_network_that_does_not_fit(
    small_portfolio: Build, arguments: dict[str, int], sentence: str
) -> None:
    small = small_portfolio()
    network = small.recipe.network.model_copy(update={"arguments": arguments})
    recipe = small.recipe.model_copy(update={"network": network})
    with pytest.raises(InvalidInput, match=sentence):
        train(small, recipe=recipe, initial=initial_state(network, 1))


def test_the_start_is_the_public_one(small_portfolio: Build) -> None:
    small = small_portfolio(noise_multiplier=1e-30, learning_rate=1e-30)
    initial = initial_state(small.recipe.network, small.recipe.initialisation_seed)
    assert train(small).model == state_bytes(initial)
