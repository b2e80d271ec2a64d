"""What to train when nothing on offer fits a budget."""

from __future__ import annotations

import math
from dataclasses import replace

from accounting import gaussian
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError
from accounting.joint_release import single_run
from accounting.trajectory import Trajectory

_DIGITS = 3
_SMALLEST, _LARGEST = 1e-3, 1e9


def training_hint(budget: PrivacyBudget, reference: Trajectory, relation: NeighboringRelation) -> str:
    """In words: the noise multiplier that brings the reference's recipe within the budget."""
    needed = noise_multiplier_needed(budget, reference, relation)
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

    def fits(noise_multiplier: float) -> bool:
        segments = tuple(replace(s, noise_multiplier=noise_multiplier) for s in reference.segments)
        bound = single_run(replace(reference, segments=segments), relation)
        try:
            return bound.epsilon(budget.delta) <= budget.epsilon
        except AccountingError:
            return False

    guess = _first_guess(budget, reference, relation)
    low, high, factor = guess, guess, 1.01
    while not fits(high):
        low, high, factor = high, high * factor, factor * factor
        if high > _LARGEST:
            return None
    if low == high:
        while low > _SMALLEST and fits(low):
            low, high, factor = low / factor, low, factor * factor
    while high / low > 1 + 10.0**-_DIGITS:
        middle = math.sqrt(low * high)
        if fits(middle):
            high = middle
        else:
            low = middle
    scale = 10.0 ** (math.floor(math.log10(high)) - _DIGITS + 1)
    rounded = math.ceil(high / scale) * scale
    while not fits(float(f"{rounded:.{_DIGITS}g}")):
        rounded += scale
    return float(f"{rounded:.{_DIGITS}g}")


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
