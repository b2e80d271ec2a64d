"""Whether a network takes the data's rows, and what it is to be trained on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from tasks.data import Splits
from tasks.objective import Objective, objective_for
from tasks.recipes import Recipe
from tasks.training.fitness import keep_frozen

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


def require_fit(module: nn.Module, splits: Splits, recipe: Recipe) -> Objective:
    """Try the network on two public rows; what it is to be trained on follows from the scores it gives.

    Raises:
        InvalidInput: it does not take such rows, or gives the wrong number of scores.
    """
    import torch

    rows = splits.public_train
    what = f"The network {recipe.network.factory} of portfolio {recipe.name}"
    try:
        scores = _scores(module.eval(), rows.features[:2])
        training = copy.deepcopy(module).train()
        keep_frozen(training)
        in_training = _scores(training, rows.features[:2])
    except (RuntimeError, ValueError, IndexError) as error:
        raise InvalidInput(
            f"{what} does not take rows of shape {tuple(rows.features.shape[1:])} "
            f"({str(error).splitlines()[0]}); correct its arguments."
        ) from None
    if getattr(scores, "shape", None) != getattr(in_training, "shape", None):
        raise InvalidInput(
            f"{what} gives scores of another shape in training mode than in eval mode; correct it."
        )
    fitting = isinstance(scores, torch.Tensor) and scores.ndim == 2 and len(scores) == len(rows.features[:2])
    objective = objective_for(scores.shape[1], splits.classes) if fitting else None
    if objective is None:
        given = tuple(scores.shape[1:]) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise InvalidInput(
            f"{what} gives scores of shape {given}, but the data have {splits.classes} "
            "classes; correct its arguments: one score a class, or a single one where there are two classes."
        )
    return objective


def _scores(module: nn.Module, rows: np.ndarray) -> Tensor:
    import torch

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        scores: Tensor = module(torch.tensor(rows))
    return scores
