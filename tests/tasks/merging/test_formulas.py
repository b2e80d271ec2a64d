"""Each operator against a straightforward second implementation of its paper's formula, and what is special to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from accounting.errors import IncompatibleCandidates
from tasks.merging import inputs, merge_models
from tasks.merging.dare import mask
from tasks.merging.elimination import product, solved
from tasks.merging.ranking import ranked
from tasks.merging.wudi import least_interference
from tests.tasks.merging.merges import file_of, public, tensors_of

Model = dict[str, np.ndarray]
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}


def several(count: int = 3, size: int = 40, seed: int = 0) -> tuple[Model, dict[str, Model]]:
    """A start, and models of two tensors that moved from it; float64."""
    rng = np.random.default_rng(seed)

    def model() -> Model:
        return {"v": rng.normal(size=size), "w": rng.normal(size=(size, 3))}

    start = model()
    return start, {
        name: {key: start[key] + 0.1 * value for key, value in model().items()} for name in "abcdef"[:count]
    }


def merged(operator: str, start: Model, models: dict[str, Model], **more: Any) -> Model:
    weights = more.pop("weights", WEIGHTS)
    files = {name: file_of(model) for name, model in models.items()}
    return tensors_of(merge_models(operator, files, weights, base=file_of(start), **more))


def flat(model: Model) -> np.ndarray:
    return np.concatenate([model[key].ravel() for key in sorted(model)])


def vectors(start: Model, models: dict[str, Model]) -> np.ndarray:
    return np.stack([flat(model) - flat(start) for model in models.values()])


# TIES


@pytest.mark.parametrize("density", [0.05, 0.2, 0.7, 1.0])
def test_ties_is_that_of_the_paper_with_equal_weights(density: float) -> None:
    """Algorithm 1: keep the top of each task vector of the whole model, elect the sign of the larger total movement,
    and take the mean over the agreeing ones; element by element."""
    start, models = several()
    moved = vectors(start, models)
    kept = np.zeros_like(moved)
    for row, vector in enumerate(moved):
        top = sorted(range(len(vector)), key=lambda p: -abs(vector[p]))[: max(1, int(density * len(vector)))]
        kept[row, top] = vector[top]
    expected = []
    for column in kept.T:
        up, down = sum(v for v in column if v > 0), -sum(v for v in column if v < 0)
        agreeing = [v for v in column if (v > 0 if up >= down else v < 0)]
        expected.append(np.mean(agreeing) if agreeing else 0.0)
    found = merged(
        "ties", start, models, weights=dict.fromkeys("abc", 1 / 3), options={"density": density, "scale": 0.7}
    )
    assert np.allclose(flat(found), flat(start) + 0.7 * np.array(expected), rtol=0, atol=1e-14)


def test_ties_keeps_all_that_are_as_large_as_the_last_and_elects_plus_on_a_draw() -> None:
    start = {"w": np.zeros(6)}
    models = {"a": {"w": np.array([4.0, 1, -1, 1, 0.5, 0])}, "b": {"w": np.array([-4.0, 0, 0, 0, 0, 0])}}
    found = merged("ties", start, models, weights={"a": 0.5, "b": 0.5}, options={"density": 0.4})
    assert found["w"].tolist() == [4.0, 1, -1, 1, 0, 0]


def test_an_election_does_not_depend_on_rounding() -> None:
    """0.1 + 0.2 - 0.3 is 0 or not, and of either sign, by the order of the sum; the outcome is one."""
    start = {"w": np.zeros(1)}
    values = [0.1, 0.2, -0.30000000000000004, 1e-17]
    outcomes = set()
    for k in range(4):
        turned = values[k:] + values[:k]
        models = {name: {"w": np.array([value])} for name, value in zip("abcd", turned, strict=True)}
        outcomes.add(
            float(
                merged("ties", start, models, weights=dict.fromkeys("abcd", 1.0), options={"density": 1.0})[
                    "w"
                ][0]
            )
        )
    assert len(outcomes) == 1


# DARE


def test_dare_keeps_its_share_and_is_right_on_average() -> None:
    start = {"w": np.zeros(100_000)}
    model = {"w": np.ones(100_000)}
    found = merged("dare", start, {"a": model}, weights={"a": 1.0}, options={"density": 0.25, "seed": 1})["w"]
    assert set(found.tolist()) == {0.0, 4.0}
    assert abs(found.mean() - 1) < 5 * np.sqrt(3 / 100_000)  # five deviations of 4 x Bernoulli(1/4)
    other = merged("dare", start, {"a": model}, weights={"a": 1.0}, options={"density": 0.25, "seed": 2})["w"]
    assert abs(np.mean(found * other) - 1) < 0.1  # independent


def test_dare_with_its_masks_written_out() -> None:
    start, models = several()
    options = {"density": 0.6, "seed": 9, "scale": 1.5}
    expected = {}
    for key, values in start.items():
        total = np.zeros(values.size)
        for name, weight in WEIGHTS.items():
            kept = mask(9, name, key, slice(0, values.size), 0.6)
            total += weight * kept * (models[name][key] - values).ravel() / 0.6
        expected[key] = values + 1.5 * total.reshape(values.shape)
    found = merged("dare", start, models, options=options)
    assert all(np.allclose(found[key], expected[key], rtol=0, atol=1e-14) for key in start)
    assert not np.allclose(found["v"], start["v"] + 0.1)


def test_masks_are_one_stream_however_it_is_cut_and_differ_by_name() -> None:
    whole = mask(3, "a", "w", slice(0, 1000), 0.5)
    cut = [mask(3, "a", "w", slice(at, min(at + 12, 1000)), 0.5) for at in range(0, 1000, 12)]
    assert np.concatenate(cut).tolist() == whole.tolist()
    others = [mask(4, "a", "w", slice(0, 1000), 0.5), mask(3, "b", "w", slice(0, 1000), 0.5)]
    others.append(mask(3, "a", "v", slice(0, 1000), 0.5))
    assert all(400 < np.sum(whole == other) < 600 for other in others)
    # pinned: a release made today must be made again from its certificate in years
    assert "".join("01"[int(kept)] for kept in whole[:32]) == "01100100111010000011100010000110"


# Fisher


def test_fisher_weighs_each_parameter_by_its_information() -> None:
    start, models = several()
    rng = np.random.default_rng(1)
    information = {name: {"w": rng.random((40, 3)) ** 4} for name in models}
    information["a"]["w"][0] = 0  # the floor
    found = merged(
        "fisher",
        start,
        models,
        statistics={name: public("fisher", value) for name, value in information.items()},
        options={"floor": 1e-3},
    )
    shares = {name: WEIGHTS[name] * np.maximum(information[name]["w"], 1e-3) for name in models}
    expected = sum(shares[name] * models[name]["w"] for name in models) / sum(shares.values())
    assert np.allclose(found["w"], expected, rtol=0, atol=1e-14)
    assert np.allclose(found["v"], sum(WEIGHTS[name] * models[name]["v"] for name in models), atol=1e-14)


# RegMean


def layer_inputs(seed: int, rows: int = 50) -> np.ndarray:
    inputs = np.random.default_rng(seed).normal(size=(rows, 3)) @ np.diag([1.0, 2.0, 0.5])
    return inputs + 1


def test_regmean_is_the_least_squares_fit_to_all_outputs() -> None:
    """The paper's problem solved as it is written, by a solver of least squares on the stacked rows."""
    start, models = several()
    seen = {name: layer_inputs(ord(name)) for name in models}
    statistics = {name: public("gram", {"w": _symmetric(x.T @ x / len(x))}) for name, x in seen.items()}
    found = merged("regmean", start, models, statistics=statistics, options={"shrink": 1.0, "ridge": 1e-10})
    left = np.concatenate([np.sqrt(WEIGHTS[name] / 50) * x for name, x in seen.items()])
    right = np.concatenate(
        [np.sqrt(WEIGHTS[name] / 50) * x @ models[name]["w"].T for name, x in seen.items()]
    )
    expected = np.linalg.lstsq(left, right, rcond=None)[0].T
    assert np.allclose(found["w"], expected, rtol=0, atol=1e-8)
    assert np.allclose(found["v"], sum(WEIGHTS[name] * models[name]["v"] for name in models), atol=1e-14)
    assert not np.allclose(found["w"], sum(WEIGHTS[name] * models[name]["w"] for name in models), atol=1e-3)


