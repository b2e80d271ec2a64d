"""Merges of tasks with disjoint records, derived anew for checking certificates.

A record enters one task, whose own profile covers it; under replace-one it may also leave one task while its
replacement enters another: a removal from the one and an addition to the other, k = 1 each. The worst of all these
is the profile of the merge. Full-batch tasks by exact fractions, others by dp_accounting's distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

from dp_accounting import NeighboringRelation as LibraryRelation

from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError
from accounting.independent_merges import joint_square
from accounting.independent_profiles import (
    POISSON_FLOOR,
    POISSON_RELATIVE,
    CheckedProfile,
    Deltas,
    gaussian_profile,
    library_composition,
    steps_profile,
)
from accounting.independent_steps import distinct_steps
from accounting.trajectory import Segment, Trajectory

Steps = Mapping[str, Segment]

_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


def steps_by_task(runs: Mapping[str, Trajectory], tasks: Mapping[str, str]) -> list[Steps]:
    """The executed steps of each task, each once.

    Args:
        runs: by candidate name.
        tasks: the task of each of them.

    Raises:
        AccountingError: a candidate without a task, or two tasks with the same rows or steps, which no parallel
            composition covers.
    """
    labels: dict[str, str] = {}
    for name, run in runs.items():
        if name not in tasks:
            raise AccountingError(f"Candidate {name} lacks a task.")
        for mark in (run.data_digest, *(segment.id for segment in run.segments)):
            if labels.setdefault(mark, tasks[name]) != tasks[name]:
                raise AccountingError(
                    f"Tasks {labels[mark]} and {tasks[name]} share rows or steps, so they are not disjoint."
                )
    members: dict[str, list[Trajectory]] = {}
    for name, run in runs.items():
        members.setdefault(tasks[name], []).append(run)
    return [distinct_steps(own) for own in members.values()]


def worst_square(tasks: Sequence[Steps], relation: NeighboringRelation) -> Fraction:
    """mu^2 of the merge of full-batch tasks, exactly: of the worst task, or of two that a record moves between."""
    squares = [joint_square(steps, relation) for steps in tasks]
    if relation is NeighboringRelation.REPLACE_ONE:
        single = [joint_square(steps, _ONE) for steps in tasks]
        squares += [one + other for one, other in combinations(single, 2)]
    return max(squares)


def tasks_profile(tasks: Sequence[Steps], relation: NeighboringRelation) -> CheckedProfile:
    """The worst profile of a record in any task, or between two.

    Raises:
        AccountingError: a loss too wide for dp_accounting's grid, or a step without noise.
    """
    if not any(_sampled(steps) for steps in tasks):
        mu = math.sqrt(worst_square(tasks, relation))
        return gaussian_profile(mu, mu)
    profiles = []
    for steps in tasks:
        mu = 0.0 if _sampled(steps) else math.sqrt(joint_square(steps, relation))
        profiles.append(steps_profile(steps, relation) if _sampled(steps) else gaussian_profile(mu, mu))
    if relation is NeighboringRelation.REPLACE_ONE:
        profiles += [_moved(one, other) for one, other in combinations(tasks, 2)]
    return _worst(profiles)


def _moved(left: Steps, entered: Steps) -> CheckedProfile:
    """A record that was in one task and now is in the other, and the reverse."""
    if not _sampled(left) and not _sampled(entered):
        mu = math.sqrt(joint_square(left, _ONE) + joint_square(entered, _ONE))
        return gaussian_profile(mu, mu)
    one: Any = library_composition(left, LibraryRelation.ADD_OR_REMOVE_ONE)
    other: Any = library_composition(entered, LibraryRelation.ADD_OR_REMOVE_ONE)
    leaving = one._pmf_remove.compose(other._pmf_add)
    returning = one._pmf_add.compose(other._pmf_remove)

    def deltas(epsilon: float) -> tuple[float, float]:
        return float(leaving.get_delta_for_epsilon(epsilon)), float(returning.get_delta_for_epsilon(epsilon))

    return CheckedProfile(low=deltas, high=deltas, relative=POISSON_RELATIVE, floor=POISSON_FLOOR)


def _worst(profiles: Sequence[CheckedProfile]) -> CheckedProfile:
    def largest(sides: Sequence[Deltas]) -> Deltas:
        def deltas(epsilon: float) -> tuple[float, float]:
            pairs = [side(epsilon) for side in sides]
            return max(remove for remove, _ in pairs), max(add for _, add in pairs)

        return deltas

    return CheckedProfile(
        low=largest([profile.low for profile in profiles]),
        high=largest([profile.high for profile in profiles]),
        relative=max(profile.relative for profile in profiles),
        floor=max(profile.floor for profile in profiles),
    )


def _sampled(steps: Steps) -> bool:
    return any(segment.sampling_probability < 1 for segment in steps.values())
