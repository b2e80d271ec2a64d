"""Scores in, a choice out: the one-standard-error rule on scores made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tasks.tuning.trials import (
    Setting,
    Trial,
    TuningFailed,
    best,
    largest_batch,
    smallest_norm,
    standard_error,
    ties,
)

ROWS = 100


def trial(
    right: int | float, *, norm: float = 1.0, rate: float = 1.0, q: float = 1.0, seeds: int = 1
) -> Trial:
    """A trial that is right on the first so many of 100 rows with every seed, or diverged where that is NaN."""
    row = np.full(ROWS, np.nan) if math.isnan(right) else (np.arange(ROWS) < right).astype(float)
    return Trial(
        setting=Setting(max_grad_norm=norm, learning_rate=rate, sampling_probability=q),
        right=np.tile(row, (seeds, 1)),
    )


def test_the_standard_error_of_one_model_is_that_of_a_share() -> None:
    share = 0.9
    exact = math.sqrt(share * (1 - share) / (ROWS - 1))
    assert trial(90).standard_error == pytest.approx(exact, rel=1e-12)
    assert trial(90, seeds=5).standard_error == pytest.approx(
        exact, rel=1e-12
    )  # seeds that agree add nothing


def test_seeds_that_differ_add_their_variance() -> None:
    right = np.stack([np.arange(ROWS) < 80, np.arange(ROWS) < 90]).astype(float)
    rows = right.mean(axis=0).var(ddof=1) / ROWS
    seeds = ((0.8 - 0.85) ** 2 + (0.9 - 0.85) ** 2) / 1 / 2
    assert standard_error(right) == pytest.approx(math.sqrt(rows + seeds), rel=1e-12)


def test_a_difference_is_taken_row_by_row() -> None:
    """Both miss the same ten rows, so that the difference is much surer than either score."""
    behind, error = trial(88).behind(trial(90))
    assert behind == pytest.approx(0.02)
    assert error == pytest.approx(math.sqrt(0.02 * 0.98 / 99))
    assert error < trial(90).standard_error / 2
    assert trial(90).behind(trial(90, norm=2)) == (0.0, 0.0)


def test_one_model_stands_for_every_seed_of_its_partner() -> None:
    assert trial(88).behind(trial(90, seeds=3))[0] == pytest.approx(0.02)
    assert trial(90, seeds=3).behind(trial(88))[0] == pytest.approx(-0.02)


def test_the_smallest_norm_within_one_standard_error_is_taken() -> None:
    """The best has 0.90 and a standard error of 0.0302: 0.87 is within it, 0.86 is not."""
    scores = {4.0: 89, 2.0: 90, 1.0: 88, 0.5: 87, 0.25: 86, 0.125: 50}
    trials = [trial(right, norm=norm) for norm, right in scores.items()]
    assert smallest_norm(trials).setting.max_grad_norm == 0.5
    assert smallest_norm(trials[::-1]).setting.max_grad_norm == 0.5
    assert {t.setting.max_grad_norm for t in ties(trials)} == {4.0, 2.0, 1.0, 0.5}


def test_a_score_exactly_one_standard_error_behind_is_a_tie() -> None:
    leader = Trial(
        setting=Setting(max_grad_norm=2.0, learning_rate=1.0, sampling_probability=1.0),
        right=np.array([[1.0, 1, 1, 1, 0]]),  # 0.8, standard error sqrt(0.2 / 5) = 0.2
    )
    other = Trial(
        setting=Setting(max_grad_norm=1.0, learning_rate=1.0, sampling_probability=1.0),
        right=np.array([[1.0, 1, 1, 0, 0]]),
    )
    assert leader.standard_error == pytest.approx(0.2)
    assert smallest_norm([leader, other]) is other


def test_the_largest_batch_is_taken_and_there_the_best_learning_rate() -> None:
    trials = [
        trial(91, q=0.25, rate=4.0),
        trial(90, q=0.5, rate=2.0),
        trial(89, q=1.0, rate=1.0),
        trial(90, q=1.0, rate=8.0),
        trial(90, q=1.0, rate=4.0),
        trial(60, q=1.0, rate=16.0),
    ]
    chosen = largest_batch(trials).setting
    assert (chosen.sampling_probability, chosen.learning_rate) == (1.0, 4.0)  # of equals the smaller rate
    trials = [trial(91, q=0.25), trial(70, q=1.0)]
    assert largest_batch(trials).setting.sampling_probability == 0.25


def test_what_diverged_is_never_taken() -> None:
    trials = [trial(math.nan, norm=0.1), trial(50, norm=1.0), trial(math.nan, norm=0.01)]
    assert [t.diverged for t in trials] == [True, False, True]
    for rule in (best, smallest_norm, largest_batch):
        assert rule(trials) is trials[1]
    assert ties(trials) == [trials[1]]


def test_one_seed_that_diverged_is_enough() -> None:
    right = np.stack([np.ones(ROWS), np.full(ROWS, np.nan)])
    setting = Setting(max_grad_norm=1.0, learning_rate=1.0, sampling_probability=1.0)
    assert Trial(setting=setting, right=right).diverged


@pytest.mark.parametrize("trials", [[], [trial(math.nan), trial(math.nan, norm=2)]])
def test_nothing_to_choose_is_said(trials: list[Trial]) -> None:
    for rule in (best, ties, smallest_norm, largest_batch):
        with pytest.raises(TuningFailed, match="Every trial diverged; lower the learning_rate"):
            rule(trials)
