"""One Poisson-sampled step: the grid dominates the truth, by 50-digit arithmetic, and closely."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from accounting.budget import NeighboringRelation
from accounting.sampled_gaussian import LossGrid, discretise, hockey_stick

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE


def phi(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def exact_deltas(
    noise: float, q: float, relation: NeighboringRelation, epsilon: float
) -> tuple[mpmath.mpf, ...]:
    """(remove, add) as a difference of two distribution functions at the point where the loss is epsilon."""
    m, q, e = 1 / mpmath.mpf(noise), mpmath.mpf(q), mpmath.mpf(epsilon)
    growth = mpmath.exp(e)
    if relation is REPLACE:
        # With y = exp(m x) and c = exp(-m^2/2): (1-q) + q c / y = exp(e) * ((1-q) + q c y), a quadratic in y.
        c = mpmath.exp(-m * m / 2)
        a, b = growth * q * c, (1 - q) * (growth - 1)
        y = (-b + mpmath.sqrt(b * b + 4 * a * q * c)) / (2 * a)
        x = mpmath.log(y) / m
        delta = (1 - q) * phi(x) + q * phi(x + m) - growth * ((1 - q) * phi(x) + q * phi(x - m))
        return delta, delta
    ratio = (growth - (1 - q)) / q
    if ratio <= 0:
        remove = 1 - growth
    else:
        x = -mpmath.log(ratio) / m - m / 2
        remove = (1 - q) * phi(x) + q * phi(x + m) - growth * phi(x)
    ratio = (1 / growth - (1 - q)) / q
    if ratio <= 0:
        return remove, mpmath.mpf(0)
    x = mpmath.log(ratio) / m + m / 2
    return remove, phi(x) - growth * ((1 - q) * phi(x) + q * phi(x - m))


STEPS = [
    (1.0, 0.01, ADD_OR_REMOVE, 2.0**-12),
    (1.0, 0.01, REPLACE, 2.0**-12),
    (0.3, 0.1, ADD_OR_REMOVE, 2.0**-11),
    (0.3, 0.5, REPLACE, 2.0**-11),
    (0.05, 0.5, REPLACE, 2.0**-8),
    (0.05, 0.5, ADD_OR_REMOVE, 2.0**-8),
    (10.0, 1e-3, ADD_OR_REMOVE, 2.0**-23),
    (10.0, 0.9, REPLACE, 2.0**-13),
    (1.0, 1e-6, ADD_OR_REMOVE, 2.0**-20),
    (1.0, 1e-6, REPLACE, 2.0**-20),
    (1e6, 1e-6, ADD_OR_REMOVE, 2.0**-52),
    (50.0, 0.99, REPLACE, 2.0**-16),
    (2.0, 1.0, ADD_OR_REMOVE, 2.0**-13),
]


@pytest.mark.parametrize(("noise", "q", "relation", "interval"), STEPS)
def test_the_grid_dominates_the_exact_divergence_closely(
    noise: float, q: float, relation: NeighboringRelation, interval: float
) -> None:
    random = np.random.default_rng(7)
    with mpmath.workdps(60):
        for direction, grid in enumerate(discretise(noise, q, relation, interval)):
            values = hockey_stick(grid.probabilities, grid.infinity, interval)
            count = len(values)
            zero = np.clip(-grid.first + np.arange(-3, 4), 0, count - 1)
            places = np.unique(
                np.concatenate((random.integers(0, count, 25), [0, 1, count - 2, count - 1], zero))
            )
            for place in places.tolist():
                exact_q = mpmath.mpf(q) if q < 1 else 1 - mpmath.mpf(10) ** -50
                truth = exact_deltas(noise, exact_q, relation, mpmath.mpf(grid.first + place) * interval)[
                    direction
                ]
                if truth > mpmath.mpf(10) ** -40:
                    assert truth <= values[place] <= truth * (1 + mpmath.mpf(10) ** -9), (direction, place)


@pytest.mark.parametrize(("noise", "q", "relation", "interval"), STEPS)
def test_the_grid_is_a_distribution(
    noise: float, q: float, relation: NeighboringRelation, interval: float
) -> None:
    for grid in discretise(noise, q, relation, interval):
        total = float(grid.probabilities.sum()) + grid.infinity
        assert np.all(grid.probabilities >= 0)
        assert 1 - 1e-13 <= total <= 1 + 1e-8
        assert grid.infinity < 1e-27


def test_the_library_falls_short_where_this_grid_does_not() -> None:
    """dp_accounting 0.6: sigma 0.3, q 0.1, its "add" grid lies below the true delta at epsilon -10.9."""
    interval, epsilon = 2.0**-12, -10.907958984375
    with mpmath.workdps(60):
        truth = exact_deltas(0.3, 0.1, ADD_OR_REMOVE, epsilon)[1]
    step = privacy_loss_distribution.from_gaussian_mechanism(
        0.3, sampling_prob=0.1, value_discretization_interval=interval
    )._pmf_add.to_dense_pmf()
    library = LossGrid(first=step._lower_loss, probabilities=step._probs, infinity=step._infinity_mass)
    ours = discretise(0.3, 0.1, ADD_OR_REMOVE, interval)[1]
    assert at(library, epsilon, interval) < truth - mpmath.mpf(10) ** -13
    assert at(ours, epsilon, interval) >= truth


def at(grid: LossGrid, epsilon: float, interval: float) -> float:
    """The grid's divergence at one grid point, summed exactly."""
    place = round(epsilon / interval) - grid.first
    beyond = grid.probabilities[place + 1 :]
    shares = -np.expm1(-interval * np.arange(1, len(beyond) + 1))
    return math.fsum([grid.infinity, *(shares * beyond).tolist()])
