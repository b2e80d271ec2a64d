"""What people read of a merge by an operator, of several tasks, and of one that found nothing to merge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accounting.budget import PrivacyBudget
from accounting.certificate import Certificate
from accounting.plan import Plan
from accounting.solver import solve
from accounting.task_sets import solve_tasks
from accounting.trajectory import Candidate, Trajectory
from infra.documents import Policy, PortfolioManifest, Provenance
from tasks.certifying import certify
from tasks.decision_page import decision_page, infeasible_page, why
from tasks.policy_merges import options_of
from tasks.report import one_sentence
from tasks.validation import Verdict
from tests.tasks.certified import KINDS, evidence_of

PASSED = Verdict(passed=True, accuracy=0.9, minimum=0.5, reason="")
BY_HAND = Provenance(started_by="hand")


def made(name: str, epsilon: float | None = None) -> tuple[Policy, PortfolioManifest, Plan, Certificate]:
    """What a policy of a kind comes to, solved and certified anew."""
    kind = KINDS[name]
    _, evidence = evidence_of(kind)
    policy, portfolio = evidence.policy, evidence.portfolio
    assert policy is not None
    assert portfolio is not None
    runs = {n: Trajectory.from_dict(json.loads(content)) for n, content in evidence.trajectories.items()}
    candidates = [Candidate(name=n, trajectory=run) for n, run in runs.items()]
    budget = PrivacyBudget(epsilon=epsilon or kind.epsilon, delta=policy.delta)
    if kind.tasks:
        plan = solve_tasks(budget, candidates, kind.tasks, relation=kind.relation, records="disjoint")
    else:
        options: dict[str, Any] = {"merge": policy.merge, "merge_options": options_of(policy)}
        plan = solve(budget, candidates, relation=kind.relation, **options)
    return policy, portfolio, plan, certify("a" * 64, policy, portfolio, plan, None)


def test_a_merge_by_an_operator_is_told_with_its_options() -> None:
    policy, portfolio, plan, certificate = made("operator")
    words = "ties (density 0.4, normalize yes, scale 1)"
    sentence = one_sentence(policy, certificate, None, PASSED)
    assert f"eu now serves a merge by {words} of c" in sentence
    page = decision_page(policy, portfolio, plan, certificate, None, PASSED, BY_HAND)
    assert f"| merged by | {words} |" in page
    assert "| certified by | joint release of the candidates used |" in page
    assert "what the operator makes of noise is not compared" in page
    shown = ", ".join(f"{name} (weight {weight:.4g})" for name, weight in certificate.weights.items())
    assert f"| candidates | {shown} |" in page
    page = infeasible_page(policy, portfolio, "Nothing fits.", BY_HAND)
    assert f"| merged by | {words} |" in page
    assert "mechanisms allowed" not in page


def test_tasks_are_told_with_what_their_records_share() -> None:
    policy, portfolio, plan, certificate = made("tasks")
    page = decision_page(policy, portfolio, plan, certificate, None, PASSED, BY_HAND)
    assert "| merged by | linear |" in page
    for name, task in certificate.tasks.items():
        assert f"{name} (task {task}, weight 0.5)" in page
    assert "| records of the tasks | disjoint: no record is in the data of two tasks |" in page
    assert "| certified by | parallel composition of tasks that share no record |" in page
    assert "of the sets of one candidate for each task that fit the budget together" in page


def test_one_candidate_instead_of_a_merge_is_told() -> None:
    policy, portfolio, plan, certificate = made("operator", epsilon=0.9)
    assert len(plan.weights) == 1
    assert why(plan).endswith("it is released alone.")
    page = decision_page(policy, portfolio, plan, certificate, None, PASSED, BY_HAND)
    assert "so ties has nothing to merge: one candidate is released alone." in page
    assert "now serves a linear combination (c" in page
    assert certificate.epsilon == pytest.approx(plan.epsilon)
