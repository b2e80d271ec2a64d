"""Merges of tasks: parallel where records are disjoint, joint where they are shared, certified and checked again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate import Certificate
from accounting.certificate_parts import CandidateReference
from accounting.errors import (
    AccountingError,
    BudgetInfeasible,
    IncompatibleCandidates,
    InvalidInput,
    RemergeError,
)
from accounting.independent import derive_again
from accounting.independent_tasks import steps_by_task, tasks_profile, worst_square
from accounting.joint_release import joint_release, single_run
from accounting.ledger import Outcome, PastRelease, cumulative
from accounting.linear_combination import accumulated_noise_variance
from accounting.parallel_tasks import DISJOINT_TASKS, MAY_CHANGE_TASK, parallel_tasks
from accounting.plan import Mechanism, Plan
from accounting.recheck import recheck
from accounting.restate import restate
from accounting.task_sets import bound_of_tasks, solve_tasks
from accounting.trajectory import Candidate, Trajectory
from tests.accounting.test_certificate import certify

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
Maker = Callable[..., Any]
GroupMaker = Callable[..., tuple[list[Candidate], dict[str, str]]]


@pytest.fixture(scope="module")
def group(make_run: Maker) -> GroupMaker:
    """Candidates "a0", "a1", ... of tasks "a", "b", ... with the given noises, each task on rows of its own."""

    def build(
        noises: Mapping[str, Sequence[float]], **changes: Any
    ) -> tuple[list[Candidate], dict[str, str]]:
        candidates, tasks = [], {}
        for task, own in noises.items():
            for i, noise in enumerate(own):
                run = replace(make_run(f"{task}{i}", noise, **changes), data_digest=f"rows of {task}")
                candidates.append(Candidate(name=f"{task}{i}", trajectory=run))
                tasks[f"{task}{i}"] = task
        return candidates, tasks

    return build


def labelled(runs: Sequence[Trajectory], tasks: Mapping[str, str], names: Sequence[str]) -> list[str]:
    assert len(runs) == len(names)
    return [tasks[name] for name in names]


@pytest.mark.parametrize("relation", NeighboringRelation)
def test_labels_tell_the_tasks_of_one_lineage(relation: NeighboringRelation, group: GroupMaker) -> None:
    """Full batch: the worst task, k = 2 within it under replace-one; a moved record (k = 1 each) is never worse."""
    candidates, tasks = group({"a": [8.0, 10.0], "b": [12.0]}, relation=relation)
    runs = [c.trajectory for c in candidates]
    bound = parallel_tasks(runs, relation, list(tasks.values()))
    factor = relation.full_batch_factor
    a, b = factor**2 * 20 * (1 / 64 + 1 / 100), factor**2 * 20 / 144
    assert bound.mu == pytest.approx(math.sqrt(max(a, b)))
    assert DISJOINT_TASKS in bound.assumptions
    assert (MAY_CHANGE_TASK in bound.assumptions) == (relation is REPLACE)
    assert parallel_tasks(runs, relation).mu == joint_release(runs, relation).mu  # one lineage, no labels
    apart = [replace(run, lineage=f"task {task}") for run, task in zip(runs, tasks.values(), strict=True)]
    assert parallel_tasks(apart, relation).mu == bound.mu
    exact = worst_square(steps_by_task(dict(zip(tasks, runs, strict=True)), tasks), relation)
    assert math.sqrt(exact) == pytest.approx(bound.mu, rel=1e-14)


def test_labels_that_do_not_fit(group: GroupMaker) -> None:
    candidates, tasks = group({"a": [8.0], "b": [12.0]})
    runs, labels = [c.trajectory for c in candidates], list(tasks.values())
    for bad in (labels[:1], [*labels, "c"], ["a", ""]):
        with pytest.raises(InvalidInput, match="one task for each run"):
            parallel_tasks(runs, REPLACE, bad)
    same_rows = [runs[0], replace(runs[1], data_digest=runs[0].data_digest)]
    same_steps = [runs[0], replace(runs[0], data_digest="rows of b")]
    for shared in (same_rows, same_steps):
        with pytest.raises(IncompatibleCandidates, match="not disjoint"):
            parallel_tasks(shared, REPLACE, labels)
        with pytest.raises(AccountingError, match="not disjoint"):
            steps_by_task({"a0": shared[0], "b0": shared[1]}, tasks)
    with pytest.raises(IncompatibleCandidates, match="lineage"):
        parallel_tasks([runs[0], replace(runs[1], lineage="others")], REPLACE, labels)


def best_by_trying(
    candidates: Sequence[Candidate],
    tasks: Mapping[str, str],
    budget: PrivacyBudget,
    records: str,
    worth: Callable[[Candidate], float],
) -> float | None:
    relation = candidates[0].trajectory.neighboring_relation
    lists = [[c for c in candidates if tasks[c.name] == task] for task in dict.fromkeys(tasks.values())]
    found = []
    for choice in product(*lists):
        bound = bound_of_tasks(
            [c.trajectory for c in choice], [tasks[c.name] for c in choice], relation, records
        )
        if bound.delta(budget.epsilon) <= budget.delta:
            found.append(math.fsum(worth(c) for c in choice))
    return max(found, default=None)


NOISES = st.lists(st.sampled_from([6.0, 9.0, 13.0, 20.0, 33.0]), min_size=1, max_size=4)


@given(
    noises=st.lists(NOISES, min_size=2, max_size=3),
    epsilon=st.sampled_from([1.0, 2.0, 3.0, 5.0]),
    records=st.sampled_from(["disjoint", "shared"]),
    utilities=st.none() | st.lists(st.sampled_from([0.1, 0.5, 0.6, 0.9]), min_size=12, max_size=12),
)
def test_no_better_choice_fits(
    noises: list[list[float]], epsilon: float, records: str, utilities: list[float] | None, group: GroupMaker
) -> None:
    candidates, tasks = group(dict(zip("abc", noises, strict=False)))
    if utilities is not None:
        candidates = [replace(c, utility=u) for c, u in zip(candidates, utilities, strict=False)]
    budget = PrivacyBudget(epsilon=epsilon, delta=1e-5)

    def worth(candidate: Candidate) -> float:
        own = candidate.utility
        return -accumulated_noise_variance(candidate.trajectory) if own is None else own

    best = best_by_trying(candidates, tasks, budget, records, worth)
    selection = "noise" if utilities is None else "stated"
    arguments: dict[str, Any] = {
        "relation": REPLACE,
        "records": records,
        "selection": selection,
        "merge": "ties",
    }
    if best is None:
        with pytest.raises(BudgetInfeasible, match=r"noise_multiplier|noisier"):
            solve_tasks(budget, candidates, tasks, **arguments)
        return
    plan = solve_tasks(budget, candidates, tasks, **arguments)
    count = len(noises)
    assert plan.objective == pytest.approx(best / (count**2 if utilities is None else count), rel=1e-12)
    assert set(plan.weights.values()) == {1 / count}
    assert [tasks[name] for name in plan.weights] == list(dict.fromkeys(tasks.values()))
    assert plan.epsilon <= epsilon
    assert plan.bound.name == {"disjoint": "parallel_tasks", "shared": "joint"}[records]


def test_under_add_or_remove_each_task_has_the_whole_budget(group: GroupMaker) -> None:
    """Also of sampled runs; where records are shared, quieter candidates have to do."""
    noises = {"a": [0.9, 1.4, 3.0], "b": [0.8, 1.3, 3.0], "c": [0.9, 1.4, 3.0]}
    candidates, tasks = group(noises, steps=50, relation=ADD_OR_REMOVE, sampling_probability=0.02)
    budget = PrivacyBudget(epsilon=0.7, delta=1e-5)
    arguments: dict[str, Any] = {"relation": ADD_OR_REMOVE, "merge": "linear"}
    plan = solve_tasks(budget, candidates, tasks, records="disjoint", **arguments)
    for name in plan.weights:
        own = [c for c in candidates if tasks[c.name] == tasks[name]]
        within = [c.name for c in own if single_run(c.trajectory).delta(0.7) <= 1e-5]
        assert name == within[0]
    runs = {c.name: c.trajectory for c in candidates}
    assert plan.epsilon == max(single_run(runs[name]).epsilon(1e-5) for name in plan.weights)
    shared = solve_tasks(budget, candidates, tasks, records="shared", **arguments)
    assert shared.objective < plan.objective
    assert_holds(certified(plan), runs)
    assert_holds(certified(shared), runs)


def test_the_second_derivation_of_a_record_that_changes_its_task(group: GroupMaker) -> None:
    """The moved record is the worst case here: within its task delta is 2.43e-5, between tasks 2.77e-5."""
    (one,), _ = group({"a": [0.34849525603761655]}, steps=3, sampling_probability=0.01)
    (other,), _ = group({"b": [1.2271521806385897]}, steps=1, sampling_probability=0.5)
    runs = {"a0": one.trajectory, "b0": other.trajectory}
    tasks = {"a0": "a", "b0": "b"}
    again = tasks_profile(steps_by_task(runs, tasks), REPLACE)
    bound = parallel_tasks(list(runs.values()), REPLACE, list(tasks.values()))
    for epsilon in (0.5, 2.0, 8.0):
        low, high = again.range(epsilon)
        assert low <= bound.delta(epsilon) <= high
    assert max(single_run(run).delta(8.0) for run in runs.values()) < again.range(8.0)[0]


def test_paired_steps_of_tasks(group: GroupMaker) -> None:
    candidates, tasks = group(
        {"a": [8.0, 12.0], "b": [9.0, 12.0]}, optimizer="dp_sam+adam", ascent_radius=0.05
    )
    budget = PrivacyBudget(epsilon=12.0, delta=1e-5)
    plan = solve_tasks(budget, candidates, tasks, relation=REPLACE, records="disjoint", merge="fisher")
    assert plan.bound.mu == pytest.approx(
        2 * math.sqrt(2 * 20) / 8 if "a0" in plan.weights else 2 * math.sqrt(40) / 9
    )
    runs = {c.name: c.trajectory for c in candidates}
    certificate = certified(plan)
    assert_holds(certificate, runs)
    plain = {
        name: replace(
            run, segments=tuple(replace(s, optimizer="sgd", ascent_radius=0.0) for s in run.segments)
        )
        for name, run in runs.items()
    }
    assert [c for c in derive_again(certificate, plain) if not c.holds]


def certified(plan: Plan) -> Certificate:
    references = {
        f"{task}{i}": CandidateReference(
            registered_model="group", version="1", model_sha256=f"{task}{i}", trajectory_sha256=f"{task}{i}"
        )
        for task in "abc"
        for i in range(4)
    }
    return certify(plan, candidates=references)


def assert_holds(certificate: Certificate, runs: Mapping[str, Trajectory]) -> None:
    used = {name: runs[name] for name in certificate.candidates}
    recheck(certificate, used)
    failing = [c for c in (*restate(certificate, used), *derive_again(certificate, used)) if not c.holds]
    assert not failing, failing


def assert_fails(certificate: Certificate, runs: Mapping[str, Trajectory]) -> None:
    """By each of the three checks."""
    used = {name: runs[name] for name in certificate.candidates}
    with pytest.raises(RemergeError):
        recheck(certificate, used)
    assert [c for c in restate(certificate, used) if not c.holds]
    assert [c for c in derive_again(certificate, used) if not c.holds]


@pytest.fixture(scope="module")
def merged(group: GroupMaker) -> tuple[Certificate, dict[str, Trajectory]]:
    candidates, tasks = group({"a": [8.0, 16.0], "b": [9.0, 16.0], "c": [20.0]})
    plan = solve_tasks(
        PrivacyBudget(epsilon=6.0, delta=1e-5),
        candidates,
        tasks,
        relation=REPLACE,
        records="disjoint",
        merge="ties",
        merge_options={"density": 0.2},
    )
    return certified(plan), {c.name: c.trajectory for c in candidates}


def test_a_certificate_of_tasks(merged: tuple[Certificate, dict[str, Trajectory]]) -> None:
    certificate, runs = merged
    assert_holds(certificate, runs)
    document = certificate.to_dict()
    assert document["mechanism"] == "operator"
    assert document["bound"] == "parallel_tasks"
    assert document["tasks"] == {"a0": "a", "b0": "b", "c0": "c"}
    assert document["records"] == "disjoint"
    assert document["mu"] == certificate.mu == pytest.approx(2 * math.sqrt(20) / 8)
    assert Certificate.from_dict(document) == certificate
    assert DISJOINT_TASKS in certificate.assumptions
    silent = replace(
        certificate, assumptions=tuple(text for text in certificate.assumptions if text != DISJOINT_TASKS)
    )
    with pytest.raises(AccountingError, match="leaves out"):
        recheck(silent, runs)


def test_a_claim_of_parallel_tasks_that_is_not_covered(
    merged: tuple[Certificate, dict[str, Trajectory]],
) -> None:
    certificate, runs = merged
    assert_fails(certificate, {**runs, "b0": replace(runs["b0"], data_digest=runs["a0"].data_digest)})
    assert_fails(certificate, {**runs, "b0": replace(runs["a0"], data_digest="rows of b")})
    assert_fails(
        replace(certificate, tasks={"a0": "a", "b0": "a", "c0": "c"}), runs
    )  # then a and b are joint
    joint = {"records": "shared", "bound": "joint", "source": "releases of all"}
    assert_fails(replace(certificate, **joint), runs)
    assert_fails(replace(certificate, mu=certificate.mu * 0.9, epsilon=certificate.epsilon * 0.9), runs)  # type: ignore[operator]


@pytest.mark.parametrize(
    "changes",
    [
        {"records": "shared"},
        {"records": None},
        {"records": "separate"},
        {"tasks": {}},
        {"tasks": {}, "records": None},
        {"tasks": {"a0": "a", "b0": "b"}},
        {"tasks": {"a0": "a", "b0": "b", "c0": ""}},
        {"tasks": {"a0": "a", "b0": "a", "c0": "a"}},
        {"tasks": {"a0": "a", "b0": "b", "c0": "c", "d0": "d"}},
        {"bound": "joint"},
        {"bound": "generic"},
        {"bound": "shifted"},
        {"mechanism": Mechanism.LINEAR_COMBINATION},
        {"mechanism": Mechanism.RANDOM_SELECTION},
        {"fresh_noise": 0.1},
    ],
)
def test_fields_of_tasks_that_do_not_fit(
    changes: dict[str, Any], merged: tuple[Certificate, dict[str, Trajectory]]
) -> None:
    with pytest.raises(InvalidInput):
        replace(merged[0], **changes)


def test_two_candidates_of_one_task_are_fine_for_the_bound(
    group: GroupMaker, merged: tuple[Certificate, dict[str, Trajectory]]
) -> None:
    """They are released jointly within their task: here of consulted scores."""
    candidates, tasks = group({"a": [8.0, 16.0], "b": [9.0, 16.0]})
    scores = {"a0": 0.6, "a1": 0.8, "b0": 0.9, "b1": 0.7}
    budget = PrivacyBudget(epsilon=8.0, delta=1e-5)
    plan = solve_tasks(
        budget, candidates, tasks, relation=REPLACE, records="disjoint", selection="validation", scores=scores
    )
    assert set(plan.weights) == {"a1", "b0"}
    assert plan.consulted == ("a0", "a1", "b0", "b1")
    assert plan.merge == "linear"
    assert plan.mechanism is Mechanism.OPERATOR
    assert plan.bound.mu == pytest.approx(2 * math.sqrt(20 * (1 / 64 + 1 / 256)))
    runs = {c.name: c.trajectory for c in candidates}
    certificate = certified(plan)
    assert_holds(certificate, runs)
    two = replace(certificate, weights={"a0": 0.25, "a1": 0.25, "b0": 0.5})
    assert_holds(two, runs)
    with pytest.raises(InvalidInput, match="lacks a task"):
        replace(certificate, tasks={n: t for n, t in certificate.tasks.items() if n != "a0"})
    with pytest.raises(BudgetInfeasible, match="consulted"):
        solve_tasks(
            PrivacyBudget(epsilon=2.0, delta=1e-5),
            candidates,
            tasks,
            relation=REPLACE,
            records="disjoint",
            selection="validation",
            scores=scores,
        )


def test_bad_requests(group: GroupMaker, make_run: Maker) -> None:
    candidates, tasks = group({"a": [8.0, 16.0], "b": [9.0]})
    arguments: dict[str, Any] = {"relation": REPLACE, "records": "disjoint"}
    budget = PrivacyBudget(epsilon=8.0, delta=1e-5)
    solve_tasks(budget, candidates, tasks, **arguments)
    for bad_tasks in (
        {"a0": "a", "a1": "a"},
        {**tasks, "z": "z"},
        dict.fromkeys(tasks, "a"),
        {**tasks, "b0": " "},
    ):
        with pytest.raises(InvalidInput):
            solve_tasks(budget, candidates, bad_tasks, **arguments)
    for bad in (
        {"records": "unknown"},
        {"merge": ""},
        {"merge_options": {"x": None}},
        {"selection": "stated"},
    ):
        with pytest.raises(InvalidInput):
            solve_tasks(budget, candidates, tasks, **(arguments | bad))
    with pytest.raises(InvalidInput, match="same name"):
        solve_tasks(budget, [*candidates, candidates[0]], tasks, **arguments)
    other = replace(candidates[1], trajectory=replace_rate(candidates[1].trajectory))
    with pytest.raises(InvalidInput, match="Task a: "):
        solve_tasks(budget, [candidates[0], other, candidates[2]], tasks, **arguments)
    with pytest.raises(IncompatibleCandidates, match="relation"):
        solve_tasks(budget, candidates, tasks, relation=ADD_OR_REMOVE, records="disjoint")
    same_rows = [replace(c, trajectory=replace(c.trajectory, data_digest="all")) for c in candidates]
    with pytest.raises(IncompatibleCandidates, match="not disjoint"):
        solve_tasks(budget, same_rows, tasks, **arguments)
    solve_tasks(budget, same_rows, tasks, relation=REPLACE, records="shared")


def replace_rate(run: Trajectory) -> Trajectory:
    return replace(run, segments=tuple(replace(s, learning_rate=0.2) for s in run.segments))


# The ledger.


def release(
    candidates: Sequence[Candidate], names: Sequence[str], tasks: Mapping[str, str] | None, region: str = "eu"
) -> PastRelease:
    runs = tuple(c.trajectory for name in names for c in candidates if c.name == name)
    labels = None if tasks is None else tuple(tasks[name] for name in names)
    return PastRelease(region=region, outcomes=(Outcome(probability=1.0, runs=runs, tasks=labels),))


@pytest.mark.parametrize(
    ("relation", "changes"),
    [(REPLACE, {}), (ADD_OR_REMOVE, {}), (ADD_OR_REMOVE, {"sampling_probability": 0.02})],
)
def test_figures_of_labelled_releases_are_parallel(
    relation: NeighboringRelation, changes: dict[str, float], group: GroupMaker
) -> None:
    candidates, tasks = group({"a": [8.0, 16.0], "b": [9.0, 16.0]}, relation=relation, **changes)
    runs = {c.name: c.trajectory for c in candidates}
    first, second = release(candidates, ["a0", "b0"], tasks), release(candidates, ["a1", "b0"], tasks)
    known = ["a0", "a1", "b0"]
    union = parallel_tasks([runs[n] for n in known], relation, [tasks[n] for n in known])
    together = joint_release([runs[n] for n in known], relation)
    figure = cumulative([first, second], relation)
    assert figure.epsilon(1e-5) == pytest.approx(union.epsilon(1e-5), rel=1e-12)
    assert figure.epsilon(1e-5) < together.epsilon(1e-5)
    assert DISJOINT_TASKS in figure.assumptions
    assert cumulative([first], relation).epsilon(1e-5) <= figure.epsilon(1e-5)
    assert cumulative([first, first], relation).epsilon(1e-5) == cumulative([first], relation).epsilon(1e-5)
    unlabelled = release(candidates, ["a1", "b0"], None)
    for releases in ([first, unlabelled], [release(candidates, known, None)]):
        mixed = cumulative(releases, relation)
        assert mixed.epsilon(1e-5) == pytest.approx(together.epsilon(1e-5), rel=1e-12)
        assert DISJOINT_TASKS not in mixed.assumptions
    again = release(candidates, ["a0", "b0"], None)
    same = cumulative([first, again], relation)
    assert same.epsilon(1e-5) == pytest.approx(
        joint_release([runs["a0"], runs["b0"]], relation).epsilon(1e-5), rel=1e-12
    )


def test_labels_that_were_not_checked_together_are_joint(group: GroupMaker) -> None:
    """Disjointness was checked within a release: of a and b, and of a and c, but not of b and c."""
    candidates, tasks = group({"a": [8.0], "b": [9.0], "c": [10.0]})
    runs = [c.trajectory for c in candidates]
    pairs = [release(candidates, ["a0", "b0"], tasks), release(candidates, ["a0", "c0"], tasks)]
    together = joint_release(runs, REPLACE)
    assert cumulative(pairs, REPLACE).mu == pytest.approx(together.mu, rel=1e-12)
    everything = release(candidates, ["a0", "b0", "c0"], tasks)
    assert cumulative([*pairs, everything], REPLACE).mu == pytest.approx(2 * math.sqrt(20) / 8, rel=1e-12)
    renamed = {"a0": "b", "b0": "a", "c0": "c"}
    crossed = [everything, release(candidates, ["a0", "b0", "c0"], renamed)]
    assert cumulative(crossed, REPLACE).mu == pytest.approx(together.mu, rel=1e-12)
    grown = [replace(c, trajectory=replace(c.trajectory, data_digest="more rows")) for c in candidates[:1]]
    new = [replace_id(grown[0], "later"), *candidates[1:]]
    later = release(new, ["a0", "b0", "c0"], tasks)
    square = 4 * 20 * (2 / 64 + 1 / 81 + 1 / 100)
    assert cumulative([everything, later], REPLACE).mu == pytest.approx(math.sqrt(square), rel=1e-12)


def replace_id(candidate: Candidate, name: str) -> Candidate:
    run = candidate.trajectory
    return replace(candidate, trajectory=replace(run, segments=(replace(run.segments[0], id=name),)))


def test_outcomes_with_labels_that_do_not_fit(group: GroupMaker) -> None:
    candidates, _ = group({"a": [8.0], "b": [9.0]})
    runs = tuple(c.trajectory for c in candidates)
    for tasks in (("a",), ("a", ""), ("a", "b", "c")):
        with pytest.raises(InvalidInput, match="one task for each run"):
            Outcome(probability=1.0, runs=runs, tasks=tasks)
    with pytest.raises(InvalidInput, match="weights out"):
        Outcome(probability=1.0, runs=runs, tasks=("a", "b"), weights=(0.5, 0.5))
