"""Linear combination: release sum_i lambda_i theta_i, with lambda on the simplex and fixed beforehand.

For one run, learning rate, clipping norm and normaliser cancel in the privacy accounting. In a merged step
they do not: a record moves run i's last step by `s_i = k * eta_i * C_i / B_i`, and its noise has standard
deviation `nu_i = eta_i * noise_multiplier_i * C_i / B_i` in each coordinate of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accounting.bounds import (
    INDEPENDENT_RUNS,
    LAST_MERGED_ONLY,
    STEPWISE_ASSUMPTION,
    WEIGHTS_BLIND,
    Bound,
    run_assumptions,
)
from accounting.budget import NeighboringRelation, require_non_negative
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.joint_release import executed_steps, single_run
from accounting.profile import GaussianProfile, require_simplex
from accounting.rounding import ULP, root_up, sum_up
from accounting.trajectory import Segment, Trajectory

Array = NDArray[np.float64]

_SMALLEST_STEP = 1e-250
_SMALLEST_FLOAT = 5e-324
_LARGEST_ROOT = 1e150  # its square is still a float

SOURCE_GENERIC = (
    "Adaptive composition of Gaussian mechanisms (Dong, Roth and Su 2022): all steps but each run's last "
    "released jointly, the last ones merged at equal hidden states"
)
SOURCE_STEPWISE = "arXiv 2604.20985, linear combination, step by step; not valid for ordinary DP-SGD"


def step_sensitivity(segment: Segment, relation: NeighboringRelation) -> float:
    """How far one neighbouring record moves the parameters in one full-batch step: `k * eta * C / B`."""
    scale = segment.learning_rate * segment.max_grad_norm / segment.expected_batch_size
    return relation.full_batch_factor * scale


def step_noise(segment: Segment) -> float:
    """Standard deviation of one step's noise per coordinate of the parameters: `eta * sigma * C / B`."""
    scale = segment.learning_rate * segment.max_grad_norm / segment.expected_batch_size
    return segment.noise_multiplier * scale


def accumulated_noise_variance(trajectory: Trajectory) -> float:
    """The variance per coordinate that all steps' noise adds to the released parameters: `sum_t nu_t^2`.

    Weight decay, momentum and the loss's own dynamics, which shrink or grow past noise, are ignored: the
    number compares runs that differ in nothing but their noise, for which they act alike.
    """
    noises = ((segment.steps, step_noise(segment)) for segment in trajectory.segments)
    return math.fsum(steps * (noise * noise) for steps, noise in noises)


def inverse_variance_weights(variances: Sequence[float] | Array) -> Array:
    """The lambda on the simplex that minimises `sum lambda_i^2 v_i`: proportional to `1 / v_i`.

    Args:
        variances: at least 0, finite, shape (runs,). Where some are 0, those share the weight equally.

    Returns:
        Shape (runs,), on the simplex within rounding.

    Raises:
        InvalidInput: a negative, infinite or NaN variance, or none at all.
    """
    values = np.asarray(variances, dtype=float)
    if values.ndim != 1 or not len(values) or not (np.all(values >= 0) and np.all(np.isfinite(values))):
        raise InvalidInput("Variances must be finite numbers of at least 0, one for each run.")
    if np.any(values == 0):
        shares: Array = (values == 0).astype(float)
    else:
        shares = values.min() / values
    weights: Array = shares / shares.sum()
    return weights


