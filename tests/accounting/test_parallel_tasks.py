"""Disjoint tasks: which of them a record touches, checked against direct integration and by counterexample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import NeighboringRelation as LibraryRelation
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.special import ndtr

from accounting.ascent import SAME_BATCH_ASCENT
from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError, IncompatibleCandidates, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.ledger import Outcome, PastRelease, cumulative
from accounting.parallel_tasks import (
    DISJOINT_TASKS,
    MAY_CHANGE_TASK,
    WorstProfile,
    moved_record,
    parallel_tasks,
)
from accounting.pld import PoissonGroup, composed_profile
from accounting.profile import DiscretisedProfile, GaussianProfile
from accounting.trajectory import ParentStep, Trajectory

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
ZERO_OUT = NeighboringRelation.REPLACE_SPECIAL
EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0)
Maker = Callable[..., Any]
TaskMaker = Callable[..., Trajectory]


@pytest.fixture
def make_task(make_run: Maker) -> TaskMaker:
    """A run on records of its own."""

    def build(name: str, noise: float, steps: int = 20, **changes: Any) -> Trajectory:
        run = make_run(name, noise, steps, lineage=changes.pop("lineage", f"task-{name}"), **changes)
        return replace(run, data_digest=f"records-of-{run.lineage}")

    return build


@pytest.mark.parametrize("relation", NeighboringRelation)
def test_full_batch_tasks_cost_as_much_as_the_loudest(
    relation: NeighboringRelation, make_task: TaskMaker
) -> None:
    tasks = [
        make_task("a", 8.0, relation=relation),
        make_task("b", 12.0, relation=relation),
        make_task("c", 50.0, relation=relation),
    ]
    bound = parallel_tasks(tasks, relation)
    assert bound.mu == single_run(tasks[0]).mu
    assert bound.epsilon(1e-5) == single_run(tasks[0]).epsilon(1e-5)
    assert parallel_tasks(tasks[::-1], relation).mu == bound.mu
    assert DISJOINT_TASKS in bound.assumptions
    assert (MAY_CHANGE_TASK in bound.assumptions) == (relation is REPLACE)


def test_composing_both_tasks_does_not_cover_a_record_replaced_within_one(make_task: TaskMaker) -> None:
    """A quiet task beside a loud one: sqrt(1 + tiny) with k = 1 each, 2 in truth."""
    tasks = [make_task("loud", math.sqrt(20)), make_task("quiet", 1e4)]
    composed = math.sqrt(sum(20 / run.segments[0].noise_multiplier ** 2 for run in tasks))
    assert composed == pytest.approx(1.0, abs=1e-3)
    assert parallel_tasks(tasks, REPLACE).mu == pytest.approx(2.0)


def group(noise: float, q: float, steps: int = 1) -> PoissonGroup:
    return PoissonGroup(noise_multiplier=noise, sampling_probability=q, steps=steps)


def test_poisson_tasks_under_add_or_remove_have_the_worst_profile(make_task: TaskMaker) -> None:
    """Pointwise: one task is worse at small epsilon, the other at large."""
    tasks = [
        make_task("often", 3.0, 40, relation=ADD_OR_REMOVE, sampling_probability=0.5),
        make_task("rarely", 0.6, 2, relation=ADD_OR_REMOVE, sampling_probability=0.05),
    ]
    bound = parallel_tasks(tasks, ADD_OR_REMOVE)
    singles = [single_run(run) for run in tasks]
    worst = [max((0, 1), key=lambda i, e=e: singles[i].delta(e)) for e in (0.0, 8.0)]
    assert worst == [0, 1]
    for epsilon in (*EPSILONS, 8.0):
        for side, found in enumerate(bound.profile.deltas(epsilon)):
            assert found == max(single.profile.deltas(epsilon)[side] for single in singles)
    assert bound.mu is None
    assert bound.epsilon(1e-3) == max(single.epsilon(1e-3) for single in singles)


def integrated(
    left: tuple[float, float], entered: tuple[float, float], epsilon: float
) -> tuple[float, float]:
    """One step of each task: the record is in the one, or in the other. Integrated over the first's outcome.

    Given that outcome, whose likelihood ratio is `ratio`, the second is told apart at `growth = e^eps / ratio`,
    in closed form: the record's presence shifts its mean by m with probability q.
    """
    x = np.linspace(-12, 12, 200_001)
    (noise, q), (other_noise, other_q) = left, entered
    plain = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    ratio = (1 - q) + q * np.exp(x / noise - 1 / (2 * noise**2))
    m = 1 / other_noise

    def above(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P(y > c) without the record and with it."""
        return ndtr(-c), (1 - other_q) * ndtr(-c) + other_q * ndtr(m - c)

    def where(likelihood: np.ndarray) -> np.ndarray:
        """The y at which the record's presence is that likely, minus infinity where it always is."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(
                likelihood > 1 - other_q, np.log((likelihood - (1 - other_q)) / other_q) / m + m / 2, -np.inf
            )

    growth = math.exp(epsilon) / ratio  # present in the first and absent from the second, against the reverse
    absent, present = above(where(1 / growth))
    leaves = np.trapezoid(plain * ratio * ((1 - absent) - growth * (1 - present)), x)
    growth = math.exp(epsilon) * ratio
    absent, present = above(where(growth))
    enters = np.trapezoid(plain * (present - growth * absent), x)
    return float(leaves), float(enters)


@pytest.mark.parametrize(
    ("left", "entered"),
    [((1.0, 0.3), (1.0, 0.3)), ((0.6, 0.2), (2.0, 0.7)), ((1.5, 0.9), (0.5, 0.01))],
)
def test_a_moved_record_matches_direct_integration(
    left: tuple[float, float], entered: tuple[float, float]
) -> None:
    profile = moved_record((0.0, (group(*left),)), (0.0, (group(*entered),)))
    back = moved_record((0.0, (group(*entered),)), (0.0, (group(*left),)))
    for epsilon in EPSILONS:
        truth = integrated(left, entered, epsilon)
        for found, exact in zip(profile.deltas(epsilon), truth, strict=True):
            assert exact * (1 - 1e-9) - 1e-13 <= found <= exact * 1.005 + 1e-9
        assert back.deltas(epsilon)[::-1] == pytest.approx(profile.deltas(epsilon), rel=1e-9)


def test_a_removal_and_an_addition_are_not_two_of_the_same() -> None:
    """Composing the tasks direction by direction is another mechanism, and not an upper bound on this one."""
    one, other = group(0.6, 0.2), group(2.0, 0.7)
    moved = moved_record((0.0, (one,)), (0.0, (other,)))
    same_way = composed_profile(0.0, (one, other), ADD_OR_REMOVE)
    differences = [m - s for e in EPSILONS for m, s in zip(moved.deltas(e), same_way.deltas(e), strict=True)]
    assert min(differences) < -1e-4
    assert max(differences) > 1e-4


def test_a_draw_between_tasks_never_adds_up_unlike_directions(make_task: TaskMaker) -> None:
    """Two outcomes of the same losses, of which a step of next to no privacy turns the directions round.

    An outside attack: delta at epsilon 8 was 2.596e-5, where each outcome alone has 2.766e-5.
    """

    def task(name: str, noise: float, q: float, steps: int, **changes: Any) -> Trajectory:
        return make_task(name, noise, steps, relation=REPLACE, sampling_probability=q, lineage="l", **changes)

    loud = {"noise": 0.34849525603761655, "q": 0.01, "steps": 3}
    often = {"noise": 1.2271521806385897, "q": 0.5, "steps": 1}
    first = [replace(task("a1", **loud), data_digest="a"), replace(task("b1", **often), data_digest="b")]
    second = [replace(task("a2", **loud), data_digest="a"), replace(task("b2", **often), data_digest="b")]
    quiet = replace(make_task("a2-start", 1e6, 1, relation=REPLACE, lineage="l").segments[0])
    (sampled,) = second[0].segments
    after = ParentStep(run="a2", segment=quiet.id, step=1)
    second[0] = replace(second[0], segments=(quiet, replace(sampled, parent=after)))
    alone = parallel_tasks(first, REPLACE, ["a", "b"]).delta(8.0)
    outcomes = tuple(Outcome(probability=0.5, runs=tuple(runs), tasks=("a", "b")) for runs in (first, second))
    drawn = cumulative([PastRelease(region="eu", outcomes=outcomes)], REPLACE).delta(8.0)
    assert alone == pytest.approx(2.766e-5, rel=1e-3)
    assert drawn >= alone * (1 - 1e-9)


def test_a_moved_record_beside_full_batch_steps(make_task: TaskMaker) -> None:
    rare = group(1.0, 1e-9, 5)
    moved = moved_record((0.6, (rare,)), (0.8, ()))
    assert isinstance(moved, DiscretisedProfile)
    for epsilon in EPSILONS:
        assert moved.delta(epsilon) == pytest.approx(
            GaussianProfile(mu=1.0).delta(epsilon), rel=1e-4, abs=1e-7
        )
    closed = moved_record((0.6, ()), (0.8, ()))
    assert isinstance(closed, GaussianProfile)
    assert closed.mu == pytest.approx(1.0)
    wide = moved_record((0.0, (group(0.01, 0.5, 3),)), (0.0, (group(1.0, 0.1),)))
    assert wide.delta(0.0) == pytest.approx(1.0)
    for noise in (0.0, 1e-200):
        assert moved_record((0.0, (group(noise, 0.5),)), (0.0, ())) == GaussianProfile(mu=math.inf)
    gentle = moved_record((0.0, (group(1e300, 1e-300),)), (0.0, (group(1e6, 1e-6),)))
    assert 0 <= gentle.delta(0.0) < 1e-6


@pytest.mark.parametrize("noises", [(1.0, 1.0), (0.8, 3.0)])
def test_poisson_tasks_under_replace_one(noises: tuple[float, float], make_task: TaskMaker) -> None:
    tasks = [
        make_task(name, noise, 50, sampling_probability=0.1) for name, noise in zip("ab", noises, strict=True)
    ]
    bound = parallel_tasks(tasks, REPLACE)
    assert isinstance(bound.profile, WorstProfile)
    moved = moved_record(*((0.0, (group(noise, 0.1, 50),)) for noise in noises))
    for epsilon in EPSILONS:
        expected = max(*(single_run(run).delta(epsilon) for run in tasks), moved.delta(epsilon))
        assert bound.delta(epsilon) == expected
        assert bound.delta(epsilon) <= joint_release_of(tasks).delta(epsilon) * (1 + 1e-9)
    with pytest.raises(AccountingError):
        bound.epsilon(bound.profile.smallest_delta / 2)


def moved_at_least(
    left: tuple[float, float, int], entered: tuple[float, float, int], epsilon: float
) -> float:
    """A lower bound on the moved record's delta: the library's optimistic losses of removal and addition, composed."""
    removed, added = (
        from_gaussian_mechanism(
            noise,
            sampling_prob=q,
            value_discretization_interval=1e-3,
            pessimistic_estimate=False,
            neighboring_relation=LibraryRelation.ADD_OR_REMOVE_ONE,
        ).self_compose(steps)
        for noise, q, steps in (left, entered)
    )
    both = removed._pmf_remove.compose(added._pmf_add)
    return float(both.get_delta_for_epsilon(epsilon))


def test_a_record_that_changes_its_task_can_be_the_worst_case(make_task: TaskMaker) -> None:
    """Within its task a replaced record costs delta 2.43e-5; leaving one task and entering the other, 2.77e-5."""
    loud, often = (0.34849525603761655, 0.01, 3), (1.2271521806385897, 0.5, 1)
    tasks = [
        make_task(name, noise, steps, sampling_probability=q)
        for name, (noise, q, steps) in zip("ab", (loud, often), strict=True)
    ]
    within = max(single_run(run).delta(8.0) for run in tasks)
    assert within == pytest.approx(2.43e-5, rel=1e-2)
    truth = max(moved_at_least(loud, often, 8.0), moved_at_least(often, loud, 8.0))
    assert truth == pytest.approx(2.77e-5, rel=1e-2)
    assert truth <= parallel_tasks(tasks, REPLACE).delta(8.0) <= truth * 1.01


def joint_release_of(tasks: list[Trajectory]) -> Any:
    return joint_release([replace(run, lineage="shared") for run in tasks], REPLACE)


def test_runs_of_one_lineage_are_released_jointly(make_task: TaskMaker) -> None:
    tasks = [
        make_task("a", 8.0, lineage="clinic"),
        make_task("b", 8.0, lineage="clinic"),
        make_task("c", 9.0),
    ]
    assert parallel_tasks(tasks, REPLACE).mu == joint_release(tasks[:2], REPLACE).mu
    alone = parallel_tasks(tasks[:2], REPLACE)
    assert DISJOINT_TASKS not in alone.assumptions


def test_paired_steps_are_accounted_as_such(make_task: TaskMaker) -> None:
    tasks = [make_task("a", 8.0, optimizer="dp_sam"), make_task("b", 8.0)]
    bound = parallel_tasks(tasks, REPLACE)
    assert bound.mu == pytest.approx(2 * math.sqrt(40) / 8)
    assert SAME_BATCH_ASCENT in bound.assumptions
    adam = [make_task("a", 8.0, optimizer="dp_sam+adamw"), make_task("b", 8.0, optimizer="adam")]
    assert parallel_tasks(adam, REPLACE).mu == bound.mu


def test_a_task_without_noise_is_not_private(make_task: TaskMaker) -> None:
    tasks = [make_task("a", 0.0, 1), make_task("b", 2.0, 5, sampling_probability=0.1)]
    for relation in (REPLACE, ADD_OR_REMOVE):
        bound = parallel_tasks([replace(run, neighboring_relation=relation) for run in tasks], relation)
        assert bound.delta(100.0) == 1.0


def test_tasks_that_are_not_disjoint_are_refused(make_task: TaskMaker) -> None:
    first = make_task("a", 8.0)
    for other in (
        replace(make_task("b", 8.0), data_digest=first.data_digest),
        replace(make_task("a", 8.0), lineage="another", data_digest="another"),
    ):
        with pytest.raises(IncompatibleCandidates, match="not disjoint"):
            parallel_tasks([first, other], REPLACE)
    with pytest.raises(IncompatibleCandidates, match="unit"):
        parallel_tasks([first, make_task("b", 8.0, unit="patient")], REPLACE)
    with pytest.raises(IncompatibleCandidates, match="relation"):
        parallel_tasks([first, make_task("b", 8.0, relation=ZERO_OUT)], REPLACE)
    with pytest.raises(IncompatibleCandidates, match="sam_adam"):
        parallel_tasks([first, make_task("b", 8.0, optimizer="sam_adam")], REPLACE)
    with pytest.raises(InvalidInput):
        parallel_tasks([], REPLACE)
    with pytest.raises(InvalidInput):
        WorstProfile(profiles=())
