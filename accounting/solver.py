"""From a budget and trained candidates to certified weights: no private data, no training, no model read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accounting.averages import best_average, best_single
from accounting.budget import NeighboringRelation, PrivacyBudget, require_positive
from accounting.comparable import comparable_class
from accounting.draws import best_draw
from accounting.errors import BudgetInfeasible, InvalidInput
from accounting.joint_release import executed_steps
from accounting.members import Member, members_of
from accounting.other_bounds import other_bounds
from accounting.plan import Mechanism, Plan
from accounting.release import Release
from accounting.training_hint import training_hint
from accounting.trajectory import Candidate

SELECTIONS = ("noise",)


def solve(
    budget: PrivacyBudget,
    candidates: Sequence[Candidate],
    *,
    relation: NeighboringRelation,
    mechanisms: Sequence[str | Mechanism] = (Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION),
    selection: str = "noise",
    realised_epsilon_cap: float | None = None,
    allow_fresh_noise: bool = False,
) -> Plan:
    """Find the weights of least noise whose release satisfies the budget, and certify them.

    Selection "noise": only candidates that are identical but for their noise are compared, by the noise
    variance that their training left in the parameters (linear combination: `sum lambda_i^2 v_i`; random
    selection: the expectation `sum pi_i v_i`). The largest set of such candidates is solved, the first in
    candidate order among equals; all others are set aside. The rule looks at public hyper-parameters only,
    never at a model, a score or a utility, so choosing the weights costs no privacy.

    Linear combination: a continuous search over weights and sets of runs that share no steps (see
    `merge_search`), certified by the least of the joint, the generic and the shifted bound. It ends in local
    optima of a problem that is not convex, so a better merge may exist; what it returns is certified. For
    runs that only the joint release covers (Poisson sampling, adapted schedules, ...): weights inversely
    proportional to the variances over promising sets.
    Random selection: the exact linear program. One candidate alone keeps its own bound.

    The noise variance compared is what training added to the parameters, `v_i = sum_t nu_t^2`, also where
    updates contract (`update_lipschitz` below 1) and past noise has shrunk by the end: how much it shrinks
    depends on the data, and v is an upper bound on what is left. Fresh noise counts in full beside it.

    Args:
        budget: epsilon in nats and delta.
        candidates: at least one, with distinct names.
        relation: the neighbouring relation of the claim; every candidate must be recorded under it.
        mechanisms: which to consider; the one with the better objective wins.
        selection: what the weights may depend on.
        realised_epsilon_cap: nats; candidates whose own epsilon at the budget's delta exceeds it are never
            drawn by random selection.
        allow_fresh_noise: let a linear combination add Gaussian noise to the merged parameters, once (the
            plan's `fresh_noise`): it reaches budgets below every candidate where updates are Lipschitz.
            Whoever carries the plan out must draw that noise exactly once: two releases with different noise
            on one merge cost more than the certificate says, so a retry has to release the same parameters.
            The pipeline of this product does not do that and leaves it off.

    Returns:
        A plan whose bound was evaluated at the answer.

    Raises:
        BudgetInfeasible: no candidate and no merge fits; says what to train.
        InvalidInput: unknown mechanism or selection, no or repeated candidates, or none comparable.
        IncompatibleCandidates: another relation, or mixed lineages or units.
    """
    wanted, notes = _check(candidates, mechanisms, selection, realised_epsilon_cap)
    executed_steps([candidate.trajectory for candidate in candidates], relation)
    members, set_aside = comparable_class(candidates)
    usable, unusable = members_of(members, budget, relation)
    set_aside |= unusable

    found: dict[Mechanism, Release | None] = {}
    if Mechanism.LINEAR_COMBINATION in wanted:
        found[Mechanism.LINEAR_COMBINATION] = best_average(
            usable, budget, relation, fresh_allowed=allow_fresh_noise
        )
    if Mechanism.RANDOM_SELECTION in wanted:
        drawable = usable
        if realised_epsilon_cap is not None:
            drawable = [member for member in usable if member.epsilon <= realised_epsilon_cap]
            set_aside |= {
                m.candidate.name: f"left out of random selection: its own epsilon of {m.epsilon:.4g} "
                f"exceeds the cap of {realised_epsilon_cap:.4g} on the epsilon of a drawn candidate"
                for m in usable
                if m.epsilon > realised_epsilon_cap
            }
        found[Mechanism.RANDOM_SELECTION] = best_draw(drawable, budget, relation)
    solutions = [solution for solution in found.values() if solution is not None]
    if not solutions:
        raise _infeasible(budget, usable, unusable, members[0], relation)
    best = solutions[0]
    for other in solutions[1:]:
        if other.clearly_better_than(best):
            best = other
    single = best_single(usable, budget, best.mechanism)
    alternatives = [s.as_alternative(str(s.mechanism)) for s in solutions if s is not best]
    if single is not None:
        alternatives.append(single.as_alternative("best_single"))
    used = [member for member in usable if member.candidate.name in best.weights]
    weights = {member.candidate.name: best.weights[member.candidate.name] for member in used}
    return Plan(
        mechanism=best.mechanism,
        weights=weights,
        bound=best.bound,
        budget=budget,
        relation=relation,
        selection=selection,
        epsilon=best.epsilon,
        objective=best.objective,
        member_epsilons={member.candidate.name: member.epsilon for member in used},
        other_bounds=other_bounds(
            best.mechanism,
            tuple(weights.values()),
            [member.candidate.trajectory for member in used],
            relation,
            budget.delta,
            certified=best.bound.name,
            fresh_noise=best.fresh_noise,
        ),
        alternatives=tuple(alternatives),
        set_aside=set_aside,
        notes=notes,
        fresh_noise=best.fresh_noise,
    )


def _check(
    candidates: Sequence[Candidate],
    mechanisms: Sequence[str | Mechanism],
    selection: str,
    realised_epsilon_cap: float | None,
) -> tuple[set[Mechanism], tuple[str, ...]]:
    if not candidates:
        raise InvalidInput("There is no candidate to choose from; train a portfolio first.")
    names = [candidate.name for candidate in candidates]
    if len(set(names)) != len(names):
        raise InvalidInput("Two candidates have the same name; each needs its own.")
    if selection not in SELECTIONS:
        raise InvalidInput(f"selection must be one of {', '.join(SELECTIONS)}, but {selection!r} was given.")
    if realised_epsilon_cap is not None:
        require_positive("realised_epsilon_cap", realised_epsilon_cap)
    try:
        wanted = {Mechanism(mechanism) for mechanism in mechanisms}
    except ValueError:
        known = ", ".join(mechanism.value for mechanism in Mechanism)
        raise InvalidInput(f"mechanisms must be among {known}, but {list(mechanisms)!r} was given.") from None
    notes: tuple[str, ...] = ()
    if Mechanism.MIXTURE in wanted:
        wanted.discard(Mechanism.MIXTURE)
        notes = ("Mixtures of merges were allowed, but are not considered yet.",)
    if not wanted:
        raise InvalidInput(
            "At least one of linear_combination and random_selection must be allowed"
            + ("; mixtures of merges cannot be solved on their own yet." if notes else ".")
        )
    return wanted, notes


def _infeasible(
    budget: PrivacyBudget,
    usable: Sequence[Member],
    unusable: Mapping[str, str],
    reference: Candidate,
    relation: NeighboringRelation,
) -> BudgetInfeasible:
    best = min((member.epsilon for member in usable), default=None)
    if best is not None and best <= budget.epsilon:  # only a cap on drawn candidates stands in the way
        hint = "raise realised_epsilon_cap or allow linear_combination"
        return BudgetInfeasible(
            f"Candidates fit epsilon {budget.epsilon:g} at delta {budget.delta:g}, but none that may be drawn: "
            f"{hint}.",
            target=budget.epsilon,
            best=best,
            hint=hint,
        )
    hint = training_hint(budget, reference.trajectory, relation)
    if best is None:
        name, reason = next(iter(unusable.items()))
        offer = f"none of them can be used ({name} {reason.rstrip('.')})"
    else:
        offer = f"the smallest epsilon on offer is {best:.4g}"
    return BudgetInfeasible(
        f"No candidate and no merge reaches epsilon {budget.epsilon:g} at delta {budget.delta:g}; {offer}, "
        f"so {hint}.",
        target=budget.epsilon,
        best=best,
        hint=hint,
    )
