"""What a network is trained on, how its scores are read, and the constants that are claimed for a regression."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.documents import NetworkRecord
from tasks.data import Rows, project
from tasks.models import state_bytes
from tasks.objective import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, Objective, objective_for, predicted
from tasks.validation import accuracy

# objective, scores a row, classes
REGRESSIONS = [(CROSS_ENTROPY, 2, 2), (CROSS_ENTROPY, 3, 3), (BINARY_CROSS_ENTROPY, 1, 2)]


@pytest.mark.parametrize(
    ("scores", "classes", "objective"),
    [
        (1, 2, BINARY_CROSS_ENTROPY),
        (2, 2, CROSS_ENTROPY),
        (10, 10, CROSS_ENTROPY),
        (1, 3, None),
        (1, 1, None),  # one class: nothing to tell apart
        (2, 3, None),
        (3, 2, None),
    ],
)
def test_the_number_of_scores_decides(scores: int, classes: int, objective: Objective | None) -> None:
    assert objective_for(scores, classes) is objective


def test_the_losses_at_50_digits() -> None:
    logits, labels = [-3.5, 0.0, 0.25, 40.0, -30.0], [1, 0, 1, 1, 1]
    with mpmath.workdps(50):
        chances = [1 / (1 + mpmath.exp(-mpmath.mpf(logit))) for logit in logits]
        binary = -sum(mpmath.log(p if y else 1 - p) for p, y in zip(chances, labels, strict=True)) / 5
    scores, targets = torch.tensor(logits, dtype=torch.float64), torch.tensor(labels)
    assert float(BINARY_CROSS_ENTROPY.losses(scores[:, None], targets).mean()) == pytest.approx(
        float(binary), rel=1e-14
    )
    both = torch.stack(
        (torch.zeros(5, dtype=torch.float64), scores), dim=1
    )  # the same chances from two scores
    assert float(CROSS_ENTROPY.losses(both, targets).mean()) == pytest.approx(float(binary), rel=1e-14)


def test_one_score_predicts_by_its_sign_and_several_by_the_largest() -> None:
    assert predicted(torch.tensor([[-2.0], [3.0], [0.0], [1e-30]])).tolist() == [0, 1, 0, 1]
    assert predicted(torch.tensor([[-2.0, -3.0], [3.0, 4.0]])).tolist() == [0, 1]


def test_a_stored_logistic_regression_is_scored_by_the_sign() -> None:
    network = NetworkRecord(factory="tasks.models:logistic_regression", arguments={"features": 2})
    rows = Rows(
        features=np.array([[1, 0], [-1, 0], [2, 5], [-3, 1]], dtype=np.float32), labels=np.array([1, 0, 1, 1])
    )
    assert accuracy(network, state_bytes({"weight": torch.tensor([[1.0, 0.0]])}), rows) == 0.75
    assert accuracy(network, state_bytes({"weight": torch.tensor([[-1.0, 0.0]])}), rows) == 0.25


def curvature(
    objective: Objective, features: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Eigenvalues of the Hessian of the rows' mean loss, by automatic differentiation in float64."""
    x, y = torch.tensor(features).double(), torch.tensor(labels)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return objective.losses(x @ flat.view(weights.shape).T, y).mean()

    hessian = torch.autograd.functional.hessian(loss, torch.tensor(weights).flatten())
    return np.linalg.eigvalsh(hessian.numpy())


@pytest.mark.parametrize(("objective", "scores", "classes"), REGRESSIONS)
@given(seed=st.integers(0, 2**32 - 1), radius=st.floats(0.1, 10), scale=st.floats(0, 20))
def test_the_loss_is_convex_and_no_more_curved_than_claimed(
    objective: Objective, scores: int, classes: int, seed: int, radius: float, scale: float
) -> None:
    numbers = np.random.default_rng(seed)
    features = (numbers.normal(size=(6, 4)) * 3 * radius).astype(np.float32)
    if seed % 2:
        features[:] = features[0]  # alike rows add up
    rows = project(Rows(features=features, labels=numbers.integers(classes, size=6)), radius)
    weights = numbers.normal(size=(scores, 4)) * scale / radius
    eigenvalues = curvature(objective, rows.features, rows.labels, weights)
    claimed = float(objective.smoothness) * radius**2
    assert eigenvalues.min() >= -1e-9 * claimed
    assert eigenvalues.max() <= claimed * (1 + 1e-9)


@pytest.mark.parametrize(("objective", "scores", "classes"), REGRESSIONS)
def test_the_claimed_curvature_is_reached(objective: Objective, scores: int, classes: int) -> None:
    features, labels = np.array([[0.0, 3.0]]), np.array([1])
    weights = np.zeros((scores, 2))
    weights[2:, 1] = -50  # two classes at odds
    top = curvature(objective, features, labels, weights).max()
    assert top == pytest.approx(float(objective.smoothness) * 9, rel=1e-9)


@pytest.mark.parametrize(("objective", "scores", "classes"), REGRESSIONS)
def test_the_claimed_steepness_is_approached_and_not_passed(
    objective: Objective, scores: int, classes: int
) -> None:
    for gap in (0.0, 1.0, 30.0):
        weights = torch.zeros(scores, 1, dtype=torch.float64)
        weights[0] = gap  # the row's label is 1 or 0, the score speaks for the other
        label = 1 if scores > 1 else 0
        weights.requires_grad_(True)
        objective.losses(
            torch.tensor([[2.0]], dtype=torch.float64) @ weights.T, torch.tensor([label])
        ).mean().backward()
        norm = float(weights.grad.norm())
        assert norm <= objective.steepness * 2
    assert norm == pytest.approx(objective.steepness * 2, rel=1e-9)


def test_the_constants_are_those_of_the_literature() -> None:
    assert (CROSS_ENTROPY.smoothness, BINARY_CROSS_ENTROPY.smoothness) == (Fraction(1, 2), Fraction(1, 4))
    assert (CROSS_ENTROPY.steepness, BINARY_CROSS_ENTROPY.steepness) == (math.sqrt(2), 1)
