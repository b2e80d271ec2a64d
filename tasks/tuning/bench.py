"""Where trials run: on public-train rows alone, some to fit and others to score, with noise from public seeds.

The private rows are not loaded and need not exist. As for public twins (tasks.public_twins), the fitting rows are
fewer than the private ones, and the noise is scaled so that it hurts a step's mean gradient as much as in the private
run. Nothing here depends on a private row, so no privacy is spent, and what is found is a public constant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from accounting.budget import LARGEST_EPSILON, LEAST_EPSILON, PrivacyBudget
from accounting.calibration import calibrated_noise
from accounting.errors import AccountingError, InvalidInput
from infra.canonical import sha256_hex
from tasks.data import Rows, Splits, load_splits
from tasks.noise_choice import shape_of
from tasks.public_twins import split_public, twin_recipe
from tasks.recipes import CandidateRecipe, Recipe
from tasks.training import TrainingFailed, train_candidate
from tasks.tuning.trials import Array, Setting, Trial
from tasks.validation import right

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST_SCORING_ROWS = 10  # with fewer, every difference is within the error
LOOKED_AT = 256  # fitting rows whose gradient norms are taken
MOST_SEEDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Public rows and a public start, ready for trials of one candidate."""

    recipe: Recipe
    candidate: CandidateRecipe
    splits: Splits  # without private rows
    fitting: Rows
    scoring: Rows
    initial: Mapping[str, Tensor]
    seeds: int

    @classmethod
    def of(cls, recipe: Recipe, candidate: CandidateRecipe, seeds: int) -> Bench:
        """Load the public rows.

        Raises:
            InvalidInput: one sentence, for example where there are too few public-train rows.
        """
        from tasks.models import initial_state

        if not 1 <= seeds <= MOST_SEEDS:
            raise InvalidInput(f"--seeds must be from 1 to {MOST_SEEDS}, but {seeds} was given.")
        splits = load_splits(
            recipe.data,
            feature_radius=recipe.feature_radius,
            n_max=recipe.n_max,
            neighboring_relation=recipe.neighboring_relation,
            with_private=False,
        )
        fitting, scoring = _parts(splits.public_train, recipe)
        return cls(
            recipe=recipe,
            candidate=candidate,
            splits=splits,
            fitting=fitting,
            scoring=scoring,
            initial=initial_state(recipe.network, recipe.initialisation_seed),
            seeds=seeds,
        )

    def median_norm(self) -> float:
        """Median L2 norm of single fitting rows' gradients at the public initialisation, of at most 256 rows.

        Raises:
            InvalidInput: the network does not fit the data.
        """
        import torch

        from tasks.models import build
        from tasks.training.scores import require_fit

        module = build(self.recipe.network)
        module.load_state_dict(self.initial)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        features = torch.tensor(self.fitting.features[:LOOKED_AT])
        labels = torch.tensor(self.fitting.labels[:LOOKED_AT])
        objective = require_fit(module, self.splits, self.recipe)
        norms = []
        for row in range(len(labels)):
            losses = objective.losses(module(features[row : row + 1]), labels[row : row + 1])
            gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
            norms.append(torch.stack([g.norm() for g in gradients if g is not None]).norm())
        return float(torch.stack(norms).median())

    def as_recipe(self, setting: Setting) -> CandidateRecipe:
        """The candidate with a setting's values, for the private rows' number that its own constants imply."""
        rows = self.candidate.expected_batch_size / self.candidate.sampling_probability
        return self.candidate.model_copy(
            update={
                "max_grad_norm": setting.max_grad_norm,
                "learning_rate": setting.learning_rate,
                "sampling_probability": setting.sampling_probability,
                "expected_batch_size": setting.sampling_probability * rows,
                "noise_multiplier": setting.noise_multiplier,
            }
        )

    def try_out(self, setting: Setting, on_progress: Callable[[float], None] = lambda share: None) -> Trial:
        """Train a setting once for each seed and score it; a setting in which nothing is random once.

        Args:
            on_progress: called after each step with the share of the trial that is done, in (0, 1].
        """
        steps = self.candidate.steps
        seeds = self.seeds if setting.is_random else 1
        found = []
        for seed in range(seeds):

            def on_step(step: int, before: int = seed * steps) -> None:
                on_progress((before + step) / (seeds * steps))

            found.append(self._one(setting, seed, on_step))
        return Trial(setting=setting, right=np.stack(found))

    def _one(self, setting: Setting, seed: int, on_step: Callable[[int], None]) -> Array:
        """Which scoring rows a model is right on, shape (rows,): 1 or 0, or NaN everywhere if training failed."""
        own = twin_recipe(self.as_recipe(setting), len(self.fitting))
        try:
            trained = train_candidate(
                own,
                recipe=_without_looks(self.recipe, own),
                splits=replace(self.splits, private=self.fitting, public_train=self.scoring),
                initial=self.initial,
                run_id=f"tuning-{self.candidate.name}",
                data_digest=sha256_hex(self.fitting.content()),
                noise_generator=self._public_generator("noise", seed),
                sampling_generator=self._public_generator("coins", seed),
                on_step=on_step,
            )
        except TrainingFailed:
            return np.full(len(self.scoring), np.nan)
        return self._right(trained.model)

    def _right(self, model: bytes) -> Array:
        from tasks.models import build, state_from_bytes

        module = build(self.recipe.network)
        module.load_state_dict(state_from_bytes(model))
        return right(module, self.scoring).astype(np.float64)

    def _public_generator(self, purpose: str, seed: int) -> torch.Generator:
        """The same for every trial with this seed, so that trials differ by their settings rather than by luck."""
        import torch

        text = f"tuning, {purpose} {seed}: {self.recipe.initialisation_seed}"
        digest = hashlib.sha256(text.encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def noise_for(recipe: Recipe, candidate: CandidateRecipe) -> Callable[[float, float], float]:
    """Epsilon and sampling probability to the noise multiplier that the recipe would get for that target."""

    def found(epsilon: float, sampling_probability: float) -> float:
        shape = shape_of(
            candidate, relation=recipe.neighboring_relation, sampling_probability=sampling_probability
        )
        return calibrated_noise(PrivacyBudget(epsilon=epsilon, delta=recipe.delta), shape)

    return found


def own_epsilon(recipe: Recipe, candidate: CandidateRecipe) -> float:
    """The epsilon that a candidate's own noise gives it at the recipe's delta, rounded up to three digits.

    Raises:
        InvalidInput: it is outside what can be a target; give one.
    """
    from accounting.words import rounded_up

    try:
        bound = shape_of(candidate, relation=recipe.neighboring_relation).bound(candidate.noise_multiplier)
        epsilon = float(rounded_up(bound.epsilon(recipe.delta), 3))
    except AccountingError:
        epsilon = np.nan
    if not LEAST_EPSILON <= epsilon <= LARGEST_EPSILON:
        raise InvalidInput(
            f"Candidate {candidate.name} has no epsilon of its own that could be a target; give one with --epsilon."
        )
    return epsilon


def _without_looks(recipe: Recipe, candidate: CandidateRecipe) -> Recipe:
    """A trial is scored when it ends: looks on the way, and checkpoints, would only take time."""
    once = {"monitor_every": candidate.steps, "checkpoint_every": candidate.steps}
    return recipe.model_copy(update={"execution": recipe.execution.model_copy(update=once)})


def _parts(rows: Rows, recipe: Recipe) -> tuple[Rows, Rows]:
    try:
        fitting, scoring = split_public(rows)
    except InvalidInput:  # its sentence speaks of twins
        scoring = None
    if scoring is None or len(scoring) < LEAST_SCORING_ROWS:
        raise InvalidInput(
            f"Tuning fits on two thirds of the public-train rows and scores on the others, at least "
            f"{LEAST_SCORING_ROWS}, but the loader {recipe.data.loader} returned {len(rows)} public-train rows, "
            "too few of them different; give it more."
        )
    return fitting, scoring
