"""The staged search: clipping without noise, then the noise, then batch size and learning rate at the target epsilon.

It knows neither torch nor the data: a trial is run by whoever calls it.

Source: Ponomareva et al. 2023 (arXiv 2303.00654, How to DP-fy ML), on tuning the hyper-parameters of DP training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from accounting.errors import InvalidInput, RemergeError
from tasks.recipes import CandidateRecipe
from tasks.tuning.plan import SearchPlan
from tasks.tuning.trials import Setting, Trial, TuningFailed, best, largest_batch, smallest_norm

CLIPPING, NOISE, BATCH_AND_RATE = "clipping", "noise", "batch and learning rate"
OWN = "the recipe's own values"  # not a stage: one trial at the end, to say whether anything was gained


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One finished stage."""

    name: str
    trials: tuple[Trial, ...]  # in the order of the table
    chosen: Trial
    because: str  # one sentence
    warnings: tuple[str, ...] = ()  # each one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search ended with."""

    stages: tuple[Stage, ...]
    own: Trial  # the recipe's own values with the noise for the target

    @property
    def chosen(self) -> Trial:
        return self.stages[-1].chosen


class Watcher(Protocol):
    """Is told how the search goes, to show it and to log it."""

    def stage_begins(self, name: str, trials: int) -> None: ...
    def trial_ended(self, stage: str, trial: Trial) -> None: ...
    def stage_ended(self, stage: Stage) -> None: ...


def staged_search(
    candidate: CandidateRecipe,
    plan: SearchPlan,
    *,
    noise_for: Callable[[float, float], float],
    try_out: Callable[[Setting], Trial],
    watcher: Watcher,
) -> Found:
    """Run the three stages one after the other, each with what the one before chose.

    Args:
        candidate: gives what a stage does not change.
        noise_for: epsilon and sampling probability to the noise multiplier of the private run; raises RemergeError
            where none meets it.
        try_out: trains and scores one setting on public rows.

    Raises:
        TuningFailed: every trial of a stage that chooses by score diverged.
        RemergeError: no noise meets the target epsilon with the recipe's own sampling.
    """
    search = _Search(candidate, plan, noise_for, try_out, watcher)
    clipping = search.clipping()
    watcher.stage_ended(clipping)
    noise = search.noise(clipping.chosen)
    watcher.stage_ended(noise)
    batch_and_rate = search.batch_and_rate(clipping.chosen.setting)
    watcher.stage_ended(batch_and_rate)
    return Found(stages=(clipping, noise, batch_and_rate), own=search.own_values())


