"""From a budget and trained candidates to certified weights: no private data, no training, no model read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from accounting.averages import best_single
from accounting.budget import NeighboringRelation, PrivacyBudget, require_count, require_positive
from accounting.errors import InvalidInput
from accounting.infeasible import budget_infeasible
from accounting.joint_release import executed_steps
from accounting.merges import LINEAR, OPERATOR_SURROGATE, Option, require_operator
from accounting.offers import Offers, offers_of
from accounting.operator_sets import best_operator_set
from accounting.other_bounds import other_bounds
from accounting.plan import CHOICES, Alternative, Mechanism, Plan
from accounting.release import Release
from accounting.selection_rules import SURROGATE, worded
from accounting.trajectory import Candidate

_AVERAGE = Mechanism.LINEAR_COMBINATION


def solve(
    budget: PrivacyBudget,
    candidates: Sequence[Candidate],
    *,
    relation: NeighboringRelation,
    mechanisms: Sequence[str | Mechanism] = (Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION),
    selection: str = "noise",
    realised_epsilon_cap: float | None = None,
    allow_fresh_noise: bool = False,
    scores: Mapping[str, float] | None = None,
    merge: str = LINEAR,
    merge_options: Mapping[str, Option] = MappingProxyType({}),
    set_size: int | None = None,
) -> Plan:
    """Find the best weights whose release satisfies the budget, and certify them.

    What "best" means is up to the selection rule (see `selection_rules`). By "noise", the default, only
    candidates that are identical but for their noise are compared, by the noise variance that their training
    left in the parameters (linear combination: `sum lambda_i^2 v_i`; random selection: the expectation
    `sum pi_i v_i`). The largest set of such candidates is solved, the first in candidate order among equals;
    all others are set aside. The rule looks at public hyper-parameters only, never at a model, a score or a
    utility, so choosing the weights costs no privacy. By "stated" and "public_twin" all candidates are
    compared by `Candidate.utility`; by "validation" and "validation_unaccounted" by `scores`.

    Linear combination: a continuous search over weights and sets of runs that share no steps (see
    `merge_search`), certified by the least of the joint, the generic and the shifted bound. It ends in local
    optima of a problem that is not convex, so a better merge may exist; what it returns is certified. For
    runs that only the joint release covers (Poisson sampling, adapted schedules, ...): weights inversely
    proportional to the variances over promising sets. By utilities, `sum lambda_i u_i` stands in for the
    merge's unknown utility, and the plan's notes say so (`selection_rules.SURROGATE`).
    Random selection: the exact linear program over all candidates. One candidate alone keeps its own bound.
    Mixture: the exact linear program over a pool of averages and single candidates (see `mixtures`), which is
    never worse than both of the above; it is chosen only where it is better.

    The noise variance compared is what training added to the parameters, `v_i = sum_t nu_t^2`, also where
    updates contract (`update_lipschitz` below 1), so that past noise has shrunk by the end: how much depends
    on the data, and v is an upper bound on what is left. Fresh noise counts in full beside it.

    Another `merge` than "linear" (TIES, Fisher, ...) is covered by the joint release of what it merges, whatever
    it computes: the best set of at least two candidates is sought whose joint release fits (`operator_sets`), and
    `mechanisms` are not asked. Where none fits, the best single candidate is released, and the notes say so.

    Args:
        budget: epsilon in nats and delta.
        candidates: at least one, with distinct names.
        relation: the neighbouring relation of the claim; every candidate must be recorded under it.
        mechanisms: which to consider; the one with the better objective wins.
        selection: what the weights may depend on.
        realised_epsilon_cap: nats; candidates whose own epsilon at the budget's delta exceeds it are never
            drawn by random selection; nor, in a mixture, merges whose own epsilon does.
        allow_fresh_noise: let a linear combination add Gaussian noise to the merged parameters, once (the
            plan's `fresh_noise`): it reaches budgets below every candidate where updates are Lipschitz.
            Whoever carries the plan out must draw that noise exactly once: two releases with different noise
            on one merge cost more than the certificate says, so a retry has to release the same parameters.
            The pipeline of this product does not do that and leaves it off. By "noise" only: no stated
            utility tells what fresh noise costs.
        scores: for the two rules by validation: by name, of the private candidates whose scores were
            consulted, which alone may get a weight.
        merge: the operator. By "noise" it gets weights inverse to the noise variances, otherwise equal ones; by
            "validation" all consulted candidates are merged.
        merge_options: of the operator, copied into the plan; none for "linear".
        set_size: exactly so many candidates for the operator, >= 2, as for one that merges two.

    Returns:
        A plan whose bound was evaluated at the answer.

    Raises:
        BudgetInfeasible: nothing fits; says what to train, and what else would help.
        InvalidInput: unknown mechanism or selection, no or repeated candidates, none comparable by noise,
            utilities or scores missing or out of place, fresh noise for an operator, or options for none.
        IncompatibleCandidates: another relation, or mixed lineages or units.
    """
    _check_merge(merge, merge_options, set_size, allow_fresh_noise)
    if merge != LINEAR:
        mechanisms = (_AVERAGE,)
    offers, wanted = offers_for(
        candidates,
        budget.delta,
        relation=relation,
        mechanisms=mechanisms,
        selection=selection,
        scores=scores,
        realised_epsilon_cap=realised_epsilon_cap,
        allow_fresh_noise=allow_fresh_noise,
    )
    if merge != LINEAR:
        return _by_operator(merge, merge_options, set_size, budget, offers)
    releases = list(offers.best_of_each(wanted, budget.epsilon).values())
    if not releases:
        raise budget_infeasible(offers, wanted, budget.epsilon)
    best = releases[0]
    for other in releases[1:]:
        if other.clearly_better_than(best):
            best = other
    alternatives = [r.as_alternative(str(r.mechanism)) for r in releases if r is not best]
    alone = Mechanism.RANDOM_SELECTION if best.mechanism is Mechanism.RANDOM_SELECTION else _AVERAGE
    single = None if offers.consulted else best_single(offers.members, budget, alone)
    if single is not None:
        alternatives.append(single.as_alternative("best_single"))
    notes = (SURROGATE,) if offers.selection != "noise" and best.merges_several else ()
    return plan_of(best, budget, offers, wanted, alternatives=tuple(alternatives), notes=notes)


def _by_operator(
    merge: str,
    merge_options: Mapping[str, Option],
    set_size: int | None,
    budget: PrivacyBudget,
    offers: Offers,
) -> Plan:
    """The best set for an operator, or the best single candidate where no set fits."""
    single = best_single(offers.members, budget, _AVERAGE)
    if offers.consulted:
        release = offers.best(_AVERAGE, budget.epsilon)  # of all consulted, whichever are merged
        if release is not None and len(offers.members) >= (set_size or 2):
            merged = sorted(offers.members, key=lambda member: member.order)[:set_size]
            release = replace(
                release,
                mechanism=Mechanism.OPERATOR,
                weights={member.name: 1 / len(merged) for member in merged},
                objective=math.fsum(member.worth for member in merged) / len(merged),
            )
        alternatives: tuple[Alternative, ...] = ()
    else:
        release = best_operator_set(offers.members, budget, offers.relation, set_size) or single
        alternatives = () if single is None else (single.as_alternative("best_single"),)
    if release is None:
        raise budget_infeasible(offers, {_AVERAGE}, budget.epsilon)
    if release.mechanism is Mechanism.OPERATOR:
        notes = () if offers.selection == "noise" else (OPERATOR_SURROGATE,)
        return plan_of(
            release,
            budget,
            offers,
            {_AVERAGE},
            alternatives=alternatives,
            notes=notes,
            merge=merge,
            merge_options=merge_options,
        )
    wanted = "two candidates" if set_size is None else f"{set_size} candidates"
    note = f"No {wanted} fit the budget together, so {merge} has nothing to merge: one candidate is released alone."
    return plan_of(release, budget, offers, {_AVERAGE}, alternatives=alternatives[:0], notes=(note,))


def offers_for(
    candidates: Sequence[Candidate],
    delta: float,
    *,
    relation: NeighboringRelation,
    mechanisms: Sequence[str | Mechanism],
    selection: str,
    scores: Mapping[str, float] | None,
    realised_epsilon_cap: float | None,
    allow_fresh_noise: bool,
) -> tuple[Offers, set[Mechanism]]:
    """Check a request of `solve`, and lay out the candidates as its selection rule considers them.

    Raises:
        InvalidInput, IncompatibleCandidates: see `solve`.
    """
    wanted = _check(candidates, mechanisms, realised_epsilon_cap)
    executed_steps([candidate.trajectory for candidate in candidates], relation)
    offers = offers_of(
        candidates,
        delta,
        relation,
        selection=selection,
        scores=scores,
        cap=realised_epsilon_cap,
        fresh_allowed=allow_fresh_noise,
    )
    return offers, wanted


def plan_of(
    release: Release,
    budget: PrivacyBudget,
    offers: Offers,
    wanted: Collection[Mechanism],
    *,
    alternatives: tuple[Alternative, ...],
    notes: tuple[str, ...],
    merge: str = LINEAR,
    merge_options: Mapping[str, Option] = MappingProxyType({}),
) -> Plan:
    """Everything that is said about a release."""
    used = [member for member in offers.members if member.name in release.weights]
    weights = {member.name: release.weights[member.name] for member in used}
    covered = [c.trajectory for c in offers.candidates if c.name in offers.consulted]
    set_aside = dict(offers.set_aside)
    if Mechanism.RANDOM_SELECTION in wanted and not offers.consulted:
        set_aside |= {
            member.name: f"left out of random selection: its own epsilon of {member.epsilon:.4g} exceeds the cap of "
            f"{offers.cap:.4g} on the epsilon of a drawn candidate"
            for member in offers.members
            if offers.cap is not None and member.epsilon > offers.cap
        }
    return Plan(
        mechanism=release.mechanism,
        weights=weights,
        bound=replace(release.bound, assumptions=worded(offers.selection, release.bound.assumptions)),
        budget=budget,
        relation=offers.relation,
        selection=offers.selection,
        epsilon=release.epsilon,
        objective=release.objective,
        member_epsilons={member.name: member.epsilon for member in used},
        other_bounds=other_bounds(
            Mechanism.MIXTURE if covered else release.mechanism,
            tuple(weights.values()),
            covered or [member.candidate.trajectory for member in used],
            offers.relation,
            budget.delta,
            certified=release.bound.name,
            fresh_noise=release.fresh_noise,
        ),
        alternatives=alternatives,
        set_aside=set_aside,
        notes=notes,
        fresh_noise=release.fresh_noise,
        expected_utility=None if offers.selection == "noise" else release.objective,
        consulted=offers.consulted,
        components=release.components,
        merge=merge,
        merge_options=dict(merge_options),
    )


def _check_merge(
    merge: str, merge_options: Mapping[str, Option], set_size: int | None, allow_fresh_noise: bool
) -> None:
    require_operator(merge, merge_options)
    if merge == LINEAR:
        if merge_options or set_size is not None:
            raise InvalidInput("merge_options and set_size belong to an operator; a linear merge has none.")
        return
    if set_size is not None and require_count("set_size", set_size) < 2:
        raise InvalidInput(
            f"set_size must be at least 2, but {set_size!r} was given: an operator merges several."
        )
    if allow_fresh_noise:
        raise InvalidInput(
            f"No bound credits fresh noise on what {merge} makes of the candidates; do not allow it, or merge linearly."
        )


def _check(
    candidates: Sequence[Candidate],
    mechanisms: Sequence[str | Mechanism],
    realised_epsilon_cap: float | None,
) -> set[Mechanism]:
    if not candidates:
        raise InvalidInput("There is no candidate to choose from; train a portfolio first.")
    names = [candidate.name for candidate in candidates]
    if len(set(names)) != len(names):
        raise InvalidInput("Two candidates have the same name; each needs its own.")
    if realised_epsilon_cap is not None:
        require_positive("realised_epsilon_cap", realised_epsilon_cap)
    try:
        wanted = {Mechanism(mechanism) for mechanism in mechanisms}
    except ValueError:
        known = ", ".join(mechanism.value for mechanism in CHOICES)
        raise InvalidInput(f"mechanisms must be among {known}, but {list(mechanisms)!r} was given.") from None
    if not wanted:
        raise InvalidInput("At least one mechanism must be allowed.")
    if Mechanism.OPERATOR in wanted:
        raise InvalidInput("Name the operator as merge; it is not one of the mechanisms to choose from.")
    return wanted
