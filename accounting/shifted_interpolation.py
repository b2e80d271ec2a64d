"""Shifted interpolation: merges of runs whose update maps are known to be Lipschitz, only the merge released.

The generic bound pays for a record's influence on every step but the last at once, as if each hidden step were
published. Where two nearby parameter vectors stay near each other in every update (`Segment.update_lipschitz`
c; full-batch gradient descent on a smooth convex loss has c <= 1), the influence may instead be left to build
up and be hidden in later steps' noise, and in that of the other runs in the merge. See `shifted_program` for
the payments and how they are chosen.

**Formal guarantees.** Full batch. Let each noiseless update map of run i at step t be c_{i,t}-Lipschitz for
every data set allowed. For any payments a_{i,t} >= 0 (t < T_i), with `z_{i,0} = 0` and
`z_{i,t} = c_{i,t} z_{i,t-1} + s_{i,t} - a_{i,t} >= 0`, releasing `sum_i lambda_i theta_i + N(0, tau^2 I)` is
mu-GDP with

    mu^2 = sum_i sum_{t < T_i} (a_{i,t} / nu_{i,t})^2
           + (sum_i lambda_i (c_{i,T} z_{i,T-1} + s_{i,T}))^2 / (tau^2 + sum_i lambda_i^2 nu_{i,T}^2).

*Proof.* Run the process on D, and beside it X~ on D' with the same noise, each step shifted by at most its
payment against the difference between X~'s next noiseless point and that on D. By induction the difference is
at most z. In the last steps, shift run i by its share `lambda_i nu_i^2 / V` of the merged difference, and the
fresh noise by its own, so that the merged points coincide. The shifts are predictable, so adaptive composition
of Gaussian mechanisms (Dong, Roth and Su 2022) bounds the two laws. z must not be negative: updates need not
preserve displacements that cancel between runs.

| case | what happens |
|---|---|
| runs of different length | aligned at their ends; before its start a run rests at z = 0 |
| c infinite (unknown) in a step | z = 0 before it; infinite throughout: exactly the generic bound |
| c = 0 in a step | it forgets all that was before it in the same run |
| runs that share steps | the shared steps are paid once, z = 0 where they part; then the theorem on what is left |
| a run all of whose steps another run shares | once the shared steps are paid, it adds nothing |
| one run | at most its own mu; less where c < 1, or where later steps are noisier |
| a step without noise | may be left unpaid; mu is infinite only where something must be paid in it |

Source: Bok, Su and Altschuler 2024, arXiv 2403.00278, shifted interpolation, for one run; extended to merges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.bounds import (
    INDEPENDENT_RUNS,
    LIPSCHITZ_UPDATES,
    ONE_MERGE_ONLY,
    SHARED_AS_RECORDED,
    WEIGHTS_BLIND,
    Bound,
    run_assumptions,
)
from accounting.budget import NeighboringRelation, require_non_negative
from accounting.errors import InvalidInput
from accounting.joint_release import joint_release
from accounting.linear_combination import (
    generic,
    require_covered,
    step_noise,
    step_sensitivity,
    used_runs,
)
from accounting.profile import GaussianProfile
from accounting.rounding import ULP, root_up
from accounting.shifted_blocks import Stretch, cost, total_up
from accounting.shifted_program import Path, carry, payments_at, prepare, price
from accounting.shifted_tree import own_and_shared
from accounting.trajectory import Segment, Trajectory

Array = NDArray[np.float64]

SOURCE = (
    "Shifted interpolation (Bok, Su and Altschuler 2024, arXiv 2403.00278), extended to merges of runs: the "
    "record's influence is paid where it costs least, the rest is hidden by the noise of the merged last steps"
)
_SMALLEST = 1e-30  # of a step's sensitivity; the largest is its inverse
_LISTED_REASONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Independent paths with what the merge's bound needs, in units in which the largest s is about 1.

    `owner` names, for each run given, the path it stands on: runs with the same steps are one path.
    """

    owner: tuple[int, ...]
    paths: tuple[Path, ...]
    settled: float  # the cost of all that must end with z = 0, shared prefixes included, rounded up
    scale: float  # a power of 2


