"""A network's loss and accuracy on public rows, and how sharply the loss rises around its parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from tasks.data import Rows
from tasks.objective import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, predicted
from tasks.validation import SCORED_AT_ONCE

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A network on rows."""

    loss: float  # mean cross-entropy, nats
    accuracy: float  # in [0, 1]


def score(module: nn.Module, rows: Rows) -> Score:
    """Mean loss and accuracy on rows; the network is left in eval mode."""
    import torch

    module.eval()
    total, right = 0.0, 0
    with torch.no_grad():
        for features, labels in _parts(rows):
            scores = module(features)
            total += float(_losses(scores, labels).double().sum())
            right += int((predicted(scores) == labels).sum())
    return Score(loss=total / len(rows), accuracy=right / len(rows))


def sharpness(module: nn.Module, rows: Rows, radius: float) -> float:
    """How much the mean loss rises from the parameters w to `w + radius * g / ||g||`, g the loss's gradient at w.

    The worst point of the ball of that radius to first order, which sharpness-aware minimisation climbs to (Foret et
    al. 2021). 0 where the gradient is 0. A proxy: curvature beyond the gradient's direction is not seen.

    Args:
        module: its trainable parameters are what is moved; they are put back exactly.
        rows: public rows, at least one.
        radius: L2 norm of the move, in the parameters' units, > 0.

    Returns:
        nats; may be below 0 where the loss falls again within the radius.
    """
    import torch

    if not 0 < radius < math.inf:
        raise InvalidInput(f"The radius of a sharpness must be a number above 0, but {radius} was given.")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return 0.0
    module.eval()
    gradients = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained]
    for features, labels in _parts(rows):
        loss = _losses(module(features), labels).sum()
        for total, one in zip(gradients, torch.autograd.grad(loss, trained), strict=True):
            total += one.double()
    length = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    before = score(module, rows).loss
    if not length > 0:
        return 0.0
    kept = [parameter.detach().clone() for parameter in trained]
    try:
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.add_((gradient * (radius / length)).to(parameter.dtype))
        return score(module, rows).loss - before
    finally:
        with torch.no_grad():
            for parameter, old in zip(trained, kept, strict=True):
                parameter.copy_(old)


def _losses(scores: Tensor, labels: Tensor) -> Tensor:
    objective = BINARY_CROSS_ENTROPY if scores.shape[1] == 1 else CROSS_ENTROPY
    return objective.losses(scores, labels)


def _parts(rows: Rows) -> list[tuple[Tensor, Tensor]]:
    import torch

    return [
        (
            torch.tensor(rows.features[start : start + SCORED_AT_ONCE]),
            torch.tensor(rows.labels[start : start + SCORED_AT_ONCE]),
        )
        for start in range(0, len(rows), SCORED_AT_ONCE)
    ]
