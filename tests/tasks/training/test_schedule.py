"""Learning rates are a public staircase: few plateaus, never zero, never above the recipe's rate."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.recipes import CandidateRecipe
from tasks.training.schedule import learning_rates


def candidate(**changes: Any) -> CandidateRecipe:
    fields: dict[str, Any] = {
        "name": "only",
        "steps": 12,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "learning_rate": 2.0,
        "expected_batch_size": 1.0,
    }
    return CandidateRecipe(**{**fields, **changes})


def test_constant() -> None:
    assert learning_rates(candidate()) == (2.0,) * 12


def test_linear_falls_in_even_plateaus() -> None:
    rates = learning_rates(candidate(learning_rate_schedule="linear", schedule_stages=4))
    assert rates == tuple(2 * share for share in (0.875, 0.625, 0.375, 0.125) for _ in range(3))


def test_cosine_follows_its_curve_at_the_plateaus_middles() -> None:
    rates = learning_rates(candidate(learning_rate_schedule="cosine", steps=50, schedule_stages=50))
    expected = [1 + math.cos(math.pi * (step + 0.5) / 50) for step in range(50)]
    assert rates == pytest.approx(expected, rel=1e-14)


def test_warm_up_comes_before_and_ends_at_the_highest_rate() -> None:
    rates = learning_rates(candidate(warmup_steps=4, schedule_stages=2, learning_rate_schedule="linear"))
    assert rates == (1.0, 1.0, 2.0, 2.0, 1.5, 1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 0.5)


def test_fewer_steps_than_stages() -> None:
    assert learning_rates(candidate(steps=2, learning_rate_schedule="linear")) == (1.5, 0.5)
    assert learning_rates(candidate(steps=1, learning_rate_schedule="cosine")) == (1.0,)


@given(
    steps=st.integers(1, 400),
    warmup=st.integers(0, 400),
    stages=st.integers(1, 50),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    rate=st.floats(1e-30, 1e30),
)
def test_laws(steps: int, warmup: int, stages: int, schedule: str, rate: float) -> None:
    warmup %= steps
    rates = learning_rates(
        candidate(
            steps=steps,
            warmup_steps=warmup,
            schedule_stages=stages,
            learning_rate_schedule=schedule,
            learning_rate=rate,
        )
    )
    assert len(rates) == steps
    assert all(0 < one <= rate for one in rates)
    assert list(rates[:warmup]) == sorted(rates[:warmup])
    assert list(rates[warmup:]) == sorted(rates[warmup:], reverse=True)
    assert len(list(groupby(rates))) <= 2 * stages
    for part in (rates[:warmup], rates[warmup:]):  # plateaus are even: their lengths differ by one at most
        if schedule != "constant" or part is rates[:warmup]:
            lengths = [len(list(group)) for _, group in groupby(part)]
            assert not lengths or max(lengths) - min(lengths) <= 1
