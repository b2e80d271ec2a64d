"""Merges of runs with Lipschitz updates: published numbers, the closed form, laws, refusals, extremes."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.bounds import (
    INDEPENDENT_RUNS,
    LIPSCHITZ_UPDATES,
    ONE_MERGE_ONLY,
    SHARED_AS_RECORDED,
    WEIGHTS_BLIND,
    run_assumptions,
)
from accounting.budget import NeighboringRelation
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.linear_combination import generic, step_noise, stepwise
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Trajectory

REPLACE = NeighboringRelation.REPLACE_ONE
Maker = Callable[..., Any]

NOISES = st.lists(st.floats(min_value=0.5, max_value=200), min_size=1, max_size=4)
SHARES = st.lists(st.floats(min_value=1e-6, max_value=1), min_size=4, max_size=4)
FACTORS = st.sampled_from([1.0, 0.98, 0.6, 0.0, 1.01, math.inf])


@st.composite
def recipes(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """One to four runs of one to three segments each, as changes to a segment."""
    segment = st.fixed_dictionaries(
        {
            "noise_multiplier": st.floats(min_value=0.5, max_value=100),
            "steps": st.integers(min_value=1, max_value=30),
            "learning_rate": st.floats(min_value=0.01, max_value=1),
            "update_lipschitz": FACTORS,
        }
    )
    return draw(st.lists(st.lists(segment, min_size=1, max_size=3), min_size=1, max_size=4))


@pytest.fixture(scope="session")
def build(make_segment: Maker, make_run: Maker) -> Callable[..., list[Trajectory]]:
    """Runs from `recipes`, optionally with every segment changed further."""

    def runs(recipe: list[list[dict[str, Any]]], **changes: Any) -> list[Trajectory]:
        return [
            make_run(
                f"r{i}", segments=[make_segment(f"r{i}-{j}", **(s | changes)) for j, s in enumerate(run)]
            )
            for i, run in enumerate(recipe)
        ]

    return runs


def simplex(shares: list[float]) -> list[float]:
    total = math.fsum(shares)
    return [share / total for share in shares]


def mu(trajectories: list[Trajectory], weights: list[float], fresh_noise: float = 0.0) -> float:
    found = shifted(trajectories, weights, REPLACE, fresh_noise).mu
    assert found is not None
    return found


@pytest.mark.parametrize(("factor", "name"), [(1.0, "mu_convex"), (0.98, "mu_contraction_0.98")])
def test_published_merges(factor: float, name: str, golden: dict[str, Any], make_run: Maker) -> None:
    for row in golden["linear_combination"]:
        runs = [
            make_run(f"s{i}", noise, row["steps"], update_lipschitz=factor)
            for i, noise in enumerate(row["noise_multiplier"])
        ]
        assert mu(runs, row["lambda"]) == pytest.approx(row[name], abs=5.1e-7)


def closed_form(
    noises: list[float], rates: list[float], weights: list[float], steps: int, tau: float
) -> mpmath.mpf:
    """mu for c = 1, steps constant in time, runs of one length: bisection for W in 40 digits."""
    with mpmath.workdps(40):
        moved = [mpmath.mpf(rate) / 100 * 2 for rate in rates]
        stds = [mpmath.mpf(rate) / 100 * noise for rate, noise in zip(rates, noises, strict=True)]
        variance = mpmath.mpf(tau) ** 2 + mpmath.fsum(
            (mpmath.mpf(w) * nu) ** 2 for w, nu in zip(weights, stds, strict=True)
        )

        def payments(merged: mpmath.mpf) -> list[mpmath.mpf]:
            return [
                min(s, w * nu**2 * merged / variance) for s, w, nu in zip(moved, weights, stds, strict=True)
            ]

        def left(merged: mpmath.mpf) -> mpmath.mpf:
            return mpmath.fsum(
                w * (steps * s - (steps - 1) * a)
                for w, s, a in zip(weights, moved, payments(merged), strict=True)
            )

        low, high = mpmath.mpf(0), left(mpmath.mpf(0))
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if left(middle) > middle else (low, middle)
        paid = mpmath.fsum((a / nu) ** 2 for a, nu in zip(payments(high), stds, strict=True))
        return mpmath.sqrt((steps - 1) * paid + left(high) ** 2 / variance)


@given(
    noises=NOISES,
    shares=SHARES,
    rates=st.lists(st.floats(min_value=0.01, max_value=1), min_size=4, max_size=4),
    steps=st.integers(min_value=1, max_value=1000),
    tau=st.sampled_from([0.0, 0.0, 1e-3, 0.5]),
)
def test_the_closed_form(
    noises: list[float], shares: list[float], rates: list[float], steps: int, tau: float, make_run: Maker
) -> None:
    count = len(noises)
    weights = simplex(shares[:count])
    runs = [
        make_run(f"s{i}", noise, steps, learning_rate=rates[i], update_lipschitz=1.0)
        for i, noise in enumerate(noises)
    ]
    truth = closed_form(noises, rates[:count], weights, steps, tau)
    assert (
        truth * (1 - mpmath.mpf(10) ** -15) <= mu(runs, weights, tau) <= truth * (1 + mpmath.mpf(10) ** -11)
    )


@given(recipe=recipes(), shares=SHARES, tau=st.sampled_from([0.0, 1e-3, 0.1]))
def test_never_above_generic_and_joint(
    recipe: list[list[dict[str, Any]]], shares: list[float], tau: float, build: Maker
) -> None:
    runs, weights = build(recipe), simplex(shares[: len(recipe)])
    found = mu(runs, weights, tau)
    plain = generic(runs, weights, REPLACE, tau).mu
    joint = joint_release(runs, REPLACE).mu
    assert plain is not None
    assert joint is not None
    assert 0 < found <= plain <= joint * (1 + 1e-12)
    unknown = build(recipe, update_lipschitz=math.inf)
    assert mu(unknown, weights, tau) == plain


@given(recipe=recipes(), shares=SHARES)
def test_not_below_the_stepwise_formula_for_maps_that_preserve_distances(
    recipe: list[list[dict[str, Any]]], shares: list[float], build: Maker
) -> None:
    """Free of the iterate, a record moves every step in one direction, and stepwise is the exact answer."""
    steps = min(sum(s["steps"] for s in run) for run in recipe)
    recipe = [[run[0] | {"steps": steps}] for run in recipe]
    runs, weights = build(recipe, update_lipschitz=1.0), simplex(shares[: len(recipe)])
    assert mu(runs, weights) >= (stepwise(runs, weights, REPLACE).mu or 0) * (1 - 1e-12)


@given(recipe=recipes(), shares=SHARES, order=st.permutations(range(4)), cut=st.integers(1, 29))
def test_what_changes_nothing(
    recipe: list[list[dict[str, Any]]], shares: list[float], order: list[int], cut: int, build: Maker
) -> None:
    weights = simplex(shares[: len(recipe)])
    reference = mu(build(recipe), weights)
    order = [i for i in order if i < len(recipe)]
    assert mu([build(recipe)[i] for i in order], [weights[i] for i in order]) == pytest.approx(
        reference, rel=1e-11
    )
    split = [[part for s in run for part in _cut(s, cut)] for run in recipe]
    single = [[s | {"steps": 1} for s in run for _ in range(s["steps"])] for run in recipe]
    assert mu(build(split), weights) == pytest.approx(reference, rel=1e-11)
    assert mu(build(single), weights) == pytest.approx(reference, rel=1e-11)
    unused = build([*recipe, [recipe[0][0] | {"noise_multiplier": 1e-3}]])
    assert mu(unused, [*weights, 0.0]) == reference


def _cut(segment: dict[str, Any], at: int) -> list[dict[str, Any]]:
    if segment["steps"] <= at:
        return [segment]
    return [segment | {"steps": at}, segment | {"steps": segment["steps"] - at}]


@given(recipe=recipes(), shares=SHARES, factors=st.lists(FACTORS, min_size=2, max_size=2))
def test_monotone_in_every_knob(
    recipe: list[list[dict[str, Any]]], shares: list[float], factors: list[float], build: Maker
) -> None:
    weights = simplex(shares[: len(recipe)])
    low, high = sorted(factors)
    reference = mu(build(recipe), weights)
    near, far = (mu(build(recipe, update_lipschitz=c), weights) for c in (low, high))
    assert near <= far * (1 + 1e-11)
    louder = [[s | {"noise_multiplier": s["noise_multiplier"] * 1.5} for s in run] for run in recipe]
    assert mu(build(louder), weights) <= reference * (1 + 1e-11)
    fresh = [mu(build(recipe), weights, tau) for tau in (0.0, 1e-4, 1e-2, 1.0)]
    assert all(later <= earlier * (1 + 1e-11) for earlier, later in pairwise(fresh))
    farthest = max(sum(2 * s["learning_rate"] * s["steps"] / 100 for s in run) for run in recipe)
    assert mu(build(recipe, update_lipschitz=1.0), weights, 1e6) <= farthest / 1e6 * (1 + 1e-12)


def test_one_run(make_segment: Maker, make_run: Maker) -> None:
    """Its own mu where nothing contracts and no later step is noisier; less otherwise, never more."""
    own = make_run("a", 8.0, update_lipschitz=1.0)
    others = [make_run("b", 32.0, 33, update_lipschitz=1.0), make_run("c", 0.0)]
    assert mu([own, *others], [1.0, 0.0, 0.0]) == single_run(own).mu
    assert shifted([own], [1.0], REPLACE).epsilon(1e-5) == single_run(own).epsilon(1e-5)
    contracting = make_run("a", 8.0, update_lipschitz=0.98)
    powers = [0.98**k for k in range(20)]
    exact = 2 / 8 * sum(powers) / math.sqrt(sum(p * p for p in powers))
    assert mu([contracting], [1.0]) == pytest.approx(exact, rel=1e-12)
    assert exact < 0.994 * (single_run(own).mu or 0)
    later = make_run(
        segments=[
            make_segment("d1", 1.0, 1, update_lipschitz=1.0),
            make_segment("d2", 100.0, 1, update_lipschitz=1.0),
        ]
    )
    assert mu([later], [1.0]) == pytest.approx(4 / math.sqrt(1 + 100**2))
    assert single_run(later).mu == pytest.approx(2.0, rel=1e-3)


def test_forgetting_forgets(make_segment: Maker, make_run: Maker) -> None:
    early = make_segment("a1", 0.0, 5, update_lipschitz=1.0)
    last = make_segment("a2", 8.0, 3, update_lipschitz=0.0)
    other = make_run("b", 8.0, 3, update_lipschitz=0.0)
    forgetful = make_run(segments=[early, last])
    alone = make_run("b", 8.0, 1)
    reference = generic([make_run("a", 8.0, 1), alone], [0.5, 0.5], REPLACE).mu
    assert mu([forgetful, other], [0.5, 0.5]) == pytest.approx(reference, rel=1e-12)


def test_runs_of_different_length_meet_at_their_ends(make_run: Maker) -> None:
    """A record's influence builds up in each run alone, so only the lengths count."""
    long = make_run("a", 16.0, 40, update_lipschitz=1.0)
    short = make_run("b", 16.0, 10, update_lipschitz=1.0)
    scale, payment = 2 * 0.1 / 100, 0.0
    variance = 2 * (0.5 * 16 * 0.1 / 100) ** 2
    merged = 0.5 * 50 * scale / (1 + (0.5 * (39 + 9) * 0.5 * (16 * 0.1 / 100) ** 2) / variance)
    payment = 0.5 * (16 * 0.1 / 100) ** 2 * merged / variance
    if payment > scale:  # the short run pays at once; the long one too
        payment = scale
    truth = math.sqrt(48 * (payment / (16 * 0.1 / 100)) ** 2 + merged**2 / variance)
    assert mu([long, short], [0.5, 0.5]) == pytest.approx(truth, rel=1e-12)


