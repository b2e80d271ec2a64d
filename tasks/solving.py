"""From a policy and its candidates to a plan: the solver, asked in the policy's words."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import AccountingError
from accounting.joint_release import joint_release, single_run
from accounting.members import epsilon_within
from accounting.plan import Mechanism, Plan
from accounting.selection_rules import UNACCOUNTED, VALIDATION
from accounting.solver import solve
from accounting.task_sets import solve_tasks
from accounting.trajectory import Candidate
from infra.documents import Policy, PortfolioManifest
from tasks.candidates import LoadedCandidate
from tasks.data import load_public_train
from tasks.merging import needs
from tasks.policy_merges import options_of
from tasks.release_merging import own_network_and_rows
from tasks.validation import accuracy


def solve_policy(
    policy: Policy,
    candidates: Sequence[Candidate],
    scores: Mapping[str, float] | None = None,
    manifest: PortfolioManifest | None = None,
) -> Plan:
    """The best weights under a policy, from trajectories and what its selection rule looks at beside them.

    With another merge operator than linear these are the weights that the operator is given.

    Args:
        candidates: from `tasks.candidates.accountable`, which gives them the utilities that the rule needs.
        scores: from `consulted_scores`; None for rules that look at none.
        manifest: of the candidates' portfolio; where it is one of several tasks, one candidate of each is merged.

    Raises:
        accounting.errors.BudgetInfeasible: nothing satisfies the budget; says what to train.
        accounting.errors.RemergeError: the candidates cannot be accounted or compared.
    """
    options = options_of(policy)
    if manifest is not None and manifest.tasks is not None:
        assert manifest.records is not None
        return solve_tasks(
            _budget(policy),
            candidates,
            {candidate.name: manifest.tasks[candidate.name] for candidate in candidates},
            relation=NeighboringRelation(policy.neighboring_relation),
            records=manifest.records,
            selection=policy.selection,
            merge=policy.merge,
            merge_options=options,
            scores=scores,
        )
    return solve(
        _budget(policy),
        candidates,
        relation=NeighboringRelation(policy.neighboring_relation),
        mechanisms=tuple(Mechanism(name) for name in policy.mechanisms),
        selection=policy.selection,
        realised_epsilon_cap=policy.cap,
        scores=scores,
        merge=policy.merge,
        merge_options=options,
        set_size=needs(policy.merge).models,
    )


def consulted_scores(
    policy: Policy,
    manifest: PortfolioManifest,
    candidates: Sequence[Candidate],
    loaded: Mapping[str, LoadedCandidate],
) -> dict[str, float] | None:
    """Look at private candidates, where the policy's selection rule does so: their accuracy on public rows.

    The rows are the public-train rows: no candidate was trained on them, and the public-gate rows stay held
    out for the gate. The same candidates always get the same scores, so that a retry makes the same plan.

    Returns:
        Accuracy in [0, 1] by candidate name, of every candidate whose model was looked at; None for a rule that
        looks at none. All of them belong into the ledger, whatever weights come of it.
    """
    if policy.selection not in (VALIDATION, UNACCOUNTED):
        return None
    names = consulted_names(policy, candidates, manifest.tasks)
    rows = load_public_train(manifest)
    scores = {}
    for name in names:
        network, own_rows = own_network_and_rows(manifest, name, rows)
        scores[name] = accuracy(network, loaded[name].model, own_rows)
    return scores


def consulted_names(
    policy: Policy, candidates: Sequence[Candidate], tasks: Mapping[str, str] | None = None
) -> list[str]:
    """Which candidates to look at, decided by public hyper-parameters and the budget alone.

    By `validation` as many as the budget covers, the most private first: their joint release must fit. By
    `validation_unaccounted`, where nothing is covered, all. Of several tasks each one's most private candidate comes
    first, then each one's second, and so on.

    Returns:
        At least one name, in candidate order. Where not even the most private candidate fits, its name, and the
        solver will say so.
    """
    if policy.selection == UNACCOUNTED:
        return [candidate.name for candidate in candidates]
    relation = NeighboringRelation(policy.neighboring_relation)

    def own(candidate: Candidate) -> tuple[float, str]:
        try:
            return single_run(candidate.trajectory, relation).epsilon(policy.delta), candidate.name
        except AccountingError:  # this delta is too small to be resolved
            return math.inf, candidate.name

    ordered = sorted(candidates, key=own)
    if tasks is not None:
        places = {
            candidate.name: sum(tasks[other.name] == tasks[candidate.name] for other in ordered[:k])
            for k, candidate in enumerate(ordered)
        }
        ordered.sort(key=lambda candidate: places[candidate.name])

    def is_too_much(count: int) -> bool:
        try:
            joint = joint_release([candidate.trajectory for candidate in ordered[:count]], relation)
            return epsilon_within(joint, _budget(policy)) is None
        except AccountingError:  # cannot be accounted together at this delta
            return True

    covered = bisect_left(range(1, len(ordered) + 1), True, key=is_too_much)
    chosen = {candidate.name for candidate in ordered[: max(covered, 1)]}
    return [candidate.name for candidate in candidates if candidate.name in chosen]


def _budget(policy: Policy) -> PrivacyBudget:
    return PrivacyBudget(epsilon=policy.epsilon, delta=policy.delta)