def generic(
    trajectories: Sequence[Trajectory],
    weights: Sequence[float],
    relation: NeighboringRelation,
    fresh_noise: float = 0.0,
) -> Bound:
    """Bound a merge of independent full-batch runs for any loss: the last steps merged, all others joint.

    `mu^2 = sum_i sum_{t<T_i} (s_i,t / nu_i,t)^2
    + (sum_i lambda_i s_i,T)^2 / (tau^2 + sum_i lambda_i^2 nu_i,T^2)`. Runs of weight 0 are dropped first.
    For a single run it is that run's own mu.

    Args:
        trajectories: the runs, shape (runs,).
        weights: lambda, on the simplex, shape (runs,).
        relation: the recorded neighbouring relation.
        fresh_noise: tau, the standard deviation per coordinate of Gaussian noise added to the merged
            parameters; 0 for none.

    Returns:
        A Gaussian bound, mu rounded up; infinite mu where some step of a used run has no noise.

    Raises:
        IncompatibleCandidates: the theorem does not cover these runs, with the reason: shared steps,
            Poisson sampling, an adapted schedule, per-layer clipping, or an optimizer other than plain SGD.
    """
    used = used_runs(trajectories, weights, relation)
    require_non_negative("fresh_noise", fresh_noise)
    require_covered([t for _, t in used])
    squares = [_square_of_last(used, relation, fresh_noise)]
    for _, trajectory in used:
        steps = [*((s, s.steps) for s in trajectory.segments[:-1])]
        steps.append((trajectory.segments[-1], trajectory.segments[-1].steps - 1))
        squares += [
            count * _square(relation.full_batch_factor, s.noise_multiplier) for s, count in steps if count
        ]
    return _gaussian_bound("generic", used, relation, root_up(sum_up(squares)), SOURCE_GENERIC)


def stepwise(
    trajectories: Sequence[Trajectory], weights: Sequence[float], relation: NeighboringRelation
) -> Bound:
    """The published step-by-step formula: NOT a guarantee for DP-SGD. For studying the paper only.

    `mu^2 = sum_t (sum_i lambda_i s_i,t)^2 / (sum_i lambda_i^2 nu_i,t^2)`. It is a bound only where the
    gradients do not depend on the hidden models (mean estimation; one step from a public start).

    Args:
        trajectories: full-batch runs with equally many steps, shape (runs,).
        weights: lambda, on the simplex, shape (runs,).
        relation: the recorded neighbouring relation.

    Returns:
        A bound marked `sound_for_dp_sgd=False`, which no solver certifies.

    Raises:
        IncompatibleCandidates: as `generic`, or runs of different length.
    """
    used = used_runs(trajectories, weights, relation)
    require_covered([t for _, t in used])
    if len({trajectory.steps for _, trajectory in used}) > 1:
        raise IncompatibleCandidates("The step-by-step formula needs runs of equally many steps.")
    squares = []
    for count, steps in _aligned([trajectory for _, trajectory in used]):
        moves = [w * step_sensitivity(s, relation) for (w, _), s in zip(used, steps, strict=True)]
        noises = [w * step_noise(s) for (w, _), s in zip(used, steps, strict=True)]
        squares.append(count * _merged_square(moves, noises))
    return _gaussian_bound("stepwise", used, relation, root_up(sum_up(squares)), SOURCE_STEPWISE)


def used_runs(
    trajectories: Sequence[Trajectory], weights: Sequence[float], relation: NeighboringRelation
) -> list[tuple[float, Trajectory]]:
    if len(trajectories) != len(weights):
        raise InvalidInput(f"{len(weights)} weights were given for {len(trajectories)} runs.")
    require_simplex(tuple(map(float, weights)))
    used = [(float(w), t) for w, t in zip(weights, trajectories, strict=True) if w > 0]
    executed_steps([t for _, t in used], relation)
    return used


def require_covered(trajectories: Sequence[Trajectory]) -> None:
    """Refuse what the theorems of this module do not cover, with the reason."""
    seen: set[str] = set()
    for trajectory in trajectories:
        for segment in trajectory.segments:
            reason = None
            if segment.id in seen:
                reason = "shares steps with another run"
            elif not segment.is_full_batch:
                reason = "is sampled by Poisson coins"
            elif segment.schedule != "fixed":
                reason = "has a schedule adapted to the data"
            elif segment.clipping != "flat":
                reason = "is clipped layer by layer"
            elif segment.optimizer != "sgd" or segment.momentum != 0:
                # An anchor alone keeps "sgd" and is covered: given the steps released before, its pull on the last
                # step is a public number added after the noise, as weight decay is. A step of DP-SAM is not: it may
                # use each record twice, and never is `sgd`.
                reason = "was not trained by plain SGD without momentum"
            if reason:
                raise IncompatibleCandidates(
                    f"The bound for merged last steps does not cover these runs: segment {segment.id} "
                    f"{reason}; use the joint release instead."
                )
        seen |= {segment.id for segment in trajectory.segments}


