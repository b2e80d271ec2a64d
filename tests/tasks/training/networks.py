"""Networks as users would bring them: small, with several parameters, by import path."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def perceptron() -> nn.Module:
    """Five numbers in, three scores out; smooth, so that two precisions see the same derivative."""
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutions() -> nn.Module:
    """The five numbers as a line of pixels: convolutions, GroupNorm, and a layer on top."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv1d(4, 2, 2, bias=False),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def sequence() -> nn.Module:
    """The five numbers as five places of a sequence, each seen by the same linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.Linear(1, 3), nn.Tanh(), _MeanOfPlaces(), nn.Linear(3, 3)
    )


class _MeanOfPlaces(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.mean(dim=1)


def dead_start() -> nn.Module:
    """A perceptron whose rows with a negative first entry have no gradient at all: its score is cut off there."""
    return _OnlyPositive()


class _OnlyPositive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows) * (rows[:, :1] > 0)


def one_score() -> nn.Module:
    """For two classes: a perceptron with one score, the logit of class 1."""
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


class ScaledLinear(nn.Module):
    """A layer of a user's own, for which Opacus has no rule."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.scale = nn.Parameter(torch.ones(outputs))
        nn.init.uniform_(self.weight, -0.5, 0.5)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.weight.T) * self.scale


def users_own_layer() -> nn.Module:
    return nn.Sequential(ScaledLinear(5, 4), nn.Linear(4, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))


def by_length() -> nn.Module:
    """A network of a user's own that forgot about rows of zeros."""
    return _ByLength()


class _ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows / rows.norm(dim=1, keepdim=True))


def that_quotes() -> nn.Module:
    """A network of a user's own that fails for batches above 30 rows, which no trial has with hooks, and quotes one."""
    return _Quoting()


class _Quoting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) > 30:
            raise ValueError(f"row {rows[0].tolist()}")
        return self.inner(rows)
