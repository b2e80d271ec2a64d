"""Loss along the straight path from a task's own model to the merge: a barrier on it explains a merge gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows
from tasks.diagnostics.losses import score
from tasks.models import network_with

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPoint:
    """A network between two others."""

    position: float  # 0: the first model; 1: the second
    loss: float  # mean cross-entropy on public rows, nats
    accuracy: float  # in [0, 1]


def along_path(
    network: NetworkRecord,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    rows: Rows,
    *,
    points: int = 11,
) -> tuple[PathPoint, ...]:
    """Loss and accuracy at evenly spaced points of the segment between two models.

    Args:
        network: of both.
        first, second: parameters by name; what is not floating point is taken from the first.
        rows: public rows.
        points: at least 2; both ends, which are exactly the two models, are among them.
    """
    if points < 2:
        raise InvalidInput(f"A path needs at least its 2 ends, but {points} points were asked for.")
    found = []
    for number in range(points):
        position = number / (points - 1)
        measured = score(network_with(network, _between(first, second, position)), rows)
        found.append(PathPoint(position=position, loss=measured.loss, accuracy=measured.accuracy))
    return tuple(found)


def barrier(path: tuple[PathPoint, ...]) -> float:
    """How far the loss rises above the straight line between its ends, nats; 0 where it never does."""
    start, end = path[0].loss, path[-1].loss
    return max(0.0, *(p.loss - ((1 - p.position) * start + p.position * end) for p in path))


def _between(first: Mapping[str, Tensor], second: Mapping[str, Tensor], position: float) -> dict[str, Tensor]:
    if position in (0.0, 1.0):
        return dict(second if position else first)
    return {
        name: ((1 - position) * tensor.double() + position * second[name].double()).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in first.items()
    }
