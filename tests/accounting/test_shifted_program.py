"""The best payments against other solvers and exact arithmetic: optimal, feasible, rounded the right way."""

from __future__ import annotations

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from accounting.errors import InvalidInput
from accounting.shifted_blocks import Stretch
from accounting.shifted_interpolation import Merge, best_payments, square_of
from accounting.shifted_program import carry, feasible, payments_at, prepare

Array = NDArray[np.float64]
Steps = list[tuple[float, float, float]]  # (s, nu, c) of single steps

STEPS = st.lists(
    st.tuples(
        st.floats(min_value=0.1, max_value=1),
        st.floats(min_value=0.1, max_value=30),
        st.sampled_from([1.0, 1.0, 0.98, 0.5, 1.02, 1.5]),
    ),
    min_size=1,
    max_size=8,
)
RUNS = st.lists(STEPS, min_size=1, max_size=3)
SHARES = st.lists(st.floats(min_value=0.01, max_value=1), min_size=3, max_size=3)


def simplex(shares: list[float]) -> Array:
    return np.array(shares) / math.fsum(shares)


def merge_of(runs: list[Steps]) -> Merge:
    paths = tuple(
        prepare([Stretch(steps=1, moved=s, noise=nu, lipschitz=c) for s, nu, c in run]) for run in runs
    )
    settled = math.fsum(path.settled_cost for path in paths)
    return Merge(owner=tuple(range(len(runs))), paths=paths, settled=settled, scale=1.0)


def value(runs: list[Steps], weights: Array, tau: float, payments: list[Array]) -> float:
    """mu^2 by the theorem, from single steps: written apart from the product."""
    total, merged, variance = 0.0, 0.0, tau**2
    for run, weight, paid in zip(runs, weights, payments, strict=True):
        z = 0.0
        for (s, nu, c), a in zip(run, [*paid, 0.0], strict=True):
            z = c * z + s - a
            assert z >= -1e-9 * (c * abs(z) + s)
            total += (a / nu) ** 2
        merged += weight * z
        variance += weight**2 * run[-1][1] ** 2
    return total + merged**2 / variance


def by_a_general_solver(runs: list[Steps], weights: Array, tau: float) -> float:
    """The same program by sequential quadratic programming."""
    counts = [len(run) - 1 for run in runs]
    cuts = np.cumsum(counts)[:-1]

    def distances(flat: Array) -> tuple[Array, Array, float]:
        """(all z, those that must be 0 because c is infinite in the next step, the merged difference)."""
        zs, zeros, merged = [], [], 0.0
        for run, weight, paid in zip(runs, weights, np.split(flat, cuts), strict=True):
            z = 0.0
            for (s, _, c), a in zip(run, [*paid, 0.0], strict=True):
                if math.isinf(c):
                    zeros.append(z)
                z = (0.0 if math.isinf(c) else c * z) + s - a
                zs.append(z)
            merged += weight * z
        return np.array(zs), np.array(zeros), merged

    noises = np.concatenate([np.zeros(0), *([nu for _, nu, _ in run[:-1]] for run in runs)])
    variance = tau**2 + sum(w**2 * run[-1][1] ** 2 for w, run in zip(weights, runs, strict=True))
    start = np.concatenate([np.zeros(0), *([s for s, _, _ in run[:-1]] for run in runs)])

    def objective(flat: Array) -> float:
        return float(np.sum((flat / noises) ** 2) + distances(flat)[2] ** 2 / variance)

    if not len(start):
        return objective(start)
    scale = objective(start)
    found = minimize(
        lambda flat: objective(flat) / scale,
        start,
        method="SLSQP",
        bounds=[(0, None)] * len(start),
        constraints=[
            {"type": "ineq", "fun": lambda flat: distances(flat)[0]},
            {"type": "eq", "fun": lambda flat: distances(flat)[1]},
        ],
        options={"maxiter": 200, "ftol": 1e-13},
    )
    return float(found.fun * scale)


