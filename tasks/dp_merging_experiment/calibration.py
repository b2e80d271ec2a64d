"""How much noise each method needs for a budget, by the product's own accounting of the run as it will be executed."""

from __future__ import annotations

from functools import lru_cache

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.calibration import TrainingShape, calibrated_noise
from tasks.dp_merging_experiment.setting import RELATION, Family, Method
from tasks.randomness import executed_probability


def noise_multiplier(family: Family, method: Method, *, epsilon: float, delta: float) -> float:
    """Of each release of a method's step, so that the whole run is (epsilon, delta) private: add-or-remove-one,
    Poisson batches. A paired step releases two gradients of one batch and needs sqrt(2) times the noise."""
    return _calibrated(family.steps, family.sampling_probability, method.is_paired, epsilon, delta)


@lru_cache(maxsize=64)
def _calibrated(
    steps: int, sampling_probability: float, is_paired: bool, epsilon: float, delta: float
) -> float:
    shape = TrainingShape(
        steps=steps,
        relation=NeighboringRelation(RELATION),
        sampling_probability=executed_probability(sampling_probability),
        optimizer="dp_sam" if is_paired else "sgd",
    )
    return calibrated_noise(PrivacyBudget(epsilon=epsilon, delta=delta), shape)
