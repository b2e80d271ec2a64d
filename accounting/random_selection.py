"""Random selection: release one candidate, drawn by weights fixed before any private model was looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from accounting.ascent import with_paired_source
from accounting.bounds import INDEX_REVEALED, WEIGHTS_BLIND, Bound, run_assumptions
from accounting.budget import NeighboringRelation, require_open_unit
from accounting.errors import InvalidInput
from accounting.joint_release import executed_steps, single_run
from accounting.profile import MixtureProfile, PrivacyProfile, average_up, require_simplex
from accounting.rdp import RdpProfile, order_grid, rdp_profile, rdp_values
from accounting.rounding import ULP
from accounting.selection_program import maximise
from accounting.trajectory import Trajectory

Array = NDArray[np.float64]

SOURCE_PLD = "arXiv 2604.20985, random selection: the hockey-stick divergence is jointly convex"
SOURCE_RDP = "arXiv 2604.20985, random selection under Renyi differential privacy"


def random_selection_profile(weights: Sequence[float], profiles: Sequence[PrivacyProfile]) -> PrivacyProfile:
    """The privacy profile of releasing one candidate drawn by weight, its index revealed.

    `delta(eps) = max over directions of sum_i w_i * delta_i(eps)`; no independence is needed.

    Args:
        weights: on the simplex, shape (candidates,).
        profiles: of the candidates, all under one neighbouring relation, shape (candidates,).

    Returns:
        An upper bound, exact where the members are; the candidate's own profile where one weight is 1.

    Source: arXiv 2604.20985, random selection.
    """
    mixture = MixtureProfile(weights=tuple(map(float, weights)), profiles=tuple(profiles))
    chosen = [p for w, p in zip(mixture.weights, mixture.profiles, strict=True) if w > 0]
    return chosen[0] if len(chosen) == 1 else mixture


def random_selection_rdp(rdp: Array, weights: Array, orders: Array) -> Array:
    """Upper-bound the Renyi divergence of releasing one candidate drawn by weight.

    Args:
        rdp: nats, shape (candidates, orders).
        weights: on the simplex, shape (candidates,).
        orders: each > 1, shape (orders,).

    Returns:
        nats, shape (orders,), an upper bound.

    Raises:
        InvalidInput: weights off the simplex, an order of at most 1, NaN, or shapes that do not fit.

    Source: arXiv 2604.20985, random selection under RDP; joint convexity.
    """
    rdp, weights, orders = (np.asarray(value, dtype=float) for value in (rdp, weights, orders))
    if rdp.shape != (len(weights), len(orders)):
        raise InvalidInput(f"rdp must have shape {(len(weights), len(orders))}, not {rdp.shape}.")
    require_simplex(tuple(map(float, weights)))
    if not (np.all(orders > 1) and np.all(rdp >= 0)):
        raise InvalidInput("RDP orders must exceed 1, and values must be at least 0 and not NaN.")
    used = weights > 0
    exponents = (orders - 1) * rdp[used]
    mixed = logsumexp(exponents, b=weights[used, None], axis=0) / (orders - 1)
    raised = mixed * (1 + 1e-12) + 16 * ULP / (orders - 1)  # the logarithm rounds before it is divided
    largest = rdp[used].max(axis=0)  # never above the worst member; also right where it is infinite
    bound: Array = np.where(np.isfinite(largest), np.minimum(raised, largest), np.inf)
    return np.maximum(bound, 0.0)


def random_selection_bound(
    weights: Sequence[float], trajectories: Sequence[Trajectory], relation: NeighboringRelation
) -> Bound:
    """The bound "random_selection_pld" of drawing one of several runs; the run's own where one weight is 1.

    Raises:
        IncompatibleCandidates: runs that may not be accounted together, or another relation.
    """
    used = [(float(w), t) for w, t in zip(weights, trajectories, strict=True) if w > 0]
    require_simplex(tuple(w for w, _ in used))
    executed_steps([t for _, t in used], relation)
    singles = [single_run(t, relation) for _, t in used]
    if len(used) == 1:
        return singles[0]
    return Bound(
        name="random_selection_pld",
        profile=random_selection_profile([w for w, _ in used], [bound.profile for bound in singles]),
        assumptions=(*run_assumptions([t for _, t in used], relation), WEIGHTS_BLIND, INDEX_REVEALED),
        source=with_paired_source(SOURCE_PLD, [t for _, t in used]),
    )


def random_selection_rdp_bound(
    weights: Sequence[float],
    trajectories: Sequence[Trajectory],
    relation: NeighboringRelation,
    delta: float,
) -> Bound:
    """The bound "random_selection_rdp" of the same release, on orders that serve `delta`.

    Raises:
        AccountingError: a run without a Renyi bound (Poisson sampling under replace-one; no noise).
    """
    used = [(float(w), t) for w, t in zip(weights, trajectories, strict=True) if w > 0]
    executed_steps([t for _, t in used], relation)
    curves = [rdp_profile(t.segments, relation, delta) for _, t in used]
    poisson = any(not segment.is_full_batch for _, t in used for segment in t.segments)
    orders = order_grid(max(float(curve.orders[-1]) for curve in curves), whole=poisson)
    values = np.array([rdp_values(t.segments, relation, orders) for _, t in used])
    mixed = random_selection_rdp(values, np.array([w for w, _ in used]), orders)
    return Bound(
        name="random_selection_rdp",
        profile=RdpProfile(orders=orders, values=mixed),
        assumptions=(*run_assumptions([t for _, t in used], relation), WEIGHTS_BLIND, INDEX_REVEALED),
        source=with_paired_source(SOURCE_RDP, [t for _, t in used]),
    )


def solve_random_selection(deltas: Array, utilities: Array, delta: float) -> Array | None:
    """The weights of largest expected utility within a budget: an exact linear program.

    Args:
        deltas: each candidate's delta at the budget's epsilon, in [0, 1], one row a direction; shape
            (directions, candidates).
        utilities: higher is better, finite, shape (candidates,).
        delta: the budget's delta, in (0, 1).

    Returns:
        Weights on the simplex, shape (candidates,), at most directions + 1 of them non-zero, with
        `sum_i w_i * deltas[r, i] <= delta` in floating point, rounded up, for every row; None where no
        weights qualify. The budget is saturated, up to rounding, wherever it binds.

    Raises:
        InvalidInput: NaN, shapes that do not fit, or values out of range.
    """
    deltas, utilities = np.atleast_2d(np.asarray(deltas, dtype=float)), np.asarray(utilities, dtype=float)
    require_open_unit("delta", delta)
    if utilities.ndim != 1 or deltas.shape[1:] != utilities.shape or not len(utilities):
        raise InvalidInput("deltas must have one column for each utility, and there must be at least one.")
    if not (np.all(deltas >= 0) and np.all(deltas <= 1) and np.all(np.isfinite(utilities))):
        raise InvalidInput("deltas must lie in [0, 1] and utilities must be finite numbers.")
    rows = np.unique(deltas, axis=0)
    # The exact optimum usually holds in floating point too; where it does not, aim a little lower.
    for margin in (0.0, *(2.0**-k for k in range(50, 9, -4))):
        solution = maximise(utilities, rows, Fraction(delta) * (1 - Fraction(margin)))
        if solution is None:
            return None
        weights = _to_weights(solution, len(utilities))
        if all(_expected_up(weights, row) <= delta for row in deltas):
            return weights
    return None


def solve_random_selection_rdp(
    rdp: Array, utilities: Array, orders: Array, epsilon: float, delta: float
) -> tuple[Array, float] | None:
    """The weights of largest expected utility that the Renyi accountant accepts: a program for each order.

    Args:
        rdp: nats, shape (candidates, orders).
        utilities: higher is better, shape (candidates,).
        orders: each > 1, shape (orders,).
        epsilon: the budget, nats.
        delta: the budget, in (0, 1).

    Returns:
        (weights, order) of the best order, the bound checked by evaluating it at the answer; None where no
        order admits any weights.
    """
    best: tuple[float, Array, float] | None = None
    for k, order in enumerate(map(float, orders)):
        allowed = epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
        usable = np.isfinite(rdp[:, k]) & ((order - 1) * (rdp[:, k] - allowed) < 600)
        if not (allowed >= 0 and usable.any()):
            continue
        row = np.exp((order - 1) * (rdp[usable, k] - allowed * (1 - 1e-11)))[None, :]
        solution = maximise(utilities[usable], row, Fraction(1))
        if solution is None:
            continue
        weights = np.zeros(len(utilities))
        weights[usable] = _to_weights(solution, int(usable.sum()))
        value = float(weights @ utilities)
        mixed = random_selection_rdp(rdp, weights, orders)
        within = RdpProfile(orders=orders, values=mixed).epsilon(delta) <= epsilon
        if within and (best is None or value > best[0]):
            best = value, weights, order
    return None if best is None else (best[1], best[2])


def _to_weights(solution: dict[int, Fraction], count: int) -> Array:
    """Floats on the simplex: the largest weight takes up the rounding of the others."""
    weights = np.zeros(count)
    largest = max(solution, key=lambda j: (solution[j], -j))
    for j, weight in solution.items():
        if j != largest:
            weights[j] = float(weight)
    weights[largest] = 1 - math.fsum(weights)
    return weights


def _expected_up(weights: Array, row: Array) -> float:
    """As `MixtureProfile` computes it: the certified number must not differ from the solved one."""
    return average_up([(float(weights[j]), float(row[j])) for j in np.flatnonzero(weights)])