def shifted(
    trajectories: Sequence[Trajectory],
    weights: Sequence[float],
    relation: NeighboringRelation,
    fresh_noise: float = 0.0,
) -> Bound:
    """Bound a merge of full-batch runs by shifted interpolation; never above `generic` or the joint release.

    Runs of weight 0 are dropped first. Where no step's Lipschitz constant is known this is `generic`.

    Args:
        trajectories: the runs, shape (runs,); they may share prefixes.
        weights: lambda, on the simplex, fixed in advance, shape (runs,).
        relation: the recorded neighbouring relation.
        fresh_noise: tau, the standard deviation per coordinate of Gaussian noise added to the merged
            parameters; 0 for none.

    Returns:
        A Gaussian bound, mu rounded up; infinite mu where noise is missing that could not be done without.

    Raises:
        IncompatibleCandidates: the theorem does not cover these runs, with the reason: Poisson sampling, an
            adapted schedule, per-layer clipping, an optimizer other than plain SGD, or another relation.
        InvalidInput: weights off the simplex, or steps too small or large for floating point.
    """
    used = used_runs(trajectories, weights, relation)
    require_non_negative("fresh_noise", fresh_noise)
    runs = [trajectory for _, trajectory in used]
    for run in runs:
        require_covered([run])
    require_representable(runs, relation, fresh_noise)
    if share_steps(runs):
        mu = joint_release(runs, relation).mu
    else:
        mu = generic(runs, [weight for weight, _ in used], relation, fresh_noise).mu
    best = math.inf if mu is None else mu
    if share_steps(runs) or _some_known(runs):
        merge = arrange(runs, relation)
        shares = np.zeros(len(merge.paths))
        np.add.at(shares, list(merge.owner), [weight for weight, _ in used])
        noise = fresh_noise * merge.scale
        best = min(best, _root(square_of(merge, shares, noise, best_payments(merge, shares, noise))))
    return Bound(
        name="shifted",
        profile=GaussianProfile(mu=best),
        assumptions=assumptions_of(runs, relation, fresh_noise),
        source=SOURCE,
        mu=best,
    )


def arrange(runs: Sequence[Trajectory], relation: NeighboringRelation) -> Merge:
    """Cut runs into paths of their own and the prefixes that they share, each shared one counted once."""
    largest = max(step_sensitivity(segment, relation) for run in runs for segment in run.segments)
    scale = 2.0 ** -math.frexp(largest)[1]

    def stretch(segment: Segment, steps: int) -> Stretch:
        noise = step_noise(segment) * scale
        return Stretch(
            steps=steps,
            moved=step_sensitivity(segment, relation) * scale,
            noise=noise if noise >= _SMALLEST**2 else 0.0,
            lipschitz=segment.update_lipschitz,
        )

    owner, own, shared = own_and_shared(runs)
    paths = tuple(prepare([stretch(*part) for part in parts]) for parts in own)
    prefixes = [prepare([stretch(*part) for part in parts], ends_at_zero=True) for parts in shared]
    settled = total_up(path.settled_cost for path in (*paths, *prefixes))
    return Merge(owner=owner, paths=paths, settled=settled, scale=scale)


def best_payments(merge: Merge, weights: Array, fresh_noise: float) -> list[list[float]]:
    """The payments in the open part of each path that make the bound least, up to rounding.

    Args:
        merge: its paths.
        weights: > 0, shape (paths,).
        fresh_noise: tau in the merge's units.

    Returns:
        For each path, the payment of the last step of each block.
    """
    lasts = [(w, path.last) for w, path in zip(weights.tolist(), merge.paths, strict=True)]
    moved = math.fsum(w * last.moved for w, last in lasts if last)
    variance = math.fsum([fresh_noise**2, *((w * last.noise) ** 2 for w, last in lasts if last)])
    chunks = [path.open for path in merge.paths]
    if not variance > 0:  # nothing hides what is left over, so there is nothing to weigh
        return [[0.0] * len(chunk.blocks) for chunk in chunks]
    root = price(chunks, weights, moved, variance)
    return [payments_at(chunk, w * root) for chunk, w in zip(chunks, weights.tolist(), strict=True)]


