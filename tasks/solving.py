"""From a policy and its candidates to a plan: the solver, asked in the policy's words."""

from __future__ import annotations

from collections.abc import Sequence

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.plan import Mechanism, Plan
from accounting.solver import solve
from accounting.trajectory import Candidate
from infra.documents import Policy


def solve_policy(policy: Policy, candidates: Sequence[Candidate]) -> Plan:
    """The best weights under a policy, from trajectories only.

    Raises:
        accounting.errors.BudgetInfeasible: nothing satisfies the budget; says what to train.
        accounting.errors.RemergeError: the candidates cannot be accounted or compared.
    """
    return solve(
        PrivacyBudget(epsilon=policy.epsilon, delta=policy.delta),
        candidates,
        relation=NeighboringRelation(policy.neighboring_relation),
        mechanisms=tuple(Mechanism(name) for name in policy.mechanisms),
        selection=policy.selection,
        realised_epsilon_cap=policy.cap,
    )
