"""What a lineage's ledger has given away so far, and the best release that a cumulative budget still covers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate_parts import Cumulative
from accounting.errors import AccountingError, BudgetInfeasible, IncompatibleCandidates, RemergeError
from accounting.ledger import Outcome, PastRelease, cumulative
from accounting.members import epsilon_within
from accounting.plan import Plan
from accounting.trajectory import Candidate, Segment, Trajectory, parse_relation, segment_from_dict
from accounting.words import rounded_up
from infra.documents import Draw, LedgerEntry, LedgerOutcome, Policy
from tasks.solving import solve_policy

_HALVINGS = 12  # of the interval in which the largest release that still fits is sought
SCOPE_WORDS = {
    "release": "this release",
    "region": "all releases of the region together",
    "all_regions": "all releases of the lineage in all regions together",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The releases of a lineage that are out, or may be, for all that the ledger says."""

    releases: tuple[PastRelease, ...]
    entries: int  # of the ledger, that were read
    is_new: bool = True  # the release that is being made is not in the ledger yet

    def of_scope(self, policy: Policy) -> tuple[PastRelease, ...]:
        """Those whose cost the policy's budget must cover beside the new release."""
        if policy.scope == "release":
            return ()
        return tuple(r for r in self.releases if policy.scope == "all_regions" or r.region == policy.region)


def past_of(entries: Sequence[LedgerEntry], release_id: str) -> Past:
    """The past of a release: all others in the ledger as it was when the release was first written into it.

    Every kind of entry counts, failed checks and merely intended releases too: more may have been seen than the
    ledger can tell. A release of which only a reservation is known counts with everything that it could be.

    Args:
        entries: of one lineage, oldest first.
        release_id: of the release that is being made, which is not its own past; a retry finds the same past.
    """
    own = next((entry for entry in entries if entry.release_id == release_id), None)
    counted = entries[: own.counted] if own is not None else entries
    by_release: dict[str, list[LedgerEntry]] = {}
    for entry in counted:
        by_release.setdefault(entry.release_id, []).append(entry)
    releases = tuple(_release(group) for name, group in by_release.items() if name != release_id)
    return Past(releases=releases, entries=len(counted), is_new=own is None)


def outcomes_of_plan(
    plan: Plan, candidates: Sequence[Candidate], consulted: Sequence[str]
) -> tuple[Outcome, ...]:
    """What a plan may release; consulted candidates are known with every outcome."""
    trajectories = {candidate.name: candidate.trajectory for candidate in candidates}
    found = []
    for name, probability in plan.outcomes.items():
        merged = plan.merged_weights(name)
        names = list(dict.fromkeys([*merged, *consulted, *plan.consulted]))
        alone = len(names) == len(merged) and not (consulted or plan.consulted)
        found.append(
            Outcome(
                probability=probability,
                runs=tuple(trajectories[each] for each in names),
                weights=tuple(merged.values()) if alone else None,
            )
        )
    return tuple(found)


def figures_after(
    past: Past,
    policy: Policy,
    plan: Plan,
    draw: Draw | None,
    candidates: Sequence[Candidate],
    consulted: Sequence[str],
) -> Cumulative | None:
    """The cumulative figures after a plan was carried out, its draw known; see `figures`."""
    new = PastRelease(
        region=policy.region,
        outcomes=outcomes_of_plan(plan, candidates, consulted),
        drawn=None if draw is None else list(plan.outcomes).index(draw.drawn),
    )
    return figures(past, new, parse_relation(policy.neighboring_relation), policy.delta)


def figures(past: Past, new: PastRelease, relation: NeighboringRelation, delta: float) -> Cumulative | None:
    """The cumulative figures after a release, for its certificate; None where none can be computed.

    That is so where the lineage has releases under another neighbouring relation, or `delta` is too small.
    """
    here = [release for release in past.releases if release.region == new.region]
    try:
        everywhere = cumulative([*past.releases, new], relation).epsilon(delta)
        region = cumulative([*here, new], relation).epsilon(delta)
    except (AccountingError, IncompatibleCandidates):
        return None
    if not math.isfinite(everywhere):
        return None
    return Cumulative(
        epsilon_all_regions=everywhere,
        epsilon_region=region,
        delta=delta,
        releases=len(past.releases) + 1,
        after_ledger_entry=past.entries,
    )