@given(runs=RUNS, shares=SHARES, tau=st.sampled_from([0.0, 0.0, 0.5, 20.0]))
def test_the_payments_are_the_best(runs: list[Steps], shares: list[float], tau: float) -> None:
    weights = simplex(shares[: len(runs)])
    merge = merge_of(runs)
    payments = best_payments(merge, weights, tau)
    ours = square_of(merge, weights, tau, payments)
    solved = by_a_general_solver(runs, weights, tau)
    assert ours <= solved * (1 + 1e-6)
    assert ours >= value(runs, weights, tau, [np.array(p) for p in payments]) * (1 - 1e-12)


@settings(max_examples=12)
@given(runs=RUNS, shares=SHARES, cut=st.integers(1, 7))
def test_what_must_be_settled_is_settled_at_the_least_cost(
    runs: list[Steps], shares: list[float], cut: int
) -> None:
    """An unknown update in the middle forces z = 0 before it; debts may still wait for noisier steps."""
    runs = [[(s, nu, math.inf if j == cut else c) for j, (s, nu, c) in enumerate(run)] for run in runs]
    weights = simplex(shares[: len(runs)])
    merge = merge_of(runs)
    ours = square_of(merge, weights, 0.0, best_payments(merge, weights, 0.0))
    assert ours <= by_a_general_solver(runs, weights, 0.0) * (1 + 1e-6)


def test_what_is_settled_by_hand() -> None:
    """a + b = 2, a <= 1, minimising a^2 + (b / 2)^2: a = 0.4, b = 1.6; then the last step's 1."""
    merge = merge_of([[(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, math.inf)]])
    assert merge.settled == pytest.approx(0.8, rel=1e-14)
    assert square_of(merge, np.ones(1), 0.0, best_payments(merge, np.ones(1), 0.0)) == pytest.approx(1.8)
    merge = merge_of([[(1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, math.inf), (0.5, 1.0, 1.0)]])
    assert square_of(merge, np.ones(1), 0.0, best_payments(merge, np.ones(1), 0.0)) == pytest.approx(3.125)


@given(runs=RUNS, shares=SHARES, tau=st.sampled_from([0.0, 3.0]), seed=st.integers(0, 10**6))
def test_no_random_payments_are_better(runs: list[Steps], shares: list[float], tau: float, seed: int) -> None:
    weights = simplex(shares[: len(runs)])
    merge = merge_of(runs)
    best = best_payments(merge, weights, tau)
    ours = square_of(merge, weights, tau, best)
    random = np.random.default_rng(seed)
    for spread in (0.0, 0.05, 1.0):  # near the best, and anywhere
        for _ in range(10):
            payments = []
            for run, near in zip(runs, best, strict=True):
                z, paid = 0.0, []
                for (s, _, c), a in zip(run[:-1], near, strict=True):
                    owed = c * z + s
                    wanted = owed * random.beta(0.5, 0.5) if spread == 1 else a * random.normal(1, spread)
                    paid.append(float(np.clip(wanted, 0, owed)))
                    z = owed - paid[-1]
                payments.append(np.array(paid))
            attempt = value(runs, weights, tau, payments)
            assert ours <= attempt * (1 + 1e-6)
            evaluated = square_of(merge, weights, tau, [p.tolist() for p in payments])
            assert attempt * (1 - 1e-12) <= evaluated <= attempt * (1 + 1e-9)


@given(run=STEPS, seed=st.integers(0, 10**6))
def test_infeasible_payments_are_rejected(run: Steps, seed: int) -> None:
    run = [*run, (1.0, 1.0, 1.0)]
    merge, weights = merge_of([run]), np.ones(1)
    random = np.random.default_rng(seed)
    z, owed = 0.0, []
    for s, _, c in run[:-1]:  # what is owed if nothing was paid before
        z = c * z + s
        owed.append(z)
    wrong = [0.0] * len(owed)
    at = int(random.integers(len(owed)))
    wrong[at] = owed[at] * (1 + 10 ** random.uniform(-8, 1))
    with pytest.raises(InvalidInput, match="owed"):
        square_of(merge, weights, 0.0, [wrong])
    lowered = feasible(merge.paths[0].open, wrong)
    assert lowered[at] == pytest.approx(owed[at], rel=1e-12)
    square_of(merge, weights, 0.0, [lowered])
    for bad in (-1e-9, math.nan, -math.inf):
        wrong[at] = bad
        for reading in (
            lambda: square_of(merge, weights, 0.0, [wrong]),
            lambda: feasible(merge.paths[0].open, wrong),
        ):
            with pytest.raises(InvalidInput, match="at least 0"):
                reading()
    with pytest.raises(InvalidInput, match="blocks"):
        square_of(merge, weights, 0.0, [[0.0] * (len(owed) + 1)])


