"""Budgets that cover many releases: the best release that they leave room for, and whether what is out keeps them.

Draws count as made, with one exception: a release whose design nothing that came out later could follow may count
as its mixture (theory: Dong, Roth and Su 2022, corollary 3.3; joint convexity). Either statement is sound; the
second no longer is once something was released by somebody who may have seen the draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from accounting.budget import PrivacyBudget
from accounting.errors import AccountingError, BudgetInfeasible, IncompatibleCandidates
from accounting.ledger import PastRelease, cumulative
from accounting.members import epsilon_within
from accounting.plan import Mechanism, Plan
from accounting.trajectory import Candidate, Trajectory, parse_relation
from accounting.words import rounded_up
from infra.documents import Draw, LedgerEntry, Policy, PortfolioManifest
from tasks.past import Past, by_release, has_grown, in_scope, is_out, outcomes_of_plan, release_of
from tasks.solving import solve_policy

# Of the budget. The first ones are for plans that exceed it by a rounding only.
_PARTS = (1 - 1e-9, 1 - 1e-6, 0.9999, 0.99, 0.95, *(part / 20 for part in range(18, 0, -1)), 0.02, 0.01, 1e-3)
_HALVINGS = 8  # of the interval between two parts
SCOPE_WORDS = {
    "release": "this release",
    "region": "all releases of the region together",
    "all_regions": "all releases of the lineage in all regions together",
}


def scope_fault(policy: Policy, entries: Sequence[LedgerEntry], release_id: str) -> str | None:
    """Why a live release breaks a policy whose budget covers many releases, in a sentence; None where it does not.

    All that is out counts, what came later too, with draws as made. The live release's own draw may count as its
    mixture instead, where nothing in the scope came out after its reservation, or nothing else at all.

    Args:
        entries: of the lineage, oldest first.
        release_id: of the live release.
    """
    groups = by_release(entries)
    own = groups.pop(release_id, None)
    if policy.scope == "release" or own is None:
        return None
    others = [
        release_of(group) for group in groups.values() if is_out(group) and in_scope(policy, group[0].region)
    ]
    live = release_of(own)
    counts = [live]
    reserved = [entry for entry in own if entry.kind == "reserved"]
    if live.drawn is not None and (not others or (reserved and not has_grown(entries, reserved, policy))):
        counts.append(replace(live, drawn=None))
    budget = PrivacyBudget(epsilon=policy.epsilon, delta=policy.delta)
    found = []
    try:
        for counted in counts:
            bound = cumulative([*others, counted], parse_relation(policy.neighboring_relation))
            if epsilon_within(bound, budget) is not None:
                return None
            found.append(bound.epsilon(policy.delta))
        spent = f"have epsilon {rounded_up(min(found))} at delta {policy.delta:g}"
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
    draw: Draw | None = None,
    manifest: PortfolioManifest | None = None,
) -> Plan:
    """The best plan whose release, together with the past of the policy's scope, satisfies the budget.

    A plan that has taken its share of the budget before is found again. Where something came out since that it could
    not count, it is made anew, beside that; but once its draw was made it is kept, and must fit as drawn, for others
    may have seen the draw.

    Args:
        draw: the stored draw of this release, where there is one.
        manifest: of the candidates' portfolio, where it may be one of several tasks.

    Raises:
        BudgetInfeasible: the past alone is too much, or nothing fits beside it.
        RemergeError: as `solve_policy`; or the past cannot be accounted together with these candidates.
    """
    if policy.scope == "release":
        return solve_policy(policy, candidates, scores, manifest)
    if past.held is None:
        return _Search(policy, candidates, scores, past, manifest).best()
    now = _Search(policy, candidates, scores, past, manifest)
    if past.grown and draw is None:
        return now.best()
    plan = _Search(policy, candidates, scores, past.held, manifest).best()
    if past.grown and not now.fits(plan, draw):
        assert draw is not None
        raise BudgetInfeasible(
            f"{draw.drawn} was drawn for policy {policy.serial} of {policy.region}, and what was released since leaves "
            "no room for it: set a policy with other terms.",
            target=policy.epsilon,
            best=None,
            hint="set a policy with other terms",
        )
    return plan


class _Search:
    """For the best plan beside a past; each is checked by evaluating the cumulative bound, so the answer holds."""

    def __init__(
        self,
        policy: Policy,
        candidates: Sequence[Candidate],
        scores: Mapping[str, float] | None,
        past: Past,
        manifest: PortfolioManifest | None,
    ) -> None:
        self.policy, self.candidates, self.scores, self.manifest = policy, candidates, scores, manifest
        self.before = past.of_scope(policy)
        self.relation = parse_relation(policy.neighboring_relation)
        self.budget = PrivacyBudget(epsilon=policy.epsilon, delta=policy.delta)

    def fits(self, plan: Plan, draw: Draw | None = None) -> bool:
        """Whether the past and this plan, as its mixture or as drawn, are within the budget."""
        new = PastRelease(
            region=self.policy.region,
            outcomes=outcomes_of_plan(plan, self.candidates, tuple(self.scores or ())),
            drawn=list(plan.outcomes).index(draw.drawn) if draw and draw.drawn in plan.outcomes else None,
        )
        return epsilon_within(cumulative([*self.before, new], self.relation), self.budget) is not None

    def best(self) -> Plan:
        """Tried are the best plan under the whole budget, the best of candidates that are out already, and the best
        under the largest smaller budget that leaves room; a better one may exist."""
        if self.before:
            spent = cumulative(self.before, self.relation)
            if epsilon_within(spent, self.budget) is None:
                raise self._exhausted(spent.epsilon(self.policy.delta), None)
        whole = solve_policy(self.policy, self.candidates, self.scores, self.manifest)
        if self.fits(whole):
            return whole
        found = []
        out = _steps(run for release in self.before for outcome in release.possible for run in outcome.runs)
        exposed = [c for c in self.candidates if _steps([c.trajectory]) <= out]
        if self._has_every_task(exposed) and (plan := self._under(self.policy.epsilon, exposed)) is not None:
            found.append(plan)
        largest = self._largest()
        if largest is not None:
            found.append(largest)
        if not found:
            # Of a plan that scores have chosen nothing is told: it says something about the models looked at.
            own = cumulative(self.before, self.relation).epsilon(self.policy.delta) if self.before else 0.0
            raise self._exhausted(own, None if self.scores else whole)
        # A policy that names an operator asks for a merge: one candidate alone only where nothing else fits.
        return max(found, key=lambda plan: (plan.mechanism is Mechanism.OPERATOR, plan.objective))

    def _largest(self) -> Plan | None:
        """The best plan under the largest part of the budget that leaves room: looked for from the whole downwards,
        for where a plan for one part does not fit, or there is none, one for a larger part still may."""
        high = 1.0
        for part in _PARTS:
            plan = self._under(part * self.policy.epsilon, self.candidates)
            if plan is not None:
                break
            high = part
        else:
            return None
        low = part
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            better = self._under(middle * self.policy.epsilon, self.candidates)
            if better is None:
                high = middle
            else:
                plan, low = better, middle
        return plan

    def _under(self, epsilon: float, some: Sequence[Candidate]) -> Plan | None:
        """The best plan of some candidates under a smaller budget, if it fits the whole one."""
        stricter = self.policy.model_copy(
            update={"epsilon": epsilon, "realised_epsilon_cap": self.policy.cap}
        )
        scores = self.scores
        own = None if scores is None else {c.name: scores[c.name] for c in some if c.name in scores}
        try:
            plan = solve_policy(stricter, some, own, self.manifest)
        except BudgetInfeasible:
            return None
        plan = replace(plan, budget=self.budget)
        return plan if self.fits(plan) else None

    def _has_every_task(self, some: Sequence[Candidate]) -> bool:
        """Whether there is anything to solve with these: a candidate, or one for each task."""
        tasks = None if self.manifest is None else self.manifest.tasks
        return bool(some) and (tasks is None or {tasks[c.name] for c in some} == set(tasks.values()))

    def _exhausted(self, own: float, plan: Plan | None) -> BudgetInfeasible:
        policy = self.policy
        scope = SCOPE_WORDS[policy.scope]
        hint = f"set a larger budget; a policy of scope release would not hold {scope} to any"
        beside = "" if own > policy.epsilon else ", and nothing was found that fits beside it"
        alone = "" if plan is None else f" (alone {rounded_up(plan.epsilon)} would do)"
        return BudgetInfeasible(
            f"The policy allows epsilon {policy.epsilon:g} at delta {policy.delta:g} for {scope}, and what is out "
            f"already has {rounded_up(own)}{beside}{alone}. What is out cannot be taken back: {hint}.",
            target=policy.epsilon,
            best=own,
            hint=hint,
        )


def _steps(runs: Iterable[Trajectory]) -> set[tuple[str, int]]:
    return {(segment.id, segment.steps) for run in runs for segment in run.segments}
