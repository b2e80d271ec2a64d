"""Merges of runs: published numbers, reductions, refusals, and an attack that was really run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from accounting.bounds import STEPWISE_ASSUMPTION, WEIGHTS_BLIND
from accounting.budget import NeighboringRelation
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.linear_combination import (
    accumulated_noise_variance,
    generic,
    inverse_variance_weights,
    step_noise,
    step_sensitivity,
    stepwise,
)

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
Maker = Callable[..., Any]

NOISES = st.lists(st.floats(min_value=0.5, max_value=200), min_size=1, max_size=5)


def simplex(shares: list[float]) -> list[float]:
    total = math.fsum(shares)
    return [share / total for share in shares]


def test_published_merges(golden: dict[str, Any], make_run: Maker) -> None:
    for row in golden["linear_combination"]:
        runs = [make_run(f"s{i}", noise, row["steps"]) for i, noise in enumerate(row["noise_multiplier"])]
        assert generic(runs, row["lambda"], REPLACE).mu == pytest.approx(row["mu_generic"], abs=6e-7)
        assert stepwise(runs, row["lambda"], REPLACE).mu == pytest.approx(row["mu_stepwise"], abs=6e-10)


@given(
    noises=NOISES,
    shares=st.lists(st.floats(min_value=1e-12, max_value=1), min_size=5, max_size=5),
    steps=st.integers(min_value=1, max_value=40),
    rates=st.lists(st.floats(min_value=0.01, max_value=1), min_size=5, max_size=5),
)
def test_generic_matches_exact_arithmetic_and_the_order_of_the_bounds(
    noises: list[float], shares: list[float], steps: int, rates: list[float], make_run: Maker
) -> None:
    weights = simplex(shares[: len(noises)])
    runs = [make_run(f"s{i}", s, steps, learning_rate=rates[i]) for i, s in enumerate(noises)]
    found = generic(runs, weights, REPLACE).mu
    assert found is not None
    with mpmath.workdps(50):
        earlier = mpmath.fsum((steps - 1) * (2 / mpmath.mpf(s)) ** 2 for s in noises)
        pairs = list(zip(weights, noises, rates, strict=False))
        moved = mpmath.fsum(mpmath.mpf(w) * 2 * mpmath.mpf(r) / 100 for w, _, r in pairs)
        variance = mpmath.fsum(
            (mpmath.mpf(w) * mpmath.mpf(r) * mpmath.mpf(s) / 100) ** 2 for w, s, r in pairs
        )
        truth = mpmath.sqrt(earlier + moved**2 / variance)
        assert truth * (1 - mpmath.mpf(10) ** -15) <= found <= truth * (1 + mpmath.mpf(10) ** -12)
    joint = joint_release(runs, REPLACE).mu
    assert joint is not None
    assert found <= joint * (1 + 1e-12)
    assert (stepwise(runs, weights, REPLACE).mu or 0) <= joint * (1 + 1e-12)


def test_one_hot_weights_give_the_run_s_own_bound(make_run: Maker) -> None:
    runs = [make_run("a", 8.0), make_run("b", 32.0, 33), make_run("c", 0.0)]
    for weights, run in (([1.0, 0.0, 0.0], runs[0]), ([0.0, 1.0, 0.0], runs[1])):
        bound = generic(runs, weights, REPLACE)
        assert bound.mu == single_run(run).mu
        assert bound.epsilon(1e-5) == single_run(run).epsilon(1e-5)


def test_unused_and_nearly_unused_runs(make_run: Maker) -> None:
    runs = [make_run("a", 8.0, 1), make_run("b", 32.0, 1)]
    without = generic(runs[:1], [1.0], REPLACE).mu
    assert generic([*runs[:1], make_run("z", 1e-3, 1)], [1.0, 0.0], REPLACE).mu == without
    nearly = generic(runs, [1 - 1e-12, 1e-12], REPLACE).mu
    assert nearly == pytest.approx(without, rel=1e-9)


def test_permutation_changes_nothing(make_run: Maker) -> None:
    runs = [make_run("a", 8.0), make_run("b", 16.0, 5), make_run("c", 32.0, 7)]
    weights = [0.25, 0.35, 0.4]
    assert generic(runs[::-1], weights[::-1], REPLACE).mu == pytest.approx(
        generic(runs, weights, REPLACE).mu, rel=1e-14
    )


@given(cut=st.integers(min_value=1, max_value=19))
def test_splitting_a_segment_changes_nothing(cut: int, make_segment: Maker, make_run: Maker) -> None:
    whole = [make_run("a", 16.0, 20), make_run("b", 8.0, 20)]
    parts = make_run(segments=[make_segment("a1", 16.0, cut), make_segment("a2", 16.0, 20 - cut)])
    for bound in (generic, stepwise):
        reference = bound(whole, [0.3, 0.7], REPLACE).mu
        assert bound([parts, whole[1]], [0.3, 0.7], REPLACE).mu == pytest.approx(reference, rel=1e-13)


def test_only_the_last_step_s_scale_enters_the_merge(make_segment: Maker, make_run: Maker) -> None:
    """A learning rate that drops before the last step makes that run's last noise, and shift, small."""
    steady = make_run("steady", 10.0, 2)
    dropped = make_run(
        segments=[make_segment("d1", 10.0, 1), make_segment("d2", 10.0, 1, learning_rate=1e-6)]
    )
    found = generic([steady, dropped], [0.5, 0.5], REPLACE).mu
    # Steps 1 of both, joint; the last step is all but the steady run's own.
    assert found == pytest.approx(2 * math.sqrt(3) / 10, rel=1e-4)


