"""The union of executed steps, and the composition theorems shown beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian
from accounting.bounds import FIXED_IN_ADVANCE, POISSON_SAMPLER, WEIGHTS_FREE
from accounting.budget import NeighboringRelation
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.joint_release import advanced_composition, basic_composition, joint_release, single_run

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
Maker = Callable[..., Any]


def test_published_joint_releases(golden: dict[str, Any], make_run: Maker) -> None:
    for row in golden["linear_combination"]:
        runs = [make_run(f"s{i}", noise, row["steps"]) for i, noise in enumerate(row["noise_multiplier"])]
        assert joint_release(runs, REPLACE).mu == pytest.approx(row["mu_joint"], rel=1e-8)
        for run, mu in zip(runs, row["mu_individual"], strict=True):
            assert single_run(run).mu == pytest.approx(mu, rel=1e-8)


def test_order_and_repetition_change_nothing(make_run: Maker) -> None:
    runs = [make_run("a", 7.0), make_run("b", 13.0, 31), make_run("c", 29.0, 2)]
    mu = joint_release(runs, REPLACE).mu
    assert joint_release(runs[::-1], REPLACE).mu == mu
    assert joint_release([*runs, runs[1]], REPLACE).mu == mu


@given(cut=st.integers(min_value=1, max_value=19))
def test_splitting_a_segment_changes_nothing(cut: int, make_segment: Maker, make_run: Maker) -> None:
    whole = single_run(make_run("a", 16.0, 20))
    parts = [make_segment("a1", 16.0, cut), make_segment("a2", 16.0, 20 - cut)]
    assert single_run(make_run(segments=parts)).mu == pytest.approx(whole.mu, rel=1e-14)


def test_a_shared_prefix_counts_once_also_from_the_middle_of_a_segment(
    make_segment: Maker, make_run: Maker
) -> None:
    trunk, branch = make_segment("trunk", 10.0, 30), make_segment("branch", 20.0, 8)
    early = make_run(segments=[make_segment("trunk", 10.0, 12), branch])
    late = make_run(segments=[trunk])
    joint = joint_release([early, late], REPLACE).mu
    assert joint == pytest.approx(2 * math.sqrt(30 / 100 + 8 / 400), rel=1e-14)
    assert joint < math.hypot(single_run(early).mu or 0, single_run(late).mu or 0)


def test_checkpoints_of_one_run_cost_the_longest(make_run: Maker) -> None:
    checkpoints = [make_run("run", 10.0, steps) for steps in (5, 20, 11)]
    assert joint_release(checkpoints, REPLACE).mu == single_run(checkpoints[1]).mu


def test_poisson_runs_have_a_profile_and_no_mu(make_run: Maker) -> None:
    runs = [
        make_run(n, s, 50, sampling_probability=0.05, relation=ADD_OR_REMOVE)
        for n, s in (("a", 1.0), ("b", 2.0))
    ]
    bound = joint_release(runs, ADD_OR_REMOVE)
    assert bound.mu is None
    assert POISSON_SAMPLER in bound.assumptions
    singles = [single_run(run).epsilon(1e-5) for run in runs]
    assert max(singles) < bound.epsilon(1e-5) < sum(single_run(run).epsilon(5e-6) for run in runs)


def test_a_run_without_noise_is_not_private(make_run: Maker) -> None:
    bound = joint_release([make_run("a", 10.0), make_run("b", 0.0)], REPLACE)
    assert not bound.is_private
    assert bound.delta(1e6) == 1.0
    assert bound.epsilon(1e-5) == math.inf


def test_relations_are_never_mixed(make_run: Maker) -> None:
    run = make_run("a", 10.0, relation=ADD_OR_REMOVE)
    with pytest.raises(IncompatibleCandidates, match="never mixed"):
        joint_release([run], REPLACE)
    with pytest.raises(IncompatibleCandidates):
        joint_release([run, make_run("b", 10.0)], REPLACE)


@pytest.mark.parametrize("change", [{"lineage": "others"}, {"unit": "person"}])
def test_lineages_and_units_are_never_mixed(change: dict[str, str], make_run: Maker) -> None:
    with pytest.raises(IncompatibleCandidates, match=next(iter(change))):
        joint_release([make_run("a", 10.0), make_run("b", 10.0, **change)], REPLACE)


def test_an_edited_segment_is_found(make_run: Maker) -> None:
    with pytest.raises(IncompatibleCandidates, match="edited"):
        joint_release([make_run("a", 10.0), make_run("a", 11.0, 5)], REPLACE)


def test_no_run_is_an_error() -> None:
    with pytest.raises(InvalidInput):
        joint_release([], REPLACE)


def test_assumptions_are_sentences_and_fit_the_runs(make_run: Maker) -> None:
    bound = joint_release([make_run("a", 10.0), make_run("b", 10.0)], REPLACE)
    assert FIXED_IN_ADVANCE in bound.assumptions
    assert WEIGHTS_FREE in bound.assumptions
    assert all(text[0].isupper() and text.endswith(".") for text in bound.assumptions)
    adapted = joint_release([make_run("a", 10.0, schedule="adapted")], REPLACE)
    assert FIXED_IN_ADVANCE not in adapted.assumptions


def test_basic_composition_adds() -> None:
    epsilon, delta = basic_composition([(1.0, 1e-6), (0.5, 2e-6)])
    assert epsilon == pytest.approx(1.5)
    assert delta == pytest.approx(3e-6)
    assert basic_composition([]) == (0.0, 0.0)


@pytest.mark.parametrize(("k", "e", "slack"), [(1000, 0.01, 1e-6), (1000, 0.1, 1e-6), (3, 0.01, 1e-6)])
def test_advanced_composition_of_equal_parts_matches_the_theorem(k: int, e: float, slack: float) -> None:
    """Kairouz, Oh and Viswanath 2015, theorem 3.4, for k equal mechanisms; each of its terms is the least once."""
    drift = k * e * (math.exp(e) - 1) / (math.exp(e) + 1)
    published = min(
        k * e,
        drift + e * math.sqrt(2 * k * math.log(math.e + math.sqrt(k * e * e) / slack)),
        drift + e * math.sqrt(2 * k * math.log(1 / slack)),
    )
    epsilon, delta = advanced_composition([(e, 1e-9)] * k, slack)
    assert epsilon == pytest.approx(published, rel=1e-12)
    assert delta == pytest.approx(1 - (1 - slack) * (1 - 1e-9) ** k, rel=1e-9)


@given(
    epsilons=st.lists(st.floats(min_value=1e-3, max_value=3), min_size=1, max_size=30),
    mu_seed=st.integers(min_value=0, max_value=3),
)
def test_advanced_composition_is_at_most_basic_and_at_least_exact(
    epsilons: list[float], mu_seed: int
) -> None:
    share, slack = 1e-7, 1e-6 / (mu_seed + 1)
    mus = [gaussian.mu_for(e, share) for e in epsilons]
    guarantees = [(gaussian.epsilon(mu, share), share) for mu in mus]
    epsilon, delta = advanced_composition(guarantees, slack)
    assert epsilon <= basic_composition(guarantees)[0]
    assert gaussian.epsilon(math.sqrt(math.fsum(mu * mu for mu in mus)), delta) <= epsilon


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_composition_theorems_refuse_what_is_no_guarantee(bad: float) -> None:
    with pytest.raises(InvalidInput):
        basic_composition([(bad, 1e-6)])
    with pytest.raises(InvalidInput):
        advanced_composition([(1.0, 1e-6)], bad)