def test_fresh_noise_reaches_below_the_most_private_run(make_run: Maker) -> None:
    runs = [make_run("a", 8.0, update_lipschitz=1.0), make_run("b", 32.0, update_lipschitz=1.0)]
    tau = 20 * step_noise(runs[1].segments[0])
    assert mu(runs, [0.1, 0.9], tau) < 0.5 * (single_run(runs[1]).mu or 0)
    assert (generic(runs, [0.1, 0.9], REPLACE, tau).mu or 0) > 1


def test_a_shared_prefix_is_paid_once(make_segment: Maker, make_run: Maker) -> None:
    def runs(c: float, steps: int = 10) -> list[Trajectory]:
        common = make_segment("p", 16.0, steps, update_lipschitz=c)
        return [
            make_run(segments=[common, make_segment("a", 8.0, 7, update_lipschitz=c)]),
            make_run(segments=[common, make_segment("b", 32.0, 5, update_lipschitz=c)]),
        ]

    suffixes = [make_run("a", 8.0, 7), make_run("b", 32.0, 5)]
    for c, bound in ((math.inf, generic), (1.0, shifted)):
        own = [make_run("a", 8.0, 7, update_lipschitz=c), make_run("b", 32.0, 5, update_lipschitz=c)]
        rest = bound(own, [0.3, 0.7], REPLACE, 1e-3).mu
        assert mu(runs(c), [0.3, 0.7], 1e-3) == pytest.approx(
            math.sqrt(10 * (2 / 16) ** 2 + rest**2), rel=1e-12
        )
    assert generic(suffixes, [0.3, 0.7], REPLACE).mu == pytest.approx(
        math.sqrt((mu(runs(math.inf), [0.3, 0.7])) ** 2 - 10 * (2 / 16) ** 2)
    )
    joint = joint_release(runs(1.0), REPLACE).mu
    assert mu(runs(1.0), [0.3, 0.7]) < joint


