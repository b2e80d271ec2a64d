"""What is tried, and how the stages follow from each other, with scores that are a formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.calibration import TrainingShape, calibrated_noise
from accounting.errors import BudgetInfeasible, InvalidInput
from tasks.recipes import CandidateRecipe
from tasks.tuning.plan import SearchPlan, search_plan
from tasks.tuning.search import BATCH_AND_RATE, CLIPPING, NOISE, OWN, Found, Stage, staged_search
from tasks.tuning.trials import Setting, Trial, TuningFailed

CANDIDATE = CandidateRecipe(
    name="only",
    steps=10,
    noise_multiplier=8.0,
    max_grad_norm=2.0,
    learning_rate=1.0,
    momentum=0.5,
    expected_batch_size=300.0,
    sampling_probability=0.5,
)
Score = Callable[[Setting], float]


class Seen:
    """Keeps what a watcher is told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self.stages: list[str] = []

    def stage_begins(self, name: str, trials: int) -> None:
        self.begun.append((name, trials))

    def trial_ended(self, stage: str, trial: Trial) -> None:
        self.ended.append(stage)

    def stage_ended(self, stage: Stage) -> None:
        self.stages.append(stage.name)


def noise_for(epsilon: float, q: float) -> float:
    shape = TrainingShape(steps=10, relation=NeighboringRelation.REPLACE_ONE, sampling_probability=q)
    return calibrated_noise(PrivacyBudget(epsilon=epsilon, delta=1e-5), shape)


def plan(**changes: object) -> SearchPlan:
    full = SearchPlan(
        norms=(2.0, 1.0, 0.5, 0.25),
        epsilons=(2.0, 1.0, 4.0),
        sampling_probabilities=(0.5, 1.0),
        learning_rates=(1.0, 0.5, 2.0),
    )
    return replace(full, **changes)  # type: ignore[arg-type]


def search(
    score: Score, *, seen: Seen | None = None, noise: Callable[[float, float], float] = noise_for
) -> Found:
    """With a thousand scoring rows, of which the share `score` is right; NaN where it diverges."""

    def try_out(setting: Setting) -> Trial:
        share = score(setting)
        right = np.full(1000, np.nan) if math.isnan(share) else (np.arange(1000) < 1000 * share).astype(float)
        return Trial(setting=setting, right=right[np.newaxis])

    return staged_search(CANDIDATE, plan(), noise_for=noise, try_out=try_out, watcher=seen or Seen())


def useful(setting: Setting) -> float:
    """Better with a norm of at least 0.5, with less noise a step, with a rate of 2."""
    clipped = 0.9 if setting.max_grad_norm >= 0.5 else 0.6
    noise = setting.noise_multiplier * setting.max_grad_norm / 1000
    return clipped - noise - 0.02 * abs(math.log2(setting.learning_rate / 2)) * (setting.epsilon is not None)


def test_each_stage_starts_from_the_choice_before() -> None:
    seen = Seen()
    found = search(useful, seen=seen)
    clipping, noise, last = found.stages
    assert [stage.name for stage in found.stages] == [CLIPPING, NOISE, BATCH_AND_RATE] == seen.stages
    assert clipping.chosen.setting.max_grad_norm == 0.5
    assert all(t.setting.epsilon is None and t.setting.learning_rate == 1.0 for t in clipping.trials)
    assert [t.setting.epsilon for t in noise.trials] == [1.0, 2.0, 4.0, None]
    assert noise.chosen.setting.epsilon == 2.0
    assert {t.setting.max_grad_norm for stage in (noise, last) for t in stage.trials} == {0.5}
    assert {t.setting.epsilon for t in last.trials} == {2.0}
    for trial in (*noise.trials[:-1], *last.trials, found.own):
        assert trial.setting.epsilon is not None
        assert trial.setting.noise_multiplier == noise_for(
            trial.setting.epsilon, trial.setting.sampling_probability
        )
    assert found.chosen.setting.learning_rate == 2.0
    assert (found.own.setting.max_grad_norm, found.own.setting.learning_rate) == (2.0, 1.0)
    assert seen.begun == [(CLIPPING, 4), (NOISE, 3), (BATCH_AND_RATE, 6), (OWN, 1)]
    assert len(seen.ended) == plan().trials == 14


def test_no_setting_is_trained_twice() -> None:
    tried: list[Setting] = []

    def score(setting: Setting) -> float:
        tried.append(setting)
        return useful(setting)

    search(score)
    assert len(tried) == len(set(tried)) == 13  # the last stage has one in common with the second


