"""What the training of a group needs before its first step: a workshop for each task, and what they share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from flows.train_workshop import Workshop, data_key, side_by_side, take_up, try_out, usable_cores
from infra.canonical import digest
from infra.documents import DataRecord, NetworkRecord, Split
from tasks.noise_choice import require_noise
from tasks.services import Services
from tasks.task_groups import Group
from tasks.unfinished import training_key

if TYPE_CHECKING:
    from tasks.data import Splits

COMMAND = "remerge merge-tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWorkshop:
    """A group whose training may begin. Each task's workshop holds that task's private rows."""

    group: Group
    workshops: dict[str, Workshop]  # by task, in the recipe's order
    network: NetworkRecord  # of the merged model
    data: DataRecord  # of all tasks, for the check of the merged model
    start: bytes  # contents of a safetensors file: the public start of all tasks


def prepare_group(services: Services, group: Group, *, fresh: bool) -> GroupWorkshop:
    """Data of every task, checked and projected, one public start, and what can be gone on with.

    Raises:
        tasks.task_groups.disjointness.NotDisjoint: two tasks share private records, and the recipe says otherwise.
        InvalidInput: one sentence that names the task at fault.
    """
    import torch

    from tasks.data import data_record
    from tasks.mlflow_server import require_up
    from tasks.models import state_bytes
    from tasks.task_groups.disjointness import require_disjoint, require_public_apart
    from tasks.task_groups.rows import LOADER, joined_splits, require_one_shape
    from tasks.task_groups.starts import public_start, start_of

    require_up(services.mlflow)
    require_noise(group.name, group.candidates)
    _, threads = side_by_side(group, usable_cores())
    torch.set_num_threads(threads)
    where = f"The group {group.name}"
    splits = {task: _splits_of(group, task) for task in group.tasks}
    network = group.network(require_one_shape(splits))
    _require_cap(group, splits)
    if group.records == "disjoint":
        require_disjoint(splits, where)
    require_public_apart(splits, where)

    records = {
        task: data_record(group.tasks[task].data, one, data_key(services)) for task, one in splits.items()
    }
    public = joined_splits({task: replace(one, private=None) for task, one in splits.items()})
    data = DataRecord(
        loader=LOADER,
        arguments={
            "tasks": {task: own.data.model_dump(mode="json") for task, own in group.tasks.items()},
            "feature_radius": group.feature_radius,
        },
        split_rule=public.split_rule,
        private=Split(rows=None, digest=digest({task: one.private.digest for task, one in records.items()})),
        public_train=Split(rows=len(public.public_train), digest=public.public_train.digest()),
        public_gate=Split(rows=len(public.public_gate), digest=public.public_gate.digest()),
    )
    start = public_start(group.initialisation, network, public.public_train)
    content = state_bytes(start)
    workshops = {
        task: Workshop(services, group.recipe_of(task), one, start_of(task, start), records[task], content)
        for task, one in splits.items()
    }
    for workshop in workshops.values():
        try_out(workshop)
    keys = {
        task: training_key(workshop.recipe, workshop.data, workshop.keys)
        for task, workshop in workshops.items()
    }
    key = digest({"group": group.model_dump(mode="json", exclude={"execution"}), "tasks": keys})
    take_up(list(workshops.values()), group, key, fresh=fresh, command=COMMAND)
    return GroupWorkshop(group=group, workshops=workshops, network=network, data=data, start=content)


def _splits_of(group: Group, task: str) -> Splits:
    from tasks.data import load_splits, require_public_alone

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


def _require_cap(group: Group, splits: dict[str, Splits]) -> None:
    """`n_max` is the whole group's: what a policy's delta is compared with."""
    spare = 1 if group.neighboring_relation == NeighboringRelation.ADD_OR_REMOVE_ONE else 0
    if sum(len(one.private or ()) for one in splits.values()) + spare > group.n_max:
        room = " (with room for one more record, as add_or_remove_one needs)" if spare else ""
        raise InvalidInput(
            f"The tasks of the group {group.name} have more private rows together than its n_max {group.n_max} "
            f"allows{room}; raise n_max, which is public, or restrict the data by a rule that does not look at them."
        )