def test_branches_within_a_segment(make_segment: Maker, make_run: Maker) -> None:
    trunk = {"noise_multiplier": 16.0, "update_lipschitz": 1.0}
    checkpoint = make_run(segments=[make_segment("p", steps=5, **trunk)])
    final = make_run(segments=[make_segment("p", steps=20, **trunk)])
    assert mu([checkpoint, final], [0.5, 0.5]) == pytest.approx(single_run(final).mu)
    assert mu([checkpoint, checkpoint], [0.5, 0.5]) == single_run(checkpoint).mu
    tau = step_noise(checkpoint.segments[0])
    assert mu([final, final], [0.5, 0.5], tau) == pytest.approx(mu([final], [1.0], tau), rel=1e-14)
    assert mu([final, final], [0.5, 0.5], tau) < 0.999 * (single_run(final).mu or 0)
    branch = make_run(
        segments=[make_segment("p", steps=8, **trunk), make_segment("b", 32.0, 6, update_lipschitz=1.0)]
    )
    fork = make_run(
        segments=[make_segment("p", steps=8, **trunk), make_segment("b", 32.0, 2, update_lipschitz=1.0)]
    )
    # Steps 1 to 5, 6 to 8 and two of b are shared; then 12 steps of `final` and 4 of `branch` are their own.
    found = mu([final, branch, checkpoint, fork], [0.25] * 4)
    rest = shifted(
        [make_run("x", 16.0, 12, update_lipschitz=1.0), make_run("y", 32.0, 4, update_lipschitz=1.0)],
        [0.5, 0.5],
        REPLACE,
    ).mu
    # All steps move by the same, so halving both weights changes nothing.
    assert found == pytest.approx(math.sqrt(8 * (2 / 16) ** 2 + 2 * (2 / 32) ** 2 + rest**2), rel=1e-12)


