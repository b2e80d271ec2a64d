"""The modules behind `task_network` and `multi_task_network`; of their own, as they need torch at once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from accounting.errors import InvalidInput


class TaskNetwork(nn.Module):
    """A trunk and the head of one task."""

    def __init__(self, trunk: nn.Module, task: str, classes: int, width: int) -> None:
        """The trunk gives `width` numbers a row."""
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict({task: nn.Linear(width, classes)})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, ...) -> (rows, classes)."""
        (head,) = self.heads.values()
        scores: torch.Tensor = head(shared_features(self.trunk, rows, head.in_features))
        return scores


class MultiTaskNetwork(nn.Module):
    """A trunk and the heads of all tasks, chosen by column 0 of each row."""

    def __init__(
        self, trunk: nn.Module, heads: Mapping[str, int], width: int, shape: tuple[int, ...]
    ) -> None:
        """`heads` in the order of the tasks' numbers."""
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict({task: nn.Linear(width, classes) for task, classes in heads.items()})
        self.shape = shape

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, 1 + product of shape) -> (rows, labels of all tasks)."""
        if rows.ndim != 2 or rows.shape[1] != 1 + math.prod(self.shape):
            raise InvalidInput(
                f"A network for several tasks takes flat rows of 1 + {math.prod(self.shape)} numbers, but rows of "
                f"shape {list(rows.shape[1:])} were given."
            )
        number = rows[:, 0]
        known = torch.arange(len(self.heads), dtype=rows.dtype, device=rows.device)
        if not bool(torch.isin(number, known).all()):
            raise InvalidInput(
                f"Column 0 of a row must hold the number of its task, one of 0 to {len(self.heads) - 1}, but another "
                "was found."
            )
        heads = list(self.heads.values())
        features = shared_features(self.trunk, rows[:, 1:].reshape(-1, *self.shape), heads[0].in_features)
        other = torch.tensor(-math.inf, dtype=features.dtype, device=features.device)
        return torch.cat(
            [
                torch.where((number == task)[:, None], head(features), other)
                for task, head in enumerate(heads)
            ],
            1,
        )


def shared_features(trunk: nn.Module, rows: torch.Tensor, width: int) -> torch.Tensor:
    """What the trunk gives: (rows, width).

    Raises:
        InvalidInput: it gives another shape.
    """
    features: torch.Tensor = trunk(rows)
    if features.shape != (len(rows), width):
        raise InvalidInput(
            f"The trunk must give {width} numbers a row, the width that is stated, but it gave shape "
            f"{list(features.shape[1:])}: correct width, or what the trunk gives."
        )
    return features