def square_of(merge: Merge, weights: Array, fresh_noise: float, payments: Sequence[Sequence[float]]) -> float:
    """mu^2 by the theorem's formula at given payments, rounded up, whoever chose them.

    Args:
        merge: its paths.
        weights: > 0, shape (paths,).
        fresh_noise: tau in the merge's units.
        payments: for each path, of the last step of each open block, >= 0.

    Raises:
        InvalidInput: payments of the wrong shape, negative, NaN, or above what is owed (negative z).
    """
    left, squares = left_over(merge, payments)
    lasts = [(w, path.last) for w, path in zip(weights.tolist(), merge.paths, strict=True)]
    total = total_up(w * r for (w, _), r in zip(lasts, left, strict=True)) * (1 + 4 * ULP)
    variance = math.fsum([fresh_noise**2, *((w * last.noise) ** 2 for w, last in lasts if last)])
    return total_up([merge.settled, squares, cost(total, math.sqrt(variance))]) * (1 + 16 * ULP)


def left_over(merge: Merge, payments: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """What each path brings into the merge, `R = c z + s`, and the sum of the payments' costs, rounded up."""
    left, squares = [], []
    for path, given in zip(merge.paths, payments, strict=True):
        z, square = carry(path.open, given)
        squares.append(square)
        if path.last is None:
            left.append(0.0)
        else:
            carried = path.last.lipschitz * z if z > 0 else 0.0
            left.append((carried + path.last.moved) * (1 + 4 * ULP))
    return left, total_up(squares)


def share_steps(runs: Sequence[Trajectory]) -> bool:
    """Whether any executed step belongs to two of the runs."""
    ids = [segment.id for run in runs for segment in run.segments]
    return len(set(ids)) < len(ids)


def assumptions_of(
    runs: Sequence[Trajectory], relation: NeighboringRelation, *fresh_noises: float
) -> tuple[str, ...]:
    """What must be true for the bound to hold, as full sentences, the recorded reasons for c included."""
    sentences = [*run_assumptions(runs, relation), WEIGHTS_BLIND]
    sentences.append(SHARED_AS_RECORDED if share_steps(runs) else INDEPENDENT_RUNS)
    sentences.append(ONE_MERGE_ONLY)
    if _some_known(runs):
        sentences.append(LIPSCHITZ_UPDATES)
        sentences += _reasons(runs)
    if any(noise > 0 for noise in fresh_noises):
        listed = ", ".join(f"{noise:.6g}" for noise in fresh_noises)
        sentences.append(
            f"Fresh Gaussian noise of standard deviation {listed} in each coordinate was added to the merged "
            "parameters before anybody saw them, drawn once and kept secret."
        )
    return tuple(sentences)


def require_representable(
    runs: Iterable[Trajectory], relation: NeighboringRelation, *fresh_noises: float
) -> None:
    """Refuse what floating point could round to nothing or to infinity when squared."""
    segments = [segment for run in runs for segment in run.segments]
    moved = [step_sensitivity(segment, relation) for segment in segments]
    noises = [*fresh_noises, *(step_noise(segment) for segment in segments)]
    if not (min(moved) >= _SMALLEST and max(moved) <= 1 / _SMALLEST and max(noises) <= 1 / _SMALLEST):
        raise InvalidInput(
            f"Steps may move the parameters by {_SMALLEST:g} to {1 / _SMALLEST:g}, and have noise of at most "
            f"{1 / _SMALLEST:g} per coordinate; these do not, so check learning_rate, max_grad_norm, "
            "expected_batch_size and noise_multiplier."
        )


def _reasons(runs: Iterable[Trajectory]) -> list[str]:
    segments = [s for run in runs for s in run.segments if math.isfinite(s.update_lipschitz)]
    reasons = sorted({segment.update_lipschitz_reason for segment in segments})
    listed = [f"The recorded reason for that factor: {reason}." for reason in reasons[:_LISTED_REASONS]]
    if len(reasons) > _LISTED_REASONS:
        listed.append(f"{len(reasons) - _LISTED_REASONS} more reasons are in the runs' trajectories.")
    return listed


def _some_known(runs: Iterable[Trajectory]) -> bool:
    return any(math.isfinite(segment.update_lipschitz) for run in runs for segment in run.segments)


def _root(square: float) -> float:
    """mu from mu^2; the few units in the last place cover the rounding of s and nu themselves."""
    if math.isnan(square):
        return math.inf
    return root_up(square) * (1 + 16 * ULP)
