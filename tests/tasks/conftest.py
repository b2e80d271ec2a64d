"""A small portfolio of random rows, brought by a loader of its own, as a user would."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from tasks.data import Rows, Splits, load_splits
from tasks.recipes import Recipe, parse_recipe

# Two threads beside other load wait for each other by spinning; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("tasks", deadline=None)  # these machines are noisy
settings.load_profile("tasks")

RECIPE = """
name: small
lineage: small
data: {loader: users_own:rows}
network: {factory: tasks.models:softmax_regression, arguments: {features: 5, classes: 3}}
feature_radius: 1.0
n_max: 50
initialisation_seed: 7
delta: 1e-5
candidates:
  only:
    steps: 12
    noise_multiplier: 2.0
    max_grad_norm: 1.4143
    learning_rate: 0.5
    expected_batch_size: 40
"""


def random_rows(seed: int, count: int, features: int = 5, classes: int = 3) -> Rows:
    numbers = np.random.default_rng(seed)
    return Rows(
        features=numbers.normal(size=(count, features)).astype(np.float32),
        labels=numbers.integers(classes, size=count),
    )


@dataclass(frozen=True)
class SmallPortfolio:
    recipe: Recipe
    splits: Splits


@pytest.fixture
def users_loader(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Make a function importable as `users_own:rows`."""

    def offer(function: Callable[..., Any]) -> None:
        module = types.ModuleType("users_own")
        module.rows = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "users_own", module)

    return offer


@pytest.fixture
def small_portfolio(
    users_loader: Callable[[Callable[..., Any]], None],
) -> Callable[..., SmallPortfolio]:
    """Build recipe and data; keyword arguments change the one candidate or `network`.

    `rows` is the private rows' number, `classes` the number of classes, `execution` what the recipe says about it.
    """

    def build(
        rows: int = 40, classes: int = 3, execution: dict[str, Any] | None = None, **changes: Any
    ) -> SmallPortfolio:
        def loader(*, with_private: bool) -> Splits:
            return Splits(
                private=random_rows(1, rows, classes=classes) if with_private else None,
                public_train=random_rows(2, 20, classes=classes),
                public_gate=random_rows(3, 20, classes=classes),
                classes=classes,
                split_rule="three different seeds",
            )

        users_loader(loader)
        text = RECIPE + "".join(
            f"    {name}: {value}\n" for name, value in changes.items() if name not in RECIPE
        )
        for name, value in changes.items():
            if name in RECIPE:
                old = next(line for line in RECIPE.splitlines() if line.strip().startswith(f"{name}:"))
                text = text.replace(old, f"{old.split(':')[0]}: {value}")
        text += f"execution: {json.dumps(execution or {})}\n"
        recipe = parse_recipe(text, "small.yaml")
        splits = load_splits(
            recipe.data,
            feature_radius=recipe.feature_radius,
            n_max=recipe.n_max,
            neighboring_relation=recipe.neighboring_relation,
        )
        return SmallPortfolio(recipe=recipe, splits=splits)

    return build
