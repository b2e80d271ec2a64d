"""Mean estimation: where gradients do not depend on the iterate, merging is as private as its formula says.

The candidates are independent, unbiased estimates of one mean, `theta_i = mean + N(0, sigma_i^2)` in each
coordinate, and one record moves all of them by the same vector, of L2 norm at most `sensitivity`. Then

- a linear combination (weights on the simplex) moves by as much as one candidate does and has variance
  `sum lambda_i^2 sigma_i^2`: one Gaussian mechanism;
- a random selection has mean squared error `sum pi_i sigma_i^2`, its index revealed.

*Theorem.* At equal error V, with at least two distinct sigmas in the support of pi, the Renyi divergence of
the linear combination is strictly smaller at every order. *Proof.* With r(v) = order * s^2 / (2 v), convex,
Jensen's inequality gives `log(sum pi_i exp((order-1) r(sigma_i^2))) / (order-1) >= sum pi_i r(sigma_i^2)`,
and `sum pi_i r(sigma_i^2) = r(V) + order s^2/2 * sum pi_i (sigma_i^2 - V)^2 / (sigma_i^2 V^2)`; the last sum
is above 0 unless all sigmas are equal.

This is about Renyi divergence. The exact profiles need not be in this order at every epsilon: where delta is
close to 1 a random selection may be the more private one.

None of this holds for trained models, whose gradients depend on their hidden iterates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.budget import require_positive
from accounting.errors import InvalidInput
from accounting.linear_combination import inverse_variance_weights
from accounting.profile import require_simplex
from accounting.random_selection import random_selection_rdp
from accounting.rdp import order_grid
from accounting.rounding import ULP, sum_up, up

Array = NDArray[np.float64]

_LEAST, _LARGEST = 1e-100, 1e100  # of sigmas and sensitivities: their squares and quotients stay finite
_LAST_ORDER = 1024.0
_SLACK = 1e-12  # relative; of sums of positive terms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """A random selection beside a linear combination of the same candidates with the same error."""

    sigmas: tuple[float, ...]  # in the support of pi, shape (candidates,)
    probabilities: tuple[float, ...]  # pi, > 0
    weights: tuple[float, ...]  # lambda of equal error, within rounding
    error: float  # mean squared error per coordinate of the random selection, rounded up
    orders: Array  # > 1, shape (orders,)
    linear_combination_rdp: Array  # nats, upper bounds, shape (orders,)
    random_selection_rdp: Array  # nats, upper bounds, shape (orders,)
    margins: Array  # nats: lower bounds on by how much the former is smaller, at exactly equal error

    @property
    def strictly_smaller(self) -> bool:
        """Whether the linear combination's divergence is proved smaller at every order."""
        return bool(np.all(self.margins > 0))


def compare(
    sigmas: Sequence[float],
    probabilities: Sequence[float],
    *,
    sensitivity: float = 1.0,
    orders: Array | None = None,
) -> Comparison:
    """Put a random selection beside the linear combination that has the same mean squared error.

    Args:
        sigmas: standard deviation of each candidate per coordinate, in [1e-100, 1e100], shape (candidates,).
        probabilities: pi, on the simplex, shape (candidates,). Candidates of probability 0 are left out.
        sensitivity: how far one record moves every candidate, L2, in [1e-100, 1e100].
        orders: each > 1, shape (orders,); 1.01 to 1024 by default.

    Raises:
        InvalidInput: NaN, or values outside these ranges.

    Source: arXiv 2604.20985, mean estimation; proof in the module's docstring.
    """
    noises, shares = _checked(sigmas, probabilities)
    used = shares > 0
    noises, shares = noises[used], shares[used]
    grid = order_grid(_LAST_ORDER, whole=False) if orders is None else np.asarray(orders, dtype=float)
    weights = equal_error_weights(noises, shares)
    # sigma_i^2 - V as a sum of differences, each without cancellation.
    gaps = np.array([shares @ ((noise - noises) * (noise + noises)) for noise in noises])
    error = float(shares @ noises**2)
    spread = float(shares @ (gaps / noises / error) ** 2)
    moved = require_scale("sensitivity", sensitivity)
    return Comparison(
        sigmas=tuple(noises.tolist()),
        probabilities=tuple(shares.tolist()),
        weights=tuple(weights.tolist()),
        error=random_selection_error(noises, shares),
        orders=grid,
        linear_combination_rdp=linear_combination_rdp(noises, weights, grid, sensitivity=moved),
        random_selection_rdp=selection_rdp(noises, shares, grid, sensitivity=moved),
        margins=grid * (moved * moved / 2 * spread * (1 - _SLACK)),
    )