def test_fresh_noise_protects_the_last_step(make_run: Maker) -> None:
    runs = [make_run("a", 8.0, 1), make_run("b", 8.0, 1)]
    step = step_noise(runs[0].segments[0])
    quiet = generic(runs, [0.5, 0.5], REPLACE).mu
    loud = generic(runs, [0.5, 0.5], REPLACE, fresh_noise=step * math.sqrt(1.5)).mu
    assert quiet == pytest.approx(2 / 8 * math.sqrt(2))
    assert loud == pytest.approx(2 / 8 / math.sqrt(2))
    one = generic(runs, [1.0, 0.0], REPLACE, fresh_noise=step).mu
    assert one == pytest.approx(2 / 8 / math.sqrt(2))


def test_step_quantities(make_segment: Maker) -> None:
    segment = make_segment("a", 3.0, max_grad_norm=2.0, learning_rate=0.5, expected_batch_size=50.0)
    assert step_sensitivity(segment, REPLACE) == pytest.approx(2 * 0.5 * 2.0 / 50)
    assert step_sensitivity(segment, ADD_OR_REMOVE) == pytest.approx(0.5 * 2.0 / 50)
    assert step_noise(segment) == pytest.approx(0.5 * 3.0 * 2.0 / 50)


def test_accumulated_noise_variance_adds_over_segments(make_segment: Maker, make_run: Maker) -> None:
    run = make_run(segments=[make_segment("a", 3.0, 4), make_segment("b", 5.0, 2, learning_rate=0.2)])
    assert accumulated_noise_variance(run) == pytest.approx(
        4 * (0.1 * 3 / 100) ** 2 + 2 * (0.2 * 5 / 100) ** 2
    )


@given(variances=st.lists(st.floats(min_value=1e-9, max_value=1e9), min_size=1, max_size=6))
def test_inverse_variance_weights_are_optimal(variances: list[float]) -> None:
    weights = inverse_variance_weights(variances)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-15 * len(weights))
    best = float(weights**2 @ variances)
    assert best == pytest.approx(1 / math.fsum(1 / v for v in variances), rel=1e-12)
    other = np.random.default_rng(0).dirichlet(np.ones(len(variances)))
    assert float(other**2 @ variances) >= best * (1 - 1e-12)


def test_inverse_variance_weights_of_silent_runs() -> None:
    assert inverse_variance_weights([0.0, 1.0, 0.0]).tolist() == [0.5, 0.0, 0.5]
    for bad in ([-1.0], [math.nan], [math.inf], []):
        with pytest.raises(InvalidInput):
            inverse_variance_weights(bad)


def test_stepwise_is_marked_and_names_its_assumption(make_run: Maker) -> None:
    runs = [make_run("a", 8.0), make_run("b", 32.0)]
    bound = stepwise(runs, [0.1, 0.9], REPLACE)
    assert not bound.sound_for_dp_sgd
    assert STEPWISE_ASSUMPTION in bound.assumptions
    assert generic(runs, [0.1, 0.9], REPLACE).sound_for_dp_sgd
    assert WEIGHTS_BLIND in generic(runs, [0.1, 0.9], REPLACE).assumptions


def test_for_one_step_stepwise_and_generic_agree(make_run: Maker) -> None:
    runs = [make_run("a", 8.0, 1), make_run("b", 32.0, 1)]
    assert generic(runs, [0.4, 0.6], REPLACE).mu == pytest.approx(
        stepwise(runs, [0.4, 0.6], REPLACE).mu, rel=1e-14
    )


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
    runs = [make_run("a", 8.0), make_run("b", 32.0, **change)]
    for bound in (generic, stepwise):
        with pytest.raises(IncompatibleCandidates, match=reason):
            bound(runs, [0.5, 0.5], REPLACE)
    assert (
        generic(runs, [1.0, 0.0], REPLACE).mu == single_run(runs[0]).mu
    )  # a run of weight 0 does not matter