def test_regmean_shrinks_what_is_off_the_diagonal() -> None:
    """With nothing left there, each input has a weighted mean of its own."""
    start, models = several()
    diagonals = {name: np.random.default_rng(ord(name)).random(3) + 0.1 for name in models}
    statistics = {}
    for name, diagonal in diagonals.items():
        gram = np.full((3, 3), 0.05)
        np.fill_diagonal(gram, diagonal)
        statistics[name] = public("gram", {"w": gram})
    found = merged("regmean", start, models, statistics=statistics, options={"shrink": 0.0, "ridge": 1e-10})
    shares = {name: WEIGHTS[name] * diagonals[name] for name in models}
    expected = sum(shares[name] * models[name]["w"] for name in models) / sum(shares.values())
    assert np.allclose(found["w"], expected, rtol=0, atol=1e-8)


def test_regmean_takes_the_mean_where_no_input_ever_was() -> None:
    """Pixels that are always 0: the paper's inverse does not exist."""
    start, models = several()
    gram = np.diag([1.0, 0.0, 2.0])
    zero = np.zeros((3, 3))
    mean = sum(WEIGHTS[name] * models[name]["w"] for name in models)
    for moments in (gram, zero):
        found = merged(
            "regmean", start, models, statistics=dict.fromkeys(models, public("gram", {"w": moments}))
        )
        assert np.allclose(found["w"], mean, rtol=0, atol=1e-12)