def linear_combination_error(sigmas: Sequence[float] | Array, weights: Sequence[float] | Array) -> float:
    """`sum lambda_i^2 sigma_i^2`: the variance per coordinate of the merged estimate, rounded up."""
    noises, shares = _checked(sigmas, weights)
    return up(sum_up((noises * shares) ** 2), 4)


def random_selection_error(sigmas: Sequence[float] | Array, probabilities: Sequence[float] | Array) -> float:
    """`sum pi_i sigma_i^2`: the mean squared error per coordinate of the drawn estimate, rounded up."""
    noises, shares = _checked(sigmas, probabilities)
    return up(sum_up(shares * noises**2), 4)


def linear_combination_mu(
    sigmas: Sequence[float] | Array, weights: Sequence[float] | Array, *, sensitivity: float = 1.0
) -> float:
    """`sensitivity / sqrt(sum lambda_i^2 sigma_i^2)`: exact, rounded up; the merge is one Gaussian mechanism."""
    noises, shares = _checked(sigmas, weights)
    variance = math.fsum(((noises * shares) ** 2).tolist()) * (1 - 16 * ULP)
    return up(require_scale("sensitivity", sensitivity) / math.sqrt(variance), 4)


def linear_combination_rdp(
    sigmas: Sequence[float] | Array,
    weights: Sequence[float] | Array,
    orders: Array,
    *,
    sensitivity: float = 1.0,
) -> Array:
    """`order * mu^2 / 2` of the merged estimate: nats, shape (orders,), rounded up.

    Source: Mironov 2017, proposition 7.
    """
    mu = linear_combination_mu(sigmas, weights, sensitivity=sensitivity)
    values: Array = _checked_orders(orders) * up(mu * mu / 2)
    return values * (1 + 4 * ULP)


def selection_rdp(
    sigmas: Sequence[float] | Array,
    probabilities: Sequence[float] | Array,
    orders: Array,
    *,
    sensitivity: float = 1.0,
) -> Array:
    """The Renyi divergence of the drawn estimate, its index revealed: nats, shape (orders,), rounded up.

    Source: arXiv 2604.20985, random selection under RDP.
    """
    noises, shares = _checked(sigmas, probabilities)
    grid = _checked_orders(orders)
    halves = (require_scale("sensitivity", sensitivity) / noises) ** 2 / 2 * (1 + 8 * ULP)
    return random_selection_rdp(np.outer(halves, grid) * (1 + 4 * ULP), shares, grid)


def equal_error_weights(sigmas: Sequence[float] | Array, probabilities: Sequence[float] | Array) -> Array:
    """Weights whose linear combination has the error of the random selection by `probabilities`.

    They lie between the noisiest candidate alone and the weights of least variance W, on which line the
    variance is `W + share^2 * (sigma_max^2 - W)`.

    Returns:
        On the simplex, shape (candidates,); of equal error within a relative 1e-14 or so.
    """
    noises, shares = _checked(sigmas, probabilities)
    variances = noises**2
    best = inverse_variance_weights(variances)
    least, largest = float(best**2 @ variances), float(variances.max())
    target = float(shares @ variances)
    noisiest = np.zeros(len(noises))
    noisiest[int(variances.argmax())] = 1.0
    if not largest > least:
        return noisiest
    share = math.sqrt(min(max((target - least) / (largest - least), 0.0), 1.0))
    weights: Array = share * noisiest + (1 - share) * best
    return weights / math.fsum(weights.tolist())


