"""mu of full-batch releases for checking certificates, derived anew: exact fractions, and the program solved again.

Recorded settings are float64 numbers, so `s = k eta C / B` and `nu = eta sigma C / B` are fractions, and so is
mu^2 of the joint release and of the generic bound: here they are computed without any rounding.

Shifted interpolation asks for payments of least cost (theory in `shifted_interpolation`). Here they are found as a
bounded least-squares problem in the distances z: with a price on what a run leaves over, the runs part, each is
smoothed like a random walk that must not fall below 0, and a root search joins them. No minorant, pool or block of
the accountant's own solution is used. Whatever payments come out are made feasible and put into the theorem's
formula, so the result is a bound wherever they come from. A stated mu close to it is therefore proven (up to that
closeness); one that is not below what linear updates with the recorded constants really leak cannot be too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from scipy.optimize import brentq

from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError, NotDerivedAgain
from accounting.independent_steps import released_sums
from accounting.trajectory import Segment, Trajectory

SHIFTED_RELATIVE = 1e-3  # of mu: the accountant's payments may cost 1e-4 more where c > 1
_MOST_STEPS = 20_000  # of one run, solved one by one
_ROUNDS = 50
_LARGEST_GROWTH = 12.0  # e-folds
_LARGEST = 1e280


def joint_square(steps: Mapping[str, Segment], relation: NeighboringRelation) -> Fraction:
    """mu^2 of releasing every full-batch step: the sum of `(k / sigma)^2`, twice for paired steps, exactly.

    Raises:
        AccountingError: a step without noise.
    """
    return sum((segment.steps * _step_square(segment, relation) for segment in steps.values()), Fraction(0))


def generic_square(
    weighted: Sequence[tuple[float, Trajectory]], relation: NeighboringRelation, fresh_noise: float
) -> Fraction:
    """mu^2 of a merge whose last steps are merged and whose other steps are released, exactly.

    Args:
        weighted: (lambda, run), lambda > 0; the runs share no step.
        relation: neighbouring data sets, for k.
        fresh_noise: tau.

    Raises:
        AccountingError: runs that share steps or are not full batch, or a step without noise.
    """
    require_apart([run for _, run in weighted])
    total = Fraction(0)
    moved, variance = Fraction(0), Fraction(fresh_noise) ** 2
    for weight, run in weighted:
        last = run.segments[-1]
        total += joint_square({segment.id: segment for segment in run.segments}, relation)
        total -= _step_square(last, relation)
        scale = (
            Fraction(last.learning_rate) * Fraction(last.max_grad_norm) / Fraction(last.expected_batch_size)
        )
        moved += Fraction(weight) * relation.full_batch_factor * scale
        variance += (Fraction(weight) * Fraction(last.noise_multiplier) * scale) ** 2
    return total + moved**2 / variance


@dataclass(frozen=True, slots=True)
class _Run:
    """One run step by step, in the units of the parameters; each list of shape (steps,)."""

    weight: float
    moved: list[float]  # s
    noise: list[float]  # nu
    lipschitz: list[float]  # c; that of the first step does not count


def shifted_mu(
    weighted: Sequence[tuple[float, Trajectory]], relation: NeighboringRelation, fresh_noise: float
) -> tuple[float, float]:
    """(lower limit, mu) of a merge by shifted interpolation.

    Args:
        weighted: (lambda, run), lambda > 0; the runs share no step.
        relation: neighbouring data sets, for k.
        fresh_noise: tau.

    Returns:
        The mu that linear updates with the recorded constants and a constant gradient have, below which no bound
        from these constants can be; and the theorem's mu at payments that are feasible.

    Raises:
        AccountingError: what this second derivation does not cover, with the reason.
    """
    require_apart([run for _, run in weighted])
    runs = [_laid_out(weight, run, relation) for weight, run in weighted]
    variance = fresh_noise**2 + math.fsum((run.weight * run.noise[-1]) ** 2 for run in runs)

    def left(price: float) -> list[tuple[list[float], float]]:
        return [_distances(run, run.weight * price) for run in runs]

    def excess(price: float) -> float:
        return math.fsum(run.weight * rest for run, (_, rest) in zip(runs, left(price), strict=True)) - (
            price * variance
        )

    most = math.fsum(run.weight * rest for run, (_, rest) in zip(runs, left(0.0), strict=True)) / variance
    price = most if excess(most) >= 0 else float(brentq(excess, 0.0, most, xtol=1e-14 * most, rtol=1e-12))
    costs, merged = [], []
    for run, (distances, _) in zip(runs, left(price), strict=True):
        cost, rest = _followed(run, distances)
        costs.append(cost)
        merged.append(run.weight * rest)
    square = math.fsum([*costs, math.fsum(merged) ** 2 / variance])
    return _linear_limit(runs, fresh_noise), math.sqrt(square)


def _laid_out(weight: float, run: Trajectory, relation: NeighboringRelation) -> _Run:
    if run.steps > _MOST_STEPS:
        raise NotDerivedAgain(
            f"A run of {run.steps} steps is too long to have its shifted interpolation solved a second way, step "
            "by step."
        )
    scales = [s.learning_rate * s.max_grad_norm / s.expected_batch_size for s in run.segments]
    counts = [segment.steps for segment in run.segments]

    def each(values: Sequence[float]) -> list[float]:
        return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]

    lipschitz = each([segment.update_lipschitz for segment in run.segments])
    # A step with c = 0 forgets whatever was before it.
    start = max((t for t, c in enumerate(lipschitz) if c == 0), default=0)
    return _Run(
        weight=weight,
        moved=each([relation.full_batch_factor * scale for scale in scales])[start:],
        noise=each([s.noise_multiplier * scale for s, scale in zip(run.segments, scales, strict=True)])[
            start:
        ],
        lipschitz=lipschitz[start:],
    )


def _distances(run: _Run, price: float) -> tuple[list[float], float]:
    """The distances z >= 0 after all steps but the last that cost least, and what they leave for the merge.

    Minimises `sum_t ((c_t z_{t-1} + s_t - z_t) / nu_t)^2 + 2 price c_T z_{T-1}`. Which z are 0 is guessed from the
    last solution until it stays the same, which it does after a few rounds (Hintermueller, Ito and Kunisch 2003).

    Returns:
        (z, shape (steps - 1,); `c_T z_{T-1} + s_T`).
    """
    count = len(run.moved) - 1
    if count == 0:
        return [], run.moved[-1]
    # Where c is unknown, z has to be 0 just before.
    pinned = [math.isinf(later) for later in run.lipschitz[1:]]
    growth = math.fsum(math.log(c) for c in run.lipschitz[1:] if 1 < c < math.inf)
    # Debts that would grow beyond what float64 can subtract are let go one by one instead.
    free = [not fixed and growth < _LARGEST_GROWTH for fixed in pinned]
    z = _smoothed(run, free, price)
    for _ in range(count + _ROUNDS):
        wanted = [
            not fixed and (distance > 0 if loose else pull < 0)
            for fixed, loose, distance, pull in zip(pinned, free, z, _pulls(run, z, price), strict=True)
        ]
        if wanted == free:
            break
        free = wanted
        z = _smoothed(run, free, price)
    z = [max(distance, 0.0) for distance in z]
    return z, _carried(run.lipschitz[-1], z[-1]) + run.moved[-1]


def _smoothed(run: _Run, free: list[bool], price: float) -> list[float]:
    """The least cost where some z are 0 and nothing holds the others: a Kalman smoother's two passes.

    Forward, where z would go and how cheaply it is moved there (`sum of nu^2` as stretched since the last 0);
    backward, where it is best moved to.
    """
    ahead, spread, place, room = [], [], 0.0, 0.0
    for t, loose in enumerate(free):
        c = run.lipschitz[t]
        place = _carried(c, place) + run.moved[t] if loose else 0.0
        room = _carried(c * c, room) + run.noise[t] ** 2 if loose else 0.0
        ahead.append(place)
        spread.append(min(room, _LARGEST))
    z = [0.0] * len(free)
    for t in reversed(range(len(free))):
        if not free[t]:
            continue
        c = run.lipschitz[t + 1]
        if t + 1 == len(free):
            z[t] = ahead[t] - price * _carried(c, spread[t])
        elif c > 0:
            gained = z[t + 1] - _carried(c, ahead[t]) - run.moved[t + 1]
            z[t] = ahead[t] + gained / (c + run.noise[t + 1] ** 2 / (c * spread[t]))
        else:
            z[t] = ahead[t]
    return z


def _pulls(run: _Run, z: list[float], price: float) -> list[float]:
    """How the cost (halved) changes with each z; where it falls, a z of 0 should be let go."""
    before = [0.0, *z]
    rates = [
        (_carried(c, earlier) + moved - later) / (noise * noise)
        for c, earlier, moved, later, noise in zip(
            run.lipschitz, before, run.moved, z, run.noise, strict=False
        )
    ]
    following = [_carried(c, rate) for c, rate in zip(run.lipschitz[1:], [*rates[1:], price], strict=True)]
    return [after - rate for after, rate in zip(following, rates, strict=True)]


def _carried(c: float, distance: float) -> float:
    """`c * distance`, where nothing is stretched to nothing even by an unknown constant."""
    return c * distance if distance else 0.0


def _followed(run: _Run, distances: list[float]) -> tuple[float, float]:
    """(cost, what is left for the merge) of payments that lead to these distances, or to smaller ones."""
    z, costs = 0.0, []
    for t, wanted in enumerate(distances):
        owed = _carried(run.lipschitz[t], z) + run.moved[t]
        z = min(max(wanted, 0.0), owed)
        costs.append(((owed - z) / run.noise[t]) ** 2)
    return math.fsum(costs), _carried(run.lipschitz[-1], z) + run.moved[-1]


def _linear_limit(runs: Sequence[_Run], fresh_noise: float) -> float:
    """mu of merging updates `theta -> c theta + gradient`, the record's gradient constant and of full norm."""
    moved, variance = [], [fresh_noise**2]
    for run in runs:
        mean, spread = 0.0, 0.0
        for s, nu, recorded in zip(run.moved, run.noise, run.lipschitz, strict=True):
            c = recorded if math.isfinite(recorded) else 1.0  # any map is allowed there, this one too
            mean, spread = c * mean + s, c * c * spread + nu * nu
        moved.append(run.weight * mean)
        variance.append(run.weight**2 * spread)
    total, root = math.fsum(moved), math.sqrt(math.fsum(variance))
    return total / root if math.isfinite(total) and math.isfinite(root) else 0.0


def _step_square(segment: Segment, relation: NeighboringRelation) -> Fraction:
    if not segment.noise_multiplier > 0:
        raise AccountingError(f"Segment {segment.id} has no noise, so nothing is private.")
    return released_sums(segment) * (relation.full_batch_factor / Fraction(segment.noise_multiplier)) ** 2


def require_apart(runs: Sequence[Trajectory]) -> None:
    """The conditions of both theorems that a trajectory records."""
    seen: set[str] = set()
    for run in runs:
        for segment in run.segments:
            covered = (
                segment.sampling_probability == 1
                and segment.schedule == "fixed"
                and segment.clipping == "flat"
                and segment.optimizer == "sgd"
                and segment.momentum == 0
            )
            if not covered or not segment.noise_multiplier > 0:
                raise AccountingError(
                    f"Segment {segment.id} is not full-batch plain SGD with noise, a fixed schedule and flat "
                    "clipping, which the theorem on merged runs needs."
                )
            if segment.id in seen:
                raise NotDerivedAgain(
                    f"Segment {segment.id} belongs to two of the merged runs; merges of runs that share steps are "
                    "not derived a second way."
                )
        seen |= {segment.id for segment in run.segments}
