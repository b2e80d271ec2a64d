"""What to train when nothing on offer fits a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

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

    @cache
    def excess(noise_multiplier: float) -> float:
        """log of the run's epsilon over the budget's: nearly linear in the logarithm of the noise."""
        segments = tuple(replace(s, noise_multiplier=noise_multiplier) for s in reference.segments)
        bound = single_run(replace(reference, segments=segments), relation)
        try:
            return math.log(max(min(bound.epsilon(budget.delta), 1e300), 1e-300) / budget.epsilon)
        except AccountingError:  # this delta is too small to be resolved
            return math.inf

    def fits(noise_multiplier: float) -> bool:
        return excess(noise_multiplier) <= 0

    guess = _first_guess(budget, reference, relation)
    low, high, factor = guess, guess, 1.05
    while not fits(high):
        low, high, factor = high, high * factor, factor**3
        if high > _LARGEST:
            return None
    while low > _SMALLEST and fits(low):
        low, high, factor = low / factor, low, factor**3
    while high / low > 1 + 10.0**-_DIGITS:
        # The secant in the logarithms, kept a little inside the bracket; the middle where there is none.
        rise, fall = excess(low), -excess(high)
        share = rise / (rise + fall) if math.isfinite(rise) and rise + fall > 0 else 0.5
        share = min(max(share, 0.02), 0.98)
        middle = low * (high / low) ** share
        for tried in (middle, middle * (1 + 0.5 * 10.0**-_DIGITS), middle / (1 + 0.5 * 10.0**-_DIGITS)):
            if low < tried < high:
                low, high = (low, tried) if fits(tried) else (tried, high)
    scale = 10.0 ** (math.floor(math.log10(high)) - _DIGITS + 1)
    rounded = math.ceil(high / scale) * scale
    while not fits(float(f"{rounded:.{_DIGITS}g}")):
        rounded += scale
    return float(f"{rounded:.{_DIGITS}g}")


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
