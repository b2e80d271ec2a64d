"""Early stopping: public-train rows say when a run no longer gets better, and its best parameters are kept.

When a run stops, and which of its parameters are best, depends on private data through the model itself. That is
a function of what all of its steps would give away, so the accounting charges every step of the recipe, taken or
not, and what is proven only for settings fixed in advance is not claimed for such a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.recipes import EarlyStopping

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Progress:
    """How far a run has come, as the public-train rows see it."""

    best_step: int = 0  # 0: not looked at yet
    best_accuracy: float = -1.0
    best: dict[str, Tensor] = field(default_factory=dict, repr=False)  # parameters by name
    looks_without_gain: int = 0

    def saw(self, step: int, accuracy: float, state: Mapping[str, Tensor], settings: EarlyStopping) -> bool:
        """Take a look in; whether the run has gone on long enough without an improvement."""
        if accuracy > self.best_accuracy + (settings.min_improvement if self.best_step else 0.0):
            self.best = {name: tensor.detach().clone() for name, tensor in state.items()}
            self.best_step, self.best_accuracy, self.looks_without_gain = step, accuracy, 0
        else:
            self.looks_without_gain += 1
        return self.looks_without_gain >= settings.patience
