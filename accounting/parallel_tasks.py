"""Merging models of different tasks whose data sets are disjoint: a record enters one of them.

Which task a record belongs to is decided from that record alone. Then neighbouring data sets differ

- under add-or-remove-one and zero-out: in one task, and the merge has the worst of the tasks' profiles;
- under replace-one: in one task, whose own replace-one profile (k = 2) covers it, **or in two**, where the
  record leaves one task and its replacement enters another: a removal and an addition, k = 1 each, composed.

The composition alone would not do: it says nothing of a record replaced within its task, which for full
batches is always the larger of the two.

Runs of one task may share records, and are released jointly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from accounting.ascent import with_paired_source
from accounting.bounds import WEIGHTS_FREE, Bound, run_assumptions
from accounting.budget import NeighboringRelation
from accounting.composition import Part, compose, delta_on_grid, window_of
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.joint_release import executed_steps
from accounting.pld import PoissonGroup, composed_profile, full_batch_mu, poisson_groups, profile_of
from accounting.profile import DiscretisedProfile, GaussianProfile, PrivacyProfile
from accounting.profile_cache import cached_by_size
from accounting.rounding import ULP, root_up, sum_up
from accounting.sampled_gaussian import discretise, loss_bounds
from accounting.trajectory import Segment, Trajectory

_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_LEAST_NOISE, _MOST_NOISE, _LEAST_SAMPLING, _LEAST_MU = 0.05, 1e9, 1e-12, 1e-12
_ROUGH_BASE = 8_000  # bins of one step while the window is sought

DISJOINT_TASKS = (
    "Every record belongs to at most one task, and which one was decided from that record alone: not from "
    "other records, their number, or anything trained on them."
)
MAY_CHANGE_TASK = "A replaced record may leave one task and its replacement enter another."
SOURCE = (
    "Parallel composition (McSherry 2009); under replace-one also sequential composition of the two tasks that "
    "a record leaves and enters"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstProfile(PrivacyProfile):
    """One of several mechanisms touches the record, and it is not known which: the largest delta of any."""

    profiles: tuple[PrivacyProfile, ...]

    def __post_init__(self) -> None:
        if not self.profiles:
            raise InvalidInput("At least one profile is needed.")

    @property
    def smallest_delta(self) -> float:
        return max(profile.smallest_delta for profile in self.profiles)

    def deltas(self, epsilon: float) -> tuple[float, float]:
        pairs = [profile.deltas(epsilon) for profile in self.profiles]
        return max(remove for remove, _ in pairs), max(add for _, add in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EitherWay(PrivacyProfile):
    """A record may move either way, so each direction gets the larger delta.

    The two directions of `moved_record` are told apart by which task is left. Of another release they may be the
    other way about, and where deltas of several releases are added up, unlike ones must not meet.
    """

    moved: PrivacyProfile

    @property
    def smallest_delta(self) -> float:
        return self.moved.smallest_delta

    def deltas(self, epsilon: float) -> tuple[float, float]:
        largest = max(self.moved.deltas(epsilon))
        return largest, largest


def parallel_tasks(
    trajectories: Sequence[Trajectory], relation: NeighboringRelation, tasks: Sequence[str] | None = None
) -> Bound:
    """Bound anything computed from models of disjoint tasks, the models themselves included.

    Args:
        trajectories: at least one. Paired steps (`paired_mechanism`) are accounted as such. The work grows
            quadratically with the number of tasks under replace-one with Poisson sampling.
        relation: the neighbouring relation of the claim, which must be the one recorded.
        tasks: the task of each run, shape (runs,): runs of one task may share records, runs of different tasks
            share none, and all have one lineage, that of the group. None: the `lineage` tells the task.

    Returns:
        Closed form (`mu` set) where all steps are full batch.

    Raises:
        IncompatibleCandidates: another relation, mixed units, mixed lineages where tasks are given, or two tasks
            with the same segment or the same data digest, which are not disjoint.
        InvalidInput: no run, or not one task for each run.
    """
    executed = executed_by_task(trajectories, relation, tasks)
    profiles = [profile_of(segments, relation) for segments in executed]
    if relation is NeighboringRelation.REPLACE_ONE:
        keys = sorted((full_batch_mu(segments, _ONE), poisson_groups(segments)) for segments in executed)
        profiles += [EitherWay(moved=moved_record(*pair)) for pair in sorted(set(combinations(keys, 2)))]
    profile, mu = worst_of(profiles)
    extra: tuple[str, ...] = (WEIGHTS_FREE,)
    if len(executed) > 1:
        moving = relation is NeighboringRelation.REPLACE_ONE
        extra = (*extra, DISJOINT_TASKS, *((MAY_CHANGE_TASK,) if moving else ()))
    return Bound(
        name="parallel_tasks",
        profile=profile,
        assumptions=(*run_assumptions(trajectories, relation), *extra),
        source=with_paired_source(SOURCE, trajectories),
        mu=mu,
    )


def worst_of(profiles: Sequence[PrivacyProfile]) -> tuple[PrivacyProfile, float | None]:
    """The pointwise largest profile, and its mu where all are Gaussian."""
    plain = [profile.moved if isinstance(profile, EitherWay) else profile for profile in profiles]
    mus = [profile.mu for profile in plain if isinstance(profile, GaussianProfile)]
    others = [
        profile
        for profile, bare in zip(profiles, plain, strict=True)
        if not isinstance(bare, GaussianProfile)
    ]
    gaussian = [GaussianProfile(mu=max(mus))] if mus else []
    if not others:
        return gaussian[0], gaussian[0].mu
    return WorstProfile(profiles=(*gaussian, *others)), None


@cached_by_size(200_000_000)
def moved_record(
    left: tuple[float, tuple[PoissonGroup, ...]], entered: tuple[float, tuple[PoissonGroup, ...]]
) -> PrivacyProfile:
    """The profile of a record that leaves one task while its replacement enters another.

    Args:
        left: mu of that task's full-batch steps with k = 1, and its Poisson-sampled steps.
        entered: the same of the other task.

    Returns:
        The removal from one composed with the addition to the other, and the reverse as the second direction.

    Raises:
        AccountingError: the composition needs more grid points than may be held.
    """
    mu, leaving = _without_wide(*left)
    other_mu, entering = _without_wide(*entered)
    mu = root_up(sum_up((mu * mu, other_mu * other_mu)) * (1 + 4 * ULP))
    same_way = composed_profile(mu, (*leaving, *entering), _ONE)  # for its grid, and where none is needed
    if not isinstance(same_way, DiscretisedProfile):
        return same_way
    interval = same_way.interval
    compositions = []
    for removed, added in ((leaving, entering), (entering, leaving)):
        kinds = [(group, 0) for group in removed] + [(group, 1) for group in added]
        if mu > 0:
            plain = PoissonGroup(noise_multiplier=(1 - 4 * ULP) / mu, sampling_probability=1.0, steps=1)
            kinds.append((plain, 0))
        roughs = [_rough(group) for group, _ in kinds]
        rough_parts = [_part(*kind, rough) for kind, rough in zip(kinds, roughs, strict=True)]
        parts = [_part(*kind, interval) for kind in kinds]
        compositions.append(compose(parts, window_of(rough_parts, roughs), interval))
    first, second = compositions
    error = max(first.rounding_error, second.rounding_error)
    return DiscretisedProfile(
        interval=interval,
        first=(max(first.first, 0), max(second.first, 0)),
        on_grid=(delta_on_grid(first, interval), delta_on_grid(second, interval)),
        error=error,
        resolution_error=error + max(first.infinity, second.infinity),
    )


def executed_by_task(
    trajectories: Sequence[Trajectory], relation: NeighboringRelation, tasks: Sequence[str] | None = None
) -> list[tuple[Segment, ...]]:
    """The executed steps of each task, in order of appearance.

    Raises:
        IncompatibleCandidates, InvalidInput: as `parallel_tasks`.
    """
    if not trajectories:
        raise InvalidInput("At least one trajectory is needed.")
    if len({trajectory.unit for trajectory in trajectories}) > 1:
        raise IncompatibleCandidates(
            "Tasks differ in their unit of privacy; only runs that agree may be merged."
        )
    if tasks is None:
        what, labels = "Lineages", [trajectory.lineage for trajectory in trajectories]
    else:
        what, labels = "Tasks", list(tasks)
        if len(labels) != len(trajectories) or not all(isinstance(t, str) and t.strip() for t in labels):
            raise InvalidInput("Name one task for each run.")
        executed_steps(trajectories, relation)  # one lineage, relation and unit; no edited segment
    runs_of: dict[str, list[Trajectory]] = {}
    owners: dict[str, str] = {}
    for label, trajectory in zip(labels, trajectories, strict=True):
        runs_of.setdefault(label, []).append(trajectory)
        for name in (trajectory.data_digest, *(segment.id for segment in trajectory.segments)):
            if owners.setdefault(name, label) != label:
                raise IncompatibleCandidates(
                    f"{what} {owners[name]} and {label} share records or steps ({name}), so these tasks are not "
                    "disjoint; account them as one, by their joint release."
                )
    return [executed_steps(runs, relation) for runs in runs_of.values()]


def _without_wide(mu: float, groups: tuple[PoissonGroup, ...]) -> tuple[float, tuple[PoissonGroup, ...]]:
    """Steps with a loss too wide for any grid are accounted as full batch, and extremes are not credited."""
    squares, kept = [mu * mu], []
    for group in groups:
        if group.noise_multiplier >= _LEAST_NOISE:
            noise = min(group.noise_multiplier, _MOST_NOISE)
            q = max(group.sampling_probability, _LEAST_SAMPLING)
            kept.append(PoissonGroup(noise_multiplier=noise, sampling_probability=q, steps=group.steps))
        else:
            ratio = 1 / group.noise_multiplier if group.noise_multiplier > 0 else math.inf
            squares.append(group.steps * (ratio * ratio))
    total = root_up(sum_up(squares) * (1 + 8 * ULP))
    return (max(total, _LEAST_MU) if total > 0 else 0.0), tuple(kept)


def _part(group: PoissonGroup, direction: int, interval: float) -> Part:
    grids = discretise(group.noise_multiplier, group.sampling_probability, _ONE, interval)
    return Part(grids[direction], group.steps)


def _rough(group: PoissonGroup) -> float:
    """An interval that is fine enough for finding the window of a composition."""
    low, high = loss_bounds(group.noise_multiplier, group.sampling_probability, _ONE)
    return (high - low) / _ROUGH_BASE