# WUDI


def interference(merged: torch.Tensor, vectors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The paper's loss of one layer, with weights."""
    products = (merged - vectors) @ vectors.transpose(1, 2)
    return (weights * products.square().sum((1, 2)) / vectors.square().sum((1, 2))).sum()


@pytest.mark.parametrize("outputs", [2, 5])  # fewer rows than inputs, where many minima exist, and more
def test_wudi_is_where_gradient_descent_from_the_sum_ends(outputs: int) -> None:
    """The authors' procedure with plain gradient descent, run until it stands still."""
    rng = np.random.default_rng(outputs)
    moved = rng.normal(size=(2, outputs, 6)) * 0.1
    weights = [0.7, 0.3]
    loss_weights, fixed = torch.tensor(weights, dtype=torch.float64), torch.tensor(moved)
    point = fixed.sum(0).requires_grad_()
    largest = np.linalg.eigvalsh(
        sum(w * v.T @ v / np.sum(v * v) for w, v in zip(weights, moved, strict=True))
    )[-1]
    for _ in range(30_000):
        (gradient,) = torch.autograd.grad(interference(point, fixed, loss_weights), point)
        point = (point - gradient / (2 * largest)).detach().requires_grad_()
        if float(gradient.abs().max()) < 1e-13:
            break
    assert float(gradient.abs().max()) < 1e-13
    found = least_interference(moved, weights, 1e-9)
    assert np.allclose(found, point.detach().numpy(), rtol=0, atol=1e-6)
    at_the_sum = float(interference(fixed.sum(0), fixed, loss_weights))
    assert float(interference(torch.tensor(found), fixed, loss_weights)) < 0.9 * at_the_sum


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 20)])  # solved by inputs and by the candidates' rows
@pytest.mark.parametrize("ridge", [1e-6, 0.1])
def test_wudi_is_where_the_gradient_with_its_ridge_is_zero(ridge: float, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    moved = rng.normal(size=shape)
    weights = [0.2, 0.3, 0.5]
    fixed, found = (
        torch.tensor(moved),
        torch.tensor(least_interference(moved, weights, ridge)).requires_grad_(),
    )
    gram = sum(w * v.T @ v / np.sum(v * v) for w, v in zip(weights, moved, strict=True))
    level = ridge * np.trace(gram) / shape[2]
    loss = interference(found, fixed, torch.tensor(weights, dtype=torch.float64))
    loss = loss + level * (found - fixed.sum(0)).square().sum()
    (gradient,) = torch.autograd.grad(loss, found)
    assert float(gradient.abs().max()) < 1e-12


def test_wudi_merges_layers_and_convolutions_and_adds_the_rest() -> None:
    rng = np.random.default_rng(4)
    shapes = {"linear": (3, 4), "conv": (3, 2, 2, 1), "bias": (5,), "still": (3, 4)}
    start = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    models = {
        key: {name: value + (name != "still") * rng.normal(size=value.shape) for name, value in start.items()}
        for key in "abc"
    }
    found = merged("wudi", start, models, options={"scale": 0.5})
    for name in ("linear", "conv"):
        moved = np.stack([(models[key][name] - start[name]).reshape(3, -1) for key in "abc"])
        step = least_interference(moved, list(WEIGHTS.values()), 1e-6).reshape(start[name].shape)
        assert np.allclose(found[name], start[name] + 0.5 * step, rtol=0, atol=1e-14)
    summed = sum(WEIGHTS[key] * (models[key]["bias"] - start["bias"]) for key in "abc")
    assert np.allclose(found["bias"], start["bias"] + 0.5 * summed, rtol=0, atol=1e-14)
    assert np.array_equal(found["still"], start["still"])


def test_a_task_vector_that_is_alone_in_its_inputs_is_kept_whole_by_wudi() -> None:
    """Tasks whose inputs do not meet do not disturb each other: the sum is right, and not the mean."""
    moved = np.zeros((2, 3, 6))
    rng = np.random.default_rng(5)
    moved[0, :, :3], moved[1, :, 3:] = rng.normal(size=(2, 3, 3))
    assert np.allclose(least_interference(moved, [0.5, 0.5], 1e-9), moved.sum(0), rtol=0, atol=1e-12)


# PCB


def pcb_by_torch(moved: torch.Tensor, density: float, weights: torch.Tensor, divided: bool) -> torch.Tensor:
    """The authors' computation over the whole model, from whole sorted vectors."""
    count, size = moved.shape
    sizes = moved.abs()
    ordered = sizes.sort(dim=1).values
    low, high = ordered[:, [int(size * 0.0001)]], ordered[:, [int(size * (1 - 0.0001) - 1)]]
    sizes = torch.minimum(torch.maximum(sizes, low), high)
    within = torch.exp(count * ((sizes - low) / (high - low)) ** 2)
    score = within * torch.tanh(moved * moved.sum(0))
    least = score.sort(dim=1).values[:, [int(size * (1 - density))]]
    score = torch.maximum(score, least)
    score = (score - least) / (score.max(dim=1, keepdim=True).values - least)
    clipped = moved.sign() * sizes
    divisor = (weights * score if divided else score).sum(0)
    return (weights * score * clipped).sum(0) / torch.clamp(divisor, min=1e-300)


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("density", [0.1, 0.5])
@pytest.mark.parametrize("size", [10, 6000])
def test_pcb_is_that_of_the_authors(size: int, density: float, divided: bool) -> None:
    start, models = several(size=size)
    expected = pcb_by_torch(
        torch.tensor(vectors(start, models)),
        density,
        torch.tensor(list(WEIGHTS.values()), dtype=torch.float64)[:, None],
        divided,
    )
    found = merged("pcb", start, models, options={"density": density, "normalize": divided, "scale": 1.2})
    assert np.allclose(flat(found), flat(start) + 1.2 * expected.numpy(), rtol=0, atol=1e-12)
    assert not np.allclose(flat(found), flat(start), atol=1e-3)


def test_pcb_of_models_without_differences_is_defined() -> None:
    """The authors' program divides 0 by 0 here."""
    start = {"w": np.zeros(4)}
    models = {"a": {"w": np.full(4, 2.0)}, "b": {"w": np.zeros(4)}}
    assert merged("pcb", start, models, weights={"a": 0.5, "b": 0.5})["w"].tolist() == [1.0] * 4


# SLERP


def test_slerp_walks_along_the_circle() -> None:
    """Between two unit vectors: of length 1, and at the given share of the angle."""
    one, other = np.array([1.0, 0, 0]), np.array([np.cos(2.0), np.sin(2.0), 0])
    for share in (0.1, 0.5, 0.9):
        found = merged(
            "slerp", {}, {"a": {"w": one}, "b": {"w": other}}, weights={"a": 1 - share, "b": share}
        )["w"]
        assert np.isclose(np.linalg.norm(found), 1, rtol=0, atol=1e-14)
        assert np.isclose(np.arccos(found @ one), share * 2.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("cosine", "round"), [(0.9994, True), (0.9996, False), (-0.9994, True), (-0.9996, False)]
)
def test_slerp_leaves_the_circle_only_where_tensors_are_nearly_parallel(cosine: float, round: bool) -> None:
    one, other = np.array([1.0, 0]), np.array([cosine, np.sqrt(1 - cosine**2)])
    weights = {"a": 0.25, "b": 0.75}
    found = merged("slerp", {}, {"a": {"w": one}, "b": {"w": other}}, weights=weights)["w"]
    angle = np.arccos(cosine)
    circle = (np.sin(0.25 * angle) * one + np.sin(0.75 * angle) * other) / np.sin(angle)
    assert np.allclose(found, circle if round else 0.25 * one + 0.75 * other, rtol=0, atol=1e-12)


def test_slerp_goes_straight_where_there_is_no_circle() -> None:
    one = np.array([1.0, 2.0])
    for other in (one * 3, -one, np.zeros(2)):
        found = merged("slerp", {}, {"a": {"w": one}, "b": {"w": other}}, weights={"a": 0.75, "b": 0.25})["w"]
        expected = 0.75 * one + 0.25 * other
        if other.any():
            assert found.tolist() == expected.tolist()
        else:  # no direction: mergekit takes a right angle
            assert np.allclose(found, np.sin(0.75 * np.pi / 2) * one, rtol=0, atol=1e-15)


# What they rest on


@given(
    arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 30)), elements=st.floats(-1e300, 1e300)),
    st.integers(1, 7),
    st.data(),
)
@example(np.array([[0.0, -0.0, 5e-324, -5e-324, 1.0, 1.0]]), 2, None)
def test_ranks_are_those_of_sorting(values: np.ndarray, width: int, data: Any) -> None:
    size = values.shape[1]
    ranks = (
        [0, size - 1]
        if data is None
        else data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3))
    )
    parts = [values[:, at : at + width] for at in range(0, size, width)]
    assert np.array_equal(ranked(lambda: parts, ranks), np.sort(values, axis=1)[:, ranks])


