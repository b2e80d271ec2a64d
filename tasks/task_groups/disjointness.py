"""Whether the tasks' private data share a record: asked before the rule for disjoint data may be used.

Records are compared by the exact bytes of their features as they are trained on, after projection. That is the
stricter of the two places to look: rows that are equal before projection are equal after it, and some that differed
before are equal after, such as two long rows of one direction. Labels are not looked at. Where a loader prepares rows
in a way that depends on its arguments, such as by subtracting the public mean of some classes, it hands over digests of
the records as they were before (`Rows.records`; the built-in loaders do), and these are compared too.

**What this cannot see.** Near copies: another scan of a page, a picture with one pixel changed. One record that two
loaders prepare differently without telling what it was, or a table's columns in another order. Two records about one
person, where the person is what should be protected. And why a record is in its task: the rule for disjoint data
also needs that this was decided from that record alone. Where any of this may be, say `records: shared`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from accounting.errors import InvalidInput
from tasks.data import Rows, Splits, record_digests


class NotDisjoint(InvalidInput):
    """Two tasks' private data share records, although the recipe says that they do not."""


def require_disjoint(splits: Mapping[str, Splits], where: str) -> None:
    """Refuse tasks whose private data share a record. Never tells which record, nor how many.

    Args:
        splits: each task's, from `tasks.data.load_splits` with one feature radius.
        where: names the recipe.

    Raises:
        NotDisjoint: naming the first two tasks at fault.
    """
    found = {task: _records(_private(one, task)) for task, one in splits.items()}
    for one, other in combinations(found, 2):
        if not found[one].isdisjoint(found[other]):
            raise NotDisjoint(
                f"{where} says `records: disjoint`, but the private data of the tasks {one} and {other} share records: "
                "split the data by a rule that looks at one record at a time, or say `records: shared`, which accounts "
                "for a record in all tasks."
            )


def require_public_apart(splits: Mapping[str, Splits], where: str) -> None:
    """Refuse a private record that is public in another task, and a gate's record that another task is trained on.

    Within a task `load_splits` has seen to it.

    Raises:
        InvalidInput: naming the first two tasks at fault.
    """
    found = {
        (task, part): _records(rows)
        for task, one in splits.items()
        for part in ("private", "public_train", "public_gate")
        if (rows := getattr(one, part)) is not None
    }
    for (one, part), (other, other_part) in combinations(found, 2):
        if one != other and part != other_part and not found[one, part].isdisjoint(found[other, other_part]):
            raise InvalidInput(
                f"{where}: records are {_words(part)} of task {one} and {_words(other_part)} of task {other}; split "
                "both by a rule that puts copies of a record on one side."
            )


def _records(rows: Rows) -> frozenset[bytes]:
    """All that the rows' records may be known again by."""
    return record_digests(rows.features) | (rows.records or frozenset())


def _words(part: str) -> str:
    return f"among the {part.replace('_', '-')} rows"


def _private(splits: Splits, task: str) -> Rows:
    if splits.private is None:
        raise InvalidInput(f"Whether records are shared needs the private rows of task {task}.")
    return splits.private
