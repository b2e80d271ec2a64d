"""Networks for several tasks: a trunk that all tasks share and a head for each task.

A candidate of one task is trained as `task_network`: its parameters are `trunk.*` and `heads.<task>.*`. The merged
model of a group is a `multi_task_network`: the same trunk keys, and the heads of all tasks beside one another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from infra.strict_document import NAME
from tasks.models.building import build
from tasks.models.sizes import require_counts

if TYPE_CHECKING:
    from torch import nn

TASK_NETWORK = "tasks.models:task_network"
MULTI_TASK_NETWORK = "tasks.models:multi_task_network"
TRUNK = "trunk."  # what the keys of shared parameters begin with
HEADS = "heads."


def task_network(trunk: Mapping[str, Any], task: str, classes: int, width: int) -> nn.Module:
    """The trunk with the head of one task, which is one linear layer with bias.

    Args:
        trunk: a network as a recipe names one, `{factory: ..., arguments: {...}}`; it gives `width` numbers a row.
        task: its name: lower-case letters, digits and hyphens.
        classes: labels of the task, at least two.
        width: numbers that the trunk gives a row.

    Returns:
        A module that maps a batch of the task's rows to (rows, classes) scores.

    Raises:
        InvalidInput: an argument is out of range, or the trunk's factory refuses its arguments.
    """
    from tasks.models.multi_task_module import TaskNetwork  # late: importing torch takes seconds

    _require_head(TASK_NETWORK, task, classes)
    require_counts(TASK_NETWORK, width=width)
    return TaskNetwork(_trunk(TASK_NETWORK, trunk), task, classes, width)


def multi_task_network(
    trunk: Mapping[str, Any], heads: Mapping[str, int], width: int, shape: Sequence[int]
) -> nn.Module:
    """The trunk with the heads of all tasks.

    Its rows are flat: column 0 holds the number of the row's task, from 0 on in the order of the tasks' names, and
    the other columns the row as its trunk takes it, flattened. Its scores are those of all tasks' labels, task
    after task in the same order; those of other tasks are minus infinity, so that a row's best label is one of its
    own task.

    Args:
        trunk: as for `task_network`.
        heads: labels of each task, by its name.
        width: numbers that the trunk gives a row.
        shape: of a row as the trunk takes it: `[features]`, or `[channels, height, width]`.

    Returns:
        A module that maps (rows, 1 + product of shape) to (rows, sum of labels).

    Raises:
        InvalidInput: an argument is out of range, or the trunk's factory refuses its arguments.
    """
    from tasks.models.multi_task_module import MultiTaskNetwork

    if not isinstance(heads, Mapping) or not heads:
        raise InvalidInput(
            f"The argument heads of {MULTI_TASK_NETWORK} must give the number of labels of each task by its name, "
            f"but {heads!r} was given."
        )
    for task, classes in heads.items():
        _require_head(MULTI_TASK_NETWORK, task, classes)
    require_counts(MULTI_TASK_NETWORK, width=width)
    if not isinstance(shape, list | tuple) or not shape:
        raise InvalidInput(
            f"The argument shape of {MULTI_TASK_NETWORK} must list the sizes of a row, such as [64] or [1, 28, 28], "
            f"but {shape!r} was given."
        )
    for size in shape:
        require_counts(MULTI_TASK_NETWORK, shape=size)
    return MultiTaskNetwork(
        _trunk(MULTI_TASK_NETWORK, trunk), {task: heads[task] for task in sorted(heads)}, width, tuple(shape)
    )


def _trunk(factory: str, trunk: object) -> nn.Module:
    if not isinstance(trunk, Mapping) or not {"factory"} <= set(trunk) <= {"factory", "arguments"}:
        raise InvalidInput(
            f"The argument trunk of {factory} must be a factory with its arguments, such as "
            "{factory: tasks.models:multilayer_perceptron, arguments: {features: 65, classes: 32}}, but "
            f"{trunk!r} was given."
        )
    return build(NetworkRecord(factory=trunk["factory"], arguments=trunk.get("arguments", {})))


def _require_head(factory: str, task: object, classes: object) -> None:
    from torch import nn

    if not isinstance(task, str) or not re.fullmatch(NAME, task) or hasattr(nn.ModuleDict(), task):
        raise InvalidInput(
            f"{task!r} cannot name a task of {factory}: take lower-case letters, digits and hyphens, and no name "
            "that torch's modules use themselves, such as train or values."
        )
    if type(classes) is not int or classes < 2:
        raise InvalidInput(
            f"The task {task} of {factory} must have at least two labels, but {classes!r} was given."
        )
