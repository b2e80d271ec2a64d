"""One candidate for each task, merged into one model of all tasks, within a budget.

Where the tasks' records are disjoint the release is covered by parallel composition: under add-or-remove-one each
task has the whole budget for itself. Where they are shared, by the joint release. Either covers the merge whatever
the operator, the tasks' own parts kept beside it, and the candidates themselves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.comparable import comparable_class
from accounting.errors import AccountingError, BudgetInfeasible, InvalidInput
from accounting.joint_release import executed_steps, joint_release
from accounting.members import Member, epsilon_within, members_of
from accounting.merges import (
    DISJOINT,
    LINEAR,
    OPERATOR_SURROGATE,
    Option,
    require_operator,
    require_tasks,
    task_bound,
)
from accounting.other_bounds import other_bounds
from accounting.parallel_tasks import executed_by_task, parallel_tasks
from accounting.plan import Mechanism, Plan
from accounting.selection_rules import VALIDATION, utilities_by, worded
from accounting.training_hint import training_hint
from accounting.trajectory import Candidate, Trajectory
from accounting.words import rounded_up

_MOST_CHOICES = 2_000  # one candidate a task, whose bound is looked at
_MOST_SAMPLED = 40  # of Poisson runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offers:
    """What each task has on offer, the best first, and what covers a choice."""

    by_task: Mapping[str, Sequence[Member]]
    consulted: tuple[str, ...]  # names of candidates that the bound covers whatever is chosen
    set_aside: Mapping[str, str]
    runs: Mapping[str, Trajectory]
    tasks: Mapping[str, str]
    relation: NeighboringRelation
    records: str

    def bound(self, names: Sequence[str]) -> Bound:
        """Of merging these candidates."""
        covered = self.consulted or names
        return bound_of_tasks(
            [self.runs[name] for name in covered],
            [self.tasks[name] for name in covered],
            self.relation,
            self.records,
        )


def solve_tasks(
    budget: PrivacyBudget,
    candidates: Sequence[Candidate],
    tasks: Mapping[str, str],
    *,
    relation: NeighboringRelation,
    records: str,
    selection: str = "noise",
    merge: str = LINEAR,
    merge_options: Mapping[str, Option] = MappingProxyType({}),
    scores: Mapping[str, float] | None = None,
) -> Plan:
    """Choose exactly one candidate of each task so that what is made of them fits the budget, and certify it.

    By "noise" the candidates of least noise variance in sum; within a task they must differ in nothing but their
    noise, as noise does not tell which of two recipes is better. By utilities or scores, those of the best sum. By
    "validation" the bound covers every candidate whose score was consulted.

    Args:
        budget: epsilon in nats and delta.
        candidates: of one lineage, with distinct names, at least one for each task.
        tasks: candidate name -> task, of exactly these candidates; at least two tasks.
        relation: the neighbouring relation of the claim; every candidate must be recorded under it.
        records: "disjoint" where every record is of at most one task and which one was decided from it alone
            (`parallel_tasks.DISJOINT_TASKS`), "shared" otherwise.
        selection: what the choice may depend on, see `selection_rules`.
        merge: the operator, "linear" included.
        merge_options: of the operator, copied into the plan.
        scores: for the two rules by validation.

    Returns:
        A plan of the mechanism "operator", with weights 1/T. Its objective is minus the noise variance of the
        average, `sum v_i / T^2`, or the mean utility.

    Raises:
        BudgetInfeasible: no choice fits; says what to train.
        InvalidInput: tasks, records, utilities or scores missing or out of place, or candidates of one task that
            are not comparable by noise.
        IncompatibleCandidates: another relation, mixed lineages or units, or "disjoint" tasks that share records.
    """
    offers = _offers(budget, candidates, tasks, relation, records, selection, scores)
    require_operator(merge, merge_options)
    chosen = _chosen(offers, budget)
    if chosen is None:
        raise _infeasible(offers, budget, candidates)
    members, bound, epsilon = chosen
    count = len(members)
    by_noise = selection == "noise"
    objective = (
        -math.fsum(member.variance for member in members) / count**2
        if by_noise
        else math.fsum(member.worth for member in members) / count
    )
    used = [member.name for member in members]
    covered = list(offers.consulted or used)
    return Plan(
        mechanism=Mechanism.OPERATOR,
        weights=dict.fromkeys(used, 1 / count),
        bound=replace(bound, assumptions=worded(selection, bound.assumptions)),
        budget=budget,
        relation=relation,
        selection=selection,
        epsilon=epsilon,
        objective=objective,
        member_epsilons={member.name: member.epsilon for member in members},
        other_bounds=other_bounds(
            Mechanism.OPERATOR,
            [1 / count] * count,
            [offers.runs[name] for name in covered],
            relation,
            budget.delta,
            certified=bound.name,
        ),
        set_aside=dict(offers.set_aside),
        notes=() if by_noise else (OPERATOR_SURROGATE,),
        expected_utility=None if by_noise else objective,
        consulted=offers.consulted,
        merge=merge,
        merge_options=dict(merge_options),
        tasks={name: tasks[name] for name in dict.fromkeys([*used, *offers.consulted])},
        records=records,
    )


def bound_of_tasks(
    runs: Sequence[Trajectory], tasks: Sequence[str], relation: NeighboringRelation, records: str
) -> Bound:
    """What covers anything made of these runs: parallel composition where records are disjoint, else all jointly.

    Raises:
        IncompatibleCandidates, InvalidInput: see `parallel_tasks.parallel_tasks`.
    """
    task_bound(records)
    if records == DISJOINT:
        return parallel_tasks(runs, relation, tasks)
    return joint_release(runs, relation)


def _offers(
    budget: PrivacyBudget,
    candidates: Sequence[Candidate],
    tasks: Mapping[str, str],
    relation: NeighboringRelation,
    records: str,
    selection: str,
    scores: Mapping[str, float] | None,
) -> _Offers:
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise InvalidInput("Two candidates have the same name; each needs its own.")
    require_tasks(tasks, names)
    order = list(dict.fromkeys(tasks[name] for name in names))
    if len(order) < 2:
        raise InvalidInput(
            "A merge of tasks needs candidates of at least two tasks; solve one task's by itself."
        )
    runs = {candidate.name: candidate.trajectory for candidate in candidates}
    executed_steps(list(runs.values()), relation)
    utilities = utilities_by(selection, candidates, scores)
    if task_bound(records) == "parallel_tasks":
        executed_by_task(
            list(runs.values()), relation, [tasks[name] for name in names]
        )  # refuses what is shared
    by_task: dict[str, Sequence[Member]] = {}
    set_aside: dict[str, str] = {}
    for task in order:
        own = [candidate for candidate in candidates if tasks[candidate.name] == task]
        if utilities is None:
            _require_comparable(task, own)
        else:
            silent = [candidate.name for candidate in own if candidate.name not in utilities]
            set_aside |= dict.fromkeys(silent, "no score was consulted for it")
            own = [candidate for candidate in own if candidate.name in utilities]
        members, unusable = members_of(own, budget.delta, relation, utilities)
        set_aside |= unusable
        by_task[task] = sorted(members, key=lambda member: member.order)
    consulted = tuple(n for n in names if n in utilities) if utilities and selection == VALIDATION else ()
    return _Offers(
        by_task=by_task,
        consulted=consulted,
        set_aside=set_aside,
        runs=runs,
        tasks=tasks,
        relation=relation,
        records=records,
    )


def _require_comparable(task: str, candidates: Sequence[Candidate]) -> None:
    try:
        _, reasons = comparable_class(candidates)
    except InvalidInput as error:
        raise InvalidInput(f"Task {task}: {error.message}") from None
    for name, reason in reasons.items():
        raise InvalidInput(
            f"Task {task}: {name} is {reason}; offer candidates of one recipe, or state utilities of all (selection "
            "'stated' or 'public_twin')."
        )


def _chosen(offers: _Offers, budget: PrivacyBudget) -> tuple[list[Member], Bound, float] | None:
    """The best choice that fits, the bound that covers it, and its epsilon."""
    sampled = not all(segment.is_full_batch for run in offers.runs.values() for segment in run.segments)
    lists = list(offers.by_task.values())
    if not offers.consulted:  # a release of several is at least a release of each
        lists = [[m for m in own if epsilon_within(m.bound, budget) is not None] for own in lists]
    if not all(lists):
        return None
    left = _MOST_SAMPLED if sampled else _MOST_CHOICES
    quietest = [min(own, key=lambda member: (member.epsilon, member.order)) for own in lists]
    for choice in (*_best_first(lists, left), quietest):
        bound = offers.bound([member.name for member in choice])
        own = epsilon_within(bound, budget)
        if own is not None:
            return list(choice), bound, own
        if offers.consulted:
            return None  # the bound does not depend on the choice
    return None


def _best_first(lists: Sequence[Sequence[Member]], most: int) -> Iterator[list[Member]]:
    """Choices of one of each list, sorted from its best, by falling sum of worths."""

    def worth(places: tuple[int, ...]) -> float:
        return math.fsum(own[place].worth for own, place in zip(lists, places, strict=True))

    first = (0,) * len(lists)
    waiting, seen = [(-worth(first), first)], {first}
    while waiting and most > 0:
        _, places = heapq.heappop(waiting)
        yield [own[place] for own, place in zip(lists, places, strict=True)]
        most -= 1
        for i, place in enumerate(places):
            following = (*places[:i], place + 1, *places[i + 1 :])
            if place + 1 < len(lists[i]) and following not in seen:
                seen.add(following)
                heapq.heappush(waiting, (-worth(following), following))


def _infeasible(offers: _Offers, budget: PrivacyBudget, candidates: Sequence[Candidate]) -> BudgetInfeasible:
    """What stands in the way, and what to train."""
    goal = f"epsilon {budget.epsilon:g} at delta {budget.delta:g}"
    if offers.consulted:
        hint = (
            "consult the scores of fewer or noisier candidates, or choose without looking at private scores"
        )
        message = f"The release of all {len(offers.consulted)} candidates whose scores were consulted exceeds {goal}"
        return BudgetInfeasible(f"{message}: {hint}.", target=budget.epsilon, best=None, hint=hint)
    for task, own in offers.by_task.items():
        least = min((member.epsilon for member in own), default=None)
        if least is None or least > budget.epsilon:
            reference = next(c.trajectory for c in candidates if offers.tasks[c.name] == task)
            hint = f"for task {task}, {training_hint(budget, reference, offers.relation)}"
            known = (
                "none can be used"
                if least is None
                else f"the smallest epsilon on offer is {rounded_up(least)}"
            )
            message = f"No candidate of task {task} reaches {goal} ({known})"
            return BudgetInfeasible(f"{message}: {hint}.", target=budget.epsilon, best=least, hint=hint)
    quietest = [
        min(own, key=lambda member: (member.epsilon, member.order)) for own in offers.by_task.values()
    ]
    best = _epsilon(lambda: offers.bound([member.name for member in quietest]), budget.delta)
    hint = "train noisier candidates, one for each task"
    if offers.records != DISJOINT:
        hint += ", or keep the tasks' records disjoint and say so"
    together = "" if best is None else f" (the least is {rounded_up(best)})"
    message = (
        f"Each task has a candidate within {goal}, but no choice of one for each fits together{together}"
    )
    return BudgetInfeasible(f"{message}: {hint}.", target=budget.epsilon, best=best, hint=hint)


def _epsilon(bound: Callable[[], Bound], delta: float) -> float | None:
    try:
        found = bound().epsilon(delta)
    except AccountingError:
        return None
    return found if math.isfinite(found) else None