def _square_of_last(
    used: list[tuple[float, Trajectory]], relation: NeighboringRelation, fresh_noise: float
) -> float:
    if len(used) == 1 and fresh_noise == 0:  # the weight cancels; do not let it round
        return _square(relation.full_batch_factor, used[0][1].segments[-1].noise_multiplier)
    lasts = [(w, t.segments[-1]) for w, t in used]
    moves = [w * step_sensitivity(s, relation) for w, s in lasts]
    return _merged_square(moves, [fresh_noise, *(w * step_noise(s) for w, s in lasts)])


def _square(factor: int, noise_multiplier: float) -> float:
    ratio = factor / noise_multiplier if noise_multiplier else math.inf
    return ratio * ratio * (1 + 4 * ULP)


def _merged_square(moves: Sequence[float], noises: Sequence[float]) -> float:
    """`(sum moves)^2 / sum noises^2`, rounded up, at any scale that float64 can tell apart.

    Raises:
        IncompatibleCandidates: the steps are so large or so small that their ratio would be lost.
    """
    largest = max(moves)
    if not _SMALLEST_STEP < largest < 1 / _SMALLEST_STEP or not all(map(math.isfinite, noises)):
        raise IncompatibleCandidates(
            f"The largest merged step moves by {largest:g}, which is beyond exact arithmetic; check "
            "learning_rate, max_grad_norm and expected_batch_size, or use the joint release."
        )
    deviation = math.hypot(*(noise / largest for noise in noises))
    if deviation == 0:
        return math.inf
    ratio = math.fsum(move / largest for move in moves) / deviation
    return max(ratio * ratio * (1 + 16 * ULP), _SMALLEST_FLOAT) if ratio < _LARGEST_ROOT else math.inf


def _aligned(trajectories: Sequence[Trajectory]) -> list[tuple[int, list[Segment]]]:
    """Cut runs of equal length into stretches within which no run changes its segment."""
    ends = sorted({end for trajectory in trajectories for end in _ends(trajectory)})
    stretches = []
    start = 0
    for end in ends:
        stretches.append((end - start, [_segment_at(trajectory, end) for trajectory in trajectories]))
        start = end
    return stretches


def _ends(trajectory: Trajectory) -> list[int]:
    return [int(end) for end in np.cumsum([segment.steps for segment in trajectory.segments])]


def _segment_at(trajectory: Trajectory, step: int) -> Segment:
    """The segment that holds step number `step`, counted from 1."""
    return next(s for s, end in zip(trajectory.segments, _ends(trajectory), strict=True) if step <= end)


def _gaussian_bound(
    name: str,
    used: list[tuple[float, Trajectory]],
    relation: NeighboringRelation,
    mu: float,
    source: str,
) -> Bound:
    trajectories = [t for _, t in used]
    if len(used) == 1:  # one run alone: no theorem on merges is needed
        own = single_run(trajectories[0], relation)
        if own.mu is not None and own.mu <= mu:
            mu = own.mu
    sound = name != "stepwise"
    extra = (WEIGHTS_BLIND, INDEPENDENT_RUNS, LAST_MERGED_ONLY)
    return Bound(
        name=name,
        profile=GaussianProfile(mu=mu),
        assumptions=(
            *run_assumptions(trajectories, relation),
            *extra,
            *(() if sound else (STEPWISE_ASSUMPTION,)),
        ),
        source=source,
        mu=mu,
        sound_for_dp_sgd=sound,
    )
