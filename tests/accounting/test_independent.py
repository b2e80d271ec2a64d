"""The second derivation of a certificate's numbers: right by itself, and it catches a wrong accountant."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

import accounting
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate import Certificate, build_certificate
from accounting.certificate_parts import CandidateReference
from accounting.errors import NotDerivedAgain
from accounting.independent import derive_again
from accounting.independent_merges import (
    generic_square,
    joint_square,
    shifted_mu,
)
from accounting.independent_profiles import drawn_profile, gaussian_delta, gaussian_profile, steps_profile
from accounting.independent_steps import distinct_steps
from accounting.joint_release import joint_release
from accounting.linear_combination import generic
from accounting.plan import Mechanism
from accounting.shifted_interpolation import shifted
from accounting.solver import solve
from accounting.trajectory import Candidate, Segment, Trajectory

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
Maker = Callable[..., Any]


@pytest.mark.parametrize("mu", [1e-9, 1e-3, 0.3, 1.0, 4.0, 25.0, 100.0])
@pytest.mark.parametrize("ratio", [0.0, 1e-6, 0.1, 1.0, 5.0, 20.0, 36.0])
def test_gaussian_delta_against_60_digits(mu: float, ratio: float) -> None:
    epsilon = ratio * mu
    with mpmath.workdps(400):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        truth = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        assert abs(gaussian_delta(mu, epsilon) / truth - 1) < 1e-11


def test_a_sampled_step_against_its_distribution_functions(make_segment: Maker) -> None:
    noise, q = 0.8, 0.3
    profile = steps_profile({"a": make_segment("a", noise, 1, sampling_probability=q)}, ADD_OR_REMOVE)
    for epsilon in (0.05, 0.3, 0.8):
        m, growth = 1 / noise, math.exp(epsilon)
        x = -math.log((growth - (1 - q)) / q) / m - m / 2
        remove = (1 - q) * ndtr(x) + q * ndtr(x + m) - growth * ndtr(x)
        low, high = profile.range(epsilon)
        assert low <= remove <= high
        assert high - low < 0.05 * remove + 3e-10


def test_replacing_in_a_sampled_step_is_not_two_removals(make_segment: Maker) -> None:
    """sigma 1, q 0.9, two steps, epsilon 0: 0.7763; halving the noise instead gives 0.7709."""
    profile = steps_profile({"a": make_segment("a", 1.0, 2, sampling_probability=0.9)}, REPLACE)
    assert max(profile.high(0.0)) == pytest.approx(0.7763, abs=5e-4)


def test_a_draw_sums_within_each_direction() -> None:
    profile = drawn_profile([(0.25, gaussian_profile(1.0, 1.0)), (0.75, gaussian_profile(2.0, 2.0))])
    expected = 0.25 * gaussian_delta(1.0, 0.5) + 0.75 * gaussian_delta(2.0, 0.5)
    assert profile.high(0.5) == pytest.approx((expected, expected), rel=1e-14)


def test_the_published_example_of_a_convex_merge(make_run: Maker) -> None:
    """Noise multipliers 8 and 32, 20 steps, replace-one, weights 0.1 and 0.9: 1.152, 1.125 and 0.338."""
    runs = [make_run(f"s{i}", noise, 20, update_lipschitz=1.0) for i, noise in enumerate((8.0, 32.0))]
    merge = list(zip((0.1, 0.9), runs, strict=True))
    assert math.sqrt(joint_square(distinct_steps(runs), REPLACE)) == pytest.approx(1.152, abs=5e-4)
    assert math.sqrt(generic_square(merge, REPLACE, 0.0)) == pytest.approx(1.125, abs=5e-4)
    low, mu = shifted_mu(merge, REPLACE, 0.0)
    assert mu == pytest.approx(0.338, abs=5e-4)
    assert low <= mu


def test_a_shared_prefix_counts_once(make_segment: Maker, make_run: Maker) -> None:
    long, short = (
        make_run(segments=[make_segment("a", 2.0, 10)]),
        make_run(segments=[make_segment("a", 2.0, 4)]),
    )
    other = make_run(segments=[make_segment("a", 2.0, 4), make_segment("b", 1.0, 1)])
    assert joint_square(distinct_steps([short, long, other]), ADD_OR_REMOVE) == Fraction(10, 4) + 1
    with pytest.raises(NotDerivedAgain, match="two of the merged runs"):
        shifted_mu([(0.5, long), (0.5, other)], ADD_OR_REMOVE, 0.0)


STRETCH = st.tuples(
    st.sampled_from([1, 2, 5, 20]),
    st.sampled_from([2.0, 8.0, 30.0, 100.0]),
    st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.0, 1.01, 1.1, math.inf]),
    st.sampled_from([0.1, 0.5, 0.02]),
)


@settings(max_examples=60)
@given(
    paths=st.lists(st.lists(STRETCH, min_size=1, max_size=4), min_size=1, max_size=4),
    shares=st.lists(st.integers(min_value=1, max_value=20), min_size=4, max_size=4),
    fresh_noise=st.sampled_from([0.0, 0.01]),
    relation=st.sampled_from(list(NeighboringRelation)),
)
def test_both_derivations_agree_on_any_merge(
    paths: list[list[tuple[int, float, float, float]]],
    shares: list[int],
    fresh_noise: float,
    relation: NeighboringRelation,
    make_segment: Maker,
    make_run: Maker,
) -> None:
    runs: list[Trajectory] = []
    for i, path in enumerate(paths):
        segments = [
            make_segment(f"{i}:{j}", noise, steps, update_lipschitz=c, learning_rate=rate)
            for j, (steps, noise, c, rate) in enumerate(path)
        ]
        runs.append(make_run(f"r{i}", segments=segments, relation=relation))
    used = [share / 64 for share in shares[: len(runs) - 1]]
    weights = (
        [*(w for w in used), 1 - math.fsum(used)] if math.fsum(used) < 1 else [1 / len(runs)] * len(runs)
    )
    weights[-1] = 1 - math.fsum(weights[:-1])
    merge = list(zip(weights, runs, strict=True))
    exact = joint_square(distinct_steps(runs), relation)
    stated = Fraction(joint_release(runs, relation).mu or 0.0) ** 2
    assert exact <= stated <= exact * (1 + Fraction(1, 10**12))
    if len(runs) > 1 or fresh_noise > 0:
        exact = generic_square(merge, relation, fresh_noise)
        stated = Fraction(generic(runs, weights, relation, fresh_noise).mu or 0.0) ** 2
        alone = joint_square(distinct_steps(runs), relation) if len(runs) == 1 else exact
        assert min(exact, alone) <= stated <= exact * (1 + Fraction(1, 10**12))
    low, mu = shifted_mu(merge, relation, fresh_noise)
    ours = shifted(runs, weights, relation, fresh_noise).mu
    assert ours is not None
    assert low * (1 - 1e-9) <= ours
    assert ours == pytest.approx(mu, rel=2e-4)


def certified(
    make_candidates: Maker, epsilon: float, mechanism: Mechanism, **changes: Any
) -> tuple[Certificate, dict[str, Trajectory]]:
    candidates: list[Candidate] = make_candidates([8.0, 16.0, 32.0], **changes)
    plan = solve(
        PrivacyBudget(epsilon=epsilon, delta=1e-5), candidates, relation=REPLACE, mechanisms=[mechanism]
    )
    certificate = build_certificate(
        plan,
        release_id="release",
        region="eu",
        policy_digest="p",
        policy_serial=1,
        manifest_digest="m",
        portfolio="clinic@1",
        lineage="patients",
        unit="record",
        candidates={
            c.name: CandidateReference(
                registered_model="clinic", version="1", model_sha256="a", trajectory_sha256="b"
            )
            for c in candidates
        },
        versions={},
        realised=next(iter(plan.outcomes)) if len(plan.outcomes) > 1 else None,
    )
    return certificate, {c.name: c.trajectory for c in candidates}


def faults(certificate: Certificate, runs: dict[str, Trajectory]) -> list[str]:
    return [check.what for check in derive_again(certificate, runs) if check.holds is not True]


def with_mu(certificate: Certificate, mu: float) -> Certificate:
    """What an accountant would state that is wrong in mu alone, and consistent in all that follows."""
    epsilons = [epsilon for epsilon, _ in certificate.profile]
    grid = np.linspace(0, 20, 20001)
    own = float(next(e for e in grid if gaussian_delta(mu, float(e)) <= 1e-5))
    return replace(
        certificate,
        mu=mu,
        epsilon=min(own, certificate.budget.epsilon),
        profile=tuple((e, gaussian_delta(mu, e) * (1 + 1e-12)) for e in epsilons),
    )


def test_a_wrong_accountant_is_caught(make_candidates: Maker) -> None:
    merged, runs = certified(make_candidates, 1.4, Mechanism.LINEAR_COMBINATION, update_lipschitz=1.0)
    assert merged.bound == "shifted"
    assert merged.mu is not None
    assert faults(merged, runs) == []
    # The step-by-step formula of the literature, unsound for DP-SGD.
    moved = sum(merged.weights.values()) * 2.0
    noise = math.fsum((w * runs[n].segments[0].noise_multiplier) ** 2 for n, w in merged.weights.items())
    stepwise = math.sqrt(20 * moved**2 / noise)
    assert stepwise < merged.mu
    assert "mu, derived again by payments found anew" in faults(with_mu(merged, stepwise), runs)
    # Half the sensitivity: add-or-remove-one counted where a record may be replaced.
    assert len(faults(with_mu(merged, merged.mu / 2), runs)) > 10
    # Loose, not unsound: found as well.
    assert len(faults(with_mu(merged, merged.mu * 1.01), runs)) > 1


def test_wrong_draws_are_caught(make_candidates: Maker) -> None:
    drawn, runs = certified(make_candidates, 1.5, Mechanism.RANDOM_SELECTION)
    assert faults(drawn, runs) == []
    assert drawn.realised is not None
    assert len(faults(replace(drawn, epsilon=drawn.epsilon * 0.999), runs)) == 1
    understated = replace(drawn, realised=replace(drawn.realised, epsilon=drawn.epsilon))
    assert len(faults(understated, runs)) == 1
    louder = replace(drawn, weights=dict.fromkeys(drawn.weights, 0.5))
    assert len(faults(louder, runs)) > 10


def test_what_is_not_covered_is_not_passed(make_run: Maker, make_candidates: Maker) -> None:
    merged, runs = certified(make_candidates, 1.4, Mechanism.LINEAR_COMBINATION, update_lipschitz=1.0)
    silent = {name: make_run(name, 0.0, update_lipschitz=1.0) for name in runs}
    assert faults(merged, silent) == ["mu, derived again", "epsilon and profile, derived again"]
    with pytest.raises(NotDerivedAgain, match="too long"):
        shifted_mu([(1.0, make_run("a", 5.0, 10**6, update_lipschitz=1.0))], REPLACE, 0.0)


def test_what_has_no_second_derivation_is_neither_passed_nor_failed(
    make_candidates: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged, runs = certified(make_candidates, 1.4, Mechanism.LINEAR_COMBINATION, update_lipschitz=1.0)
    monkeypatch.setattr("accounting.independent_merges._MOST_STEPS", 10)
    checks = derive_again(merged, runs)
    assert {check.holds for check in checks if "again" in check.what} == {None}
    assert "too long" in checks[0].note


ITS_OWN = {
    "accounting.budget",
    "accounting.certificate",
    "accounting.checks",
    "accounting.errors",
    "accounting.independent_merges",
    "accounting.independent_profiles",
    "accounting.independent_steps",
    "accounting.independent_tasks",
    "accounting.plan",
    "accounting.trajectory",
}


def test_the_second_derivation_shares_no_bound() -> None:
    files = sorted(Path(accounting.__file__).parent.glob("independent*.py"))
    assert len(files) == 5
    for file in files:
        names = {
            node.module
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accounting")
        }
        assert names <= ITS_OWN, file.name


def test_segments_are_taken_as_recorded(make_segment: Maker) -> None:
    segment: Segment = make_segment("a", 0.1, 3)
    exact = joint_square({"a": segment}, REPLACE)
    assert exact == 3 * (2 / Fraction(0.1)) ** 2
