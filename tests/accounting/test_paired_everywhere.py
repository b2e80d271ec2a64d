"""Paired steps wherever trajectories are accounted: nowhere as plain ones, and never under a theorem on merges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accounting.ascent import PREVIOUS_ASCENT, PUBLIC_ANCHOR, SAME_BATCH_ASCENT, SOURCE_PAIRED
from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.calibration import TrainingShape, calibrated_noise
from accounting.certificate import Certificate
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.independent import derive_again
from accounting.independent_merges import joint_square
from accounting.independent_profiles import steps_profile
from accounting.independent_steps import distinct_steps, released_sums
from accounting.joint_release import joint_release, single_run
from accounting.ledger import Outcome, PastRelease, cumulative
from accounting.linear_combination import generic, stepwise
from accounting.linear_combination_many import generic_mu_many
from accounting.mixtures import mixture_bound
from accounting.other_bounds import joint_rdp, other_bounds
from accounting.paired_mechanism import multiplier_of_equal_privacy, paired_run
from accounting.plan import Mechanism
from accounting.random_selection import random_selection_bound, random_selection_rdp_bound
from accounting.recheck import recheck
from accounting.restate import restate
from accounting.shifted_interpolation import shifted
from accounting.shifted_several import shifted_several
from accounting.solver import solve
from accounting.training_hint import noise_multiplier_needed
from accounting.trajectory import Candidate, Segment, Trajectory, segment_from_dict, segment_to_dict
from tests.accounting.test_certificate import certify

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
Maker = Callable[..., Any]
SAMPLED = {"sampling_probability": 0.1}


def bounds_of(runs: list[Trajectory], relation: NeighboringRelation) -> dict[str, Bound]:
    """Every bound that covers these two runs."""
    half = (0.5, 0.5)
    alone = tuple(Outcome(probability=0.5, runs=(run,)) for run in runs)
    found = {
        "joint": joint_release(runs, relation),
        "selection": random_selection_bound(half, runs, relation),
        "ledger": cumulative(
            [PastRelease(region="eu", outcomes=(Outcome(probability=1.0, runs=tuple(runs)),))], relation
        ),
        "ledger, draw to come": cumulative([PastRelease(region="eu", outcomes=alone)], relation),
        "mixture": mixture_bound([(0.5, single_run(run)) for run in runs]),
    }
    if relation is not REPLACE or all(s.is_full_batch for run in runs for s in run.segments):
        found["joint_rdp"] = joint_rdp(runs, relation, 1e-5)
        found["selection_rdp"] = random_selection_rdp_bound(half, runs, relation, 1e-5)
    return found


@pytest.mark.parametrize(
    ("relation", "changes"),
    [*((relation, {}) for relation in NeighboringRelation), (REPLACE, SAMPLED), (ADD_OR_REMOVE, SAMPLED)],
)
def test_every_bound_counts_a_paired_step_as_one_with_less_noise(
    relation: NeighboringRelation, changes: dict[str, float], make_run: Maker
) -> None:
    """Equal to those of plain runs whose noise is divided by sqrt(2), and above those of their own noise."""

    def two(noise: float, optimizer: str) -> dict[str, Bound]:
        runs = [make_run(n, noise, 9, relation=relation, optimizer=optimizer, **changes) for n in "ab"]
        return bounds_of(runs, relation)

    paired, equal, plain = two(3.0, "dp_sam+adam"), two(3.0 / math.sqrt(2), "sgd"), two(3.0, "adam")
    for name, bound in paired.items():
        own = bound.epsilon(1e-5)
        assert own == pytest.approx(equal[name].epsilon(1e-5), rel=1e-6), name
        assert own > 1.2 * plain[name].epsilon(1e-5), name
        assert {SAME_BATCH_ASCENT, PUBLIC_ANCHOR} <= set(bound.assumptions), name
        assert SOURCE_PAIRED in bound.source, name
        assert not {SAME_BATCH_ASCENT, PREVIOUS_ASCENT, PUBLIC_ANCHOR} & set(plain[name].assumptions)
        assert SOURCE_PAIRED not in plain[name].source
    free = two(3.0, "dp_sam_previous_gradient")
    for name, bound in free.items():
        assert bound.epsilon(1e-5) == plain[name].epsilon(1e-5)
        assert {PREVIOUS_ASCENT, PUBLIC_ANCHOR} <= set(bound.assumptions)


def test_full_batch_mu_is_the_closed_form(make_run: Maker, make_segment: Maker) -> None:
    """A warm-up of plain steps, shared; then paired steps: mu^2 = sum of (k / sigma)^2 + sum of 2 (k / sigma)^2."""
    warm = make_segment("warm", 4.0, 3)
    runs = [
        make_run(segments=[warm, make_segment(n, 5.0, 7, optimizer="dp_sam", ascent_radius=0.05)])
        for n in "ab"
    ]
    found = joint_release(runs, REPLACE).mu
    assert found == pytest.approx(2 * math.sqrt(3 / 16 + 2 * 2 * 7 / 25), rel=1e-14)
    assert math.sqrt(joint_square(distinct_steps(runs), REPLACE)) == pytest.approx(found, rel=1e-14)
    assert found >= math.sqrt(joint_square(distinct_steps(runs), REPLACE))
    assert single_run(runs[0]) == replace(paired_run(runs[0]), name="joint")


@pytest.mark.parametrize("relation", [REPLACE, ADD_OR_REMOVE])
def test_the_second_derivation_of_sampled_pairs_agrees(
    relation: NeighboringRelation, make_run: Maker
) -> None:
    run = make_run("s", 1.5, 200, relation=relation, optimizer="dp_sam", sampling_probability=0.02)
    again = steps_profile(distinct_steps([run]), relation)
    for epsilon in (0.1, 0.5, 1.0):
        low, high = again.range(epsilon)
        assert low <= single_run(run).delta(epsilon) <= high
        assert single_run(replace_optimizer(run, "sgd")).delta(epsilon) < low


def replace_optimizer(run: Trajectory, optimizer: str) -> Trajectory:
    segments = tuple(replace(s, optimizer=optimizer, ascent_radius=0.0) for s in run.segments)
    return replace(run, segments=segments)


def test_how_many_sums_a_step_released(make_segment: Maker) -> None:
    for optimizer, sums in [
        ("sgd", 1),
        ("adamw", 1),
        ("dp_sam", 2),
        ("dp_sam+adamw", 2),
        ("dp_sam_previous_gradient", 1),
        ("dp_sam_previous_gradient+adam", 1),
    ]:
        assert released_sums(make_segment("s", 2.0, optimizer=optimizer)) == sums


@pytest.mark.parametrize("optimizer", ["dp_sam", "dp_sam_previous_gradient", "dp_sam+adamw"])
def test_theorems_on_merges_refuse_steps_that_climb(optimizer: str, make_run: Maker) -> None:
    """Also where a Lipschitz constant is recorded: it is that of another update."""
    runs = [make_run(n, 8.0, 4, optimizer=optimizer, update_lipschitz=1.0) for n in "ab"]
    for theorem in (generic, stepwise, shifted):
        with pytest.raises(IncompatibleCandidates, match="plain SGD"):
            theorem(runs, [0.5, 0.5], REPLACE)
        with pytest.raises(IncompatibleCandidates, match="plain SGD"):
            theorem(runs[:1], [1.0], REPLACE)
    with pytest.raises(IncompatibleCandidates, match="plain SGD"):
        shifted_several(runs, [[0.5, 0.5], [1.0, 0.0]], REPLACE)
    with pytest.raises(IncompatibleCandidates, match="plain SGD"):
        generic_mu_many(runs, [[0.5, 0.5]], REPLACE)
    said = other_bounds(Mechanism.LINEAR_COMBINATION, [0.5, 0.5], runs, REPLACE, 1e-5, certified="joint")
    for name in ("generic", "shifted"):
        assert "plain SGD" in str(said[name].reason)


def test_an_anchor_alone_costs_nothing_and_is_named(make_run: Maker) -> None:
    plain, anchored = (
        [make_run(n, 8.0, 4, anchor_strength=strength) for n in "ab"] for strength in (0.0, 0.01)
    )
    for bound, other in [
        (joint_release(anchored, REPLACE), joint_release(plain, REPLACE)),
        (generic(anchored, [0.5, 0.5], REPLACE), generic(plain, [0.5, 0.5], REPLACE)),
    ]:
        assert bound.mu == other.mu
        assert bound.assumptions.count(PUBLIC_ANCHOR) == 1
        assert PUBLIC_ANCHOR not in other.assumptions


def test_a_paired_run_certified_and_checked_three_ways(make_candidates: Maker) -> None:
    """One that is mutated to plain steps no longer fits its certificate, nor one of another optimizer."""
    for changes in ({}, {"sampling_probability": 0.05}):
        candidates = make_candidates([6.0, 9.0, 14.0], optimizer="dp_sam", ascent_radius=0.05, **changes)
        budget = PrivacyBudget(epsilon=4.0, delta=1e-5)
        plan = solve(budget, candidates, relation=REPLACE)
        assert SAME_BATCH_ASCENT in plan.bound.assumptions
        certificate = certify(plan, realised=next(iter(plan.outcomes)) if len(plan.outcomes) > 1 else None)
        runs = {c.name: c.trajectory for c in candidates}
        assert_holds(certificate, runs)
        plainer = {name: replace_optimizer(run, "sgd") for name, run in runs.items()}
        assert not all(check.holds for check in derive_again(certificate, plainer))
        assert not all(check.holds for check in restate(certificate, plainer))


def test_a_plain_certificate_does_not_hold_for_paired_runs(make_candidates: Maker) -> None:
    plain = make_candidates([8.0, 16.0, 32.0])
    certificate = certify(solve(PrivacyBudget(epsilon=3.0, delta=1e-5), plain, relation=REPLACE))
    runs = {c.name: replace_optimizer(c.trajectory, "dp_sam") for c in plain}
    with pytest.raises(IncompatibleCandidates if certificate.bound != "joint" else Exception):
        recheck(certificate, runs)
    assert not all(check.holds for check in derive_again(certificate, runs))
    alone = certify(solve(PrivacyBudget(epsilon=3.0, delta=1e-5), plain[1:2], relation=REPLACE))
    stated = replace(alone, bound="generic")
    assert not all(check.holds for check in derive_again(stated, runs))


def assert_holds(certificate: Certificate, runs: dict[str, Trajectory]) -> None:
    recheck(certificate, runs)
    failing = [c for c in (*restate(certificate, runs), *derive_again(certificate, runs)) if not c.holds]
    assert not failing, failing


def test_calibration_gives_a_paired_run_more_noise() -> None:
    target = PrivacyBudget(epsilon=2.0, delta=1e-5)
    optimizers = ("sgd", "dp_sam", "dp_sam_previous_gradient+adam")
    shapes = [TrainingShape(steps=8, relation=REPLACE, optimizer=optimizer) for optimizer in optimizers]
    plain, paired, free = (calibrated_noise(target, shape) for shape in shapes)
    assert paired == pytest.approx(multiplier_of_equal_privacy(plain), rel=1e-4)
    assert free == plain
    plain_shape, paired_shape, free_shape = (replace(shape, sampling_probability=0.02) for shape in shapes)
    needed = paired_shape.bound(multiplier_of_equal_privacy(1.5)).epsilon(1e-5)
    assert needed == pytest.approx(plain_shape.bound(1.5).epsilon(1e-5), rel=1e-6)
    assert free_shape.bound(1.5).epsilon(1e-5) == plain_shape.bound(1.5).epsilon(1e-5)


def test_a_hint_names_the_noise_that_paired_steps_need(make_run: Maker) -> None:
    budget = PrivacyBudget(epsilon=1.0, delta=1e-5)
    plain, paired = (
        noise_multiplier_needed(budget, make_run("s", 4.0, 20, optimizer=o), REPLACE)
        for o in ("sgd", "dp_sam")
    )
    assert plain is not None
    assert paired == pytest.approx(math.sqrt(2) * plain, rel=1e-2)  # rounded up to three digits


def test_new_fields_of_a_segment(make_segment: Maker) -> None:
    old = make_segment("s", 4.0)
    assert list(segment_to_dict(old)) == [
        "id",
        "steps",
        "noise_multiplier",
        "max_grad_norm",
        "learning_rate",
        "expected_batch_size",
        "sampling_probability",
        "parent",
        "clipping",
        "optimizer",
        "momentum",
        "weight_decay",
        "sampler",
        "schedule",
        "update_lipschitz",
        "update_lipschitz_reason",
    ]
    new = make_segment("s", 4.0, optimizer="dp_sam", ascent_radius=0.05, anchor_strength=0.01)
    document = segment_to_dict(new)
    assert (document["ascent_radius"], document["anchor_strength"]) == (0.05, 0.01)
    assert segment_from_dict(document) == new
    assert segment_from_dict(segment_to_dict(old)) == old
    assert replace(new, ascent_radius=0.1).mechanism_key() != new.mechanism_key()
    for changes in (
        {"ascent_radius": 0.05},
        {"ascent_radius": math.nan, "optimizer": "dp_sam"},
        {"anchor_strength": -1.0},
        {"anchor_strength": math.inf},
    ):
        with pytest.raises(InvalidInput):
            make_segment("s", 4.0, **changes)


def test_runs_that_disagree_on_a_shared_segment_are_refused(make_run: Maker) -> None:
    one: Segment = make_run("s", 4.0, 5, optimizer="dp_sam").segments[0]
    for other in (
        replace(one, optimizer="sgd"),
        replace(one, noise_multiplier=4 / math.sqrt(2), optimizer="sgd"),
    ):
        with pytest.raises(IncompatibleCandidates, match="edited"):
            joint_release([make_run(segments=[one]), make_run(segments=[other])], REPLACE)


def test_candidates_of_different_ascents_are_not_compared_by_noise(make_run: Maker) -> None:
    pair = [
        Candidate(name="plain", trajectory=make_run("a", 20.0)),
        Candidate(name="paired", trajectory=make_run("b", 20.0, optimizer="dp_sam", ascent_radius=0.05)),
    ]
    with pytest.raises(InvalidInput, match="optimizer"):
        solve(PrivacyBudget(epsilon=8.0, delta=1e-5), pair, relation=REPLACE)
