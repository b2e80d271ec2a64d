"""The trunk: small, so that hundreds of private runs fit into an hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.models.sizes import require_counts

if TYPE_CHECKING:
    from torch import nn

_PERCEPTRON = "tasks.dp_merging_experiment.networks:perceptron_trunk"


def perceptron_trunk(features: int, hidden: int, width: int) -> nn.Module:
    """Two linear layers, each with tanh: (rows, ...), flattened to (rows, features), -> (rows, width)."""
    from torch import nn  # late: importing torch takes seconds

    require_counts(_PERCEPTRON, features=features, hidden=hidden, width=width)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Tanh()
    )
