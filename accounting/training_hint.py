"""What to train when nothing on offer fits a budget."""

from __future__ import annotations

import math
from dataclasses import replace

from accounting import gaussian
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError
from accounting.joint_release import single_run
from accounting.least_noise import least_noise
from accounting.trajectory import Trajectory

_DIGITS = 3


def training_hint(budget: PrivacyBudget, reference: Trajectory, relation: NeighboringRelation) -> str:
    """In words: the noise multiplier that brings the reference's recipe within the budget."""
    needed = noise_multiplier_needed(budget, reference, relation)
    if needed is None and not _resolved(budget, reference, relation):
        return (
            "ask for a larger delta: this one is too small for the accounting of Poisson sampling to resolve"
        )
    if needed is None:
        return "train candidates for fewer steps, or ask for a larger epsilon or delta"
    steps = f"{reference.steps} steps" if reference.steps > 1 else "its single step"
    return f"train a candidate with noise_multiplier >= {needed:g} (same recipe, {steps})"


def noise_multiplier_needed(
    budget: PrivacyBudget, reference: Trajectory, relation: NeighboringRelation
) -> float | None:
    """The least noise multiplier, to three digits, at which the reference's recipe alone fits the budget.

    Returns:
        Rounded up and checked by evaluating the run's bound; None where no multiplier up to 1e9 is enough.
    """

    def epsilon_of(noise_multiplier: float) -> float:
        segments = tuple(replace(s, noise_multiplier=noise_multiplier) for s in reference.segments)
        bound = single_run(replace(reference, segments=segments), relation)
        try:
            return bound.epsilon(budget.delta)
        except AccountingError:  # this delta is too small to be resolved
            return math.inf

    return least_noise(epsilon_of, budget.epsilon, _first_guess(budget, reference, relation), _DIGITS)


def _resolved(budget: PrivacyBudget, reference: Trajectory, relation: NeighboringRelation) -> bool:
    try:
        single_run(reference, relation).epsilon(budget.delta)
    except AccountingError:
        return False
    return True


def _first_guess(budget: PrivacyBudget, reference: Trajectory, relation: NeighboringRelation) -> float:
    """As if epsilon depended on the noise as for a Gaussian of mu proportional to its inverse."""
    noise = min(segment.noise_multiplier for segment in reference.segments)
    if noise == 0:
        return 1.0
    try:
        own = single_run(reference, relation).epsilon(budget.delta)
    except AccountingError:
        return noise
    if not math.isfinite(own):
        return noise
    return noise * gaussian.mu_for(own, budget.delta) / gaussian.mu_for(budget.epsilon, budget.delta)
