"""Several merges released together: against one merge, the joint release, and an exact recursion."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.budget import NeighboringRelation
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release
from accounting.linear_combination import step_noise, step_sensitivity
from accounting.shifted_interpolation import shifted
from accounting.shifted_several import shifted_several
from accounting.trajectory import Trajectory

REPLACE = NeighboringRelation.REPLACE_ONE
Maker = Callable[..., Any]


def exact(runs: list[Trajectory], merges: list[list[float]], taus: list[float], signs: list[float]) -> float:
    """The exact mu of merges of runs on a quadratic loss, run i moved by `signs[i] * s` in every step."""
    shifts, spreads = [], []
    for run, sign in zip(runs, signs, strict=True):
        shift, spread = 0.0, 0.0
        for segment in run.segments:
            for _ in range(segment.steps):
                shift = segment.update_lipschitz * shift + sign * step_sensitivity(segment, REPLACE)
                spread = segment.update_lipschitz**2 * spread + step_noise(segment) ** 2
        shifts.append(shift)
        spreads.append(spread)
    rows = np.array(merges)
    covariance = rows @ np.diag(spreads) @ rows.T + np.diag(np.square(taus))
    moved = rows @ np.array(shifts)
    return math.sqrt(float(moved @ np.linalg.pinv(covariance) @ moved))


@given(
    noises=st.lists(st.floats(min_value=0.5, max_value=50), min_size=2, max_size=4),
    steps=st.lists(st.integers(min_value=1, max_value=20), min_size=4, max_size=4),
    factors=st.lists(st.sampled_from([1.0, 0.9, 1.02, math.inf]), min_size=4, max_size=4),
    count=st.integers(min_value=1, max_value=5),
    tau=st.sampled_from([0.0, 1e-3, 0.1]),
    unequal=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_between_the_exact_recursion_and_the_joint_release(
    noises: list[float],
    steps: list[int],
    factors: list[float],
    count: int,
    tau: float,
    unequal: bool,
    seed: int,
    make_run: Maker,
) -> None:
    runs = [make_run(f"s{i}", noise, steps[i], update_lipschitz=factors[i]) for i, noise in enumerate(noises)]
    random = np.random.default_rng(seed)
    merges = random.dirichlet(np.ones(len(runs)), size=count)
    merges = [[*row[:-1].tolist(), 1 - math.fsum(row[:-1])] for row in merges]
    taus = [tau * 10.0**k if unequal else tau for k in range(count)]
    claimed = shifted_several(runs, merges, REPLACE, taus).mu
    assert claimed is not None
    assert claimed <= (joint_release(runs, REPLACE).mu or 0) * (1 + 1e-12)
    least = max(shifted(runs, row, REPLACE, own).mu or 0 for row, own in zip(merges, taus, strict=True))
    assert claimed >= least * (1 - 1e-9)  # whoever has all merges has each
    linear = [
        make_run(f"s{i}", noise, steps[i], update_lipschitz=min(factors[i], 1.0))
        for i, noise in enumerate(noises)
    ]
    for signs in product([-1.0, 1.0], repeat=len(runs)):
        assert exact(linear, merges, taus, list(signs)) <= claimed * (1 + 1e-6)


@given(
    count=st.integers(2, 4),
    taus=st.lists(st.sampled_from([0.0, 0.003, 0.03, 0.3]), min_size=2, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_merges_of_single_steps_against_the_worst_of_all_signs(
    count: int, taus: list[float], seed: int, make_run: Maker
) -> None:
    """With one step a run everything is Gaussian, and the signs decide: pairs of runs may help or hide each other."""
    random = np.random.default_rng(seed)
    noises = 10 ** random.uniform(-0.5, 1.5, size=count)
    runs = [make_run(f"s{i}", float(noise), 1, update_lipschitz=1.0) for i, noise in enumerate(noises)]
    rows = random.dirichlet(np.full(count, 0.4), size=len(taus))
    merges = [[*row[:-1].tolist(), 1 - math.fsum(row[:-1])] for row in rows]
    claimed = shifted_several(runs, merges, REPLACE, taus).mu
    truth = max(exact(runs, merges, taus, list(signs)) for signs in product([1.0, -1.0], repeat=count))
    assert truth * (1 - 1e-7) <= claimed


def test_runs_that_hide_each_other_do_not_lower_the_bound(make_run: Maker) -> None:
    """Examples in which only signs that differ reach the worst case."""
    found = 0
    random = np.random.default_rng(7)
    for _ in range(200):
        noises = 10 ** random.uniform(-0.5, 1.5, size=3)
        runs = [make_run(f"s{i}", float(noise), 1, update_lipschitz=1.0) for i, noise in enumerate(noises)]
        rows = random.dirichlet(np.full(3, 0.4), size=2)
        merges = [[*row[:-1].tolist(), 1 - math.fsum(row[:-1])] for row in rows]
        every = {
            signs: exact(runs, merges, [0.0, 0.0], list(signs)) for signs in product([1.0, -1.0], repeat=3)
        }
        truth = max(every.values())
        if truth > 1.05 * every[1.0, 1.0, 1.0]:
            found += 1
            assert truth * (1 - 1e-7) <= shifted_several(runs, merges, REPLACE).mu
    assert found > 20


def test_one_merge_and_repeated_merges_are_shifted(make_run: Maker) -> None:
    runs = [make_run("a", 8.0, update_lipschitz=1.0), make_run("b", 32.0, update_lipschitz=1.0)]
    one = shifted(runs, [0.1, 0.9], REPLACE)
    assert shifted_several(runs, [[0.1, 0.9]], REPLACE).mu == one.mu
    assert shifted_several(runs, [[0.1, 0.9]] * 3, REPLACE).mu == one.mu
    tau = 0.01
    twice = shifted_several(runs, [[0.1, 0.9]] * 2, REPLACE, tau).mu
    # Two copies with noise of their own are one with half its variance, to whoever averages them.
    assert twice == pytest.approx(shifted(runs, [0.1, 0.9], REPLACE, tau / math.sqrt(2)).mu, rel=1e-9)


def test_nearly_equal_merges_reveal_the_runs(make_run: Maker) -> None:
    runs = [make_run("a", 8.0, update_lipschitz=1.0), make_run("b", 32.0, update_lipschitz=1.0)]
    joint = joint_release(runs, REPLACE).mu
    for gap in (1e-15, 1e-9, 1e-3, 0.3):
        found = shifted_several(runs, [[0.1, 0.9], [0.1 + gap, 1 - (0.1 + gap)]], REPLACE).mu
        assert found == pytest.approx(joint, rel=1e-9)
    blurred = shifted_several(runs, [[0.1, 0.9], [0.1 + 1e-9, 0.9 - 1e-9]], REPLACE, 0.01).mu
    assert blurred < 0.5 * joint


def test_silent_runs_are_no_accident_of_a_pseudo_inverse(make_run: Maker) -> None:
    """One run without noise among two merges: each alone is private, together they are not."""
    runs = [make_run("a", 8.0, 3, update_lipschitz=1.0), make_run("b", 0.0, 3, update_lipschitz=1.0)]
    assert math.isfinite(shifted(runs, [0.5, 0.5], REPLACE).mu or math.inf)
    assert shifted_several(runs, [[0.5, 0.5], [0.25, 0.75]], REPLACE).mu == math.inf
    assert math.isfinite(shifted_several(runs, [[0.5, 0.5], [0.25, 0.75]], REPLACE, 0.01).mu or math.inf)


def test_assumptions_refusals_and_prefixes(make_segment: Maker, make_run: Maker) -> None:
    common = make_segment("p", 16.0, 10, update_lipschitz=1.0)
    runs = [
        make_run(segments=[common, make_segment(name, noise, 5, update_lipschitz=1.0)])
        for name, noise in (("a", 8.0), ("b", 32.0))
    ]
    merges = [[0.1, 0.9], [0.2, 0.8]]
    bound = shifted_several(
        [*runs, make_run("z", 0.0)], [[*row, 0.0] for row in merges], REPLACE, [0.01, 0.02]
    )
    assert "All 2 merges were fixed together before any of them was released." in bound.assumptions
    assert "0.01, 0.02" in " ".join(bound.assumptions)
    assert bound.mu < joint_release(runs, REPLACE).mu
    suffixes = [make_run("a", 8.0, 5, update_lipschitz=1.0), make_run("b", 32.0, 5, update_lipschitz=1.0)]
    rest = shifted_several(suffixes, merges, REPLACE, [0.01, 0.02]).mu
    assert bound.mu == pytest.approx(math.sqrt(10 * (2 / 16) ** 2 + rest**2), rel=1e-9)
    for bad in ([], [[0.5]], [[0.5, 0.6]], [[0.5, 0.5], [math.nan, 1.0]]):
        with pytest.raises(InvalidInput):
            shifted_several(runs, bad, REPLACE)
    with pytest.raises(InvalidInput):
        shifted_several(runs, merges, REPLACE, [0.1])
    with pytest.raises(IncompatibleCandidates, match="momentum"):
        shifted_several([runs[0], make_run("m", 8.0, momentum=0.9)], merges, REPLACE)
