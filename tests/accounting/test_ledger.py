"""Cumulative figures of many releases: against integration, counterexamples to what is finer, and laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import gaussian
from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError, IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.ledger import (
    DRAWS_BLIND,
    DRAWS_REALISED,
    Outcome,
    PastRelease,
    cumulative,
)
from accounting.linear_combination import generic
from accounting.random_selection import random_selection_bound
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Trajectory
from tests.accounting.conftest import RunMaker

REPLACE = NeighboringRelation.REPLACE_ONE


def run_of_mu(make_run: RunMaker, name: str, mu: float, **changes: object) -> Trajectory:
    """One full-batch step; under replace-one mu = 2 / noise."""
    return make_run(name, 2.0 / mu, 1, **changes)


def selection(
    region: str,
    shares: dict[Trajectory, float] | Sequence[tuple[Trajectory, float]],
    drawn: int | None = None,
) -> PastRelease:
    pairs = shares.items() if isinstance(shares, dict) else shares
    outcomes = tuple(Outcome(probability=share, runs=(run,)) for run, share in pairs)
    return PastRelease(region=region, outcomes=outcomes, drawn=drawn)


def average(
    region: str, runs: Sequence[Trajectory], weights: Sequence[float], tau: float = 0.0
) -> PastRelease:
    outcome = Outcome(probability=1.0, runs=tuple(runs), weights=tuple(weights), fresh_noise=tau)
    return PastRelease(region=region, outcomes=(outcome,))


def integrated_delta(mus: Sequence[float], epsilon: float) -> float:
    """The profile of independent Gaussians together, by 30-digit integration over their summed loss."""
    with mpmath.workdps(30):
        square = sum(mpmath.mpf(mu) ** 2 for mu in mus)
        spread = mpmath.sqrt(square)

        def excess(loss: mpmath.mpf) -> mpmath.mpf:
            density = mpmath.npdf(loss, square / 2, spread)
            return density * (1 - mpmath.exp(epsilon - loss))

        return float(mpmath.quad(excess, mpmath.linspace(epsilon, epsilon + 30 * spread + square, 9)))


def test_asking_for_the_other_one_after_a_draw(make_run: RunMaker) -> None:
    """The example of the two runs of mu 0.8: weighting the past draw would claim 0.119, and the truth is 0.175."""
    a, b = (run_of_mu(make_run, name, 0.8) for name in "ab")
    first = selection("eu", [(a, 0.5), (b, 0.5)], drawn=0)
    both = cumulative([first, average("us", [b], [1.0])], REPLACE)
    truth = integrated_delta([0.8, 0.8], 1.0)
    assert truth == pytest.approx(0.175, abs=5e-4)
    assert truth <= both.delta(1.0) * (1 + 1e-12) <= truth * (1 + 1e-9)
    assert DRAWS_REALISED in both.assumptions
    fixed_beforehand = cumulative([selection("eu", [(a, 0.5), (b, 0.5)]), average("us", [b], [1.0])], REPLACE)
    assert fixed_beforehand.delta(1.0) == pytest.approx(0.119, abs=5e-4)  # right only where it was
    assert DRAWS_BLIND in fixed_beforehand.assumptions


def test_two_averages_of_the_same_runs_tell_both(make_run: RunMaker) -> None:
    runs = [make_run(f"s{i}", 20.0 + 5 * i, 30, update_lipschitz=1.0) for i in range(2)]
    one = cumulative([average("eu", runs, [0.9, 0.1])], REPLACE)
    own = shifted(runs, [0.9, 0.1], REPLACE)
    assert one.mu == pytest.approx(own.mu, rel=1e-12)
    again = cumulative([average("eu", runs, [0.9, 0.1]), average("us", runs, [0.9, 0.1])], REPLACE)
    assert again.mu == one.mu  # the same model twice
    two = cumulative([average("eu", runs, [0.9, 0.1]), average("us", runs, [0.9001, 0.0999])], REPLACE)
    assert two.mu == pytest.approx(joint_release(runs, REPLACE).mu, rel=1e-12)
    assert two.mu > one.mu * 1.05


def test_the_same_merge_with_new_noise_is_another_model(make_run: RunMaker) -> None:
    runs = [make_run(f"s{i}", 20.0, 30, update_lipschitz=1.0) for i in range(2)]
    noisy = average("eu", runs, [0.5, 0.5], tau=1.0)
    whole = joint_release(runs, REPLACE).mu
    assert cumulative([noisy], REPLACE).mu < whole
    for releases in ([noisy, noisy], [noisy, average("us", runs, [0.5, 0.5], tau=1.0)]):
        assert cumulative(releases, REPLACE).mu == pytest.approx(whole, rel=1e-12)


def test_groups_without_a_common_step_compose(make_run: RunMaker) -> None:
    runs = [make_run(f"s{i}", 20.0 + i, 30, update_lipschitz=1.0) for i in range(4)]
    left, right = average("eu", runs[:2], [0.5, 0.5]), average("us", runs[2:], [0.3, 0.7])
    squares = [
        shifted(runs[:2], [0.5, 0.5], REPLACE).mu ** 2,
        shifted(runs[2:], [0.3, 0.7], REPLACE).mu ** 2,
    ]
    assert cumulative([left, right], REPLACE).mu == pytest.approx(math.sqrt(sum(squares)), rel=1e-12)
    bridge = average("jp", [runs[1], runs[2]], [0.5, 0.5])  # now everything hangs together
    assert cumulative([left, right, bridge], REPLACE).mu == pytest.approx(
        joint_release(runs, REPLACE).mu, rel=1e-12
    )


def test_a_shared_prefix_joins_groups(make_run: RunMaker, make_segment: RunMaker) -> None:
    prefix = make_segment("prefix", 30.0, 10, update_lipschitz=1.0)
    tails = [make_segment(name, 25.0, 10, update_lipschitz=1.0) for name in "ab"]
    runs = [make_run("r", segments=[prefix, tail]) for tail in tails]
    both = cumulative([average("eu", [runs[0]], [1.0]), average("us", [runs[1]], [1.0])], REPLACE)
    assert both.mu == pytest.approx(joint_release(runs, REPLACE).mu, rel=1e-12)
    assert both.mu < math.hypot(*(single_run(run).mu or 0 for run in runs))  # the prefix counts once


@settings(max_examples=10)
@given(
    mus=st.lists(st.floats(0.1, 2.0), min_size=2, max_size=4),
    share=st.floats(0.05, 0.95),
    epsilon=st.floats(0.1, 3.0),
    seed=st.integers(0, 10**6),
)
def test_draws_to_come_are_the_average_over_all_tuples(
    mus: list[float], share: float, epsilon: float, seed: int, make_run: RunMaker
) -> None:
    """Against every tuple of outcomes, each integrated by itself."""
    random = np.random.default_rng(seed)
    runs = [run_of_mu(make_run, f"s{i}", mu) for i, mu in enumerate(mus)]
    picks = [random.choice(len(runs), size=2, replace=False).tolist() for _ in range(3)]
    chances = [(share, 1 - share)] * 3
    releases = [
        selection("eu", [(runs[i], p) for i, p in zip(pick, chance, strict=True)])
        for pick, chance in zip(picks, chances, strict=True)
    ]
    truth = 0.0
    for tuple_ in product((0, 1), repeat=3):
        known = {pick[k] for pick, k in zip(picks, tuple_, strict=True)}
        probability = math.prod(chance[k] for chance, k in zip(chances, tuple_, strict=True))
        truth += probability * integrated_delta([mus[i] for i in known], epsilon)
    found = cumulative(releases, REPLACE).delta(epsilon)
    assert truth * (1 - 1e-9) <= found <= truth * (1 + 1e-6)


def test_one_release_is_its_own_bound(make_run: RunMaker) -> None:
    runs = [make_run(f"s{i}", 8.0 + i, 20, sampling_probability=0.1) for i in range(2)]
    chosen = cumulative([selection("eu", [(runs[0], 0.5), (runs[1], 0.5)])], REPLACE)
    own = random_selection_bound([0.5, 0.5], runs, REPLACE)
    assert chosen.epsilon(1e-5) == pytest.approx(own.epsilon(1e-5), rel=1e-9)
    assert chosen.mu is None
    full = [make_run(f"f{i}", 20.0 + i, 20) for i in range(2)]
    merged = cumulative([average("eu", full, [0.4, 0.6])], REPLACE)
    assert merged.mu == pytest.approx(generic(full, [0.4, 0.6], REPLACE).mu, rel=1e-12)


@given(seed=st.integers(0, 10**6))
def test_laws(seed: int, make_run: RunMaker) -> None:
    """Order does not matter; one more release never lowers the figure; nothing exceeds all runs released."""
    random = np.random.default_rng(seed)
    runs = [make_run(f"s{i}", float(random.uniform(10, 60)), 20, update_lipschitz=1.0) for i in range(4)]
    releases = []
    for _ in range(4):
        some = [runs[i] for i in sorted(random.choice(4, size=2, replace=False))]
        share = float(random.uniform(0.1, 0.9))
        if random.uniform() < 0.5:
            releases.append(average("eu", some, [share, 1 - share]))
        else:
            pairs = [(some[0], share), (some[1], 1 - share)]
            releases.append(selection("us", pairs, drawn=int(random.integers(2))))
    figures = [cumulative(releases[: k + 1], REPLACE).epsilon(1e-5) for k in range(4)]
    assert all(after >= before * (1 - 1e-12) for before, after in pairwise(figures))
    shuffled = [releases[i] for i in random.permutation(4)]
    assert cumulative(shuffled, REPLACE).epsilon(1e-5) == pytest.approx(figures[-1], rel=1e-12)
    assert figures[-1] <= joint_release(runs, REPLACE).epsilon(1e-5) * (1 + 1e-9)
    for region in {release.region for release in releases}:
        alone = cumulative([release for release in releases if release.region == region], REPLACE)
        assert alone.epsilon(1e-5) <= figures[-1] * (1 + 1e-12)


def test_poisson_and_full_batch_together(make_run: RunMaker) -> None:
    poisson = make_run("p", 1.0, 100, sampling_probability=0.05)
    full = make_run("f", 30.0, 20, update_lipschitz=1.0)
    both = cumulative([average("eu", [poisson], [1.0]), average("us", [full], [1.0])], REPLACE)
    joint = joint_release([poisson, full], REPLACE)
    assert both.epsilon(1e-5) == pytest.approx(joint.epsilon(1e-5), rel=1e-9)


def test_an_average_beside_a_draw_to_come(make_run: RunMaker) -> None:
    """Where the draw hits a run of the average both are known; else the average keeps its own bound."""
    runs = [make_run(f"s{i}", 20.0 + i, 30, update_lipschitz=1.0) for i in range(3)]
    mixed = cumulative(
        [average("eu", runs[:2], [0.5, 0.5]), selection("us", [(runs[1], 0.25), (runs[2], 0.75)])], REPLACE
    )
    hit = joint_release(runs[:2], REPLACE).mu or math.nan
    missed = math.hypot(shifted(runs[:2], [0.5, 0.5], REPLACE).mu or 0, single_run(runs[2]).mu or 0)
    expected = 0.25 * gaussian.delta(hit, 0.8) + 0.75 * gaussian.delta(missed, 0.8)
    assert mixed.delta(0.8) == pytest.approx(expected, rel=1e-9)


def test_refusals(make_run: RunMaker) -> None:
    a, b = make_run("a"), make_run("b", lineage="others")
    with pytest.raises(InvalidInput, match="at least one release"):
        cumulative([], REPLACE)
    with pytest.raises(IncompatibleCandidates):
        cumulative([average("eu", [a], [1.0]), average("us", [b], [1.0])], REPLACE)
    with pytest.raises(IncompatibleCandidates):
        cumulative([average("eu", [a], [1.0])], NeighboringRelation.ADD_OR_REMOVE_ONE)
    with pytest.raises(InvalidInput, match="sum to 1"):
        selection("eu", [(a, 0.4), (make_run("c"), 0.4)])
    with pytest.raises(InvalidInput, match="outcomes"):
        selection("eu", [(a, 0.5), (make_run("c"), 0.5)], drawn=2)
    with pytest.raises(InvalidInput, match="weights"):
        average("eu", [a], [0.5, 0.5])


def test_too_many_ways_ask_for_the_draws(make_run: RunMaker) -> None:
    runs = [make_run(f"s{i}") for i in range(26)]
    releases = [selection("eu", [(runs[2 * i], 0.5), (runs[2 * i + 1], 0.5)]) for i in range(13)]
    with pytest.raises(AccountingError, match="state what was drawn"):
        cumulative(releases, REPLACE)
    drawn = [PastRelease(region=r.region, outcomes=r.outcomes, drawn=0) for r in releases]
    assert cumulative(drawn, REPLACE).mu == pytest.approx(joint_release(runs[::2], REPLACE).mu, rel=1e-12)


def test_a_run_without_noise_leaves_nothing(make_run: RunMaker) -> None:
    silent = make_run("silent", 0.0)
    bound = cumulative([average("eu", [silent], [1.0]), average("us", [make_run("a")], [1.0])], REPLACE)
    assert bound.delta(100.0) == 1.0
