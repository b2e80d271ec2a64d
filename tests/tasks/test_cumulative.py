"""What the ledger has given away, read back from its entries, and budgets that cover many releases."""

from __future__ import annotations

import json
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
from tasks.cumulative import figures, ledger_figures
from tasks.past import Past, outcomes_of_plan, past_of
from tasks.promotion import ledger_fields
from tasks.scope import scope_fault, solve_in_scope
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

    def __init__(
        self, candidates: Sequence[Candidate] = CANDIDATES, relation: NeighboringRelation = RELATION
    ) -> None:
        self.entries: list[LedgerEntry] = []
        self.candidates = candidates
        self.relation = relation.value

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
                    SimpleNamespace(lineage="patients", neighboring_relation=self.relation, unit="record"),
                ),
                plan=plan,
                candidates=self.candidates,
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


def test_releases_under_different_relations_have_figures_of_their_own_and_no_total() -> None:
    """One lineage, a portfolio under replace-one and one under add-or-remove-one: nothing adds the two up."""
    book = Book()
    book.add(1, "eu", plan_of(Mechanism.LINEAR_COMBINATION, 1.2))
    (own,) = {entry.region: entry for entry in book.entries}.values()
    fields = json.loads(own.content()) | {
        "serial": len(book.entries) + 1,
        "release_id": "9" * 64,
        "region": "us",
        "neighboring_relation": "add_or_remove_one",
    }
    other = LedgerEntry.from_fields(fields, "entry")
    found = ledger_figures([*book.entries, other], DELTA)
    assert found.everywhere is None
    assert found.reason is not None
    assert (
        "different neighbouring relations (add_or_remove_one, replace_one) are never added up" in found.reason
    )
    alone, added = found.by_region["eu"], found.by_region["us"]
    assert alone is not None
    assert added is not None
    assert added < alone


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


def regions_of(past: Past | None) -> list[str]:
    assert past is not None
    return [release.region for release in past.releases]


def test_a_retry_finds_the_past_of_the_certificate() -> None:
    book = Book()
    book.add(1, "eu", plan_of(Mechanism.LINEAR_COMBINATION, 1.2))
    book.add(2, "us", plan_of(Mechanism.LINEAR_COMBINATION, 1.3))
    book.add(3, "jp", plan_of(Mechanism.LINEAR_COMBINATION, 2.0))
    past = past_of(book.entries, f"{2:064x}")
    assert (past.entries, past.is_new, past.held) == (2, False, None)
    assert regions_of(past) == ["eu"]
    assert regions_of(past_of(book.entries, "f" * 64)) == ["eu", "us", "jp"]


def test_a_reservation_keeps_its_turn_but_not_its_past() -> None:
    """What came out since counts; what was only reserved after it does not, for that counts it."""
    book = Book()
    plan = plan_of(Mechanism.LINEAR_COMBINATION, 1.2)
    book.add(1, "eu", plan)
    book.add(2, "us", plan, kinds=("reserved",))
    book.add(3, "jp", plan, kinds=("reserved",))
    ours = past_of(book.entries, f"{2:064x}")
    assert (regions_of(ours), regions_of(ours.held), ours.grown) == (["eu"], ["eu"], False)
    theirs = past_of(book.entries, f"{3:064x}")
    assert (regions_of(theirs), theirs.grown) == (["eu", "us"], False)
    book.add(2, "us", plan, kinds=("intended",))
    assert not past_of(book.entries, f"{3:064x}").grown  # it was foreseen with these outcomes
    book.add(4, "br", plan_of(Mechanism.LINEAR_COMBINATION, 2.0), kinds=("intended",))
    theirs = past_of(book.entries, f"{3:064x}")
    assert (regions_of(theirs), theirs.grown) == (["eu", "us", "br"], True)
    assert not past_of(book.entries, f"{3:064x}", policy_of("jp", 2.0, "region")).grown
    assert past_of(book.entries, f"{3:064x}", policy_of("jp", 2.0, "all_regions")).grown


def test_what_was_reserved_later_and_came_out_first_was_not_counted() -> None:
    book = Book()
    plan = plan_of(Mechanism.LINEAR_COMBINATION, 1.2)
    book.add(1, "us", plan, kinds=("reserved",))
    book.add(2, "jp", plan, kinds=("reserved",))
    book.add(2, "jp", plan, kinds=("intended",))
    past = past_of(book.entries, f"{1:064x}")
    assert (regions_of(past), regions_of(past.held), past.grown) == (["jp"], [], True)


def test_a_plan_is_found_again_unless_something_came_out_before_its_draw() -> None:
    book = Book()
    policy = policy_of("us", 2.6, "all_regions", mechanisms=["random_selection"])
    plan = solve_in_scope(policy, CANDIDATES, None, past_of(book.entries, f"{1:064x}"))
    book.add(1, "us", plan, kinds=("reserved",))
    again = solve_in_scope(policy, CANDIDATES, None, past_of(book.entries, f"{1:064x}"))
    assert again.outcomes == plan.outcomes
    loud = plan_of(Mechanism.LINEAR_COMBINATION, 1.3)
    book.add(2, "eu", loud)
    grown = past_of(book.entries, f"{1:064x}", policy)
    assert together(book, policy, plan, f"{1:064x}") > 2.6
    anew = solve_in_scope(policy, CANDIDATES, None, grown)
    assert together(book, policy, anew, f"{1:064x}") <= 2.6 * (1 + 1e-12)
    # Whoever asked for the other release may have seen the draw, so it counts as drawn.
    quiet, noisy = sorted(plan.outcomes, key=lambda name: joint_of(name))[:: len(plan.outcomes) - 1]
    with pytest.raises(BudgetInfeasible, match=f"{noisy} was drawn for policy 1 of us"):
        solve_in_scope(policy, CANDIDATES, None, grown, draw_of(plan, noisy))
    kept = solve_in_scope(policy, CANDIDATES, None, grown, draw_of(plan, quiet))
    assert kept.outcomes == plan.outcomes


