"""What the training of a group needs before its first step: a workshop for each task, and what they share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect import get_run_logger

from flows.train_workshop import Workshop, data_key, side_by_side, take_up, try_out, usable_cores
from infra.canonical import digest
from infra.documents import DataRecord, NetworkRecord, Split
from tasks.noise_choice import require_noise
from tasks.services import Services
from tasks.task_groups import Group
from tasks.unfinished import training_key

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
    from tasks.task_groups.loading import load_task, require_apart
    from tasks.task_groups.rows import LOADER, joined_splits, require_one_shape
    from tasks.task_groups.starts import public_start, start_of

    require_up(services.mlflow)
    require_noise(group.name, group.candidates)
    _, threads = side_by_side(group, usable_cores())
    torch.set_num_threads(threads)
    splits = {task: load_task(group, task) for task in group.tasks}
    network = group.network(require_one_shape(splits))
    require_apart(group, splits)
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
    if (pretrain := group.initialisation.pretrain) is not None:
        get_run_logger().info("Pre-training the public start on public-train rows: %d steps.", pretrain.steps)
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
