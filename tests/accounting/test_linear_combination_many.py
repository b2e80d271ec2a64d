"""Many weights at once give what one at a time gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.budget import NeighboringRelation
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.joint_release import single_run
from accounting.linear_combination import generic
from accounting.linear_combination_many import generic_mu_many

REPLACE = NeighboringRelation.REPLACE_ONE
Maker = Callable[..., Any]


def agree(runs: list[Any], weights: np.ndarray, fresh_noise: float = 0.0) -> None:
    found = generic_mu_many(runs, weights, REPLACE, fresh_noise)
    expected = [generic(runs, row.tolist(), REPLACE, fresh_noise).mu for row in weights]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found.shape == (len(weights),)


@given(
    noises=st.lists(st.floats(0.05, 1e4), min_size=1, max_size=6),
    rates=st.lists(st.floats(1e-4, 10.0), min_size=6, max_size=6),
    steps=st.lists(st.integers(1, 50), min_size=6, max_size=6),
    fresh=st.sampled_from([0.0, 1e-4, 0.3]),
    seed=st.integers(0, 1000),
)
def test_equals_one_at_a_time(
    noises: list[float], rates: list[float], steps: list[int], fresh: float, seed: int, make_run: Maker
) -> None:
    runs = [make_run(f"s{i}", s, steps[i], learning_rate=rates[i]) for i, s in enumerate(noises)]
    random = np.random.default_rng(seed)
    weights = random.dirichlet(np.ones(len(runs)), 6) * (random.random((6, len(runs))) < 0.6)
    weights = weights[weights.sum(axis=1) > 0]
    weights = np.vstack((weights / weights.sum(axis=1, keepdims=True), np.eye(len(runs))))
    agree(runs, weights, fresh)


def test_never_below_exact_arithmetic(make_run: Maker) -> None:
    """Small whole numbers, whose mu^2 is a fraction."""
    runs = [make_run("a", 2.0, 3), make_run("b", 4.0, 5)]
    found = generic_mu_many(runs, np.array([[0.25, 0.75], [0.5, 0.5]]), REPLACE)
    for value, square in zip(found.tolist(), (2 + 1 + 4 / (0.25 + 9), 2 + 1 + 4 / (1 + 4)), strict=True):
        assert math.sqrt(square) < value < math.sqrt(square) * (1 + 1e-14)


def test_segments_and_silent_runs(make_run: Maker, make_segment: Maker) -> None:
    parts = make_run(segments=[make_segment("p", 8.0, 4), make_segment("q", 5.0, 1, learning_rate=1e-3)])
    silent_first = make_run(segments=[make_segment("x", 0.0, 1), make_segment("y", 5.0, 3)])
    silent_last = make_run(segments=[make_segment("u", 5.0, 3), make_segment("v", 0.0, 1)])
    runs = [parts, silent_first, silent_last]
    weights = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])
    agree(runs, weights)
    found = generic_mu_many(runs, weights, REPLACE)
    assert found[0] == single_run(parts).mu
    assert np.isinf(found[[1, 3, 4]]).all()
    assert math.isfinite(found[2])  # the other run's noise covers the last step
    agree(runs, weights, fresh_noise=1e-3)


def test_extreme_scales(make_run: Maker) -> None:
    for rate in (1e-140, 1e140):
        runs = [make_run("a", 8.0, 3, learning_rate=rate), make_run("b", 2.0, 3, learning_rate=rate / 7)]
        found = generic_mu_many(runs, np.array([[0.3, 0.7]]), REPLACE)
        like = [make_run("a", 8.0, 3, learning_rate=1.0), make_run("b", 2.0, 3, learning_rate=1 / 7)]
        assert found == pytest.approx([generic(like, [0.3, 0.7], REPLACE).mu], rel=1e-12)


def test_only_sets_that_occur_must_be_covered(make_run: Maker) -> None:
    """Two checkpoints of one run may be weighed in turn, but not together."""
    runs = [make_run("run", 8.0, 5), make_run("run", 8.0, 20), make_run("other", 9.0)]
    apart = np.array([[0.5, 0.0, 0.5], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    agree(runs, apart)
    with pytest.raises(IncompatibleCandidates, match="shares steps"):
        generic_mu_many(runs, np.vstack((apart, [[0.5, 0.5, 0.0]])), REPLACE)
    poisson = [runs[0], make_run("p", 8.0, sampling_probability=0.1)]
    with pytest.raises(IncompatibleCandidates, match="Poisson"):
        generic_mu_many(poisson, np.array([[0.5, 0.5]]), REPLACE)


@pytest.mark.parametrize(
    "weights",
    [[[0.5, 0.6]], [[-0.5, 1.5]], [[math.nan, 1.0]], [[math.inf, 0.0]], [[1.0]], [0.5, 0.5], [[0.0, 0.0]]],
)
def test_weights_off_the_simplex_fail(weights: list[Any], make_run: Maker) -> None:
    with pytest.raises(InvalidInput):
        generic_mu_many([make_run("a", 8.0), make_run("b", 8.0)], np.array(weights), REPLACE)


def test_no_rows_and_too_many_runs(make_run: Maker) -> None:
    assert generic_mu_many([make_run("a", 8.0)], np.empty((0, 1)), REPLACE).shape == (0,)
    with pytest.raises(InvalidInput, match="62 runs"):
        generic_mu_many([make_run(f"s{i}", 8.0) for i in range(63)], np.full((1, 63), 1 / 63), REPLACE)
    with pytest.raises(InvalidInput, match="fresh_noise"):
        generic_mu_many([make_run("a", 8.0)], np.ones((1, 1)), REPLACE, math.nan)