def test_elimination_solves_as_lapack_does() -> None:
    rng = np.random.default_rng(6)
    factor = rng.normal(size=(40, 30))
    matrix, right = factor.T @ factor, rng.normal(size=(7, 30))
    assert np.allclose(product(right, matrix), right @ matrix, rtol=1e-13, atol=1e-13)
    assert np.allclose(solved(matrix.copy(), right), np.linalg.solve(matrix, right.T).T, rtol=1e-9, atol=1e-9)
    for bad in (np.diag([1.0, 0.0]), np.diag([1.0, -1.0]), np.full((2, 2), np.nan)):
        with pytest.raises(IncompatibleCandidates, match="larger ridge"):
            solved(bad, np.ones((1, 2)))


@pytest.mark.parametrize(
    "operator", ["task_arithmetic", "ties", "dare", "fisher", "regmean", "pcb", "wudi", "slerp"]
)
def test_the_size_of_the_parts_changes_nothing(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last units of SLERP's inner products."""
    start, models = several(size=50)
    start, models = {"w": start["w"], "v": start["v"]}, dict(list(models.items())[:2])
    statistics: dict[str, bytes] = {}
    for name in models:
        if operator == "fisher":
            statistics[name] = public("fisher", {"w": np.abs(models[name]["w"])})
        if operator == "regmean":
            statistics[name] = public("gram", {"w": np.diag([1.0, 2.0, 3.0])})
    run: Callable[[], Model] = lambda: merged(  # noqa: E731
        operator, start, models, weights={"a": 0.5, "b": 0.5}, statistics=statistics
    )
    expected = run()
    monkeypatch.setattr(inputs, "PIECE", 8)
    again = run()
    for key in start:
        if operator == "slerp":
            assert np.allclose(again[key], expected[key], rtol=1e-14, atol=1e-14)
        else:
            assert again[key].tobytes() == expected[key].tobytes()


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return (matrix + matrix.T) / 2
