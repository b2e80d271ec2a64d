"""Which operator merges the chosen candidates, with which options, and which tasks they are of.

Whatever an operator makes of a set of models is post-processing of releasing them all, so the joint release of the
set covers it; for tasks whose records are disjoint, parallel composition does. Only a plain linear combination of
candidates of one task has tighter theorems of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from accounting.documents import require_text
from accounting.errors import InvalidInput

LINEAR = "linear"
DISJOINT, SHARED = "disjoint", "shared"
TASK_BOUNDS: Mapping[str, str] = {DISJOINT: "parallel_tasks", SHARED: "joint"}

Option = float | int | str | bool

OPERATOR_SURROGATE = (
    "The utility of what an operator makes of several models is not known; the mean of their utilities stands in for "
    "it."
)


def require_merge(
    *,
    is_operator: bool,
    names: Collection[str],
    weighted: Collection[str],
    merge: str,
    merge_options: Mapping[str, Option],
    tasks: Mapping[str, str],
    records: str | None,
    bound: str,
) -> None:
    """Refuse a merge that does not go with its mechanism, or tasks that do not go with its bound.

    Args:
        is_operator: whether the mechanism is that of a merge operator.
        names: all candidates that the bound covers: those weighted and those consulted.
        weighted: those that are merged.
        merge: the operator.
        merge_options: its options, plain values by name.
        tasks: candidate name -> task, of all `names`; empty where all are of one task.
        records: "disjoint" or "shared" where there are tasks, else None.
        bound: the name of the bound.

    Raises:
        InvalidInput: with the reason.
    """
    require_operator(merge, merge_options)
    if is_operator != (merge != LINEAR or bool(tasks)):
        raise InvalidInput(
            "A merge by an operator, or of several tasks, has the mechanism operator, and no other merge has."
        )
    if not is_operator and merge_options:
        raise InvalidInput("A linear combination of candidates of one task has no merge_options.")
    if is_operator and len(weighted) < 2:
        raise InvalidInput("An operator merges at least two candidates; a single one is released as it is.")
    if bool(tasks) != (records is not None):
        raise InvalidInput("tasks and records go together: state both, or neither where all is one task.")
    expected = "joint" if records is None else task_bound(records)
    if is_operator and bound != expected:
        raise InvalidInput(
            f"What this operator makes of the candidates is covered by the bound {expected}, not by {bound}."
        )
    if not is_operator and bound == "parallel_tasks":
        raise InvalidInput("The bound parallel_tasks covers merges of several tasks; name each candidate's.")
    if tasks:
        require_tasks(tasks, names)
        if len({tasks[name] for name in weighted}) < 2:
            raise InvalidInput("A merge of tasks merges candidates of at least two tasks.")


def require_operator(merge: str, merge_options: Mapping[str, Option]) -> None:
    """Refuse an operator without a name, or options that are not plain values."""
    require_text("merge", merge)
    for name, value in merge_options.items():
        require_text("each name of merge_options", name)
        if not isinstance(value, str | bool | int | float) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise InvalidInput(
                f"merge_options must hold finite numbers, texts or truth values, but {name} is {value!r}."
            )


def require_tasks(tasks: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse tasks that are not those of exactly the named candidates, or no text."""
    lacking = sorted(set(names) - set(tasks))
    if lacking:
        raise InvalidInput(f"Candidate {lacking[0]!r} lacks a task; name the task of every candidate.")
    unknown = sorted(set(tasks) - set(names))
    if unknown:
        raise InvalidInput(f"A task is named for {unknown[0]!r}, which is not among the candidates.")
    for name, task in tasks.items():
        require_text(f"the task of candidate {name}", task)


def task_bound(records: str) -> str:
    """The bound that covers a merge of tasks.

    Raises:
        InvalidInput: neither "disjoint" nor "shared".
    """
    if not isinstance(records, str) or records not in TASK_BOUNDS:
        raise InvalidInput(f"records must be one of {', '.join(TASK_BOUNDS)}, but {records!r} was given.")
    return TASK_BOUNDS[records]
