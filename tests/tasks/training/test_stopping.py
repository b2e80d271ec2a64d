"""Early stopping: public rows decide, all steps are charged, and nothing is claimed that needs a fixed schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accounting.budget import NeighboringRelation
from accounting.errors import IncompatibleCandidates
from accounting.joint_release import single_run
from accounting.linear_combination import generic
from accounting.shifted_interpolation import shifted
from tasks.data import Rows
from tasks.models import build, initial_state, state_from_bytes
from tasks.recipes import EarlyStopping
from tasks.training import TrainedCandidate
from tasks.training.noise import SeededNoise
from tasks.training.stopping import Progress
from tasks.validation import share_right
from tests.tasks.training.by_hand import seeded, train_by_hand
from tests.tasks.training.test_reference import network, require_equal, train

Build = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
STOPPING = "{every: 3, patience: 2, min_improvement: 0.01}"


def looks(accuracies: list[float], **settings: Any) -> tuple[Progress, int | None]:
    """The progress after these looks, and at which one the run was ended."""
    progress, ends = Progress(), None
    for number, accuracy in enumerate(accuracies, start=1):
        state = {"weight": torch.tensor([float(number)])}
        if progress.saw(number, accuracy, state, EarlyStopping(every=1, **settings)):
            ends = number
            break
    return progress, ends


@pytest.mark.parametrize(
    ("accuracies", "settings", "best", "ends"),
    [
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, 4, None),
        ([0.5, 0.5], {"patience": 1}, 1, 2),  # as good is no improvement
        ([0.5, 0.4, 0.6, 0.5, 0.5], {"patience": 2}, 3, 5),  # patience begins anew
        (
            [0.5, 0.509, 0.518, 0.511],
            {"patience": 3, "min_improvement": 0.01},
            3,
            None,
        ),  # over the best, not the last
        ([0.5, 0.51], {"patience": 1, "min_improvement": 0.02}, 1, 2),
        ([0.0, 0.0, 0.0], {"patience": 2}, 1, 3),  # a first look is kept, whatever it shows
        ([0.0, 1.0], {"patience": 1, "min_improvement": 1.0}, 1, 2),
    ],
)
def test_patience(accuracies: list[float], settings: dict[str, Any], best: int, ends: int | None) -> None:
    progress, ended = looks(accuracies, **settings)
    assert (progress.best_step, ended) == (best, ends)
    assert progress.best["weight"].tolist() == [best]


def test_not_a_number_is_no_improvement() -> None:
    progress, ends = looks([0.5, math.nan, math.nan], patience=2)
    assert (progress.best_step, ends) == (1, 3)
    progress, ends = looks([math.nan, math.nan], patience=2)
    assert (progress.best_step, progress.best, ends) == (0, {}, 2)


def test_the_best_parameters_are_a_copy() -> None:
    state = {"weight": torch.ones(2)}
    progress = Progress()
    progress.saw(1, 0.5, state, EarlyStopping(every=1, patience=1))
    state["weight"].zero_()
    assert progress.best["weight"].tolist() == [1, 1]


def expected(small: Any, every: int, patience: int, gain: float) -> tuple[int, int, dict[str, Tensor]]:
    """By hand: the step it ends at, the step kept, and its parameters."""
    best, kept_at, without, kept = -1.0, 0, 0, {}
    for step in range(1, small.recipe.candidate("only").steps + 1):
        if step % every and step != small.recipe.candidate("only").steps:
            continue
        state = train_by_hand(small, steps=step)
        module = build(small.recipe.network)
        module.load_state_dict(state)
        accuracy = share_right(module, small.splits.public_train)
        if accuracy > best + (gain if kept_at else 0):
            best, kept_at, without, kept = accuracy, step, 0, state
        else:
            without += 1
        if without == patience:
            break
    return step, kept_at, kept


def stopping_run(small_portfolio: Build, **changes: Any) -> tuple[Any, TrainedCandidate]:
    small = small_portfolio(
        **network("perceptron"),
        **{"early_stopping": STOPPING, "steps": 40, **changes},
        execution={"grad_sample_mode": "hooks"},
    )
    return small, train(small)


def test_it_ends_early_keeps_the_best_and_charges_everything(small_portfolio: Build) -> None:
    steps_seen: list[int] = []
    small, trained = stopping_run(small_portfolio)
    train(small, on_step=steps_seen.append)
    ended, kept_at, kept = expected(small, every=3, patience=2, gain=0.01)
    assert ended < 40
    assert kept_at < ended
    assert steps_seen == list(range(1, ended + 1))
    require_equal(trained.model, kept, 2e-5)
    assert trained.trajectory.notes["early_stopping"] == (
        f"stopped after {ended} of 40 steps, and kept the parameters after {kept_at}, by public-train rows; all 40 "
        "steps are charged"
    )
    module = build(small.recipe.network)
    module.load_state_dict(state_from_bytes(trained.model))
    assert trained.public_train_accuracy == share_right(module, small.splits.public_train)
    (segment,) = trained.trajectory.segments
    assert (segment.steps, segment.schedule) == (40, "adapted")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling_probability": 0.3, "expected_batch_size": 12},
        {"learning_rate_schedule": "cosine", "schedule_stages": 5, "warmup_steps": 2},
    ],
)
def test_its_epsilon_is_the_full_run_s(small_portfolio: Build, changes: dict[str, Any]) -> None:
    small, _ = stopping_run(small_portfolio, **changes)
    early = train(small, noise=SeededNoise(seeded(1), description="as if it were secret"))
    full = train(
        small_portfolio(**network("perceptron"), steps=40, **changes, execution={"grad_sample_mode": "hooks"})
    )
    assert early.trajectory.steps == full.trajectory.steps == 40
    one, other = (single_run(run.trajectory).epsilon(1e-5) for run in (early, full))
    assert one == pytest.approx(other, rel=1e-12)
    rates = [
        [s.learning_rate for s in run.trajectory.segments for _ in range(s.steps)] for run in (early, full)
    ]
    assert rates[0] == rates[1]
    assert "epsilon_so_far" in early.metrics[-1]
    shown = [metrics["epsilon_so_far"] for metrics in early.metrics if "epsilon_so_far" in metrics]
    assert shown == pytest.approx(
        [one] * len(shown), rel=1e-12
    )  # all steps are charged from the first one on


def test_what_needs_a_fixed_schedule_is_refused(small_portfolio: Build) -> None:
    """A regression, for which everything else would be proven."""
    stopped = train(small_portfolio(early_stopping=STOPPING, steps=40)).trajectory
    plain = train(small_portfolio(steps=40)).trajectory
    relation = NeighboringRelation.REPLACE_ONE
    assert {segment.schedule for segment in stopped.segments} == {"adapted"}
    assert all(math.isinf(segment.update_lipschitz) for segment in stopped.segments)
    assert all(
        segment.update_lipschitz_reason == "unknown: when the run stops depends on its data"
        for segment in stopped.segments
    )
    assert all(math.isfinite(segment.update_lipschitz) for segment in plain.segments)
    for bound in (generic, shifted):
        assert math.isfinite(bound([plain], [1.0], relation).mu)
        with pytest.raises(IncompatibleCandidates, match="has a schedule adapted to the data"):
            bound([stopped], [1.0], relation)
        with pytest.raises(IncompatibleCandidates, match="has a schedule adapted to the data"):
            bound([plain, stopped], [0.5, 0.5], relation)


def test_without_an_early_end_the_best_is_kept_all_the_same(small_portfolio: Build) -> None:
    small, trained = stopping_run(small_portfolio, early_stopping="{every: 5, patience: 50}", steps=12)
    ended, kept_at, kept = expected(small, every=5, patience=50, gain=0.0)
    assert ended == 12
    require_equal(trained.model, kept, 2e-5)
    assert (
        f"stopped after 12 of 12 steps, and kept the parameters after {kept_at}"
        in (trained.trajectory.notes["early_stopping"])
    )


def test_private_rows_do_not_decide_but_through_the_model(small_portfolio: Build) -> None:
    """With public rows that look all alike to every model, it ends at the same look whatever the private rows."""
    small, _ = stopping_run(small_portfolio)
    public = small.splits.public_train
    same = Rows(features=public.features, labels=public.labels * 0)
    ends = []
    for private in (small.splits.private, small.splits.public_gate):
        steps: list[int] = []
        splits = replace(small.splits, private=private, public_train=same)
        train(small, splits=splits, on_step=steps.append, initial=_always_first(small))
        ends.append(len(steps))
    assert ends == [9, 9]  # looks at 3, 6 and 9: one to beat, and two without an improvement


def _always_first(small: Any) -> dict[str, Tensor]:
    """Parameters that give class 0 to every row, by far."""
    initial = initial_state(small.recipe.network, small.recipe.initialisation_seed)
    initial["2.bias"] = torch.tensor([1e6, 0.0, 0.0])
    return initial
