"""What the ledger has given away, read back from its entries, and budgets that cover many releases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import BudgetInfeasible
from accounting.joint_release import joint_release
from accounting.ledger import PastRelease, cumulative
from accounting.plan import Mechanism, Plan
from accounting.solver import solve
from accounting.trajectory import Candidate
from infra.documents import LedgerEntry, Policy
from tasks.cumulative import figures, ledger_figures, outcomes_of_plan, past_of, solve_in_scope
from tasks.promotion import ledger_fields
from tests.tasks.test_promotion import candidate, draw_of

RELATION = NeighboringRelation.REPLACE_ONE
CANDIDATES = [candidate(f"c{i}", noise, 1.0) for i, noise in enumerate((64.0, 34.0, 18.0, 10.0))]
DELTA = 1e-5


def policy_of(region: str, epsilon: float, scope: str = "release", **more: Any) -> Policy:
    return Policy.from_fields(
        {
            "region": region,
            "serial": 1,
            "epsilon": epsilon,
            "delta": DELTA,
            "portfolio": "clinic@1",
            "scope": scope,
            "effective_at": "2026-01-01T00:00:00Z",
            "author": "test",
            **more,
        },
        "policy",
    )


def plan_of(mechanism: Mechanism, epsilon: float) -> Plan:
    budget = PrivacyBudget(epsilon=epsilon, delta=DELTA)
    return solve(budget, CANDIDATES, relation=RELATION, mechanisms=[mechanism], realised_epsilon_cap=9.0)


class Book:
    """A ledger under construction."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []

    def add(
        self,
        number: int,
        region: str,
        plan: Plan,
        *,
        kinds: Sequence[str] = ("intended", "live"),
        drawn: str | None = None,
        consulted: Sequence[str] = (),
    ) -> None:
        counted = len(self.entries)
        for kind in kinds:
            fields = ledger_fields(
                kind=kind,
                release_id=f"{number:064x}",
                policy=cast(Any, SimpleNamespace(region=region, selection="noise")),
                manifest=cast(
                    Any,
                    SimpleNamespace(lineage="patients", neighboring_relation="replace_one", unit="record"),
                ),
                plan=plan,
                candidates=CANDIDATES,
                draw=None if drawn is None else draw_of(plan, drawn),
                certificate_sha256=None if kind in ("reserved", "consulted") else "b" * 64,
                counted=counted,
                consulted=consulted,
            )
            serial = len(self.entries) + 1
            previous = self.entries[-1].sha256() if self.entries else None
            entry = LedgerEntry.from_fields(
                {**fields, "serial": serial, "previous_digest": previous}, "entry"
            )
            self.entries.append(LedgerEntry.from_content(entry.content(), "entry"))  # as stored


def joint_of(*names: str) -> float:
    return joint_release([c.trajectory for c in CANDIDATES if c.name in names], RELATION).epsilon(DELTA)


def test_one_average_is_read_back_with_its_own_bound() -> None:
    book = Book()
    plan = plan_of(Mechanism.LINEAR_COMBINATION, 1.2)
    assert plan.bound.name == "shifted"
    book.add(1, "eu", plan)
    found = ledger_figures(book.entries, DELTA)
    assert found.everywhere == pytest.approx(plan.epsilon, rel=1e-9)
    assert found.by_region == {"eu": found.everywhere}
    assert found.counts == {"eu": 1}  # two entries, one release
    assert found.everywhere is not None
    assert found.everywhere < joint_of(*plan.weights) * (1 - 1e-6)


def test_two_averages_tell_all_of_their_models() -> None:
    book = Book()
    one, two = (plan_of(Mechanism.LINEAR_COMBINATION, epsilon) for epsilon in (1.2, 1.3))
    book.add(1, "eu", one)
    book.add(2, "us", two)
    found = ledger_figures(book.entries, DELTA)
    assert found.everywhere == pytest.approx(joint_of(*one.weights, *two.weights), rel=1e-9)
    assert found.by_region["eu"] == pytest.approx(one.epsilon, rel=1e-9)


def test_a_draw_counts_as_what_was_drawn_and_a_lost_one_as_everything() -> None:
    plan = plan_of(Mechanism.RANDOM_SELECTION, 1.2)
    first, second = plan.outcomes
    for kinds, drawn, expected in (
        (("intended",), first, joint_of(first)),
        (("intended", "failed_check"), second, joint_of(second)),
        (("consulted", "intended", "live"), second, joint_of(second)),
        (("reserved",), None, joint_of(first, second)),  # drawn or not, nobody can tell
    ):
        book = Book()
        book.add(1, "eu", plan, kinds=kinds, drawn=drawn)
        found = ledger_figures(book.entries, DELTA).everywhere
        assert found == pytest.approx(expected, rel=1e-9)


def test_entries_of_one_release_that_disagree_count_all_together() -> None:
    plan = plan_of(Mechanism.RANDOM_SELECTION, 1.2)
    first, second = plan.outcomes
    book = Book()
    book.add(1, "eu", plan, kinds=("intended",), drawn=first)
    book.add(1, "eu", plan, kinds=("intended",), drawn=second)
    assert ledger_figures(book.entries, DELTA).everywhere == pytest.approx(joint_of(first, second), rel=1e-9)


def test_consulted_models_count_with_every_outcome() -> None:
    plan = plan_of(Mechanism.RANDOM_SELECTION, 1.2)
    book = Book()
    book.add(1, "eu", plan, kinds=("intended",), drawn=next(iter(plan.outcomes)), consulted=["c3"])
    found = ledger_figures(book.entries, DELTA).everywhere
    assert found == pytest.approx(joint_of(next(iter(plan.outcomes)), "c3"), rel=1e-9)


