"""One tuning from a recipe to its result, and the result in words, as a document and as a recipe's lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from accounting.errors import InvalidInput
from tasks.recipes import CandidateRecipe, Recipe
from tasks.tuning.bench import Bench, noise_for, own_epsilon
from tasks.tuning.plan import MOST_TRIALS, SearchPlan, search_plan
from tasks.tuning.search import Found, Stage, Watcher, staged_search
from tasks.tuning.trials import Setting, Trial

NOTHING_PRIVATE = (
    "No private row was read: every trial was fitted and scored on public-train rows, with noise from public seeds, "
    "so this costs no privacy, and the values found are public constants."
)


class Onlooker(Watcher, Protocol):
    """As `Watcher`, and is told of the steps within a trial."""

    def trial_progresses(self, share: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A tuning that is about to start."""

    bench: Bench
    epsilon: float  # the target, nats, at the recipe's delta
    median_norm: float
    plan: SearchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A finished tuning. Everything in it is computed from public rows, public constants and public seeds."""

    prepared: Prepared
    found: Found

    @property
    def candidate(self) -> CandidateRecipe:
        """As it is proposed for private training."""
        return self.prepared.bench.as_recipe(self.found.chosen.setting)


def prepare(
    recipe: Recipe, *, candidate: str | None, epsilon: float | None, seeds: int, budget_trials: int | None
) -> Prepared:
    """Load the public rows and lay out the search.

    Args:
        candidate: the name of the one to tune; None: the recipe's first.
        epsilon: the target, nats; None: the candidate's own.
        seeds: public seeds that each trial is trained with.
        budget_trials: at most so many trials; None: the whole search.

    Raises:
        InvalidInput: one sentence.
    """
    names = [one.name for one in recipe.candidates]
    if candidate is not None and candidate not in names:
        raise InvalidInput(
            f"The recipe {recipe.name} has no candidate {candidate}; it has {', '.join(names)}."
        )
    own = recipe.candidate(candidate or names[0])
    target = own_epsilon(recipe, own) if epsilon is None else epsilon
    noise_for(recipe, own)(target, own.sampling_probability)  # refused before anything is trained
    bench = Bench.of(recipe, own, seeds)
    median = bench.median_norm()
    plan = search_plan(own, epsilon=target, median_norm=median).within(
        MOST_TRIALS if budget_trials is None else budget_trials
    )
    return Prepared(bench=bench, epsilon=target, median_norm=median, plan=plan)


def tune_candidate(prepared: Prepared, onlookers: Sequence[Onlooker] = ()) -> Tuning:
    """Run the three stages.

    Raises:
        TuningFailed: every trial diverged.
    """
    bench, seen = prepared.bench, _Everybody(onlookers)
    found = staged_search(
        bench.candidate,
        prepared.plan,
        noise_for=noise_for(bench.recipe, bench.candidate),
        try_out=lambda setting: bench.try_out(setting, seen.trial_progresses),
        watcher=seen,
    )
    return Tuning(prepared=prepared, found=found)


class _Everybody:
    """Tells several onlookers."""

    def __init__(self, onlookers: Sequence[Onlooker]) -> None:
        self._onlookers = onlookers

    def stage_begins(self, name: str, trials: int) -> None:
        for one in self._onlookers:
            one.stage_begins(name, trials)

    def trial_progresses(self, share: float) -> None:
        for one in self._onlookers:
            one.trial_progresses(share)

    def trial_ended(self, stage: str, trial: Trial) -> None:
        for one in self._onlookers:
            one.trial_ended(stage, trial)

    def stage_ended(self, stage: Stage) -> None:
        for one in self._onlookers:
            one.stage_ended(stage)


def verdict(tuning: Tuning) -> str:
    """Whether the chosen values are better than the recipe's own, in a sentence."""
    own, chosen = tuning.found.own, tuning.found.chosen
    if own.diverged:
        return "With the recipe's own values training diverged."
    gain, error = own.behind(chosen)
    found = f"The recipe's own values score {own.accuracy:.3f} at this epsilon; the chosen ones {chosen.accuracy:.3f}, "
    if chosen.setting == own.setting:
        return "The recipe's own values are the chosen ones."
    if gain > error:
        return f"{found}which is {gain:.3f} ± {error:.3f} more."
    return f"{found}a difference of {gain:.3f} ± {error:.3f}: that is no reason to change the recipe."


def cautions(tuning: Tuning) -> list[str]:
    """What else the chosen values may change, each in one sentence."""
    from tasks.models import build, is_regression

    before, after = tuning.prepared.bench.candidate, tuning.candidate
    harder = after.max_grad_norm < before.max_grad_norm or after.learning_rate > before.learning_rate
    if before.dp_merging or not (before.is_full_batch and (harder or not after.is_full_batch)):
        return []
    if not is_regression(build(tuning.prepared.bench.recipe.network)):
        return []
    return [
        "The network is a regression: with a smaller clipping norm, a larger learning rate or smaller batches its "
        "updates may no longer be proven Lipschitz, and averages of its candidates then get weaker bounds."
    ]


def snippet(tuning: Tuning) -> str:
    """The candidate's lines for the recipe; reading them finds the same noise again.

    Fields of the candidate that the search left alone are written too where they differ from their defaults, so that
    the lines hold under any `defaults:`.
    """
    candidate = tuning.candidate
    fields = {
        "target_epsilon": tuning.prepared.epsilon,
        **{
            name: value
            for name, value in candidate.model_dump(mode="json", exclude_defaults=True).items()
            if name not in ("name", "noise_multiplier")
        },
        "sampling_probability": candidate.sampling_probability,
    }
    lines = [
        "candidates:",
        f"  {candidate.name}: # tuned on public rows alone: every value is a public constant",
    ]
    for name, value in fields.items():
        written = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        comment = f" # noise_multiplier {candidate.noise_multiplier!r}" if name == "target_epsilon" else ""
        lines.append(f"    {name}: {written}{comment}")
    return "\n".join(lines) + "\n"


def document(tuning: Tuning) -> dict[str, Any]:
    """Everything a tuning found, for programs; all numbers in full, None for a trial that diverged."""
    prepared = tuning.prepared
    return {
        "portfolio": prepared.bench.recipe.name,
        "recipe_sha256": prepared.bench.recipe.sha256(),
        "candidate": prepared.bench.candidate.name,
        "target_epsilon": prepared.epsilon,
        "delta": prepared.bench.recipe.delta,
        "seeds": prepared.bench.seeds,
        "fitting_rows": len(prepared.bench.fitting),
        "scoring_rows": len(prepared.bench.scoring),
        "median_gradient_norm": prepared.median_norm,
        "stages": [
            {
                "name": stage.name,
                "because": stage.because,
                "warnings": list(stage.warnings),
                "trials": [{**_scored(trial), "chosen": trial is stage.chosen} for trial in stage.trials],
            }
            for stage in tuning.found.stages
        ],
        "own_values": _scored(tuning.found.own),
        "verdict": verdict(tuning),
        "cautions": cautions(tuning),
        "recipe": snippet(tuning),
    }


def _scored(trial: Trial) -> dict[str, float | None]:
    return {
        **values(trial.setting),
        "accuracy": None if trial.diverged else trial.accuracy,
        "standard_error": None if trial.diverged else trial.standard_error,
    }


def values(setting: Setting) -> dict[str, float | None]:
    """A setting by field name."""
    return {
        "max_grad_norm": setting.max_grad_norm,
        "learning_rate": setting.learning_rate,
        "sampling_probability": setting.sampling_probability,
        "epsilon": setting.epsilon,
        "noise_multiplier": setting.noise_multiplier,
    }
