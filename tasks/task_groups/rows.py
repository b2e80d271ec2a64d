"""Rows of all tasks beside one another, as the network of a whole group takes them.

A row is flat: column 0 holds the number of its task, from 0 on in the order of the tasks' names, and the rest is the
task's own row, flattened. Labels follow one another: those of the first task are 0, 1, ..., then come the second's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows, Splits, load_splits
from tasks.models.multi_task import MULTI_TASK_NETWORK, TASK_NETWORK
from tasks.recipes import DataRecipe

LOADER = "tasks.task_groups:load_tasks"
PARTS = ("private", "public_train", "public_gate")


def load_tasks(
    *, with_private: bool, tasks: Mapping[str, Mapping[str, Any]], feature_radius: float | None
) -> Splits:
    """The rows of several tasks as those of one: the loader that a group's manifest names.

    Args:
        tasks: by name, the loader of each and its arguments.
        feature_radius: R; each task's rows are projected to it before the task's number is put in front, which no
            projection may touch.

    Raises:
        InvalidInput: a loader fails, or the rows of two tasks have different shapes.
    """
    found = {}
    for name, source in tasks.items():
        if not isinstance(source, Mapping) or not {"loader"} <= set(source) <= {"loader", "arguments"}:
            raise InvalidInput(f"Task {name} must name a loader and its arguments, but {source!r} was given.")
        found[name] = load_splits(
            DataRecipe(loader=source["loader"], arguments=dict(source.get("arguments", {}))),
            feature_radius=feature_radius,
            n_max=2**62,  # what each task may hold is checked when it is trained
            neighboring_relation="replace_one",
            with_private=with_private,
        )
    return joined_splits(found)


def joined_splits(splits: Mapping[str, Splits]) -> Splits:
    """What `load_tasks` returns, of splits that are loaded already; private rows where every task has them.

    Raises:
        InvalidInput: the rows of two tasks have different shapes.
    """
    ordered = {name: splits[name] for name in sorted(splits)}
    require_one_shape(ordered)
    parts: dict[str, Rows | None] = {}
    for part in PARTS:
        rows = [getattr(one, part) for one in ordered.values()]
        parts[part] = None if any(one is None for one in rows) else _joined(rows, ordered)
    rules = "; ".join(f"task {name}: {one.split_rule}" for name, one in ordered.items())
    return Splits(
        private=parts["private"],
        public_train=parts["public_train"],  # type: ignore[arg-type]
        public_gate=parts["public_gate"],  # type: ignore[arg-type]
        classes=sum(one.classes for one in ordered.values()),
        split_rule=f"column 0 holds the number of the row's task; {rules}",
    )


def require_one_shape(splits: Mapping[str, Splits]) -> tuple[int, ...]:
    """The shape of a row of every task.

    Raises:
        InvalidInput: the rows of two tasks have different shapes.
    """
    shapes = {name: one.public_gate.features.shape[1:] for name, one in splits.items()}
    (first, shape), *others = shapes.items()
    for name, other in others:
        if other != shape:
            raise InvalidInput(
                f"The tasks {first} and {name} have rows of different shapes, {list(shape)} and {list(other)}, but one "
                "trunk takes rows of one shape: let their loaders bring them to one."
            )
    return shape


def rows_of_task(rows: Rows, network: NetworkRecord, task: str) -> Rows:
    """The rows of one task out of a group's, as the task's own network takes them.

    Args:
        rows: from `tasks.data.load_public_train` or `load_public_gate` of a group's manifest.
        network: the manifest's, a `multi_task_network`.

    Raises:
        InvalidInput: the network is of no group, or has no such task.
    """
    heads = _heads(network, task)
    number = sorted(heads).index(task)
    first = sum(heads[name] for name in sorted(heads)[:number])
    own = rows.features[:, 0] == number
    return Rows(
        features=np.ascontiguousarray(rows.features[own, 1:]).reshape(-1, *network.arguments["shape"]),
        labels=rows.labels[own] - first,
    )


def task_network_of(network: NetworkRecord, task: str) -> NetworkRecord:
    """The network of one task's candidates, of the group's.

    Raises:
        InvalidInput: the network is of no group, or has no such task.
    """
    classes = _heads(network, task)[task]
    arguments = {
        "trunk": network.arguments["trunk"],
        "task": task,
        "classes": classes,
        "width": network.arguments["width"],
    }
    return NetworkRecord(factory=TASK_NETWORK, arguments=arguments)


def _heads(network: NetworkRecord, task: str) -> dict[str, int]:
    heads: dict[str, int] = network.arguments.get("heads", {})
    if network.factory != MULTI_TASK_NETWORK or task not in heads:
        raise InvalidInput(f"The network {network.factory} has no head of a task {task}.")
    return heads


def _joined(rows: list[Rows], splits: Mapping[str, Splits]) -> Rows:
    features, labels, first = [], [], 0
    for number, (one, task) in enumerate(zip(rows, splits.values(), strict=True)):
        flat = one.features.reshape(len(one), -1)
        features.append(np.concatenate([np.full((len(one), 1), number, dtype=np.float32), flat], axis=1))
        labels.append(one.labels + first)
        first += task.classes
    return Rows(features=np.concatenate(features), labels=np.concatenate(labels), handed_over=True)