def test_a_retry_finds_the_past_of_the_first_attempt() -> None:
    book = Book()
    plan = plan_of(Mechanism.LINEAR_COMBINATION, 1.2)
    book.add(1, "eu", plan)
    book.add(2, "us", plan_of(Mechanism.LINEAR_COMBINATION, 1.3), kinds=("reserved",))
    book.add(3, "jp", plan_of(Mechanism.LINEAR_COMBINATION, 2.0))
    past = past_of(book.entries, f"{2:064x}")
    assert past.entries == 2
    assert [release.region for release in past.releases] == ["eu"]
    assert [release.region for release in past_of(book.entries, "f" * 64).releases] == ["eu", "us", "jp"]


def test_figures_for_a_certificate() -> None:
    book = Book()
    book.add(1, "eu", plan_of(Mechanism.LINEAR_COMBINATION, 1.2))
    plan = plan_of(Mechanism.RANDOM_SELECTION, 1.2)
    past = past_of(book.entries, f"{2:064x}")
    name = list(plan.outcomes)[1]
    new = PastRelease(region="us", outcomes=outcomes_of_plan(plan, CANDIDATES, ()), drawn=1)
    found = figures(past, new, RELATION, DELTA)
    assert found is not None
    assert found.epsilon_region == pytest.approx(joint_of(name), rel=1e-9)
    assert found.epsilon_all_regions == pytest.approx(
        cumulative([*past.releases, new], RELATION).epsilon(DELTA), rel=1e-12
    )
    assert found.epsilon_all_regions > found.epsilon_region
    assert (found.releases, found.after_ledger_entry) == (2, 2)


def together(book: Book, policy: Policy, plan: Plan) -> float:
    past = past_of(book.entries, "f" * 64)
    new = PastRelease(region=policy.region, outcomes=outcomes_of_plan(plan, CANDIDATES, ()))
    return cumulative([*past.of_scope(policy), new], RELATION).epsilon(DELTA)


@pytest.mark.parametrize(
    ("scope", "mechanisms"),
    [
        ("region", ["linear_combination"]),
        ("all_regions", ["linear_combination"]),
        ("region", ["random_selection"]),
        ("all_regions", ["mixture"]),
    ],
)
def test_a_budget_of_many_releases_covers_them_with_the_new_one(scope: str, mechanisms: list[str]) -> None:
    book = Book()
    book.add(1, "eu", plan_of(Mechanism.LINEAR_COMBINATION, 1.0))
    past = past_of(book.entries, "f" * 64)
    policy = policy_of("eu", 2.0, scope, mechanisms=mechanisms)
    plan = solve_in_scope(policy, CANDIDATES, None, past)
    assert together(book, policy, plan) <= 2.0 * (1 + 1e-12)
    assert plan.epsilon <= 2.0
    assert plan.budget.epsilon == 2.0
    alone = solve_in_scope(policy_of("eu", 2.0, mechanisms=mechanisms), CANDIDATES, None, past)
    assert plan.objective <= alone.objective  # what is out already leaves less room
    assert together(book, policy, alone) > 2.0


def test_another_region_s_releases_count_only_where_the_scope_says_so() -> None:
    book = Book()
    book.add(1, "us", plan_of(Mechanism.LINEAR_COMBINATION, 2.0))
    past = past_of(book.entries, "f" * 64)
    free = solve_in_scope(policy_of("eu", 2.0, "region"), CANDIDATES, None, past)
    bound = solve_in_scope(policy_of("eu", 2.2, "all_regions"), CANDIDATES, None, past)
    assert free.epsilon == pytest.approx(2.0, rel=1e-3)
    assert together(book, policy_of("eu", 2.2, "all_regions"), bound) <= 2.2 * (1 + 1e-12)


def test_the_same_release_again_costs_nothing_more() -> None:
    book = Book()
    plan = plan_of(Mechanism.LINEAR_COMBINATION, 1.5)
    book.add(1, "us", plan)
    past = past_of(book.entries, "f" * 64)
    again = solve_in_scope(
        policy_of("eu", 1.5, "all_regions", mechanisms=["linear_combination"]), CANDIDATES, None, past
    )
    assert again.weights == plan.weights


@pytest.mark.parametrize(("epsilon", "words"), [(1.0, "is out already has 1.5"), (1.52, "nothing was found")])
def test_a_spent_budget_is_said_to_be_spent(epsilon: float, words: str) -> None:
    book = Book()
    book.add(1, "eu", plan_of(Mechanism.LINEAR_COMBINATION, 1.5))
    others = [
        candidate("d", 60.0, math.inf),
        candidate("e", 61.0, math.inf),
    ]  # each fits alone, none beside it
    with pytest.raises(BudgetInfeasible, match="cannot be taken back") as raised:
        solve_in_scope(policy_of("eu", epsilon, "region"), others, None, past_of(book.entries, "f" * 64))
    assert words in raised.value.message


def test_entries_survive_their_store() -> None:
    """Every field of a run that a bound reads comes back from the ledger's JSON."""
    book = Book()
    book.add(1, "eu", plan_of(Mechanism.MIXTURE, 1.7), kinds=("reserved",))
    stored: Mapping[str, Any] = book.entries[0].model_dump(mode="json")
    assert LedgerEntry.from_fields(dict(stored), "entry") == book.entries[0]
    runs = past_of(book.entries, "f" * 64).releases[0].outcomes[0].runs
    known: dict[str, Candidate] = {c.trajectory.segments[0].id: c for c in CANDIDATES}
    assert all(run.segments == known[run.segments[0].id].trajectory.segments for run in runs)
