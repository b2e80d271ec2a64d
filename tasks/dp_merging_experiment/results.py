"""The finished results of a setting, gathered from the store into plain numbers by method, budget and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.dp_merging_experiment.plan import Start, scorings, starts
from tasks.dp_merging_experiment.rows import task_network, task_rows
from tasks.dp_merging_experiment.running import RUNS, STARTS, Unfinished, start_model
from tasks.dp_merging_experiment.scoring import MERGES
from tasks.dp_merging_experiment.setting import Setting
from tasks.dp_merging_experiment.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """One private model on its own task."""

    accuracy: float  # in [0, 1], on the task's test rows, as are the others
    loss: float  # nats
    sharpness: float  # nats
    drift: float  # L2, of the trunk
    noise_multiplier: float
    epsilon: float  # nats, of the trajectory as executed
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The models of one method, budget and seed, and what operators made of them."""

    own: Mapping[str, TaskResult]  # by task
    merged: Mapping[str, Mapping[str, float]]  # by operator and task: accuracy on the test rows
    cosine: float  # mean over pairs of tasks
    seconds: float  # of all merges

    def own_mean(self) -> float:
        """Mean over tasks of the accuracy of each task's own model."""
        return sum(one.accuracy for one in self.own.values()) / len(self.own)

    def merged_mean(self, operator: str) -> float:
        """Mean over tasks of the merge's accuracy."""
        found = self.merged[operator]
        return sum(found.values()) / len(found)

    def gap(self, operator: str) -> float:
        """What the tasks lose by the merge on average."""
        return self.own_mean() - self.merged_mean(operator)

    def mean(self, what: str) -> float:
        """Mean over tasks of a number of `TaskResult`."""
        return float(sum(getattr(one, what) for one in self.own.values()) / len(self.own))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResult:
    """A public start, before any private training."""

    accuracy: Mapping[str, float]  # by task, on the same test rows
    parameters: int
    trunk_parameters: int
    seconds: float

    def mean(self) -> float:
        return sum(self.accuracy.values()) / len(self.accuracy)


Group = tuple[str, str, float, int]  # family, method, epsilon, seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that a page needs beside the setting."""

    starts: Mapping[tuple[str, int], StartResult]  # by family and seed
    groups: Mapping[Group, GroupResult]


def gathered(setting: Setting, store: Store) -> Results:
    """All results of a finished setting.

    Raises:
        Unfinished: something is missing.
    """
    groups: dict[Group, GroupResult] = {}
    for scoring in scorings(setting):
        own = {}
        for run in scoring.runs:
            found = _result(store, RUNS, run.key)
            own[run.task.name] = TaskResult(**{name: found[name] for name in TaskResult.__slots__})
        merges = {one.name: _result(store, MERGES, scoring.key(one)) for one in scoring.family.operators}
        groups[scoring.family.name, scoring.method.name, scoring.epsilon, scoring.seed] = GroupResult(
            own=own,
            merged={name: one["test"] for name, one in merges.items()},
            cosine=next(iter(merges.values()))["cosine"],
            seconds=sum(one["seconds"] for one in merges.values()),
        )
    return Results(
        starts={
            (one.family.name, one.seed): _start(one, store, setting.test_rows) for one in starts(setting)
        },
        groups=groups,
    )


def _start(start: Start, store: Store, test_rows: int) -> StartResult:
    """It is scored here: a start does not depend on how many rows are for tests."""
    from tasks.validation import accuracy

    found, family = _result(store, STARTS, start.key), start.family
    return StartResult(
        accuracy={
            task.name: accuracy(
                task_network(family, task),
                start_model(start, task.name, store),
                task_rows(family, task, test_rows=test_rows).test,
            )
            for task in family.tasks
        },
        parameters=found["parameters"],
        trunk_parameters=found["trunk_parameters"],
        seconds=found["seconds"],
    )


def _result(store: Store, kind: str, key: str) -> dict[str, Any]:
    found = store.result(kind, key)
    if found is None:
        raise Unfinished(
            "The experiment is not finished; run the same command again, what is finished is kept."
        )
    return found