def test_shared_steps_are_refused(make_run: Maker) -> None:
    with pytest.raises(IncompatibleCandidates, match="shares steps"):
        generic([make_run("run", 8.0, 5), make_run("run", 8.0, 20)], [0.5, 0.5], REPLACE)


def test_stepwise_needs_equal_length(make_run: Maker) -> None:
    with pytest.raises(IncompatibleCandidates, match="equally many"):
        stepwise([make_run("a", 8.0, 5), make_run("b", 8.0, 6)], [0.5, 0.5], REPLACE)


def test_a_used_run_without_noise_is_not_private(make_run: Maker) -> None:
    runs = [make_run("a", 8.0), make_run("b", 0.0)]
    assert generic(runs, [0.5, 0.5], REPLACE).mu == math.inf
    assert generic(runs, [0.5, 0.5], REPLACE).delta(100.0) == 1.0


@pytest.mark.parametrize("weights", [[0.5], [0.5, 0.6], [-0.5, 1.5], [math.nan, 1.0]])
def test_weights_off_the_simplex_fail(weights: list[float], make_run: Maker) -> None:
    with pytest.raises(InvalidInput):
        generic([make_run("a", 8.0), make_run("b", 8.0)], weights, REPLACE)


def advantage(mu: float) -> float:
    """The largest TPR - FPR that mu-GDP allows: the total variation between N(0, 1) and N(mu, 1)."""
    return float(2 * ndtr(mu / 2) - 1)


def test_an_attack_beats_the_stepwise_claim_and_not_the_generic_bound(make_run: Maker) -> None:
    """The counterexample: a loud run learns of the record in its first step and moves all others after it."""
    records, steps, noises, weights = 2000, 4, (0.5, 50.0), (0.5, 0.5)
    runs = [
        make_run(
            f"s{i}",
            noise,
            steps,
            relation=ADD_OR_REMOVE,
            learning_rate=1.0,
            max_grad_norm=1.0,
            expected_batch_size=float(records),
        )
        for i, noise in enumerate(noises)
    ]
    claimed = stepwise(runs, weights, ADD_OR_REMOVE).mu
    sound = generic(runs, weights, ADD_OR_REMOVE).mu
    assert claimed is not None
    assert sound is not None
    assert claimed == pytest.approx(0.080, abs=5e-4)
    assert joint_release(runs, ADD_OR_REMOVE).mu == pytest.approx(4.0, abs=2e-3)

    random = np.random.default_rng(20)
    trials = 100_000

    def merged(with_record: bool) -> np.ndarray:
        total = np.zeros(trials)
        for noise, weight in zip(noises, weights, strict=True):
            theta = np.zeros(trials)
            for _ in range(steps):
                gradient = np.where(theta > 0.5 / records, -(records - 1.0), 0.0) - with_record
                theta -= (gradient + noise * random.standard_normal(trials)) / records
            total += weight * theta
        return total

    present, absent = merged(with_record=True), merged(with_record=False)
    thresholds = np.quantile(np.concatenate((present, absent)), np.linspace(0.01, 0.99, 99))
    gaps = [float(np.mean(present > t) - np.mean(absent > t)) for t in thresholds]
    found = max(gaps)
    noise_of_estimate = 5 / math.sqrt(trials)
    assert found > 0.4
    assert found - noise_of_estimate > advantage(claimed)
    assert found + noise_of_estimate < advantage(sound)


@pytest.mark.parametrize("rate", [1e-200, 1e-163, 1e-161, 1e-80, 1.0, 1e80, 1e200])
def test_absurd_scales_are_right_or_refused(rate: float, make_run: Maker) -> None:
    """The merged step's ratio does not depend on the learning rate; squares of tiny steps once gave mu = 0."""

    def mu_at(learning_rate: float) -> float | None:
        runs = [make_run(name, 20.0, 1, learning_rate=learning_rate, max_grad_norm=1e-60) for name in "ab"]
        return generic(runs, [0.5, 0.5], REPLACE).mu

    if rate == 1e-200:
        with pytest.raises(IncompatibleCandidates, match="beyond exact arithmetic"):
            mu_at(rate)
    else:
        assert mu_at(rate) == pytest.approx(mu_at(1.0), rel=1e-12)