class _Search:
    def __init__(
        self,
        candidate: CandidateRecipe,
        plan: SearchPlan,
        noise_for: Callable[[float, float], float],
        try_out: Callable[[Setting], Trial],
        watcher: Watcher,
    ) -> None:
        self.candidate = candidate
        self.plan = plan
        self.noise_for = noise_for
        self.try_out = try_out
        self.watcher = watcher
        self.done: dict[Setting, Trial] = {}  # stages share settings

    def clipping(self) -> Stage:
        settings = [
            replace(self._own(), max_grad_norm=norm) for norm in sorted(self.plan.norms, reverse=True)
        ]
        trials = self._run(CLIPPING, settings)
        chosen, leader = _choose(smallest_norm, trials, self.candidate), best(trials)
        least = min(trial.setting.max_grad_norm for trial in trials)
        warnings = []
        if chosen.setting.max_grad_norm == least and len(trials) > 1:
            warnings.append(
                f"The norm {least:g} is the smallest that was tried; paste the result and tune again to try smaller "
                "ones."
            )
        return Stage(
            name=CLIPPING,
            trials=trials,
            chosen=chosen,
            because=f"Norm {chosen.setting.max_grad_norm:g} is the smallest within one standard error of the best, "
            f"{_accuracy(leader)} at norm {leader.setting.max_grad_norm:g}; noise is added in units of it.",
            warnings=tuple(warnings),
        )

    def noise(self, clipped: Trial) -> Stage:
        target = self.plan.epsilons[0]
        settings = [
            replace(clipped.setting, epsilon=epsilon, noise_multiplier=noise)
            for epsilon, noise in self._reachable(
                (e, clipped.setting.sampling_probability) for e in self.plan.epsilons
            )
        ]
        tried = self._run(NOISE, sorted(settings, key=lambda s: s.epsilon or 0.0))
        chosen = next(trial for trial in tried if trial.setting.epsilon == target)
        return Stage(
            name=NOISE,
            trials=(*tried, clipped),
            chosen=chosen,
            because=_price_of_noise(tried, chosen, clipped),
        )

    def batch_and_rate(self, clipped: Setting) -> Stage:
        target = self.plan.epsilons[0]
        # The recipe's own sampling comes first and must be reachable; the others are left out where they are not.
        probabilities = self.plan.sampling_probabilities
        noises = dict(
            zip(
                probabilities,
                [self._noise_or_none(target, q, must=i == 0) for i, q in enumerate(probabilities)],
                strict=True,
            )
        )
        settings = [
            replace(
                clipped,
                learning_rate=rate,
                sampling_probability=q,
                epsilon=target,
                noise_multiplier=noise,
            )
            for q, noise in sorted(noises.items(), reverse=True)
            if noise is not None
            for rate in sorted(self.plan.learning_rates)
        ]
        trials = self._run(BATCH_AND_RATE, settings)
        chosen, leader = _choose(largest_batch, trials, self.candidate), best(trials)
        rates = sorted({trial.setting.learning_rate for trial in trials})
        warnings = []
        if len(rates) > 1 and chosen.setting.learning_rate in (rates[0], rates[-1]):
            warnings.append(
                f"The learning rate {chosen.setting.learning_rate:g} is at the end of the range; paste the result and "
                "tune again to look beyond."
            )
        left_out = [f"{q:g}" for q, noise in noises.items() if noise is None]
        if left_out:
            warnings.append(
                f"Sampling probability {', '.join(left_out)} was left out: no noise meets the target with it."
            )
        return Stage(
            name=BATCH_AND_RATE,
            trials=trials,
            chosen=chosen,
            because=f"Within one standard error of the best, {_accuracy(leader)} with sampling probability "
            f"{leader.setting.sampling_probability:g} and learning rate {leader.setting.learning_rate:g}, sampling "
            f"probability {chosen.setting.sampling_probability:g} is the largest, and with it learning rate "
            f"{chosen.setting.learning_rate:g} scores best.",
            warnings=tuple(warnings),
        )

    def own_values(self) -> Trial:
        target, own = self.plan.epsilons[0], self._own()
        noise = self.noise_for(target, own.sampling_probability)
        return self._run(OWN, [replace(own, epsilon=target, noise_multiplier=noise)])[0]

    def _own(self) -> Setting:
        return Setting(
            max_grad_norm=self.candidate.max_grad_norm,
            learning_rate=self.candidate.learning_rate,
            sampling_probability=self.candidate.sampling_probability,
        )

    def _run(self, stage: str, settings: list[Setting]) -> tuple[Trial, ...]:
        self.watcher.stage_begins(stage, len(settings))
        trials = []
        for setting in settings:
            if setting not in self.done:
                self.done[setting] = self.try_out(setting)
            trials.append(self.done[setting])
            self.watcher.trial_ended(stage, trials[-1])
        return tuple(trials)

    def _reachable(self, wanted: Iterator[tuple[float, float]]) -> Iterator[tuple[float, float]]:
        for index, (epsilon, q) in enumerate(wanted):
            noise = self._noise_or_none(epsilon, q, must=index == 0)
            if noise is not None:
                yield epsilon, noise

    def _noise_or_none(self, epsilon: float, q: float, *, must: bool) -> float | None:
        try:
            return self.noise_for(epsilon, q)
        except RemergeError as error:
            if must:
                raise InvalidInput(f"Candidate {self.candidate.name}: {error.message}") from None
            return None


def _choose(
    rule: Callable[[tuple[Trial, ...]], Trial], trials: tuple[Trial, ...], candidate: CandidateRecipe
) -> Trial:
    try:
        return rule(trials)
    except TuningFailed:
        raise TuningFailed(
            f"Every trial of candidate {candidate.name} diverged; lower its learning_rate "
            f"{candidate.learning_rate:g} in the recipe, then tune again."
        ) from None


def _price_of_noise(tried: tuple[Trial, ...], chosen: Trial, clipped: Trial) -> str:
    """What the noise costs, with differences row by row."""
    if chosen.diverged:
        return (
            f"At epsilon {chosen.setting.epsilon:g} training diverged at this learning rate; the next stage tries "
            "lower ones."
        )
    parts = [f"Epsilon {chosen.setting.epsilon:g} costs {_points(*chosen.behind(clipped))} against no noise"]
    for trial in tried:
        if trial.setting.epsilon == 2 * (chosen.setting.epsilon or 0) and not trial.diverged:
            parts.append(f"twice as much would give back {_points(*chosen.behind(trial))}")
        if trial.setting.epsilon == (chosen.setting.epsilon or 0) / 2 and not trial.diverged:
            parts.append(f"half as much would cost {_points(*trial.behind(chosen))} more")
    return "; ".join(parts) + "."


def _accuracy(trial: Trial) -> str:
    return _points(trial.accuracy, trial.standard_error)


def _points(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"