def scope_fault(policy: Policy, entries: Sequence[LedgerEntry], release_id: str) -> str | None:
    """Why a live release breaks a policy whose budget covers many releases, in a sentence; None where it does not.

    Everything in the ledger counts, later entries too: past draws as realised, the live release as its mixture.
    """
    own = [entry for entry in entries if entry.release_id == release_id]
    if policy.scope == "release" or not own:
        return None
    others = past_of([entry for entry in entries if entry.release_id != release_id], release_id)
    live = replace(_release(own), drawn=None)
    relation = parse_relation(policy.neighboring_relation)
    budget = PrivacyBudget(epsilon=policy.epsilon, delta=policy.delta)
    try:
        together = cumulative([*others.of_scope(policy), live], relation)
        if epsilon_within(together, budget) is not None:
            return None
        spent = f"have epsilon {rounded_up(together.epsilon(policy.delta))} at delta {policy.delta:g}"
    except (AccountingError, IncompatibleCandidates) as error:
        spent = f"cannot be accounted ({error.message.rstrip('.')})"
    return (
        f"{SCOPE_WORDS[policy.scope].capitalize()} {spent}, which does not satisfy the policy's epsilon "
        f"{policy.epsilon:g}."
    )


def solve_in_scope(
    policy: Policy,
    candidates: Sequence[Candidate],
    scores: Mapping[str, float] | None,
    past: Past,
) -> Plan:
    """The best plan whose release, together with the past of the policy's scope, satisfies the budget.

    Tried are the best plan under the whole budget, the best of candidates that are out already, and the best under
    the largest smaller budget that leaves room; each is checked by evaluating the cumulative bound, so the answer
    holds, though a better one may exist.

    Raises:
        BudgetInfeasible: the past alone is too much, or nothing fits beside it.
        RemergeError: as `solve_policy`; or the past cannot be accounted together with these candidates.
    """
    before = past.of_scope(policy)
    if not before:
        return solve_policy(policy, candidates, scores)
    relation = parse_relation(policy.neighboring_relation)
    budget = PrivacyBudget(epsilon=policy.epsilon, delta=policy.delta)
    consulted = tuple(scores or ())

    def fits(plan: Plan) -> bool:
        new = PastRelease(region=policy.region, outcomes=outcomes_of_plan(plan, candidates, consulted))
        return epsilon_within(cumulative([*before, new], relation), budget) is not None

    def plan_under(epsilon: float, some: Sequence[Candidate]) -> Plan | None:
        stricter = policy.model_copy(update={"epsilon": epsilon, "realised_epsilon_cap": policy.cap})
        own = None if scores is None else {c.name: scores[c.name] for c in some if c.name in scores}
        try:
            plan = solve_policy(stricter, some, own)
        except BudgetInfeasible:
            return None
        plan = replace(plan, budget=budget)
        return plan if fits(plan) else None

    spent = epsilon_within(cumulative(before, relation), budget)
    if spent is None:
        raise _exhausted(policy, cumulative(before, relation), None)
    whole = solve_policy(policy, candidates, scores)
    if fits(whole):
        return whole
    found = []
    out = _steps(before)
    exposed = [c for c in candidates if _steps_of_runs([c.trajectory]) <= out]
    if exposed and (plan := plan_under(policy.epsilon, exposed)) is not None:
        found.append(plan)
    low, high = 0.0, policy.epsilon
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        plan = plan_under(middle, candidates)
        if plan is None:
            high = middle
            if low == 0.0 and middle < policy.epsilon * 1e-3:
                break
        else:
            found.append(plan)
            low = middle
    if not found:
        # Of a plan that scores have chosen nothing is told: it says something about the models that were looked at.
        raise _exhausted(policy, cumulative(before, relation), None if consulted else whole)
    return max(found, key=lambda plan: plan.objective)