def test_sentences_say_what_was_chosen_and_what_noise_costs() -> None:
    clipping, noise, last = search(useful).stages
    assert clipping.because.startswith(
        "Norm 0.5 is the smallest within one standard error of the best, 0.900 ±"
    )
    assert noise.because.startswith("Epsilon 2 costs 0.0")
    assert "half as much would cost" in noise.because
    assert "twice as much would give back" in noise.because
    assert "learning rate 2 scores best" in last.because
    assert not clipping.warnings
    assert "learning rate 2 is at the end of the range" in last.warnings[0]


def test_the_end_of_the_norms_is_warned_of() -> None:
    clipping = search(lambda setting: 0.9).stages[0]
    assert clipping.chosen.setting.max_grad_norm == 0.25
    assert "0.25 is the smallest that was tried" in clipping.warnings[0]


def test_what_diverges_is_passed_over() -> None:
    def score(setting: Setting) -> float:
        wild = setting.learning_rate > 1 or (setting.max_grad_norm > 1 and setting.epsilon is None)
        return math.nan if wild else useful(setting)

    found = search(score)
    assert found.stages[0].chosen.setting.max_grad_norm == 0.5
    assert found.chosen.setting.learning_rate == 1.0
    assert sum(trial.diverged for trial in found.stages[2].trials) == 2


def test_noise_that_diverges_leaves_it_to_the_last_stage() -> None:
    found = search(lambda s: math.nan if s.epsilon is not None and s.learning_rate > 0.5 else useful(s))
    assert found.stages[1].because.startswith("At epsilon 2 training diverged")
    assert found.chosen.setting.learning_rate == 0.5
    assert found.own.diverged


def test_nothing_but_divergence_is_one_sentence() -> None:
    with pytest.raises(TuningFailed) as caught:
        search(lambda setting: math.nan)
    assert caught.value.message == (
        "Every trial of candidate only diverged; lower its learning_rate 1 in the recipe, then tune again."
    )


def test_a_target_out_of_reach_is_refused_and_a_neighbour_is_left_out() -> None:
    def refusing(wanted: Callable[[float, float], bool]) -> Callable[[float, float], float]:
        def noise(epsilon: float, q: float) -> float:
            if wanted(epsilon, q):
                raise BudgetInfeasible("No noise is enough.", target=epsilon, best=None, hint="")
            return noise_for(epsilon, q)

        return noise

    with pytest.raises(InvalidInput, match="Candidate only: No noise is enough"):
        search(useful, noise=refusing(lambda epsilon, q: epsilon == 2.0 and q == 0.5))
    found = search(useful, noise=refusing(lambda epsilon, q: q == 1.0 or epsilon == 4.0))
    assert [t.setting.epsilon for t in found.stages[1].trials] == [1.0, 2.0, None]
    assert {t.setting.sampling_probability for t in found.stages[2].trials} == {0.5}
    assert "Sampling probability 1 was left out" in found.stages[2].warnings[-1]


def test_ranges_are_geometric_around_the_recipe() -> None:
    full = search_plan(CANDIDATE, epsilon=2.0, median_norm=1.00049)
    assert full.norms == (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)
    assert full.epsilons == (2.0, 1.0, 4.0, 0.5, 8.0)
    assert full.sampling_probabilities == (0.5, 1.0, 0.25)
    assert full.learning_rates == (1.0, 0.5, 2.0, 0.25, 4.0)
    whole = CANDIDATE.model_copy(update={"sampling_probability": 1.0, "expected_batch_size": 600.0})
    assert search_plan(whole, epsilon=2.0, median_norm=1.0).sampling_probabilities == (1.0, 0.5)
    assert 2.0 in search_plan(CANDIDATE, epsilon=2.0, median_norm=0.33).norms


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_gradients_that_are_no_use_are_refused(norm: float) -> None:
    with pytest.raises(InvalidInput, match="no usable gradient at the start"):
        search_plan(CANDIDATE, epsilon=2.0, median_norm=norm)


@pytest.mark.parametrize("most", range(4, 30))
def test_a_budget_of_trials_is_kept_and_keeps_the_recipes_own(most: int) -> None:
    full = search_plan(CANDIDATE, epsilon=2.0, median_norm=1.0)
    assert full.trials == 27
    small = full.within(most)
    assert small.trials <= most
    assert small.trials >= min(most, full.trials) - 4  # a whole batch size or learning rate goes at once
    assert (small.norms[0], small.epsilons[0]) == (2.0, 2.0)
    assert (small.sampling_probabilities[0], small.learning_rates[0]) == (0.5, 1.0)


@pytest.mark.parametrize("most", [-1, 0, 3, 201])
def test_a_budget_without_a_trial_a_stage_is_refused(most: int) -> None:
    with pytest.raises(
        InvalidInput, match=r"--budget-trials must be from 4, one for each stage .* to 200, but"
    ):
        plan().within(most)
