"""The generic bound of one set of runs at very many weights at once: for searches, plots and frontiers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accounting.budget import NeighboringRelation, require_non_negative
from accounting.errors import InvalidInput
from accounting.linear_combination import generic, step_noise, step_sensitivity
from accounting.rounding import ULP
from accounting.trajectory import Trajectory

Array = NDArray[np.float64]

_MOST_RUNS = 62  # a set of runs is told by the bits of a 64-bit number


def generic_mu_many(
    trajectories: Sequence[Trajectory],
    weights: Array,
    relation: NeighboringRelation,
    fresh_noise: float = 0.0,
) -> Array:
    """`linear_combination.generic(...).mu` for each row of weights, in one pass of numpy.

    Each mu is an upper bound, within a relative 1e-12 of what `generic` gives for that row. A set of runs is
    checked once, however many rows weigh exactly these runs.

    Args:
        trajectories: the runs, shape (runs,), at most 62.
        weights: each row on the simplex, shape (vectors, runs). Runs of weight 0 are dropped from that row.
        relation: the recorded neighbouring relation.
        fresh_noise: tau, the standard deviation per coordinate of Gaussian noise added to the merged
            parameters, the same for all rows; 0 for none.

    Returns:
        mu, rounded up, shape (vectors,); infinite where some step of a used run has no noise.

    Raises:
        IncompatibleCandidates: as `generic`, for any row's set of runs.
        InvalidInput: weights off the simplex, NaN, a shape that does not fit, or more than 62 runs.

    Source: as `generic`.
    """
    table = np.asarray(weights, dtype=float)
    runs = len(trajectories)
    if table.ndim != 2 or table.shape[1] != runs or not 0 < runs <= _MOST_RUNS:
        raise InvalidInput(f"weights must have shape (vectors, {runs}), with 1 to {_MOST_RUNS} runs.")
    _require_simplex(table)
    used = table > 0
    alone = _check_sets(trajectories, used, relation, require_non_negative("fresh_noise", fresh_noise))

    lasts = [trajectory.segments[-1] for trajectory in trajectories]
    # In units of the largest movement, so that squares neither underflow nor overflow for no reason.
    moves = np.array([step_sensitivity(last, relation) for last in lasts])
    scale = float(moves.max())
    moves, noises = moves / scale, np.array([step_noise(last) for last in lasts]) / scale
    earlier = np.array([_square_of_earlier(trajectory, relation) for trajectory in trajectories])

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        moved = table @ moves
        variance = (fresh_noise / scale) ** 2 + table**2 @ noises**2
        last_square = np.where(variance > 0, moved * moved / variance, np.inf)
        silent = ~np.isfinite(earlier)
        squares = last_square + used @ np.where(silent, 0.0, earlier)
        squares[np.any(used & silent, axis=1)] = np.inf
        mus: Array = np.sqrt(squares) * (1 + (24 + 4 * runs) * ULP)
    if fresh_noise == 0:  # one run alone keeps its own mu: its weight cancels, and must not round
        single = used.sum(axis=1) == 1
        mus[single] = alone[used[single].argmax(axis=1)]
    return mus


def _require_simplex(table: Array) -> None:
    """As `profile.require_simplex`, row by row."""
    if not np.all((table >= 0) & (table <= 2)):
        raise InvalidInput("Each weight must be a finite number of at least 0, and each row must sum to 1.")
    totals = table.sum(axis=1)
    allowed = 8 * ULP * max(table.shape[1], 2)  # twice as wide: these sums are rounded themselves
    if not np.all(np.abs(totals - 1) <= allowed):
        worst = totals[int(np.abs(totals - 1).argmax())]
        raise InvalidInput(f"Each row of weights must sum to 1, but one sums to {worst!r}.")


def _check_sets(
    trajectories: Sequence[Trajectory], used: NDArray[np.bool_], relation: NeighboringRelation, noise: float
) -> Array:
    """Let `generic` itself accept or refuse every set of runs that occurs; the mus of runs that stand alone."""
    alone = np.full(len(trajectories), np.nan)
    bits = used @ (1 << np.arange(len(trajectories), dtype=np.int64))
    for pattern in np.unique(bits).tolist():
        members = [i for i in range(len(trajectories)) if pattern >> i & 1]
        bound = generic(
            [trajectories[i] for i in members], [1 / len(members)] * len(members), relation, noise
        )
        if len(members) == 1 and bound.mu is not None:
            alone[members[0]] = bound.mu
    return alone


def _square_of_earlier(trajectory: Trajectory, relation: NeighboringRelation) -> float:
    """`sum_{t<T} (s_t / nu_t)^2`; infinite where one of these steps has no noise."""
    *before, last = trajectory.segments
    counts = [*((segment, segment.steps) for segment in before), (last, last.steps - 1)]
    total = 0.0
    for segment, count in counts:
        if count:
            noise = segment.noise_multiplier
            ratio = relation.full_batch_factor / noise if noise else np.inf
            total += count * ratio * ratio
    return float(total)
