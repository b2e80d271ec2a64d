"""Several merges of the same runs, fixed together before any is released, by shifted interpolation.

Row k of a matrix L holds one merge's weights, tau_k its fresh noise. As for one merge, run i keeps
`R_i = c_T z_{T-1} + s_T` for its last step; there the merged differences `w = L r`, `||r_i|| <= R_i`, are hidden
by Gaussian noise of covariance `S = L diag(nu^2) L' + diag(tau^2)` across the merges, so that

    mu^2 = sum of the payments' costs + tr(w' S^-1 w)
         <= sum of the payments' costs + sum_ij |M_ij| R_i R_j,   M = L' S^-1 L.

If S has no inverse, w need not lie in its range, and then no finite mu holds (S's pseudo-inverse would claim
one). Nearly singular merges, which reveal the runs' last parameters one by one, are bounded by releasing all of
them: `M = diag(1 / nu^2)`, which is never below L' S^-1 L in the order of positive semidefinite matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, require_non_negative
from accounting.errors import InvalidInput
from accounting.joint_release import executed_steps, joint_release
from accounting.linear_combination import require_covered
from accounting.profile import GaussianProfile, require_simplex
from accounting.rounding import ULP, root_up
from accounting.shifted_blocks import total_up
from accounting.shifted_interpolation import (
    SOURCE,
    Merge,
    arrange,
    assumptions_of,
    left_over,
    require_representable,
    shifted,
)
from accounting.shifted_program import payments_at, price
from accounting.trajectory import Trajectory

Array = NDArray[np.float64]

_LEAST_RATIO = 1e-6  # of singular values, below which merges count as nearly singular
_SWEEPS = 500  # over the runs, each set to its best price in turn
_SETTLED = 1e-13  # relative change of the prices in a sweep that ends the search


def shifted_several(
    trajectories: Sequence[Trajectory],
    merges: Sequence[Sequence[float]],
    relation: NeighboringRelation,
    fresh_noises: Sequence[float] | float = 0.0,
) -> Bound:
    """Bound the release of several merges of the same full-batch runs, all fixed before any is released.

    Args:
        trajectories: the runs, shape (runs,); they may share prefixes.
        merges: each row on the simplex, shape (merges, runs). Runs without weight in any are dropped.
        relation: the recorded neighbouring relation.
        fresh_noises: standard deviation per coordinate of the Gaussian noise added to each merge, shape
            (merges,), or one number for all; each merge's noise is its own.

    Returns:
        A Gaussian bound, mu rounded up, never above the joint release. For one merge, `shifted`.

    Raises:
        IncompatibleCandidates, InvalidInput: as `shifted`.
    """
    rows = [tuple(map(float, row)) for row in merges]
    if not rows or any(len(row) != len(trajectories) for row in rows):
        raise InvalidInput("At least one merge is needed, with one weight for each run.")
    for row in rows:
        require_simplex(row)
    given = [fresh_noises] * len(rows) if isinstance(fresh_noises, int | float) else list(fresh_noises)
    noises = [require_non_negative("fresh_noise", noise) for noise in given]
    if len(noises) != len(rows):
        raise InvalidInput(f"{len(noises)} fresh noises were given for {len(rows)} merges.")
    different = list({(row, tau): None for row, tau in zip(rows, noises, strict=True) if tau == 0})
    different += [(row, tau) for row, tau in zip(rows, noises, strict=True) if tau > 0]
    if len(different) == 1:
        return shifted(trajectories, different[0][0], relation, different[0][1])
    columns = [i for i in range(len(trajectories)) if any(row[i] > 0 for row in rows)]
    runs = [trajectories[i] for i in columns]
    executed_steps(runs, relation)
    for run in runs:
        require_covered([run])
    require_representable(runs, relation, *noises)

    merge = arrange(runs, relation)
    weights = np.zeros((len(different), len(merge.paths)))
    for place, i in zip(merge.owner, columns, strict=True):
        weights[:, place] += [row[i] for row, _ in different]
    fresh = np.array([tau for _, tau in different]) * merge.scale
    square = min((_square(merge, hiding) for hiding in _hidings(merge, weights, fresh)), default=math.inf)
    joint = joint_release(runs, relation).mu
    mu = min(root_up(square) * (1 + 16 * ULP), math.inf if joint is None else joint)
    together = f"All {len(rows)} merges were fixed together before any of them was released."
    return Bound(
        name="shifted",
        profile=GaussianProfile(mu=mu),
        assumptions=(*assumptions_of(runs, relation, *sorted(set(noises))), together),
        source=SOURCE,
        mu=mu,
    )


def _hidings(merge: Merge, weights: Array, fresh: Array) -> list[Array]:
    """Matrices K such that the last steps cost at most `sum_ij K_ij R_i R_j`; shape (paths, paths) each."""
    noise = np.array([path.last.noise if path.last else 0.0 for path in merge.paths])
    moves = np.array([path.last is not None for path in merge.paths])
    weights = np.where(moves, weights, 0.0)  # what is settled moves nothing, and hides nothing
    found = []
    if np.all(noise[moves] > 0):
        with np.errstate(over="ignore"):
            found.append(np.diag([(1 + 8 * ULP) / nu / nu if nu > 0 else 0.0 for nu in noise]))
    spread = np.hstack((weights * noise, np.diag(fresh)))  # S = spread spread'
    norms = np.linalg.norm(spread, axis=1)
    if not np.all(norms > 0):
        return found
    basis, values, _ = np.linalg.svd(spread / norms[:, None], full_matrices=False)
    if not values[-1] > _LEAST_RATIO * values[0]:
        return found
    scaled = weights / norms[:, None]
    roots = (basis / values).T @ scaled  # M = roots' roots
    error = 64 * ULP * sum(spread.shape) * values[0] / values[-1]
    reach = np.linalg.norm(scaled, axis=0) / values[-1]
    found.append(np.abs(roots.T @ roots) + 3 * error * np.outer(reach, reach))
    return found


def _square(merge: Merge, hiding: Array) -> float:
    """mu^2 at payments found by setting each run's price to its best, in turn, until none moves.

    The cost at given payments is what is returned, so it holds however good they are.
    """
    count = len(merge.paths)
    left = np.array([_left_at(merge, i, 0.0) for i in range(count)])
    prices = np.zeros(count)
    for _ in range(_SWEEPS):
        before = prices.copy()
        for i, path in enumerate(merge.paths):
            own = float(hiding[i, i])
            if path.last is None or not own > 0:
                continue
            others = float(hiding[i] @ left) - own * left[i]
            moved = path.last.moved + others / own
            prices[i] = price([path.open], np.ones(1), moved, 1 / own)
            left[i] = _left_at(merge, i, prices[i])
        if np.all(np.abs(prices - before) <= _SETTLED * prices):
            break
    payments = [payments_at(path.open, p) for path, p in zip(merge.paths, prices.tolist(), strict=True)]
    exact, squares = left_over(merge, payments)
    cross = [hiding[i, j] * exact[i] * exact[j] for i in range(count) for j in range(count)]
    return total_up([merge.settled, squares, *map(float, cross)]) * (1 + 32 * ULP)


def _left_at(merge: Merge, index: int, theta: float) -> float:
    """R of one path at a price, from its pools; up to rounding."""
    path = merge.paths[index]
    chunk = path.open
    if path.last is None:
        return 0.0
    pools = chunk.pool_slope > theta
    return path.last.moved + float(np.sum(chunk.debt[pools] - theta * chunk.x[pools]))