def test_assumptions_say_what_the_bound_needs(make_segment: Maker, make_run: Maker) -> None:
    known = make_run("a", 8.0, update_lipschitz=1.0, update_lipschitz_reason="a convex loss, projected")
    unknown = make_run("b", 8.0)
    bound = shifted([known, unknown], [0.5, 0.5], REPLACE, 0.25)
    assert bound.name == "shifted"
    assert bound.sound_for_dp_sgd
    expected = {*run_assumptions([known, unknown], REPLACE), WEIGHTS_BLIND, INDEPENDENT_RUNS, ONE_MERGE_ONLY}
    assert {*expected, LIPSCHITZ_UPDATES} < set(bound.assumptions)
    text = " ".join(bound.assumptions)
    assert "a convex loss, projected" in text
    assert "0.25" in text
    plain = shifted([unknown], [1.0], REPLACE)
    assert LIPSCHITZ_UPDATES not in plain.assumptions
    assert SHARED_AS_RECORDED in shifted([known, known], [0.5, 0.5], REPLACE).assumptions
    many = [make_run(f"m{i}", 8.0, update_lipschitz=1.0, update_lipschitz_reason=f"r{i}") for i in range(20)]
    assert "12 more reasons" in " ".join(shifted(many, [0.05] * 20, REPLACE).assumptions)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sampling_probability": 0.1}, "Poisson"),
        ({"schedule": "adapted"}, "adapted"),
        ({"clipping": "per_layer"}, "layer by layer"),
        ({"momentum": 0.9}, "momentum"),
        ({"optimizer": "adam"}, "plain SGD"),
    ],
)
def test_what_the_theorem_does_not_cover_is_refused(
    change: dict[str, Any], reason: str, make_run: Maker
) -> None:
    runs = [make_run("a", 8.0, update_lipschitz=1.0), make_run("b", 32.0, update_lipschitz=1.0, **change)]
    with pytest.raises(IncompatibleCandidates, match=reason):
        shifted(runs, [0.5, 0.5], REPLACE)
    assert mu(runs, [1.0, 0.0]) == single_run(runs[0]).mu


