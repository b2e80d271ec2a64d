"""The calculator's plans: utilities where they are stated, noise where not, and what is said of the choice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from accounting.errors import BudgetInfeasible, InvalidInput
from tasks.account_answer import Answer
from tasks.account_documents import answer_document
from tasks.account_file import AccountFile
from tasks.account_frontier import RATIOS
from tasks.account_report import answer_sentences, frontier_table
from tasks.account_runs import runs_of
from tasks.account_solve import answer_of


def run_of(
    name: str, noise_multiplier: float, utility: float | None = None, **changes: Any
) -> dict[str, Any]:
    segment = {
        "id": name,
        "steps": 20,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": 1,
        "learning_rate": 1,
        "expected_batch_size": 60,
    }
    return {"utility": utility, "segments": [segment | changes]}


def answer(
    runs: dict[str, Any],
    epsilon: float = 2.0,
    cap: float | None = None,
    *,
    with_frontier: bool = False,
    **changes: Any,
) -> Answer:
    fields = {
        "neighboring_relation": "replace_one",
        "delta": 1e-5,
        "runs": runs,
        "budget": {"epsilon": epsilon, "realised_epsilon_cap": cap},
    }
    file = AccountFile.from_fields(fields | changes, "f.yaml")
    return answer_of(file, runs_of(file, "f.yaml"), "f.yaml", with_frontier=with_frontier)


def test_stated_utilities_are_maximised_by_random_selection() -> None:
    """Also between runs of different recipes; no other weights within the budget do better."""
    runs = {
        "a": run_of("a", 8, 0.9, learning_rate=0.5),
        "b": run_of("b", 16, 0.86, steps=30),
        "c": run_of("c", 32, 0.8),
    }
    found = answer(runs, mechanisms=["random_selection"])
    assert (found.best.label, found.selection) == ("random_selection", "stated")
    assert found.bound.delta(2.0) <= 1e-5
    best = found.best.expected_utility
    assert best is not None
    profiles = [answer({"x": run}, epsilon=1e3).bound for run in runs.values()]
    values = [bound.delta(2.0) for bound in profiles]
    for i, j, k in itertools.product(range(41), repeat=3):
        if i + j + k == 40 and sum(w / 40 * v for w, v in zip((i, j, k), values, strict=True)) <= 1e-5:
            assert (i * 0.9 + j * 0.86 + k * 0.8) / 40 <= best + 1e-12


def test_the_order_in_the_file_decides_nothing() -> None:
    runs = {"a": run_of("a", 8, 0.9), "b": run_of("b", 16, 0.86), "c": run_of("c", 32, 0.8)}
    first = answer(runs)
    again = answer(dict(reversed(runs.items())))
    assert dict(first.best.weights) == dict(again.best.weights)
    assert first.best.epsilon == again.best.epsilon


def test_a_linear_combination_has_the_average_utility_and_that_is_said() -> None:
    runs = {name: run_of(name, 40, 0.8 + i / 100) for i, name in enumerate("ab")}
    found = answer(runs, epsilon=3.0, mechanisms=["linear_combination", "random_selection"])
    options = [found.best, *found.alternatives]
    assert {"linear_combination", "random_selection"} <= {option.label for option in options}
    for option in options:
        average = sum(weight * (0.8 if name == "a" else 0.81) for name, weight in option.weights.items())
        assert option.expected_utility == pytest.approx(average)
        assert option.epsilon <= 3.0
    only = answer(
        {"a": run_of("a", 16, 0.9, update_lipschitz=1.0), "b": run_of("b", 32, 0.8, update_lipschitz=1.0)}
    )
    if len(only.best.weights) > 1 and only.best.label == "linear_combination":
        assert any("stands in for it" in note for note in only.notes)


def test_without_utilities_the_noise_decides() -> None:
    runs = {"a": run_of("a", 40), "b": run_of("b", 50)}
    found = answer(runs, epsilon=3.0)
    document = answer_document(found)
    assert found.selection == "noise"
    assert document["expected_utility"] is None
    assert document["reasons"]["expected_utility"] == "The file does not state a utility for every run."
    assert document["epsilon"] <= 3.0
    assert "least noise" in document["selection_rule"]


def test_some_utilities_are_not_used_and_that_is_said() -> None:
    found = answer({"a": run_of("a", 40, 0.9), "b": run_of("b", 50)}, epsilon=3.0)
    assert found.selection == "noise"
    assert any("none is stated for b" in note for note in found.notes)


def test_only_a_linear_combination_allowed() -> None:
    runs = {"a": run_of("a", 40, 0.9), "b": run_of("b", 50, 0.8)}
    found = answer(runs, epsilon=3.0, mechanisms=["linear_combination"])
    assert found.best.label == "linear_combination"
    assert found.account.release.kind == "linear_combination"


def test_stated_guarantees_take_part_by_their_utility() -> None:
    runs = {"ours": run_of("o", 16, 0.9), "theirs": {"utility": 0.7, "stated": {"epsilon": 1, "delta": 1e-6}}}
    found = answer(runs)
    assert set(found.best.weights) == {"ours", "theirs"}
    assert found.best.epsilon == pytest.approx(2.0)
    assert any("theirs has epsilon 1" in text for text in found.bound.assumptions)
    weak = {
        **runs,
        "theirs": {"utility": 50, "stated": {"epsilon": 1, "delta": 1e-3}},
        "c": run_of("c", 64, 0.5),
    }
    found = answer(weak)  # below its stated delta the guarantee alone says nothing
    assert 0 < found.best.weights["theirs"] <= 1e-2
    assert found.member_epsilons["theirs"] is None


def test_stated_guarantees_cannot_be_compared_by_noise() -> None:
    theirs = {"stated": {"epsilon": 1, "delta": 1e-6}}
    found = answer({"a": run_of("a", 40), "theirs": theirs})
    assert "stated guarantee" in found.set_aside["theirs"]
    with pytest.raises(InvalidInput, match=r"f\.yaml: these runs .* state a utility for every run"):
        answer({"theirs": theirs})


def test_a_run_that_is_hardly_private_is_named_and_can_be_capped() -> None:
    runs = {"weak": run_of("w", 0.01, 0.99), "strong": run_of("s", 32, 0.8)}
    assert dict(answer(runs).best.weights) == {"strong": 1.0}  # no draw for next to nothing
    free = answer(runs, mechanisms=["random_selection"])
    assert 0 < free.best.weights["weak"] < 1e-4
    assert any("weak may be drawn" in note and "policies use 8" in note for note in free.notes)
    capped = answer(runs, cap=8.0, mechanisms=["random_selection"])
    assert dict(capped.best.weights) == {"strong": 1.0}
    assert "exceeds the cap of 8" in capped.set_aside["weak"]
    assert not any("may be drawn" in note for note in capped.notes)


def test_a_run_without_noise_is_never_drawn() -> None:
    found = answer({"silent": run_of("s", 0, 0.99), "b": run_of("b", 32, 0.8)})
    assert set(found.best.weights) == {"b"}
    assert "without noise" in found.set_aside["silent"]
    assert any("silent was trained without noise" in text for text in answer_sentences(found))


def test_an_infeasible_budget_says_what_would_make_it_feasible() -> None:
    runs = {"a": run_of("a", 16, 0.9, steps=30), "b": run_of("b", 32, 0.8)}
    for mechanisms in (["random_selection"], ["linear_combination", "random_selection"]):
        with pytest.raises((BudgetInfeasible, InvalidInput)) as caught:
            answer(runs, epsilon=0.1, mechanisms=mechanisms)
        assert "\n" not in caught.value.message
    with pytest.raises(BudgetInfeasible, match=r"1\.048.* so train a candidate with noise_multiplier"):
        answer(runs, epsilon=0.1, mechanisms=["random_selection"])
    with pytest.raises(BudgetInfeasible, match="raise realised_epsilon_cap"):
        answer(runs, epsilon=2.0, cap=0.5, mechanisms=["random_selection"])


def test_an_infeasible_budget_names_the_stated_guarantee_that_comes_nearest() -> None:
    runs = {"ours": run_of("o", 16, 0.9), "theirs": {"utility": 0.7, "stated": {"epsilon": 1, "delta": 1e-6}}}
    with pytest.raises(BudgetInfeasible, match=r"on offer is 1, of run theirs, so train a candidate"):
        answer(runs, epsilon=0.5, mechanisms=["random_selection"])
    with pytest.raises(BudgetInfeasible, match="raise realised_epsilon_cap"):
        answer(runs, epsilon=2.0, cap=0.5, mechanisms=["random_selection"])
    del runs["ours"]
    with pytest.raises(BudgetInfeasible, match="ask for a larger epsilon or delta"):
        answer(runs, epsilon=0.5)


def test_fresh_noise_is_the_last_resort() -> None:
    runs = {"a": run_of("a", 16, update_lipschitz=1.0), "b": run_of("b", 32, update_lipschitz=1.0)}
    assert answer(runs, epsilon=2.0).best.fresh_noise == 0
    found = answer(runs, epsilon=0.5)  # below both
    assert found.best.fresh_noise > 0
    assert found.best.epsilon <= 0.5
    assert found.account.release.fresh_noise == found.best.fresh_noise
    assert answer_document(found)["fresh_noise"] == found.best.fresh_noise
    assert any("once, before anybody sees them" in text for text in answer_sentences(found))
    with pytest.raises(BudgetInfeasible):
        answer(runs, epsilon=0.5, mechanisms=["random_selection"])
    useful = answer({name: {**run, "utility": 0.5} for name, run in runs.items()}, epsilon=0.5)
    assert useful.best.fresh_noise > 0
    assert useful.best.expected_utility is None
    assert "no stated utility tells what that costs" in (useful.utility_reason or "")


def test_a_mixture_names_its_merges() -> None:
    runs = {name: run_of(name, noise) for name, noise in (("a", 16), ("b", 32), ("c", 64))}
    found = answer(runs, epsilon=1.5, mechanisms=["mixture"])
    document = answer_document(found)
    assert (document["mechanism"], document["bound"]) == ("mixture", "mixture")
    assert sum(component["weight"] for component in document["components"]) == pytest.approx(1)
    assert document["bounds"]["mixture"] == {"epsilon": document["epsilon"]}
    assert document["bounds"]["joint"]["epsilon"] > 1.5 >= document["epsilon"]
    text = "\n".join(answer_sentences(found))
    for component in document["components"]:
        assert f"{component['name']}, drawn with probability" in text
    assert "mixture of merges, on average" in text
    assert set(found.drawn_epsilons) == {component["name"] for component in document["components"]}


@pytest.mark.parametrize("utilities", [(None, None), (0.9, 0.8)])
def test_the_frontier_shows_other_budgets(utilities: tuple[float | None, float | None]) -> None:
    runs = {"a": run_of("a", 16, utilities[0]), "b": run_of("b", 32, utilities[1])}
    mechanisms = ["linear_combination", "random_selection"]
    found = answer(runs, mechanisms=mechanisms, with_frontier=True)
    points = answer_document(found)["frontier"]
    assert {point["mechanism"] for point in points} == set(mechanisms)
    assert [point["budget_epsilon"] for point in points[:9]] == pytest.approx([2 * r for r in RATIOS])
    key = "expected_utility" if utilities[0] is not None else "noise_standard_deviation"
    sign = 1 if utilities[0] is not None else -1
    for mechanism in mechanisms:
        row = [p for p in points if p["mechanism"] == mechanism]
        values = [sign * p[key] for p in row if p[key] is not None]
        assert values
        assert values == sorted(values)
        assert all(p["epsilon"] is None or p["epsilon"] <= p["budget_epsilon"] for p in row)
    assert frontier_table(found).row_count == 9
    assert "frontier" not in answer_document(answer(runs, mechanisms=mechanisms))


def test_runs_of_different_recipes_need_utilities() -> None:
    with pytest.raises(InvalidInput, match=r"f\.yaml: .* or state a utility for every run\.$"):
        answer({"a": run_of("a", 16, steps=30), "b": run_of("b", 32)})
