"""The calculator's bounds: stated guarantees, composition, shared noise, and which bound is certified."""

from __future__ import annotations

import math
from typing import Any

import pytest

from accounting.budget import NeighboringRelation
from accounting.joint_release import advanced_composition, joint_release
from accounting.profile import StatedProfile
from accounting.trajectory import Segment, Trajectory
from accounting.words import rounded_up
from tasks.account_bounds import BOUNDS, Account, account_of
from tasks.account_documents import bounds_document
from tasks.account_plot import draw_account
from tasks.account_runs import Release, Run

RELATION = NeighboringRelation.REPLACE_ONE
DELTA = 1e-5


def known(name: str, noise_multiplier: float, segment: str | None = None, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "id": segment or name,
        "steps": 20,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": 1.0,
        "learning_rate": 1.0,
        "expected_batch_size": 60.0,
    }
    trajectory = Trajectory(
        portfolio="p",
        lineage="l",
        unit="record",
        neighboring_relation=RELATION,
        data_digest="d",
        initialisation_digest="i",
        feature_radius=None,
        n_max=None,
        segments=(Segment(**(values | changes)),),
    )
    return Run(name=name, known_by=trajectory, utility=None)


def stated(name: str, epsilon: float, delta: float) -> Run:
    return Run(name=name, known_by=StatedProfile(stated_epsilon=epsilon, stated_delta=delta), utility=None)


def account(kind: str, *runs: Run, weights: tuple[float, ...] | None = None, **changes: Any) -> Account:
    delta = changes.pop("delta", DELTA)
    release = Release(kind=kind, runs=runs, weights=weights, relation=RELATION, **changes)
    return account_of(release, delta)


def epsilon(account: Account, name: str) -> float:
    value = account.lines[name].epsilon
    assert value is not None, account.lines[name].reason
    return value


def test_every_bound_is_answered_with_a_number_or_a_reason() -> None:
    for kind in ("linear_combination", "random_selection", "joint"):
        weights = None if kind == "joint" else (0.5, 0.5)
        found = account(kind, known("a", 16), known("b", 32), weights=weights)
        assert tuple(found.lines) == tuple(BOUNDS)
        for line in found.lines.values():
            assert (line.epsilon is None) == (line.reason is not None)
            if not line.covers_kind:
                assert "only, and this is a" in (line.reason or "")
        sound = [line for line in found.lines.values() if line.sound]
        assert found.certified is not None
        assert found.certified.epsilon == min(line.epsilon for line in sound if line.epsilon is not None)
        assert found.certified.name != "stepwise"


def test_among_equal_bounds_the_weakest_assumptions_are_certified() -> None:
    found = account("linear_combination", known("a", 16), weights=(1.0,))
    assert epsilon(found, "joint") == epsilon(found, "generic")
    assert found.certified is not None
    assert found.certified.name == "joint"


def test_fresh_noise_lowers_what_merges_the_last_steps() -> None:
    runs = (known("a", 16, update_lipschitz=1.0), known("b", 32, update_lipschitz=1.0))
    bare = account("linear_combination", *runs, weights=(0.5, 0.5))
    noisy = account("linear_combination", *runs, weights=(0.5, 0.5), fresh_noise=1.0)
    assert epsilon(noisy, "joint") == epsilon(bare, "joint")
    assert epsilon(noisy, "generic") < epsilon(bare, "generic")
    assert epsilon(noisy, "shifted") < epsilon(bare, "shifted")
    assert "fresh noise" in (noisy.lines["stepwise"].reason or "")


def test_compositions_are_those_of_the_theorems() -> None:
    a, b = known("a", 16), known("b", 32)
    found = account("joint", a, b)
    halves = [
        joint_release((run.trajectory,), RELATION).epsilon(DELTA / 2) for run in (a, b) if run.trajectory
    ]
    assert epsilon(found, "basic_composition") == pytest.approx(sum(halves), rel=1e-12)
    quarters = [
        (joint_release((run.trajectory,), RELATION).epsilon(DELTA / 4), DELTA / 4)
        for run in (a, b)
        if run.trajectory
    ]
    expected, total = advanced_composition(quarters, DELTA / 2)
    assert total <= DELTA
    assert epsilon(found, "advanced_composition") == pytest.approx(expected, rel=1e-12)
    assert epsilon(found, "joint") < epsilon(found, "basic_composition")


@pytest.mark.parametrize("delta", [1e-299, 1e-20, 1e-5, 0.5])
def test_advanced_composition_reaches_every_delta(delta: float) -> None:
    found = account("joint", known("a", 160), known("b", 320), known("c", 200), delta=delta)
    assert epsilon(found, "advanced_composition") >= epsilon(found, "joint")


