"""What an adversary really achieves against a merge, beside what shifted interpolation certifies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr

from accounting.budget import NeighboringRelation
from accounting.linear_combination import generic, step_noise, step_sensitivity, stepwise
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Trajectory

Array = NDArray[np.float64]
Maker = Callable[..., Any]
REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE


def advantage(mu: float) -> float:
    """The largest TPR - FPR that mu-GDP allows: the total variation between N(0, 1) and N(mu, 1)."""
    return float(2 * ndtr(mu / 2) - 1)


def best_threshold(present: Array, absent: Array) -> float:
    """TPR - FPR of the best threshold; overestimated by the choice, covered by the margin of the tests."""
    cuts = np.quantile(np.concatenate((present, absent)), np.linspace(0.01, 0.99, 99))
    return max(abs(float(np.mean(present > cut) - np.mean(absent > cut))) for cut in cuts)


def linear_gaussian(
    runs: list[Trajectory], weights: list[float], tau: float, signs: NDArray[np.float64]
) -> float:
    """The exact mu of a merge of runs on a quadratic loss, where `theta_t = +-c theta_{t-1} + g + noise`.

    The neighbouring record moves step t by `signs[i, t] * s_t`. All is Gaussian, so mean and variance of the
    merge under both data sets tell everything.
    """
    mean, variance = 0.0, tau**2
    for weight, run, row in zip(weights, runs, signs, strict=True):
        shift, spread, step = 0.0, 0.0, 0
        for segment in run.segments:
            for _ in range(segment.steps):
                shift = segment.update_lipschitz * shift + row[step] * step_sensitivity(segment, REPLACE)
                spread = segment.update_lipschitz**2 * spread + step_noise(segment) ** 2
                step += 1
        mean += weight * shift
        variance += weight**2 * spread
    return abs(mean) / math.sqrt(variance)


@given(
    noises=st.lists(st.floats(min_value=0.5, max_value=50), min_size=1, max_size=3),
    shares=st.lists(st.floats(min_value=1e-4, max_value=1), min_size=3, max_size=3),
    lengths=st.lists(st.integers(min_value=1, max_value=12), min_size=6, max_size=6),
    rates=st.lists(st.floats(min_value=0.01, max_value=1), min_size=6, max_size=6),
    factors=st.lists(st.sampled_from([1.0, 0.98, 0.7, 0.0, 1.05]), min_size=6, max_size=6),
    tau=st.sampled_from([0.0, 1e-3, 0.1]),
    seed=st.integers(0, 10**6),
)
def test_the_exact_recursion_of_a_quadratic_loss_lies_below(
    noises: list[float],
    shares: list[float],
    lengths: list[int],
    rates: list[float],
    factors: list[float],
    tau: float,
    seed: int,
    make_segment: Maker,
    make_run: Maker,
) -> None:
    count = len(noises)
    weights = [share / math.fsum(shares[:count]) for share in shares[:count]]
    runs = [
        make_run(
            segments=[
                make_segment(
                    f"s{i}-{j}",
                    noise * (1 + j),
                    lengths[2 * i + j],
                    learning_rate=rates[2 * i + j],
                    update_lipschitz=factors[2 * i + j],
                )
                for j in range(2)
            ]
        )
        for i, noise in enumerate(noises)
    ]
    claimed = shifted(runs, weights, REPLACE, tau).mu
    assert claimed is not None
    random = np.random.default_rng(seed)
    together = np.ones((count, 24))  # one record, one direction: the worst case of this family
    assert linear_gaussian(runs, weights, tau, together) <= claimed * (1 + 1e-12)
    for signs in (random.choice([-1.0, 1.0], size=(count, 24)), random.uniform(-1, 1, size=(count, 24))):
        assert linear_gaussian(runs, weights, tau, signs) <= claimed * (1 + 1e-12)


def test_the_bound_is_exact_where_no_payment_reaches_what_is_owed(make_run: Maker) -> None:
    """Equal runs at equal weights, or much fresh noise: no z is 0, and the quadratic loss attains the bound."""
    runs = [make_run(f"s{i}", noise, 20, update_lipschitz=0.98) for i, noise in enumerate((16.0, 16.0, 16.0))]
    for weights, tau in (([1 / 3] * 3, 0.0), ([0.3, 0.3, 0.4], 0.05)):
        claimed = shifted(runs, weights, REPLACE, tau).mu
        truth = linear_gaussian(runs, weights, tau, np.ones((3, 20)))
        assert truth == pytest.approx(claimed, rel=1e-12)


def test_an_expanding_update_is_never_certified_below_the_truth(make_run: Maker) -> None:
    """The stepwise formula's counterexample: its update jumps, so c is infinite and the generic bound holds.

    Two runs of four steps, one loud, learn of a record in the first and move all others after it. Thresholding
    the merge gains TPR - FPR = 0.45 (run as a test of the generic bound).
    """
    runs = [
        make_run(
            f"s{i}",
            noise,
            4,
            relation=ADD_OR_REMOVE,
            learning_rate=1.0,
            max_grad_norm=1.0,
            expected_batch_size=2000.0,
        )
        for i, noise in enumerate((0.5, 50.0))
    ]
    claimed = shifted(runs, [0.5, 0.5], ADD_OR_REMOVE).mu
    assert claimed == generic(runs, [0.5, 0.5], ADD_OR_REMOVE).mu
    assert advantage(claimed or 0) > 0.45 > advantage(stepwise(runs, [0.5, 0.5], ADD_OR_REMOVE).mu or 0)


def clipped_logistic_runs(
    features: Array,
    labels: Array,
    runs: list[Trajectory],
    weights: list[float],
    trials: int,
    random: np.random.Generator,
) -> Array:
    """Merged parameters of full-batch DP-GD on logistic regression; shape (trials, dimensions)."""
    merged = np.zeros((trials, features.shape[1]))
    for weight, run in zip(weights, runs, strict=True):
        theta = np.zeros_like(merged)
        for segment in run.segments:
            for _ in range(segment.steps):
                residual = 1 / (1 + np.exp(-theta @ features.T)) - labels  # (trials, records)
                norms = np.abs(residual) * np.linalg.norm(features, axis=1)
                scale = np.minimum(1, segment.max_grad_norm / np.maximum(norms, 1e-300))
                noise = segment.noise_multiplier * segment.max_grad_norm * random.standard_normal(theta.shape)
                summed = (residual * scale) @ features + noise
                decayed = theta * (1 - segment.learning_rate * segment.weight_decay)
                theta = decayed - segment.learning_rate * summed / segment.expected_batch_size
        merged += weight * theta
    return merged


@pytest.mark.parametrize(
    ("noises", "weights", "decay", "least", "gain"),
    [
        ((4.0, 4.0), (0.5, 0.5), 0.0, 0.9, 0.0),
        ((2.0, 12.0), (0.15, 0.85), 0.0, 0.8, 0.5),
        ((3.0, 6.0), (0.3, 0.7), 0.1, 0.6, 0.3),
    ],
)
def test_an_attack_on_merged_logistic_regression_stays_below(
    noises: tuple[float, float],
    weights: tuple[float, float],
    decay: float,
    least: float,
    gain: float,
    make_run: Maker,
) -> None:
    """Real clipped DP-GD, attacked with the likelihood ratio's direction; and the claim is not far above.

    A record's gradient points one way or, replaced, the other, and is clipped. Rows have norm at most 1, so the
    loss is 1/4-smooth, 10 records a step: c = max(|1 - eta m|, |1 - eta m - eta / 4|).
    """
    records, trials, eta = 10, 8_000, 0.5
    factor = max(abs(1 - eta * decay), abs(1 - eta * decay - eta / 4))
    runs = [
        make_run(
            f"s{i}",
            noise,
            25,
            learning_rate=eta,
            max_grad_norm=0.25,
            expected_batch_size=float(records),
            weight_decay=decay,
            update_lipschitz=factor,
        )
        for i, noise in enumerate(noises)
    ]
    random = np.random.default_rng(11)
    features = random.standard_normal((records, 2))
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1)
    features[:, 0] *= 0.05  # the others hardly hold the first direction
    features[0] = (1.0, 0.0)
    labels = (np.arange(records) % 2).astype(float)
    outcomes = []
    for label in (1.0, 0.0):
        labels[0] = label
        outcomes.append(clipped_logistic_runs(features, labels, runs, list(weights), trials, random))
    found = best_threshold(outcomes[0][:, 0], outcomes[1][:, 0])
    claimed = shifted(runs, weights, REPLACE).mu
    assert claimed is not None
    assert found < advantage(claimed) + 3 / math.sqrt(trials)
    assert found > least * advantage(claimed) - 3 / math.sqrt(trials)
    assert claimed <= (1 - gain) * (generic(runs, weights, REPLACE).mu or 0)
