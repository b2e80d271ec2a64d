"""What a network is trained on: its loss, how its scores are read, and what is proven about a regression on it.

The one place that decides it, from the number of scores a row: one score on two-class data is the logit of
class 1, trained on binary cross-entropy; one score a class is trained on cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with the constants of a *regression* on it: one linear map of the row and nothing else.

    For a row of L2 norm at most R, whatever its label, the loss of a regression is convex and
    `smoothness` x R^2-smooth in the parameters, and its gradient has L2 norm at most `steepness` x R.
    """

    loss_name: str
    regression: str  # what a regression on this loss is called
    smoothness: Fraction
    steepness: float
    steepness_in_words: str
    clipping_keeps_it: (
        bool  # whether a gradient clipped to any flat norm is still one of a convex, as smooth loss
    )
    losses: Callable[[Tensor, Tensor], Tensor] = field(repr=False)  # scores, labels (rows,) -> (rows,)
    residuals: Callable[[Tensor, Tensor], Tensor] = field(
        repr=False
    )  # scores, labels -> the derivative of each row's loss by its scores, in the scores' shape


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    import torch  # late: importing torch takes seconds

    return torch.nn.functional.cross_entropy(scores, labels, reduction="none")


def _cross_entropy_residuals(scores: Tensor, labels: Tensor) -> Tensor:
    import torch

    chances = torch.softmax(scores, dim=1)
    chances[torch.arange(len(labels)), labels] -= 1
    return chances


def _binary_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    import torch

    targets = labels.to(scores.dtype)
    return torch.nn.functional.binary_cross_entropy_with_logits(scores[:, 0], targets, reduction="none")


def _binary_cross_entropy_residuals(scores: Tensor, labels: Tensor) -> Tensor:
    import torch

    return torch.sigmoid(scores) - labels.to(scores.dtype)[:, None]


CROSS_ENTROPY = Objective(
    loss_name="cross-entropy",
    regression="softmax regression",
    smoothness=Fraction(1, 2),  # Boehning 1992: diag(p) - p p' has norm at most 1/2
    steepness=math.sqrt(2),  # the gradient is (p - y) x, and p - y is longest between two corners
    steepness_in_words="sqrt(2) R",
    clipping_keeps_it=False,  # clipped, it expands: by 1.047 in an example
    losses=_cross_entropy,
    residuals=_cross_entropy_residuals,
)

BINARY_CROSS_ENTROPY = Objective(
    loss_name="binary cross-entropy with logits",
    regression="logistic regression",
    smoothness=Fraction(1, 4),  # p (1 - p) is at most 1/4
    steepness=1.0,  # the gradient is (p - y) x, and |p - y| < 1
    steepness_in_words="R",
    clipping_keeps_it=True,  # it is a number times x, and Opacus's clipping of that number has a slope in [0, 1]
    losses=_binary_cross_entropy,
    residuals=_binary_cross_entropy_residuals,
)


def objective_for(scores: int, classes: int) -> Objective | None:
    """The objective of a network with `scores` scores a row on data of `classes` classes; None: no fit."""
    if scores == 1 and classes == 2:
        return BINARY_CROSS_ENTROPY
    if scores == classes and classes > 1:
        return CROSS_ENTROPY
    return None


def predicted(scores: Tensor) -> Tensor:
    """The class that a network's scores speak for; shape (rows,).

    Args:
        scores: shape (rows, 1), a logit of class 1 each, or (rows, classes).
    """
    if scores.shape[1] == 1:
        return (scores[:, 0] > 0).long()
    return scores.argmax(dim=1)
