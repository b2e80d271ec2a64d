"""What the calculator answers, as JSON-ready documents: no infinity, no NaN, a reason for every null."""

from __future__ import annotations

from typing import Any

from accounting.frontier import Point
from accounting.plan import Component
from tasks.account_answer import Answer, Option
from tasks.account_bounds import Account, Line
from tasks.account_frontier import worth
from tasks.account_report import NOT_A_GUARANTEE, SELECTION_WORDS, no_guarantee


def bounds_document(account: Account) -> dict[str, Any]:
    """JSON-ready: every bound, or null with its reason, and the one that is certified."""
    best = account.certified
    reasons = {line.name: line.reason for line in account.lines.values() if line.reason is not None}
    if best is None:
        reasons["certified"] = no_guarantee(account)
    document: dict[str, Any] = {
        "bounds": {line.name: _numbers(line) for line in account.lines.values()},
        "certified": {
            "bound": None if best is None else best.name,
            "epsilon": None if best is None else best.epsilon,
        },
        "delta": account.delta,
        "neighboring_relation": account.release.relation.value,
        "reasons": reasons,
        "assumptions": [] if best is None or best.bound is None else list(best.bound.assumptions),
        "source": None if best is None or best.bound is None else best.bound.source,
    }
    if account.lines["stepwise"].epsilon is not None:
        document["warnings"] = {"stepwise": NOT_A_GUARANTEE}
    return document


def answer_document(answer: Answer) -> dict[str, Any]:
    """JSON-ready: the plan, what stands beside it, and why."""
    best = answer.best
    others = bounds_document(answer.account)
    reasons = {f"bounds.{name}": reason for name, reason in others["reasons"].items() if name != "certified"}
    if answer.utility_reason is not None:
        reasons["expected_utility"] = answer.utility_reason
    return {
        "mechanism": best.label,
        "weights": dict(best.weights),
        "bound": best.bound,
        "epsilon": best.epsilon,
        "expected_utility": best.expected_utility,
        "fresh_noise": best.fresh_noise,
        "delta": answer.budget.delta,
        "budget": {"epsilon": answer.budget.epsilon, "delta": answer.budget.delta},
        "neighboring_relation": answer.account.release.relation.value,
        "selection": answer.selection,
        "selection_rule": SELECTION_WORDS[answer.selection],
        "member_epsilons": dict(answer.member_epsilons),
        "components": [_component(component) for component in answer.components],
        "bounds": others["bounds"],
        "alternatives": [_option(option) for option in answer.alternatives],
        **({"frontier": [_point(point) for point in answer.frontier]} if answer.frontier else {}),
        "set_aside": dict(answer.set_aside),
        "reasons": reasons,
        "notes": list(answer.notes),
        "assumptions": list(answer.bound.assumptions),
        "source": answer.bound.source,
    }


def _numbers(line: Line) -> dict[str, float] | None:
    if line.epsilon is None:
        return None
    return {"epsilon": line.epsilon} if line.mu is None else {"mu": line.mu, "epsilon": line.epsilon}


def _option(option: Option) -> dict[str, Any]:
    return {
        "label": option.label,
        "weights": dict(option.weights),
        "bound": option.bound,
        "epsilon": option.epsilon,
        "expected_utility": option.expected_utility,
        "fresh_noise": option.fresh_noise,
    }


def _component(component: Component) -> dict[str, Any]:
    return {
        "name": component.name,
        "weight": component.weight,
        "weights": dict(component.weights),
        "fresh_noise": component.fresh_noise,
        "bound": component.bound.name,
        "epsilon": component.epsilon,
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "mechanism": point.mechanism.value,
        "budget_epsilon": point.budget_epsilon,
        "epsilon": point.epsilon,
        "bound": point.bound_name,
        "weights": dict(point.weights),
        "expected_utility": point.expected_utility,
        "noise_standard_deviation": worth(point) if point.expected_utility is None else None,
    }