@pytest.mark.parametrize(
    ("mechanism", "epsilon"),
    [
        *(("linear_combination", epsilon) for epsilon in (0.9, 1.3, 2.2)),
        *(("random_selection", epsilon) for epsilon in (0.9, 1.0, 1.3, 1.7, 2.2, 3.0)),
        ("mixture", 1.7),
    ],
)
def test_a_first_release_complies_with_the_budget_that_it_was_made_for(
    mechanism: str, epsilon: float
) -> None:
    """A plan that fills its budget must not exceed it by a rounding of the ledger's own bound."""
    policy = policy_of("eu", epsilon, "region", mechanisms=[mechanism])
    plan = solve_in_scope(policy, CANDIDATES, None, past_of([], "f" * 64))
    for drawn in plan.outcomes if len(plan.outcomes) > 1 else (None,):
        for kinds in (("reserved", "intended", "live"), ("intended", "live")):  # the latter for scope release
            book = Book()
            book.add(1, "eu", plan, kinds=kinds, drawn=drawn)
            assert scope_fault(policy, book.entries, f"{1:064x}") is None


def test_a_draw_counts_as_made_once_somebody_may_have_seen_it() -> None:
    """One half over two runs of mu .8, then the other one on purpose: delta .175 at epsilon 1, and not .119."""
    runs = [candidate("a", 2 * math.sqrt(20) / 0.8, 1.0), candidate("b", 2 * math.sqrt(20) / 0.8, 1.0)]
    assert runs[0].trajectory.steps == 20
    one: Any = SimpleNamespace(
        mechanism=Mechanism.RANDOM_SELECTION,
        outcomes={"a": 0.5, "b": 0.5},
        consulted=(),
        records=None,
        merged_weights=lambda name: {name: 1.0},
    )
    other = solve(
        PrivacyBudget(epsilon=30.0, delta=DELTA),
        [runs[1]],
        relation=RELATION,
        mechanisms=[Mechanism.RANDOM_SELECTION],
    )
    for delta, complies in ((0.11, False), (0.12, False), (0.17, False), (0.18, True)):
        for first_kinds in (("intended",), ("reserved", "intended")):
            book = Book(runs)
            book.add(1, "eu", one, kinds=first_kinds, drawn="a")
            book.add(2, "us", other, kinds=("intended",))
            policy = policy_of("eu", 1.0, "all_regions").model_copy(update={"delta": delta})
            assert (scope_fault(policy, book.entries, f"{1:064x}") is None) == complies
            own = policy_of("eu", 1.0, "region").model_copy(update={"delta": 0.07})
            assert scope_fault(own, book.entries, f"{1:064x}") is None  # in eu it is alone


def test_what_came_after_a_release_that_complies_as_drawn_does_not_undo_that() -> None:
    """The mixture of the first may be above the budget by then, though all that is out is within it."""
    plan = plan_of(Mechanism.RANDOM_SELECTION, 1.2)
    quiet = min(plan.outcomes, key=lambda name: joint_of(name))
    book = Book()
    book.add(1, "eu", plan, drawn=quiet)
    book.add(2, "us", plan, drawn=quiet)
    policy = policy_of("eu", joint_of(quiet) * 1.001, "all_regions")
    assert scope_fault(policy, book.entries, f"{1:064x}") is None


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


def together(book: Book, policy: Policy, plan: Plan, release_id: str = "f" * 64) -> float:
    past = past_of(book.entries, release_id)
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


def test_what_used_up_a_budget_before_the_last_step_keeps_a_release_from_going_live() -> None:
    from flows.policy_change import over_budget

    plan = plan_of(Mechanism.LINEAR_COMBINATION, 1.2)
    book = Book()
    book.add(1, "eu", plan, kinds=("reserved", "intended"))
    services: Any = SimpleNamespace(ledger=SimpleNamespace(entries=lambda lineage: book.entries))
    manifest: Any = SimpleNamespace(lineage="patients", reference="clinic@1")
    lifetime = policy_of("eu", 1.25, "all_regions")
    assert over_budget(services, lifetime, manifest, f"{1:064x}") is None
    book.add(2, "us", plan_of(Mechanism.LINEAR_COMBINATION, 2.0), kinds=("intended",))
    ended = over_budget(services, lifetime, manifest, f"{1:064x}")
    assert ended is not None
    assert ended.kind == "infeasible"
    assert "Other releases came first" in ended.sentence
    assert over_budget(services, policy_of("eu", 1.25), manifest, f"{1:064x}") is None