def test_composition_does_not_split_the_least_delta() -> None:
    found = account("joint", known("a", 160), known("b", 320), delta=1e-300)
    assert epsilon(found, "joint") > 0
    for name, what in (("basic_composition", "share of each run"), ("advanced_composition", "slack")):
        assert found.lines[name].epsilon is None
        assert f"its {what} would be below 1e-300" in str(found.lines[name].reason)


def test_stated_guarantees_add_to_the_joint_release_of_the_known_runs() -> None:
    """Known runs that share steps are accounted together first: a shared step is paid for once."""
    late, early, theirs = known("late", 16), known("early", 16, "late", steps=5), stated("theirs", 1, 1e-6)
    found = account("joint", late, early, theirs)
    own = joint_release((late.known_by,), RELATION).epsilon(9e-6)  # type: ignore[arg-type]
    assert epsilon(found, "basic_composition") == pytest.approx(own + 1, rel=1e-12)
    assert epsilon(found, "basic_composition") >= own + 1
    assert found.lines["joint"].reason == (
        "It needs every run step by step, and of theirs only a stated guarantee is known."
    )
    assert found.certified is not None
    assert found.certified.bound is not None
    text = " ".join(found.certified.bound.assumptions)
    assert "Run theirs has epsilon 1 at delta 1e-06 under replace_one" in text
    assert "noise of different runs is independent" in text


def test_stated_guarantees_alone() -> None:
    found = account("joint", stated("x", 1, 5e-6), stated("y", 2, 5e-6))
    assert epsilon(found, "basic_composition") == pytest.approx(3, rel=1e-12)
    assert "no delta for the slack" in (found.lines["advanced_composition"].reason or "")
    alone = account("joint", stated("x", 1, 1e-6))
    assert epsilon(alone, "basic_composition") == pytest.approx(
        StatedProfile(stated_epsilon=1, stated_delta=1e-6).epsilon(1e-5), rel=1e-9
    )
    many = account("joint", *(stated(f"s{i}", 0.01, 1e-9) for i in range(100)))
    assert epsilon(many, "advanced_composition") < epsilon(many, "basic_composition")


def test_stated_deltas_that_exceed_delta_leave_nothing() -> None:
    found = account("joint", known("a", 16), stated("x", 1, 1e-5))
    assert found.certified is None
    assert "ask for a larger delta" in (found.lines["basic_composition"].reason or "")
    document = bounds_document(found)
    assert document["certified"] == {"bound": None, "epsilon": None}
    assert "larger delta" in document["reasons"]["certified"]


def test_random_selection_with_a_stated_guarantee() -> None:
    """delta(eps) is the weighted sum of the members'."""
    ours, theirs = known("a", 16), stated("x", 1, 1e-6)
    found = account("random_selection", ours, theirs, weights=(0.25, 0.75))
    value = epsilon(found, "random_selection_pld")
    total = 0.25 * joint_release((ours.known_by,), RELATION).delta(value) + 0.75 * 1e-6  # type: ignore[arg-type]
    assert value > 1
    assert total == pytest.approx(DELTA, rel=1e-9)
    alone = account("random_selection", theirs, weights=(1.0,))
    assert epsilon(alone, "random_selection_pld") <= 1


def test_nothing_infinite_or_nan_is_reported() -> None:
    for noise in (0.0, 1e-30, 1e-6, 1e6, 1e30):
        for kind in ("linear_combination", "random_selection", "joint"):
            weights = None if kind == "joint" else (1e-12, 1 - 1e-12)
            found = account(kind, known("a", noise), known("b", 32), weights=weights)
            for line in found.lines.values():
                assert line.epsilon is None or 0 <= line.epsilon < math.inf
                assert line.mu is None or 0 <= line.mu < math.inf


@pytest.mark.parametrize("kind", ["linear_combination", "random_selection", "joint"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_release_can_be_drawn(kind: str, count: int, tmp_path: Any) -> None:
    runs = [known(f"r{i}", 8.0 * 2**i, update_lipschitz=1.0) for i in range(count)]
    if kind != "linear_combination" and count == 3:
        runs[2] = stated("r2", 1, 1e-6)
    weights = None if kind == "joint" else ((1.0,), (0.25, 0.75), (0.25, 0.5, 0.25))[count - 1]
    found = account(kind, *runs, weights=weights)
    assert found.certified is not None
    out = tmp_path / "plot.svg"
    draw_account(found, out, certified=found.certified.name)
    assert "</svg>" in out.read_text()


def test_numbers_are_rounded_up() -> None:
    assert rounded_up(1.0001) == "1.001"
    assert rounded_up(2.0) == "2"
    assert rounded_up(0.0) == "0"
    assert rounded_up(0.1) == "0.1"
    assert float(rounded_up(1 / 3)) >= 1 / 3
