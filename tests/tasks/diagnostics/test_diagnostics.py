"""Diagnostics of a merge against values worked out by hand or by numpy alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from accounting.errors import IncompatibleCandidates, InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows
from tasks.diagnostics import (
    PathPoint,
    TaskModels,
    along_path,
    cosines,
    diagnose,
    drift,
    pages,
    score,
    section,
    sharpness,
    task_vector,
)
from tasks.diagnostics.paths import barrier
from tasks.models import network_with, state_bytes

NETWORK = NetworkRecord(factory="tasks.models:softmax_regression", arguments={"features": 3, "classes": 2})


def rows(seed: int = 0, count: int = 2500) -> Rows:
    """More rows than are scored at once, so that parts are added up."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, 3)).astype(np.float32)
    labels = (features[:, 0] + 0.3 * random.normal(size=count) > 0).astype(np.int64)
    return Rows(features=features, labels=labels)


def state(*numbers: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor(numbers).reshape(2, 3)}


def loss_by_hand(weights: np.ndarray, on: Rows) -> float:
    scores = on.features.astype(np.float64) @ weights.T
    scores -= scores.max(axis=1, keepdims=True)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return float(-np.log(chances[np.arange(len(on)), on.labels]).mean())


OWN = state(-0.5, 0.2, 0.0, 0.5, -0.2, 0.1)
MERGED = state(-0.1, 0.0, 0.3, 0.1, 0.2, 0.0)
START = state(*[0.0] * 6)


def test_score_is_the_mean_loss_and_the_share_right() -> None:
    on = rows()
    measured = score(network_with(NETWORK, OWN), on)
    weights = OWN["weight"].double().numpy()
    right = (on.features @ weights.T).argmax(axis=1) == on.labels
    assert measured.accuracy == right.mean()
    assert measured.loss == pytest.approx(loss_by_hand(weights, on), rel=1e-6)


def test_sharpness_is_the_rise_along_the_gradient_and_leaves_the_network_as_it_was() -> None:
    on, radius = rows(), 0.7
    weights = OWN["weight"].double().numpy()
    scores = on.features.astype(np.float64) @ weights.T
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    gradient = (chances - np.eye(2)[on.labels]).T @ on.features
    climbed = weights + radius * gradient / np.linalg.norm(gradient)
    module = network_with(NETWORK, OWN)
    rise = sharpness(module, on, radius)
    assert rise == pytest.approx(loss_by_hand(climbed, on) - loss_by_hand(weights, on), rel=1e-4)
    assert rise > 0
    assert torch.equal(module.weight, OWN["weight"])


def test_no_point_of_the_ball_is_much_worse_than_the_one_climbed_to_where_the_ball_is_small() -> None:
    on, radius = rows(1), 1e-2
    found = sharpness(network_with(NETWORK, OWN), on, radius)
    random = np.random.default_rng(2)
    weights = OWN["weight"].double().numpy()
    before = loss_by_hand(weights, on)
    for _ in range(200):
        step = random.normal(size=weights.shape)
        assert loss_by_hand(weights + radius * step / np.linalg.norm(step), on) - before <= found * 1.05


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
def test_a_radius_out_of_range_is_refused(radius: float) -> None:
    with pytest.raises(InvalidInput, match="radius of a sharpness"):
        sharpness(network_with(NETWORK, OWN), rows(), radius)


def test_task_vectors_cosines_and_drift() -> None:
    vector = task_vector({**OWN, "head": torch.ones(5)}, {**START, "head": torch.zeros(4)}, "weight")
    assert vector == pytest.approx(OWN["weight"].numpy().ravel())
    assert drift(np.array([3.0, 4.0])) == 5.0
    right, up, left = np.array([2.0, 0.0]), np.array([0.0, 0.1]), np.array([-5.0, 0.0])
    found = cosines([right, up, left, up * 0])
    assert found == pytest.approx(np.array([[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]]))


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(IncompatibleCandidates, match="only in one of them"):
        task_vector({**OWN, "bias": torch.ones(2)}, START)
    with pytest.raises(IncompatibleCandidates, match="has shape"):
        task_vector({"weight": torch.ones(2, 2)}, START)
    with pytest.raises(InvalidInput, match=r"begins with 'trunk\.'"):
        task_vector(OWN, START, "trunk.")
    with pytest.raises(IncompatibleCandidates, match="do not fit the network"):
        network_with(NETWORK, {"other": torch.ones(2)})
    with pytest.raises(InvalidInput, match="at least one task vector"):
        cosines([])


def test_a_path_begins_and_ends_at_the_two_models() -> None:
    on = rows()
    path = along_path(NETWORK, OWN, MERGED, on, points=5)
    assert [point.position for point in path] == [0.0, 0.25, 0.5, 0.75, 1.0]
    for position, point in zip((0.0, 0.25, 1.0), (path[0], path[1], path[-1]), strict=True):
        weights = (1 - position) * OWN["weight"].double() + position * MERGED["weight"].double()
        assert point.loss == pytest.approx(loss_by_hand(weights.numpy(), on), rel=1e-6)
    assert barrier(path) == pytest.approx(0.0, abs=1e-9)  # this loss is convex
    hill = tuple(PathPoint(position=p, loss=x, accuracy=0.5) for p, x in ((0.0, 1.0), (0.5, 2.0), (1.0, 1.4)))
    assert barrier(hill) == pytest.approx(0.8)
    with pytest.raises(InvalidInput, match="at least its 2 ends"):
        along_path(NETWORK, OWN, MERGED, on, points=1)


def test_a_diagnosis_has_a_metric_for_each_figure_and_drawings() -> None:
    models = {"left": OWN, "right": state(0.5, 0.1, 0.0, -0.5, 0.0, 0.0)}
    tasks = [
        TaskModels(
            task=name,
            network=NETWORK,
            own=state_bytes(own),
            merged=state_bytes(MERGED),
            rows=rows(seed),
        )
        for seed, (name, own) in enumerate(models.items())
    ]
    start = {name: state_bytes(START) for name in models}
    found = diagnose(tasks, start, radius=0.1, points=3)
    metrics = found.metrics()
    first = found.tasks[0]
    assert metrics["merge_gap_left"] == first.own.accuracy - first.merged.accuracy
    assert metrics["drift_left"] == pytest.approx(float(OWN["weight"].double().norm()))
    assert metrics["cosine_left_right"] == pytest.approx(found.cosines[0, 1])
    assert metrics["cosine_left_right"] < -0.5
    assert metrics["merge_gap_worst"] == max(metrics["merge_gap_left"], metrics["merge_gap_right"])
    assert all(math.isfinite(value) for value in metrics.values())
    row = f"| left | {first.own.accuracy:.3f} | {first.merged.accuracy:.3f} | {first.merge_gap:+.3f} |"
    assert row in section(found)
    drawn = pages(found)
    assert set(drawn) == {"paths.png", "cosines.png"}
    assert all(content.startswith(b"\x89PNG") for content in drawn.values())
    with pytest.raises(InvalidInput, match="name of its own"):
        diagnose([tasks[0], tasks[0]], start)
