"""Why nothing on offer fits a budget, and what would."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from accounting.budget import PrivacyBudget
from accounting.errors import AccountingError, BudgetInfeasible
from accounting.joint_release import joint_release, single_run
from accounting.offers import Offers
from accounting.plan import Mechanism
from accounting.release import Release
from accounting.training_hint import training_hint
from accounting.words import rounded_up

_OTHERS = (Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION)


def budget_infeasible(offers: Offers, wanted: Collection[Mechanism], epsilon: float) -> BudgetInfeasible:
    """The error for a budget that no wanted mechanism reaches, with everything that would help."""
    budget = PrivacyBudget(epsilon=epsilon, delta=offers.delta)
    best = min((member.epsilon for member in offers.members), default=None)
    if offers.consulted:
        return _validation(offers, budget)
    helps = [*_other_mechanism(offers, wanted, epsilon), *_set_aside(offers, epsilon)]
    if best is not None and best <= epsilon:  # only a cap on drawn candidates stands in the way
        hint = " or ".join(["raise realised_epsilon_cap", *(helps or ["allow linear_combination"])])
        return BudgetInfeasible(
            f"Candidates fit epsilon {epsilon:g} at delta {offers.delta:g}, but none that may be drawn: {hint}.",
            target=epsilon,
            best=best,
            hint=hint,
        )
    helps += _fresh_noise(offers, epsilon)
    reference = offers.candidates[0].trajectory
    hint = "; or ".join([training_hint(budget, reference, offers.relation), *helps])
    if best is None:
        name = next(c.name for c in offers.candidates if c.name in offers.set_aside)
        reason = offers.set_aside[name].rstrip(".")
        offer = f"none of them can be used ({name} {reason})"
    else:
        offer = f"the smallest epsilon on offer is {rounded_up(best)}"
    return BudgetInfeasible(
        f"No candidate and no merge reaches epsilon {epsilon:g} at delta {offers.delta:g}; {offer}, so {hint}.",
        target=epsilon,
        best=best,
        hint=hint,
    )


def _other_mechanism(offers: Offers, wanted: Collection[Mechanism], epsilon: float) -> list[str]:
    """Mechanisms that were not allowed and that reach the budget."""
    others = [mechanism for mechanism in _OTHERS if mechanism not in wanted]
    return [f"allow {mechanism.value}" for mechanism in others if offers.best(mechanism, epsilon) is not None]


def _set_aside(offers: Offers, epsilon: float) -> list[str]:
    """A candidate that fits on its own, but was not considered for being unlike the others."""
    if offers.selection != "noise":
        return []
    for candidate in offers.incomparable:
        try:
            own = single_run(candidate.trajectory, offers.relation).epsilon(offers.delta)
        except AccountingError:
            continue
        if own <= epsilon:
            return [
                f"state utilities of all candidates: {candidate.name}, set aside because its noise alone cannot be "
                "compared, fits on its own"
            ]
    return []


def _fresh_noise(offers: Offers, epsilon: float) -> list[str]:
    """How much fresh noise on which merge would fit, if it was not allowed."""
    if offers.fresh_allowed or offers.selection != "noise":
        return []
    found = replace(offers, fresh_allowed=True).best(Mechanism.LINEAR_COMBINATION, epsilon)
    if found is None or found.fresh_noise == 0:
        return []
    return [
        f"release {_in_words(found)} with Gaussian noise of standard deviation {found.fresh_noise:.3g} in each "
        "coordinate added once (allow_fresh_noise; policies cannot)"
    ]


def _in_words(release: Release) -> str:
    if len(release.weights) == 1:
        return next(iter(release.weights))
    return " + ".join(f"{weight:.4g} {name}" for name, weight in release.weights.items())


def _validation(offers: Offers, budget: PrivacyBudget) -> BudgetInfeasible:
    """The joint release of all consulted candidates is too much."""
    hint = "consult the scores of fewer or noisier candidates, or choose the weights without looking at private scores"
    try:
        joint = joint_release([c.trajectory for c in offers.candidates], offers.relation).epsilon(
            budget.delta
        )
        offer = f"which has epsilon {rounded_up(joint)}"
    except AccountingError as error:
        offer = f"which could not be accounted ({error.message.rstrip('.')})"
    return BudgetInfeasible(
        f"Scores of {len(offers.candidates)} private candidates were consulted, so their joint release, {offer}, must "
        f"fit epsilon {budget.epsilon:g} at delta {budget.delta:g}: {hint}.",
        target=budget.epsilon,
        best=min((member.epsilon for member in offers.members), default=None),
        hint=hint,
    )
