"""Copies kept on a run's way are candidates of their own, which share the run's first steps and are charged once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accounting.joint_release import joint_release, single_run
from accounting.trajectory import union_of_segments
from tasks.models import build, state_from_bytes
from tasks.training import TrainingFailed
from tasks.validation import share_right
from tests.tasks.training.by_hand import train_by_hand
from tests.tasks.training.test_reference import CountingNoise, network, require_equal, train

Build = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
POISSON = {"sampling_probability": 0.3, "expected_batch_size": 12}
CASES: dict[str, dict[str, Any]] = {
    "full batch": {},
    "Poisson": POISSON,
    "Adam in parts": {"optimizer": "adam", "learning_rate": 0.05},
    "a schedule": {"learning_rate_schedule": "linear", "schedule_stages": 3},
}


def kept_run(small_portfolio: Build, **changes: Any) -> Any:
    return small_portfolio(
        **network("perceptron"),
        keep_checkpoints=[1, 5, 11],
        **changes,
        execution={"grad_sample_mode": "hooks", "physical_batch_size": 16},
    )


@pytest.mark.parametrize("case", CASES)
def test_each_is_the_run_up_to_there(small_portfolio: Build, case: str) -> None:
    small = kept_run(small_portfolio, **CASES[case])
    noise = CountingNoise()
    trained = train(small, noise=noise)
    assert [one.name for one in trained.kept] == ["only-at-1", "only-at-5", "only-at-11"]
    assert len(noise.drawn) == 12 * 4  # keeping draws no noise of its own
    rates = [0.5 * share for share in (5 / 6, 0.5, 1 / 6) for _ in range(4)] if case == "a schedule" else None
    for one, steps in [*zip(trained.kept, (1, 5, 11), strict=True), (trained, 12)]:
        by_hand = train_by_hand(small, steps=steps, rates=rates)
        require_equal(one.model, by_hand, 2e-4 if "Adam" in case else 2e-5)
        module = build(small.recipe.network)
        module.load_state_dict(state_from_bytes(one.model))
        assert one.public_train_accuracy == share_right(module, small.splits.public_train)
        assert one.trajectory.steps == steps
        assert [metrics["step"] for metrics in one.metrics] == list(range(1, steps + 1))
        assert one.trajectory.data_digest == trained.trajectory.data_digest
    assert all(not one.kept for one in trained.kept)


@pytest.mark.parametrize("case", CASES)
def test_together_they_are_charged_as_the_longest(small_portfolio: Build, case: str) -> None:
    trained = train(kept_run(small_portfolio, **CASES[case]))
    runs = [one.trajectory for one in (*trained.kept, trained)]
    union = union_of_segments(tuple(runs))
    assert sum(segment.steps for segment in union) == 12
    assert {segment.id: segment.steps for segment in union} == {
        segment.id: segment.steps for segment in trained.trajectory.segments
    }
    for one in runs:
        for segment, whole in zip(one.segments, trained.trajectory.segments, strict=False):
            assert segment.id == whole.id
            assert segment.steps <= whole.steps
            assert segment.mechanism_key() == whole.mechanism_key()
    together = joint_release(runs, trained.trajectory.neighboring_relation).epsilon(1e-5)
    alone = [single_run(one).epsilon(1e-5) for one in runs]
    assert together == pytest.approx(alone[-1], rel=1e-12)
    assert alone == sorted(alone)
    assert alone[0] < alone[-1]


def test_a_kept_model_equals_a_run_that_ends_there(small_portfolio: Build) -> None:
    """With the same noise, to the last bit: keeping a copy changes nothing, before or after."""
    plain = {"execution": {"grad_sample_mode": "hooks"}, **network("perceptron"), "momentum": 0.5}
    kept = train(small_portfolio(**plain, keep_checkpoints=[4]))
    short, whole = train(small_portfolio(**plain, steps=4)), train(small_portfolio(**plain))
    assert kept.kept[0].model == short.model
    assert kept.model == whole.model


def test_a_diverged_copy_is_no_candidate(small_portfolio: Build) -> None:
    small = kept_run(small_portfolio, learning_rate=1e38, noise_multiplier=1e30)
    with pytest.raises(TrainingFailed, match="diverged"):
        train(small)