def test_bad_input(make_run: Maker) -> None:
    runs = [make_run("a", 8.0, update_lipschitz=1.0), make_run("b", 8.0, update_lipschitz=1.0)]
    for weights in ([0.5], [0.5, 0.6], [-0.5, 1.5], [math.nan, 1.0]):
        with pytest.raises(InvalidInput):
            shifted(runs, weights, REPLACE)
    for tau in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidInput):
            shifted(runs, [0.5, 0.5], REPLACE, tau)
    with pytest.raises(IncompatibleCandidates):
        shifted(runs, [0.5, 0.5], NeighboringRelation.ADD_OR_REMOVE_ONE)
    stranger = make_run("c", 8.0, update_lipschitz=1.0, lineage="other")
    with pytest.raises(IncompatibleCandidates):
        shifted([runs[0], stranger], [0.5, 0.5], REPLACE)


def test_steps_without_noise(make_segment: Maker, make_run: Maker) -> None:
    """Another run's last noise hides a silent run; nothing hides a silent merge, or an unknown update's past."""
    noisy, silent = (make_run(n, s, 3, update_lipschitz=1.0) for n, s in (("a", 8.0), ("b", 0.0)))
    hidden = mu([noisy, silent], [0.5, 0.5])
    assert generic([noisy, silent], [0.5, 0.5], REPLACE).mu == math.inf
    assert single_run(silent).mu == math.inf
    # b brings 3 s, a pays what is left evenly: 2 a_t + W = 6 * s/2 with a_t = 2 W
    assert hidden == pytest.approx(closed_form_of_one_noisy(), rel=1e-12)
    assert mu([silent, make_run("c", 0.0, update_lipschitz=1.0)], [0.5, 0.5]) == math.inf
    assert mu([silent], [1.0]) == math.inf
    tau = step_noise(noisy.segments[0])
    assert mu([silent], [1.0], tau) == pytest.approx(3 * 2 / 8)
    assert mu([noisy, make_run("d", 0.0, 3)], [0.5, 0.5]) == math.inf
    ends_loud = make_run(
        segments=[
            make_segment("e1", 0.0, 4, update_lipschitz=1.0),
            make_segment("e2", 8.0, 1, update_lipschitz=1.0),
        ]
    )
    assert mu([ends_loud], [1.0]) == pytest.approx(5 * 2 / 8)


