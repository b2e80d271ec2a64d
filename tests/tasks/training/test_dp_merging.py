"""The steps of DP-Merging are those written by hand, noise included, whatever way the gradients are had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tasks.training.by_hand import train_by_hand
from tests.tasks.training.test_reference import POISSON, RARE, CountingNoise, network, require_equal, train

Build = Callable[..., Any]
SAME = {"ascent": "same_batch", "radius": 0.3, "anchor": 0.05}
PREVIOUS = {"ascent": "previous_gradient", "radius": 0.3, "anchor": 0.05}
ANCHORED = {"ascent": "none", "anchor": 0.2}

CASES: dict[str, dict[str, Any]] = {
    "full batch": {"max_grad_norm": 0.5},
    "momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.05, "learning_rate": 0.2},
    "AdamW, Poisson": {"optimizer": "adamw", "learning_rate": 0.05, "weight_decay": 0.1, **POISSON},
    "Adam, a schedule": {"optimizer": "adam", "learning_rate": 0.05},
    "Poisson, some empty batches": RARE,
    "Poisson, only empty batches": {**RARE, "sampling_probability": 1e-9, "steps": 3},
}


@pytest.mark.parametrize("merging", [SAME, PREVIOUS, ANCHORED], ids=lambda one: one["ascent"])
@pytest.mark.parametrize("case", CASES)
def test_every_mode(small_portfolio: Build, case: str, merging: dict[str, Any]) -> None:
    expected: Any = {}
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(
            **network("perceptron"), **CASES[case], dp_merging=merging, execution={"grad_sample_mode": mode}
        )
        expected = expected or train_by_hand(small)
        trained = train(small)
        require_equal(trained.model, expected, atol=1e-4 if "Adam" in case else 2e-5)
