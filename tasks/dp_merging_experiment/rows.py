"""A task's rows and what each is for: private ones to train on, public ones to start from or to look at, test rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from infra.canonical import canonical_json, strict_json
from infra.documents import NetworkRecord
from tasks.data import Rows, Splits, load_splits
from tasks.dp_merging_experiment.setting import RELATION, Family, Task
from tasks.models.multi_task import MULTI_TASK_NETWORK, TASK_NETWORK
from tasks.recipes import DataRecipe

N_MAX = 100_000  # public cap on each task's private rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """Four parts that share no record."""

    splits: Splits  # private rows; public_train: the rows to look at; public_gate: the test rows
    pretraining: Rows  # public: the start is trained on them

    @property
    def looked_at(self) -> Rows:
        """Public: hyper-parameters were chosen by them, and merge statistics are computed from them."""
        return self.splits.public_train

    @property
    def test(self) -> Rows:
        return self.splits.public_gate


def task_rows(family: Family, task: Task, *, test_rows: int, with_private: bool = True) -> TaskRows:
    """Load a task's rows: of its public-train rows every second one is for pre-training, up to the family's limit,
    and the others are looked at; of its public-gate rows the first are test rows."""
    loaded = _loaded(task.loader, canonical_json(dict(task.arguments)), with_private)
    public = loaded.public_train
    pretraining = _rows(public, slice(0, 2 * family.pretraining_rows, 2))
    return TaskRows(
        splits=replace(
            loaded,
            public_train=_rows(public, slice(1, None, 2)),
            public_gate=_rows(loaded.public_gate, slice(0, test_rows)),
        ),
        pretraining=pretraining,
    )


def task_network(family: Family, task: Task) -> NetworkRecord:
    """The trunk with the task's head."""
    arguments = {
        "trunk": dict(family.trunk),
        "task": task.name,
        "classes": task.classes,
        "width": family.width,
    }
    return NetworkRecord(factory=TASK_NETWORK, arguments=arguments)


def family_network(family: Family) -> NetworkRecord:
    """The trunk with the heads of all tasks."""
    arguments = {
        "trunk": dict(family.trunk),
        "heads": {task.name: task.classes for task in family.tasks},
        "width": family.width,
        "shape": list(family.shape),
    }
    return NetworkRecord(factory=MULTI_TASK_NETWORK, arguments=arguments)


def _rows(rows: Rows, chosen: slice) -> Rows:
    return Rows(features=rows.features[chosen], labels=rows.labels[chosen])


@lru_cache(maxsize=16)
def _loaded(loader: str, arguments: bytes, with_private: bool) -> Splits:
    """Once for each process: a worker trains a task many times."""
    return load_splits(
        DataRecipe(loader=loader, arguments=strict_json(arguments)),
        feature_radius=None,
        n_max=N_MAX,
        neighboring_relation=RELATION,
        with_private=with_private,
    )