def merged_path_mu(moves: Array, noises: Array, weights: Sequence[float]) -> float:
    """Release the merged model after every step: the step-by-step formula, exact for gradients free of iterates.

    `mu^2 = sum_t (sum_i lambda_i s_i,t)^2 / sum_i lambda_i^2 nu_i,t^2`.

    Args:
        moves: s, how far one record moves run i in step t, the same direction in all runs; >= 0, shape
            (runs, steps). For DP-SGD's units see `linear_combination.step_sensitivity`.
        noises: nu, standard deviation of the step's noise per coordinate, in the same units; >= 0, same shape.
        weights: lambda, on the simplex, shape (runs,). Runs of weight 0 are left out.

    Returns:
        mu, rounded up: attained by a record that moves every step as far as it can. Infinite where a step
        moves without noise.

    Raises:
        InvalidInput: NaN, negative or infinite entries, or shapes that do not fit.

    Source: arXiv 2604.20985, linear combination; exact because the differences between the steps of the
    merged model are then independent Gaussians.
    """
    moved, noise = _merged_steps(moves, noises, weights)
    return _norm_up(_ratios(moved, noise))


def last_model_mu(moves: Array, noises: Array, weights: Sequence[float]) -> float:
    """Release only the merged model after the last step: exact, and never above `merged_path_mu`.

    `mu = sum_t sum_i lambda_i s_i,t / sqrt(sum_t sum_i lambda_i^2 nu_i,t^2)`; the two are equal where every
    step has the same ratio of (merged) movement to noise variance. Arguments, errors and rounding as there.
    """
    moved, noise = _merged_steps(moves, noises, weights)
    whole = np.array([math.fsum(moved.tolist())]), _norms(noise[:, None])
    return _norm_up(_ratios(*whole))


def require_scale(name: str, value: float) -> float:
    """Refuse what is not a number in [1e-100, 1e100], whose square and quotients are doubles."""
    if not _LEAST <= require_positive(name, value) <= _LARGEST:
        raise InvalidInput(f"{name} must lie in [1e-100, 1e100], but {value!r} was given; change the unit.")
    return float(value)


def _checked(sigmas: Sequence[float] | Array, weights: Sequence[float] | Array) -> tuple[Array, Array]:
    noises = np.array([require_scale("each sigma", float(value)) for value in sigmas])
    shares = np.asarray(weights, dtype=float)
    if noises.shape != shares.shape or not len(noises):
        raise InvalidInput(
            f"{shares.size} weights were given for {len(noises)} sigmas; there must be one each."
        )
    require_simplex(tuple(shares.tolist()))
    return noises, shares


def _checked_orders(orders: Array) -> Array:
    grid = np.asarray(orders, dtype=float)
    if grid.ndim != 1 or not len(grid) or not (np.all(grid > 1) and np.all(grid <= 1e12)):
        raise InvalidInput("RDP orders must lie in (1, 1e12], and there must be at least one.")
    return grid


def _merged_steps(moves: Array, noises: Array, weights: Sequence[float]) -> tuple[Array, Array]:
    """Movement and standard deviation of the merged model in each step, shapes (steps,)."""
    moves, noises = np.asarray(moves, dtype=float), np.asarray(noises, dtype=float)
    shares = np.asarray(weights, dtype=float)
    if moves.ndim != 2 or moves.shape != noises.shape or len(moves) != len(shares) or not moves.size:
        raise InvalidInput("moves and noises must have one row for each weight, and a column for each step.")
    require_simplex(tuple(shares.tolist()))
    for name, values in (("moves", moves), ("noises", noises)):
        if not (np.all(values >= 0) and np.all(values <= _LARGEST)):
            raise InvalidInput(f"{name} must be numbers from 0 to 1e100.")
    used = shares > 0
    return shares[used] @ moves[used], _norms(shares[used, None] * noises[used])


def _norms(values: Array) -> Array:
    """Euclidean norms of the columns, also where squares would underflow or overflow."""
    largest = values.max(axis=0)
    scaled = values / np.where(largest > 0, largest, 1.0)
    norms: Array = largest * np.sqrt((scaled * scaled).sum(axis=0))
    return norms


def _ratios(moved: Array, noise: Array) -> Array:
    with np.errstate(divide="ignore", over="ignore"):
        ratios: Array = np.where(moved > 0, moved / np.where(moved > 0, noise, 1.0), 0.0)
    return ratios


def _norm_up(ratios: Array) -> float:
    if np.any(np.isinf(ratios)):
        return math.inf
    value = float(_norms(ratios[:, None])[0])
    return up(value * (1 + _SLACK)) if value > 0 else 0.0