def _exhausted(policy: Policy, spent: Bound, plan: Plan | None) -> BudgetInfeasible:
    own = spent.epsilon(policy.delta)
    what = f"epsilon {policy.epsilon:g} at delta {policy.delta:g} for {SCOPE_WORDS[policy.scope]}"
    hint = f"set a larger budget; a policy of scope release would not hold {SCOPE_WORDS[policy.scope]} to any"
    beside = "" if own > policy.epsilon else ", and nothing was found that fits beside it"
    alone = "" if plan is None else f" (alone {rounded_up(plan.epsilon)} would do)"
    return BudgetInfeasible(
        f"The policy allows {what}, and what is out already has {rounded_up(own)}{beside}{alone}. What is out "
        f"cannot be taken back: {hint}.",
        target=policy.epsilon,
        best=own,
        hint=hint,
    )


def _steps(releases: Sequence[PastRelease]) -> set[tuple[str, int]]:
    return _steps_of_runs(
        [run for release in releases for outcome in release.possible for run in outcome.runs]
    )


def _steps_of_runs(runs: Sequence[Trajectory]) -> set[tuple[str, int]]:
    return {(segment.id, segment.steps) for run in runs for segment in run.segments}


def _release(entries: Sequence[LedgerEntry]) -> PastRelease:
    """One release from all its entries."""
    certified = [entry for entry in entries if entry.certificate_digest is not None]
    told = {(entry.drawn, *(outcome.sha256() for outcome in entry.outcomes)) for entry in certified}
    if len(told) == 1:
        entry = certified[0]
        outcomes = tuple(_outcome(entry, outcome) for outcome in entry.outcomes)
        names = [outcome.name for outcome in entry.outcomes]
        if len(names) == 1 or entry.drawn in names:
            drawn = None if len(names) == 1 else names.index(str(entry.drawn))
            return PastRelease(region=entry.region, outcomes=outcomes, drawn=drawn)
    runs = [
        run for entry in entries for each in entry.outcomes for run in _outcome(entry, each).runs
    ]  # nobody can tell which of these came out: all of them may have
    return PastRelease(region=entries[0].region, outcomes=(Outcome(probability=1.0, runs=tuple(runs)),))


def _outcome(entry: LedgerEntry, outcome: LedgerOutcome) -> Outcome:
    segments = {segment.id: segment for segment in map(segment_from_dict, outcome.segments)}
    runs = {name: _run(entry, path, segments) for name, path in outcome.paths.items()}
    if outcome.coefficients is None:
        return Outcome(probability=outcome.weight, runs=tuple(runs.values()))
    return Outcome(
        probability=outcome.weight,
        runs=tuple(runs[name] for name in outcome.coefficients),
        weights=tuple(outcome.coefficients.values()),
    )


def _run(entry: LedgerEntry, path: Sequence[tuple[str, int]], segments: Mapping[str, Segment]) -> Trajectory:
    """A run as the ledger knows it: its steps, and whose records it used."""
    return Trajectory(
        portfolio="ledger",
        lineage=entry.lineage,
        unit=entry.unit,
        neighboring_relation=parse_relation(entry.neighboring_relation),
        data_digest="ledger",
        initialisation_digest="ledger",
        feature_radius=None,
        n_max=None,
        segments=tuple(replace(segments[name], steps=steps) for name, steps in path),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Cumulative epsilons of a lineage; None, and a reason, where there is no finite one."""

    everywhere: float | None  # nats
    by_region: Mapping[str, float | None]  # nats
    counts: Mapping[str, int]  # releases by region
    reason: str | None


def ledger_figures(entries: Sequence[LedgerEntry], delta: float) -> Figures:
    """What everything in a ledger costs together, over all regions and for each.

    Args:
        entries: of one lineage, oldest first, at least one.
        delta: where the epsilons are taken.
    """
    releases = past_of(entries, "").releases
    regions = sorted({release.region for release in releases})
    counts = {region: sum(release.region == region for release in releases) for region in regions}
    relation = parse_relation(entries[0].neighboring_relation)
    reasons: list[str] = []

    def epsilon(some: Sequence[PastRelease]) -> float | None:
        try:
            found = cumulative(some, relation).epsilon(delta)
        except RemergeError as error:
            reasons.append(error.message)
            return None
        if not math.isfinite(found):
            reasons.append("A run without noise was released, so there is no finite epsilon.")
            return None
        return found

    by_region = {region: epsilon([r for r in releases if r.region == region]) for region in regions}
    everywhere = epsilon(releases)
    return Figures(
        everywhere=everywhere, by_region=by_region, counts=counts, reason=reasons[0] if reasons else None
    )
