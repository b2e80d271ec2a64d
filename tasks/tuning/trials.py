"""Trials and how they are compared: scores in, a choice out. Pure; nothing is trained here.

**The rule.** A trial *ties* with the best one if its mean accuracy is behind by at most one standard error of the
best's (the one-standard-error rule of Breiman et al. 1984, section 3.4.3). Among the ties the safer setting is taken:
the smallest clipping norm, or the largest batch. The best of many trials is partly the luckiest, so a rule that went by
the highest score alone would follow the luck. A trial that diverged has no score and is never taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accounting.errors import RemergeError

Array = NDArray[np.float64]

NEGLIGIBLE_NOISE = (
    1e-9  # in place of none: a recipe's noise_multiplier is above 0, and this changes no prediction
)
_ROUNDING = 1e-12  # so that exactly one standard error is a tie on every machine


class TuningFailed(RemergeError):
    """The search ended without a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one trial tries; everything else is the recipe's."""

    max_grad_norm: float
    learning_rate: float
    sampling_probability: float  # q in (0, 1]; 1 is full batch
    epsilon: float | None = None  # nats, at the recipe's delta; None: without noise
    noise_multiplier: float = NEGLIGIBLE_NOISE  # of the private run; on fewer public rows it is scaled

    @property
    def is_random(self) -> bool:
        """Whether another seed gives another model."""
        return self.epsilon is not None or self.sampling_probability < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting with what came out of it on the public scoring rows."""

    setting: Setting
    right: Array = field(repr=False, compare=False)  # 1 or 0, shape (seeds, rows); NaN where a run diverged

    @property
    def accuracy(self) -> float:
        """Mean over seeds and rows, in [0, 1]; NaN if a seed diverged."""
        return float(self.right.mean())

    @property
    def standard_error(self) -> float:
        """Of the accuracy, see `standard_error`."""
        return standard_error(self.right)

    @property
    def diverged(self) -> bool:
        return math.isnan(self.accuracy)

    def behind(self, other: Trial) -> tuple[float, float]:
        """How much more accurate `other` is, and the standard error of that, row by row."""
        difference = _by_seed(other.right, self.right) - _by_seed(self.right, other.right)
        return float(difference.mean()), standard_error(difference)


def _by_seed(values: Array, partner: Array) -> Array:
    """One model, of a setting in which nothing is random, stands for every seed of its partner."""
    return np.broadcast_to(values, (max(len(values), len(partner)), values.shape[1]))


def standard_error(values: Array) -> float:
    """Of the mean over seeds and rows: rows are a sample of all rows, and seeds of all noise.

    Args:
        values: shape (seeds, rows), at least two rows.

    Returns:
        The root of (variance over rows of the seeds' mean) / rows + (variance over seeds of the rows' mean) / seeds,
        which counts a little too much rather than too little; with one seed the second part is not known and is 0.
    """
    seeds, rows = values.shape
    squared = float(values.mean(axis=0).var(ddof=1)) / rows
    if seeds > 1:
        squared += float(values.mean(axis=1).var(ddof=1)) / seeds
    return math.sqrt(squared)


def best(trials: Sequence[Trial]) -> Trial:
    """The most accurate trial; of equals the first.

    Raises:
        TuningFailed: every trial diverged, or there is none.
    """
    usable = [trial for trial in trials if not trial.diverged]
    if not usable:
        raise TuningFailed("Every trial diverged; lower the learning_rate in the recipe, then tune again.")
    return max(usable, key=lambda trial: trial.accuracy)


def ties(trials: Sequence[Trial]) -> list[Trial]:
    """The best trial and those within one standard error of it; errors as `best`."""
    leader = best(trials)
    least = leader.accuracy - leader.standard_error - _ROUNDING
    return [trial for trial in trials if trial.accuracy >= least]  # NaN is not


def smallest_norm(trials: Sequence[Trial]) -> Trial:
    """Of the ties the smallest clipping norm; there the more accurate learning rate, then the smaller one."""
    return min(ties(trials), key=lambda t: (t.setting.max_grad_norm, -t.accuracy, t.setting.learning_rate))


def largest_batch(trials: Sequence[Trial]) -> Trial:
    """Of the ties the largest batch; there the more accurate learning rate, then the smaller one."""
    return min(
        ties(trials), key=lambda t: (-t.setting.sampling_probability, -t.accuracy, t.setting.learning_rate)
    )