@given(
    blocks=st.lists(
        st.tuples(
            st.integers(min_value=1, max_value=100),
            st.floats(min_value=0.01, max_value=1),
            st.floats(min_value=0.01, max_value=30),
            st.sampled_from([1.0, 1 - 1e-12, 0.999, 0.9, 0.3, 1e-20]),
            st.sampled_from([0.0, 1e-6, 0.3, 0.9, 1.0]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_blocks_are_carried_as_their_steps_would_be_and_rounded_up(
    blocks: list[tuple[int, float, float, float, float]],
) -> None:
    """The recursion of each single step in 50 digits, against the closed forms of whole blocks."""
    end = Stretch(steps=1, moved=1.0, noise=1.0, lipschitz=1.0)
    chunk = prepare(
        [*(Stretch(steps=n, moved=s, noise=nu, lipschitz=c) for n, s, nu, c, _ in blocks), end]
    ).open
    assert len(chunk.blocks) == len(blocks)
    shares = [share for *_, share in blocks]
    payments = [x * b.moved * b.moved_sum / b.paid_sum for b, x in zip(chunk.blocks, shares, strict=True)]
    found, squares = carry(chunk, payments)
    with mpmath.workdps(50):
        z, costs, scale = mpmath.mpf(0), mpmath.mpf(0), mpmath.mpf(0)
        for (n, s, nu, c, _), payment in zip(blocks, payments, strict=True):
            for k in range(n - 1, -1, -1):
                a = payment * mpmath.mpf(c) ** k
                z = max(c * z + s - a, 0)
                scale = max(scale, z, s)
                costs += (a / mpmath.mpf(nu)) ** 2
        assert z <= found <= z + scale * mpmath.mpf(10) ** -11
        assert costs <= squares <= costs * (1 + mpmath.mpf(10) ** -12)


@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.005, 0.03])
def test_long_growing_stretches_lose_little(rate: float) -> None:
    """c > 1 for longer than is taken step by step, against all of its steps."""
    steps, growing = 1500, Stretch(steps=1, moved=1.0, noise=5.0, lipschitz=1 + rate)
    quiet = Stretch(steps=40, moved=1.0, noise=2.0, lipschitz=0.9)
    coarse = [quiet, Stretch(steps=steps, moved=1.0, noise=5.0, lipschitz=1 + rate), quiet]
    exact = [quiet, *[growing] * steps, quiet]
    squares = []
    for stretches in (coarse, exact):
        paths = (prepare(stretches), prepare([quiet]))
        merge = Merge(owner=(0, 1), paths=paths, settled=sum(p.settled_cost for p in paths), scale=1.0)
        weights = np.array([0.05, 0.95])
        squares.append(square_of(merge, weights, 0.0, best_payments(merge, weights, 0.0)))
    assert squares[1] * (1 - 1e-9) <= squares[0] <= squares[1] * (1 + 2e-4)


@pytest.mark.parametrize("c", [1.0, 0.98, 1.02])
def test_a_minorant_is_convex_and_pays_all_at_its_end(c: float) -> None:
    random = np.random.default_rng(7)
    steps = [
        Stretch(steps=1, moved=float(s), noise=float(nu), lipschitz=c)
        for s, nu in random.uniform(0.1, 2, size=(50, 2))
    ]
    chunk = prepare([*steps, steps[0]]).open
    assert all(a <= b for a, b in pairwise(chunk.slope))
    left, _ = carry(chunk, payments_at(chunk, math.inf))
    assert left <= 1e-12
