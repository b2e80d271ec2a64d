"""Segments as executed, and the Lipschitz constant that is claimed for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

from accounting.trajectory import Segment
from tasks.data import Enforced, Rows, project
from tasks.models import is_regression, logistic_regression, softmax_regression
from tasks.objective import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, Objective
from tasks.training.recording import (
    ExecutedStep,
    StepRecorder,
    Stretch,
    TrainingFailed,
    segments,
    update_lipschitz,
)

STEP = ExecutedStep(
    noise_multiplier=50.0,
    max_grad_norm=1.4143,
    learning_rate=3.9,
    expected_batch_size=1200.0,
    momentum=0.0,
    weight_decay=0.0,
    optimizer="sgd",
)
ENFORCED = Enforced(feature_radius=1.0, n_max=1200, neighboring_relation="replace_one")


def changed(**changes: object) -> ExecutedStep:
    values = {name: getattr(STEP, name) for name in STEP.__dataclass_fields__}
    return ExecutedStep(**{**values, **changes})


def encode(*steps: ExecutedStep) -> tuple[Segment, ...]:
    return segments(
        list(steps),
        stretches=[Stretch(run_id="r", token="")],
        sampling_probability=1.0,
        regression=True,
        objective=CROSS_ENTROPY,
        enforced=ENFORCED,
    )


def test_equal_steps_are_one_segment_and_changes_start_another() -> None:
    slower = changed(learning_rate=1.0)
    first, second, third = encode(STEP, STEP, STEP, slower, STEP, STEP)
    assert [(s.id, s.steps, s.learning_rate) for s in (first, second, third)] == [
        ("r:0", 3, 3.9),
        ("r:1", 1, 1.0),
        ("r:2", 2, 3.9),
    ]
    assert first.parent is None
    assert (second.parent.run, second.parent.segment, second.parent.step) == ("r", "r:0", 3)
    assert (third.parent.run, third.parent.segment, third.parent.step) == ("r", "r:1", 1)


def test_the_recorder_reads_the_optimizer_and_not_the_recipe() -> None:
    network = GradSampleModule(torch.nn.Linear(5, 3, bias=False))
    optimizer = DPOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.5),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        expected_batch_size=7,
    )
    recorder = StepRecorder()
    optimizer.attach_step_hook(recorder)

    def step() -> None:
        optimizer.zero_grad()
        inputs = torch.ones(4, 5, requires_grad=True)
        torch.nn.functional.cross_entropy(network(inputs), torch.zeros(4, dtype=torch.int64)).backward()
        optimizer.step()

    step()
    optimizer.noise_multiplier = 3.0
    optimizer.max_grad_norm = 0.5
    step()
    optimizer.param_groups[0].update(lr=0.25, momentum=0.5)
    optimizer.expected_batch_size = 9
    step()
    optimizer.param_groups[0]["nesterov"] = True
    step()
    seen = [
        (s.noise_multiplier, s.max_grad_norm, s.learning_rate, s.expected_batch_size) for s in recorder.steps
    ]
    assert seen == [(2, 1, 0.5, 7), (3, 0.5, 0.5, 7), (3, 0.5, 0.25, 9), (3, 0.5, 0.25, 9)]
    assert [s.momentum for s in recorder.steps] == [0, 0, 0.5, 0.5]
    assert [s.optimizer for s in recorder.steps] == ["sgd"] * 3 + ["sgd (modified)"]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(TrainingFailed):
        recorder(optimizer)


def lipschitz(
    step: ExecutedStep,
    q: float = 1.0,
    module: torch.nn.Module | None = None,
    objective: Objective = CROSS_ENTROPY,
    enforced: Enforced = ENFORCED,
) -> tuple[float, str]:
    if module is None:
        module = softmax_regression(5, 3) if objective is CROSS_ENTROPY else logistic_regression(5)
    return update_lipschitz(
        step,
        sampling_probability=q,
        regression=is_regression(module),
        objective=objective,
        enforced=enforced,
    )


def test_the_demo_recipe_is_non_expansive() -> None:
    bound, reason = lipschitz(STEP)
    assert bound == 1.0
    assert "softmax regression" in reason
    assert "at most 1200" in reason


def test_logistic_regression_is_recorded_with_its_own_constants() -> None:
    bound, reason = lipschitz(changed(max_grad_norm=1.000002), objective=BINARY_CROSS_ENTROPY)
    assert bound == 1.0
    assert "beta = R^2/4: logistic regression on binary cross-entropy" in reason
    assert "flat clipping at 1.000002 >= R + 1e-6, which never acts, in real-number arithmetic" in reason
    assert "executed in float32" in reason


@pytest.mark.parametrize("limit", [1.0, 0.25, 1e-9])
def test_clipped_logistic_regression_keeps_its_constant(limit: float) -> None:
    bound, reason = lipschitz(changed(max_grad_norm=limit), objective=BINARY_CROSS_ENTROPY)
    assert bound == 1.0
    assert f"flat clipping at {limit}, which leaves the gradient of a convex, as smooth loss" in reason


WITH_BIAS, FROZEN = torch.nn.Linear(5, 3), logistic_regression(5)
FROZEN.weight.requires_grad_(False)
LOGISTIC = BINARY_CROSS_ENTROPY


@pytest.mark.parametrize(
    ("objective", "step", "q", "module", "reason"),
    [
        (CROSS_ENTROPY, STEP, 0.25, None, "Poisson"),
        (CROSS_ENTROPY, changed(momentum=0.1), 1.0, None, "momentum"),
        (CROSS_ENTROPY, changed(optimizer="adam"), 1.0, None, "the optimizer is adam"),
        (CROSS_ENTROPY, changed(max_grad_norm=1.4142), 1.0, None, "clipping can act"),
        (CROSS_ENTROPY, changed(max_grad_norm=math.sqrt(2)), 1.0, None, "clipping can act"),
        (CROSS_ENTROPY, STEP, 1.0, WITH_BIAS, "not softmax regression"),
        (LOGISTIC, STEP, 0.25, None, "Poisson"),
        (LOGISTIC, changed(momentum=0.1), 1.0, None, "momentum"),
        (LOGISTIC, changed(optimizer="adam"), 1.0, None, "the optimizer is adam"),
        (LOGISTIC, STEP, 1.0, torch.nn.Linear(5, 1), "not logistic regression"),
        (LOGISTIC, STEP, 1.0, FROZEN, "not logistic regression"),
        (LOGISTIC, STEP, 1.0, torch.nn.Sequential(logistic_regression(5)), "not logistic regression"),
    ],
)
def test_an_unchecked_condition_gives_infinity(
    objective: Objective, step: ExecutedStep, q: float, module: torch.nn.Module | None, reason: str
) -> None:
    bound, why = lipschitz(step, q, module, objective)
    assert bound == math.inf
    assert reason in why


def test_the_formula() -> None:
    assert lipschitz(changed(weight_decay=0.01, learning_rate=1.0))[0] == pytest.approx(0.99)
    assert lipschitz(changed(weight_decay=0.01))[0] == pytest.approx(0.039 + 1.95 - 1)
    assert lipschitz(changed(learning_rate=6.0))[0] == pytest.approx(2.0)
    assert lipschitz(changed(expected_batch_size=300.0))[0] == pytest.approx(3.9 * 0.5 * 4 - 1)


def test_the_formula_of_logistic_regression() -> None:
    wide = Enforced(feature_radius=2.0, n_max=1200, neighboring_relation="replace_one")
    for step, enforced, expected in (
        (changed(weight_decay=0.01, learning_rate=1.0), ENFORCED, 0.99),
        (changed(learning_rate=8.0), ENFORCED, 1.0),
        (changed(learning_rate=12.0), ENFORCED, 2.0),
        (changed(expected_batch_size=300.0), ENFORCED, 3.9 - 1),
        (changed(max_grad_norm=2.1), wide, 3.9 - 1),
    ):
        bound, _ = lipschitz(step, objective=LOGISTIC, enforced=enforced)
        assert bound == pytest.approx(expected, rel=1e-12)
        assert bound >= expected


def full_batch_update(
    weights: torch.Tensor, rows: Rows, step: ExecutedStep, objective: Objective
) -> torch.Tensor:
    """Noiseless, clipped as Opacus does it, in float64."""
    x, y = torch.tensor(rows.features).double(), torch.tensor(rows.labels)
    if objective is LOGISTIC:
        off = torch.sigmoid(x @ weights.T) - y[:, None]
    else:
        off = torch.softmax(x @ weights.T, dim=1) - torch.nn.functional.one_hot(y, weights.shape[0])
    gradients = off[:, :, None] * x[:, None, :]
    norms = gradients.flatten(1).norm(dim=1)
    factor = (step.max_grad_norm / (norms + 1e-6)).clamp(max=1)
    total = (factor[:, None, None] * gradients).sum(0) / step.expected_batch_size
    return weights - step.learning_rate * (total + step.weight_decay * weights)


REGRESSIONS = pytest.mark.parametrize(
    ("objective", "scores", "classes"), [(CROSS_ENTROPY, 3, 3), (LOGISTIC, 1, 2)]
)


@REGRESSIONS
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(0, 20),
    gap=st.floats(1e-3, 5),
    rate=st.floats(0.1, 20),
    decay=st.floats(0, 0.3),
    alike=st.booleans(),
    limit=st.floats(1e-8, 1.2),
)
def test_no_data_set_expands_more_than_claimed(
    objective: Objective,
    scores: int,
    classes: int,
    seed: int,
    scale: float,
    gap: float,
    rate: float,
    decay: float,
    alike: bool,
    limit: float,
) -> None:
    """Attack the claim: random and concentrated data, random weights, small and large gaps."""
    numbers = np.random.default_rng(seed)
    count = 12
    features = numbers.normal(size=(count, 5)).astype(np.float32) * 3
    if alike:
        features[:] = features[0]
    rows = project(Rows(features=features, labels=numbers.integers(classes, size=count)), 1.0)
    step = changed(learning_rate=rate, weight_decay=decay, expected_batch_size=12.0)
    if objective is LOGISTIC:
        step = changed(learning_rate=rate, weight_decay=decay, expected_batch_size=12.0, max_grad_norm=limit)
    enforced = Enforced(feature_radius=1.0, n_max=count, neighboring_relation="replace_one")
    bound, _ = lipschitz(step, objective=objective, enforced=enforced)
    one = torch.tensor(numbers.normal(size=(scores, 5)) * scale)
    other = one + gap * torch.tensor(numbers.normal(size=(scores, 5)))
    moved = full_batch_update(one, rows, step, objective) - full_batch_update(other, rows, step, objective)
    assert moved.norm() <= bound * (one - other).norm() * (1 + 1e-9)


@pytest.mark.parametrize(
    ("objective", "rate", "start", "other"),
    [
        (CROSS_ENTROPY, 6.0, [0, 0, -50], [1e-4, -1e-4, -50]),  # two classes at odds, the third is out
        (LOGISTIC, 12.0, [0], [1e-4]),
    ],
)
def test_the_claim_is_reached(
    objective: Objective, rate: float, start: list[float], other: list[float]
) -> None:
    """Equal rows at the radius: the claim could not be smaller."""
    features = np.zeros((12, 5), dtype=np.float32)
    features[:, 0] = 1.0
    rows = Rows(features=features, labels=np.zeros(12, dtype=np.int64))
    step = changed(learning_rate=rate, expected_batch_size=12.0)
    enforced = Enforced(feature_radius=1.0, n_max=12, neighboring_relation="replace_one")
    bound, _ = lipschitz(step, objective=objective, enforced=enforced)
    ends = []
    for column in (start, other):
        weights = torch.zeros(len(column), 5, dtype=torch.float64)
        weights[:, 0] = torch.tensor(column)
        ends.append((weights, full_batch_update(weights, rows, step, objective)))
    moved, apart = ends[0][1] - ends[1][1], ends[0][0] - ends[1][0]
    assert bound == pytest.approx(2.0)
    assert float(moved.norm() / apart.norm()) == pytest.approx(bound, rel=1e-6)


@REGRESSIONS
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0, 100), radius=st.floats(0.01, 10))
def test_a_projected_row_has_a_gradient_below_the_clipping_norm(
    objective: Objective, scores: int, classes: int, seed: int, scale: float, radius: float
) -> None:
    """As executed, in float32 with Opacus's own gradients: no row's is longer than claimed, but for rounding."""
    numbers = np.random.default_rng(seed)
    raw = Rows(
        features=(numbers.normal(size=(8, 5)) * scale).astype(np.float32),
        labels=numbers.integers(classes, size=8),
    )
    rows = project(raw, radius)
    module = torch.nn.Linear(5, scores, bias=False)
    module.weight.data = torch.tensor(numbers.normal(size=(scores, 5)) * 50, dtype=torch.float32)
    network = GradSampleModule(module)
    inputs = torch.tensor(rows.features, requires_grad=True)
    objective.losses(network(inputs), torch.tensor(rows.labels)).mean().backward()
    norms = network._module.weight.grad_sample.flatten(1).norm(dim=1)
    assert float(norms.max()) <= objective.steepness * radius * (1 + 1e-6)
