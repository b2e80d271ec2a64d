"""What the ledger holds of merges by operators and of several tasks, and budgets that cover many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import BudgetInfeasible
from accounting.joint_release import joint_release
from accounting.ledger import PastRelease, cumulative
from accounting.parallel_tasks import parallel_tasks
from accounting.plan import Mechanism, Plan
from accounting.solver import solve
from accounting.task_sets import solve_tasks
from accounting.trajectory import Candidate
from tasks.past import outcomes_of_plan, past_of
from tasks.scope import scope_fault, solve_in_scope
from tests.tasks.test_cumulative import CANDIDATES, DELTA, RELATION, Book, joint_of, policy_of
from tests.tasks.test_promotion import candidate

RELEASE = "f" * 64
ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
TASKS = {"c0": "left", "c1": "left", "c2": "right", "c3": "right"}


def by_operator(epsilon: float) -> Plan:
    plan = solve(PrivacyBudget(epsilon=epsilon, delta=DELTA), CANDIDATES, relation=RELATION, merge="average")
    assert plan.mechanism is Mechanism.OPERATOR
    return plan


def test_all_candidates_of_an_operator_count_as_known() -> None:
    book, plan = Book(), by_operator(1.5)
    book.add(1, "eu", plan)
    [outcome] = book.entries[0].outcomes
    assert outcome.coefficients is None
    assert outcome.tasks is None
    assert set(outcome.candidates) == set(plan.weights)
    past = past_of(book.entries, RELEASE)
    assert cumulative(past.releases, RELATION).epsilon(DELTA) == pytest.approx(joint_of(*plan.weights))
    # An average of the same candidates beside it is no news; alone it has a tighter bound than their joint release.
    average = solve(
        PrivacyBudget(epsilon=1.2, delta=DELTA),
        [c for c in CANDIDATES if c.name in plan.weights],
        relation=RELATION,
        mechanisms=["linear_combination"],
    )
    assert len(average.weights) > 1
    book.add(2, "eu", average)
    both = cumulative(past_of(book.entries, RELEASE).releases, RELATION).epsilon(DELTA)
    assert both == pytest.approx(joint_of(*plan.weights))


@pytest.mark.parametrize("scope", ["region", "all_regions"])
def test_an_operator_stays_within_a_budget_of_many_releases(scope: str) -> None:
    book = Book()
    book.add(1, "eu", by_operator(1.2))
    past = past_of(book.entries, RELEASE)
    policy = policy_of("eu", 2.0, scope, merge="ties")
    plan = solve_in_scope(policy, CANDIDATES, None, past)
    assert (plan.mechanism, plan.merge) == (Mechanism.OPERATOR, "ties")
    assert plan.merge_options == {"density": 0.2, "scale": 1.0, "normalize": True}
    new = PastRelease(region="eu", outcomes=outcomes_of_plan(plan, CANDIDATES, ()))
    assert cumulative([*past.releases, new], RELATION).epsilon(DELTA) <= 2.0 * (1 + 1e-12)
    book.add(2, "eu", plan)
    assert scope_fault(policy, book.entries, f"{2:064x}") is None
    alone = solve_in_scope(policy_of("eu", 2.0, merge="ties"), CANDIDATES, None, past)
    assert plan.objective <= alone.objective


def test_an_operator_for_two_gets_two() -> None:
    plan = solve_in_scope(policy_of("eu", 8.0, merge="slerp"), CANDIDATES, None, past_of([], RELEASE))
    assert len(plan.weights) == 2
    several = solve_in_scope(policy_of("eu", 8.0, merge="ties"), CANDIDATES, None, past_of([], RELEASE))
    assert len(several.weights) > 2


DIGESTS = {"left": "1" * 64, "right": "2" * 64}


def run_of(name: str, noise: float, data: str) -> Candidate:
    made = candidate(name, noise, 1.0)
    trajectory = replace(made.trajectory, neighboring_relation=ADD, data_digest=DIGESTS[data])
    return replace(made, trajectory=trajectory)


NOISES = {"c0": 40.0, "c1": 30.0, "c2": 36.0, "c3": 28.0}
GROUP = [run_of(name, noise, TASKS[name]) for name, noise in NOISES.items()]


def of_tasks(group: Sequence[Candidate], epsilon: float = 8.0, records: str = "disjoint") -> Plan:
    tasks = {one.name: TASKS[one.name] for one in group}
    budget = PrivacyBudget(epsilon=epsilon, delta=DELTA)
    return solve_tasks(budget, group, tasks, relation=ADD, records=records)


def figure(book: Book) -> float:
    return cumulative(past_of(book.entries, RELEASE).releases, ADD).epsilon(DELTA)


def book_of(group: Sequence[Candidate], *plans: Plan) -> Book:
    book = Book(group, ADD)
    for number, plan in enumerate(plans, start=1):
        book.add(number, "eu", plan)
    return book


def runs(*names: str) -> list[Any]:
    return [one.trajectory for one in GROUP if one.name in names]


def test_releases_of_the_same_disjoint_tasks_compose_task_by_task() -> None:
    noisy, quiet = of_tasks(GROUP[::2]), of_tasks(GROUP[1::2])
    book = book_of(GROUP, noisy)
    [outcome] = book.entries[0].outcomes
    assert outcome.tasks == {"c0": "left", "c2": "right"}
    assert outcome.coefficients is None
    assert figure(book) == pytest.approx(
        parallel_tasks(runs("c0", "c2"), ADD, ["left", "right"]).epsilon(DELTA)
    )
    both = figure(book_of(GROUP, noisy, quiet))
    tasks = [TASKS[name] for name in TASKS]
    assert both == pytest.approx(parallel_tasks(runs(*TASKS), ADD, tasks).epsilon(DELTA))
    assert both < joint_release(runs(*TASKS), ADD).epsilon(DELTA) * 0.9


def test_shared_records_are_released_jointly() -> None:
    book = book_of(GROUP, of_tasks(GROUP[::2], records="shared"))
    assert book.entries[0].outcomes[0].tasks is None
    assert figure(book) == pytest.approx(joint_release(runs("c0", "c2"), ADD).epsilon(DELTA))


def test_tasks_of_other_data_sets_may_share_records() -> None:
    """Version 2 may have given to one task what version 1 gave to the other: nobody has compared them."""
    exchanged = {"left": "right", "right": "left"}
    later = [run_of(name, NOISES[name], exchanged[TASKS[name]]) for name in ("c1", "c3")]
    book = book_of([*GROUP[::2], *later], of_tasks(GROUP[::2]), of_tasks(later))
    assert figure(book) == pytest.approx(joint_release(runs(*TASKS), ADD).epsilon(DELTA))


def test_a_past_release_of_no_task_may_share_records_with_all() -> None:
    plain = solve(PrivacyBudget(epsilon=8.0, delta=DELTA), GROUP[1:2], relation=ADD)
    both = figure(book_of(GROUP, plain, of_tasks(GROUP[::2])))
    assert both == pytest.approx(joint_release(runs("c0", "c1", "c2"), ADD).epsilon(DELTA))


def test_what_nobody_can_tell_keeps_its_tasks() -> None:
    """Two certificates of one release: everything that either stands for may be out, still task by task."""
    book = Book(GROUP, ADD)
    for epsilon, names in ((8.0, GROUP[::2]), (8.0, GROUP[1::2])):
        book.add(1, "eu", of_tasks(names, epsilon))
    assert figure(book) == pytest.approx(
        parallel_tasks(runs(*TASKS), ADD, [TASKS[name] for name in TASKS]).epsilon(DELTA)
    )


def test_a_budget_of_many_releases_takes_a_candidate_of_each_task() -> None:
    manifest: Any = type("Manifest", (), {"tasks": TASKS, "records": "disjoint"})
    first = of_tasks(GROUP[::2])
    book = book_of(GROUP, first)
    terms = {"neighboring_relation": "add_or_remove_one", "merge": "average"}
    for scope in ("region", "all_regions"):
        policy = policy_of("eu", 2.0, scope, **terms)
        plan = solve_in_scope(policy, GROUP, None, past_of(book.entries, RELEASE), manifest=manifest)
        assert {plan.tasks[name] for name in plan.weights} == {"left", "right"}
        new = PastRelease(region="eu", outcomes=outcomes_of_plan(plan, GROUP, ()))
        assert cumulative([*past_of(book.entries, RELEASE).releases, new], ADD).epsilon(DELTA) <= 2.0
    with pytest.raises(BudgetInfeasible):
        solve_in_scope(
            policy_of("eu", 0.05, "region", **terms),
            GROUP,
            None,
            past_of(book.entries, RELEASE),
            manifest=manifest,
        )
