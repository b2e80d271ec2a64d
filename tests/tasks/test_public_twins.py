"""Public twins: the same recipes on public rows, no private row touched, no row both fitted and scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accounting.errors import InvalidInput
from tasks.data import Rows, Splits, load_splits
from tasks.models import initial_state, state_from_bytes
from tasks.public_twins import TrainedTwin, split_public, train_twin, twin_recipe
from tasks.recipes import Recipe, parse_recipe
from tasks.training.recording import TrainingFailed
from tests.tasks.conftest import random_rows

Build = Callable[..., Any]


def twin_of(small: Any, **changes: Any) -> TrainedTwin:
    arguments = {
        "recipe": small.recipe,
        "splits": small.splits,
        "initial": initial_state(small.recipe.network, small.recipe.initialisation_seed),
    }
    return train_twin(small.recipe.candidate("only"), **{**arguments, **changes})


def weights_of(model: bytes) -> np.ndarray:
    return state_from_bytes(model)["weight"].double().numpy()


def contents(*parts: Rows) -> list[tuple[bytes, int]]:
    rows = [(f.tobytes(), int(label)) for part in parts for f, label in zip(*_columns(part), strict=True)]
    return sorted(rows)


def _columns(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    return rows.features, rows.labels


@pytest.mark.parametrize("sampling", [{}, {"sampling_probability": 0.5, "expected_batch_size": 20}])
def test_no_private_row_is_needed_and_none_makes_a_difference(
    small_portfolio: Build, sampling: dict[str, Any]
) -> None:
    small = small_portfolio(**sampling)
    without = twin_of(small, splits=replace(small.splits, private=None))
    assert without.model == twin_of(small).model
    other = replace(small.splits, private=random_rows(99, 31))
    assert without.model == twin_of(small, splits=other).model
    assert without.metrics == twin_of(small, splits=other).metrics


def test_the_score_is_that_of_rows_that_were_not_fitted(small_portfolio: Build) -> None:
    small = small_portfolio()
    twin = twin_of(small)
    fitting, scoring = split_public(small.splits.public_train)
    assert (len(fitting), len(scoring)) == (14, 6)
    scores = scoring.features.astype(np.float64) @ weights_of(twin.model).T
    assert twin.score == np.mean(scores.argmax(axis=1) == scoring.labels)

    # Other rows to score by give the same model, other rows to fit another one.
    changed = Rows(
        features=small.splits.public_train.features, labels=(small.splits.public_train.labels + 1) % 3
    )
    gate = replace(small.splits, public_gate=random_rows(98, 20))
    assert twin_of(small, splits=gate).model == twin.model
    assert twin_of(small, splits=replace(small.splits, public_train=changed)).model != twin.model


def test_public_metrics_have_public_names(small_portfolio: Build) -> None:
    twin = twin_of(small_portfolio())
    assert len(twin.metrics) == 12
    for step in twin.metrics:
        assert {"loss", "score_rows_accuracy", "clipping_rate"} <= set(step)
        assert not any("private" in name for name in step)
    assert twin.metrics[-1]["score_rows_accuracy"] == twin.score


@pytest.mark.parametrize("rows", [3, 10, 11, 12, 300])
def test_two_thirds_are_fitted_whatever_the_order(rows: int) -> None:
    public = random_rows(4, rows)
    fitting, scoring = split_public(public)
    assert len(fitting) == math.ceil(rows * 2 / 3)
    assert contents(fitting, scoring) == contents(public)
    backwards = split_public(Rows(features=public.features[::-1], labels=public.labels[::-1]))
    assert contents(backwards[0]) == contents(fitting)
    assert contents(backwards[1]) == contents(scoring)


def test_copies_of_a_row_stay_on_one_side() -> None:
    few = random_rows(6, 5)
    copies = Rows(features=np.tile(few.features, (8, 1)), labels=np.arange(40) % 3)
    fitting, scoring = split_public(copies)
    assert len(fitting) + len(scoring) == 40
    sides = [{features.tobytes() for features in part.features} for part in (fitting, scoring)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 5


@pytest.mark.parametrize(
    "public", [random_rows(1, 1), Rows(features=np.ones((9, 5)), labels=np.arange(9) % 3)]
)
def test_too_few_different_rows_are_refused(public: Rows) -> None:
    with pytest.raises(InvalidInput, match="more public-train rows, or set public_twins to false"):
        split_public(public)


def wide(users_loader: Callable[..., None], scale: float, **changes: Any) -> tuple[Recipe, Splits]:
    """One step over rows with 800 features of about the given size, and an initialisation of zeros."""

    def loader(*, with_private: bool) -> Splits:
        def rows(seed: int, count: int) -> Rows:
            drawn = random_rows(seed, count, features=800)
            return Rows(features=drawn.features * np.float32(scale), labels=drawn.labels)

        return Splits(
            private=rows(1, 40) if with_private else None,
            public_train=rows(2, 20),
            public_gate=rows(3, 20),
            classes=3,
            split_rule="three different seeds",
        )

    users_loader(loader)
    fields = {
        "steps": 1,
        "noise_multiplier": 6.0,
        "max_grad_norm": 1.4143,
        "learning_rate": 0.5,
        "expected_batch_size": 40,
        **changes,
    }
    recipe = parse_recipe(
        "name: wide\nlineage: wide\ndata: {loader: users_own:rows}\nfeature_radius: 1.0\nn_max: 50\n"
        "network: {factory: tasks.models:softmax_regression, arguments: {features: 800, classes: 3}}\n"
        "initialisation_seed: 7\ndelta: 1e-5\ncandidates:\n  only:\n"
        + "".join(f"    {name}: {value}\n" for name, value in fields.items()),
        "wide.yaml",
    )
    splits = load_splits(
        recipe.data, feature_radius=1.0, n_max=50, neighboring_relation="replace_one", with_private=False
    )
    return recipe, splits


def first_step(recipe: Recipe, splits: Splits) -> np.ndarray:
    """How far one step moves the parameters, in units of the learning rate."""
    initial = initial_state(recipe.network, recipe.initialisation_seed)
    initial = {name: tensor * 0 for name, tensor in initial.items()}
    candidate = recipe.candidate("only")
    twin = train_twin(candidate, recipe=recipe, splits=splits, initial=initial)
    return -weights_of(twin.model) / candidate.learning_rate


@pytest.mark.parametrize(
    ("sampling", "deviation"),
    [({}, 6 * 1.4143 / 40), ({"sampling_probability": 0.5, "expected_batch_size": 20}, 6 * 1.4143 / 20)],
)
def test_the_noise_on_the_mean_gradient_is_the_private_runs(
    users_loader: Callable[..., None], sampling: dict[str, Any], deviation: float
) -> None:
    """2,400 coordinates of nothing but noise: their root mean square is within 6 of its standard errors."""
    moved = first_step(*wide(users_loader, scale=1e-7, **sampling))
    assert np.sqrt((moved**2).mean()) == pytest.approx(deviation, rel=6 / math.sqrt(2 * 2400))


def test_the_mean_gradient_is_that_of_the_fitting_rows(users_loader: Callable[..., None]) -> None:
    """From zeros every class has the probability 1/3; without noise the first step is the mean gradient."""
    recipe, splits = wide(users_loader, scale=0.03, noise_multiplier=1e-9)
    fitting, _ = split_public(splits.public_train)
    residuals = 1 / 3 - np.eye(3)[fitting.labels]
    mean = residuals.T @ fitting.features.astype(np.float64) / len(fitting)
    assert np.allclose(first_step(recipe, splits), mean, rtol=0, atol=1e-6)


def test_what_is_scaled_and_what_is_kept(small_portfolio: Build) -> None:
    candidate = small_portfolio(sampling_probability=0.25, expected_batch_size=10).recipe.candidate("only")
    twin = twin_recipe(candidate, 14)
    assert twin.expected_batch_size == 3.5
    assert twin.noise_multiplier == pytest.approx(0.7)  # 2 x 3.5 / 10
    kept = {"expected_batch_size", "noise_multiplier"}
    assert twin.model_dump(exclude=kept) == candidate.model_dump(exclude=kept)


def test_a_twin_that_diverges_is_an_error(small_portfolio: Build) -> None:
    with pytest.raises(TrainingFailed, match="The public twin failed: Candidate only diverged"):
        twin_of(small_portfolio(noise_multiplier=1e30, learning_rate=1e38))


@pytest.mark.parametrize("ascent", ["same_batch", "previous_gradient"])
def test_a_twin_climbs_and_is_anchored_as_its_candidate(small_portfolio: Build, ascent: str) -> None:
    plain = small_portfolio()
    small = small_portfolio(dp_merging=f"{{ascent: {ascent}, radius: 0.2, anchor: 0.1}}")
    twin = twin_of(small)
    assert twin.recipe.dp_merging == small.recipe.candidate("only").dp_merging
    assert twin.model == twin_of(small).model != twin_of(plain).model