def closed_form_of_one_noisy() -> float:
    """In units of s = 2, nu = 8: payments a <= s of the noisy run minimise 2 (a/8)^2 + (W/4)^2."""
    grid = np.linspace(0, 2, 2_000_001)
    merged = 0.5 * (3 * 2 - 2 * grid) + 0.5 * 3 * 2
    return float(np.sqrt(np.min(2 * (grid / 8) ** 2 + (merged / 4) ** 2)))


def test_extremes_are_numbers(make_segment: Maker, make_run: Maker) -> None:
    tiny, loud = make_run("a", 1e6, update_lipschitz=1.0), make_run("b", 0.5, update_lipschitz=1.0)
    assert 0 < mu([tiny, loud], [1 - 1e-12, 1e-12]) < 1e-4
    alone = mu([tiny], [1.0])
    assert mu([tiny, loud], [1 - 1e-12, 1e-12]) == pytest.approx(alone, rel=1e-3)
    million = [make_run(f"m{i}", 800.0 * (i + 1), 10**6, update_lipschitz=1.0) for i in range(8)]
    assert 0 < mu(million, [0.125] * 8) < (generic(million, [0.125] * 8, REPLACE).mu or 0)
    for factor in (1e-300, 1e-3, 0.98, 1 - 2**-53, 1 + 2**-52, 1.0001, 1.5, 1e6, 1e300):
        runs = [
            make_run(f"m{i}", 800.0 * (i + 1), steps, update_lipschitz=factor)
            for i, steps in enumerate((1, 2, 1000, 10**6))
        ]
        for tau in (0.0, 1e-3, 1e29):
            found = mu(runs, [0.25] * 4, tau)
            assert 0 < found <= (generic(runs, [0.25] * 4, REPLACE, tau).mu or 0)
    rates = [1e-25, 1e-9, 1.0, 1e12, 1e25]
    mixed = [make_run(f"r{i}", 8.0, 5, learning_rate=r, update_lipschitz=1.0) for i, r in enumerate(rates)]
    for tau in (0.0, 1e-30, 1.0):
        found = mu(mixed, [0.2] * 5, tau)
        assert 0 < found <= (generic(mixed, [0.2] * 5, REPLACE, tau).mu or 0)
    for changes in ({"learning_rate": 1e200, "max_grad_norm": 1e200}, {"learning_rate": 1e-200}):
        with pytest.raises(InvalidInput, match="learning_rate"):
            shifted([make_run("w", 8.0, 5, **changes), loud], [0.5, 0.5], REPLACE)
    with pytest.raises(InvalidInput, match="noise"):
        shifted([tiny, loud], [0.5, 0.5], REPLACE, 1e300)


def test_it_is_fast_and_small(make_segment: Maker, make_run: Maker) -> None:
    """Three times what is asked of a quiet machine: 5 ms and 200 ms."""
    random = np.random.default_rng(3)
    equal = [make_run(f"e{i}", 8.0 * (i + 1), 1000, update_lipschitz=1.0) for i in range(8)]
    unequal = [
        make_run(
            segments=[
                make_segment(f"u{i}-{j}", 8.0 * (i + 1), 1, learning_rate=float(r), update_lipschitz=0.999)
                for j, r in enumerate(random.uniform(0.01, 0.1, 200))
            ]
        )
        for i in range(8)
    ]
    for runs, limit in ((equal, 0.015), (unequal, 0.6)):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            mu(runs, [0.125] * 8)
            times.append(time.perf_counter() - start)
        assert min(times) < limit
    thousand = [make_run(f"t{i}", 100.0 + i, 1000, update_lipschitz=1.0001) for i in range(200)]
    tracemalloc.start()
    mu(thousand, [1 / 200] * 200)
    assert tracemalloc.get_traced_memory()[1] < 500e6
    tracemalloc.stop()
