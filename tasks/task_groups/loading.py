"""A group's data: each task's loaded and checked as a portfolio's, then what they must keep between them."""

from __future__ import annotations

from collections.abc import Mapping

from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from tasks.data import Splits, load_splits, require_public_alone
from tasks.task_groups.disjointness import require_disjoint, require_public_apart
from tasks.task_groups.recipes import Group


def load_task(group: Group, task: str) -> Splits:
    """The data of one task, checked and projected.

    Raises:
        InvalidInput: as `tasks.data.load_splits`, or they have another number of classes than the recipe says.
    """
    own = group.tasks[task]
    splits = load_splits(
        own.data,
        feature_radius=group.feature_radius,
        n_max=group.n_max,
        neighboring_relation=group.neighboring_relation,
    )
    if splits.classes != own.classes:
        raise InvalidInput(
            f"Task {task} of the group {group.name} says classes: {own.classes}, but the loader {own.data.loader} "
            f"returned rows of {splits.classes} classes; correct one of them."
        )
    require_public_alone(own.data, splits, n_max=group.n_max)
    return splits


def require_apart(group: Group, splits: Mapping[str, Splits]) -> None:
    """Check what the tasks' data must keep between them.

    Raises:
        tasks.task_groups.disjointness.NotDisjoint: two tasks share private records, and the recipe says otherwise.
        InvalidInput: all tasks together have more private rows than `n_max`, with which a policy's delta is compared,
            or what is private in one task is public in another.
    """
    spare = 1 if group.neighboring_relation == NeighboringRelation.ADD_OR_REMOVE_ONE else 0
    if sum(len(one.private or ()) for one in splits.values()) + spare > group.n_max:
        room = " (with room for one more record, as add_or_remove_one needs)" if spare else ""
        raise InvalidInput(
            f"The tasks of the group {group.name} have more private rows together than its n_max {group.n_max} "
            f"allows{room}; raise n_max, which is public, or restrict the data by a rule that does not look at them."
        )
    where = f"The group {group.name}"
    if group.records == "disjoint":
        require_disjoint(splits, where)
    require_public_apart(splits, where)
