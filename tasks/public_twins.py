"""Public twins: the recipes of the candidates, trained on public rows alone, to compare the recipes by.

Policies with `selection: public_twin` choose the weights by the twins' scores. That costs no privacy, because
nothing here depends on a private row: this module never reads `Splits.private`, and the twins' noise comes
from public seeds, so that anybody with the public rows can train the twins again and get the same scores.

**Rows.** The public-gate rows stay held out for the gate, and a twin is scored on rows that it was not trained
on. So the public-train rows are ordered by the SHA-256 of their features, and the first two thirds are for
fitting, the rest for scoring; copies of a row stay on one side.

**What "the same recipe" means for another number of rows.** A private step moves the parameters by

    learning_rate x (sum of clipped gradients + N(0, (noise_multiplier x max_grad_norm)^2)) / expected_batch_size,

where expected_batch_size is sampling_probability x (number of rows), as the recipe states it. A twin with m
fitting rows keeps steps, learning rate, clipping, momentum, weight decay and sampling probability q, and takes

    expected_batch_size' = q x m,    noise_multiplier' = noise_multiplier x expected_batch_size' / expected_batch_size.

Then the sum is again divided by the expected number of rows in it, so that the update is again the learning
rate times a mean gradient, and the noise in each coordinate of that mean has the private run's standard
deviation, noise_multiplier x max_grad_norm / expected_batch_size. So noise hurts a twin as much as its
candidate. With the recipe's own noise_multiplier it would hurt by expected_batch_size / (q m) times more, and
every twin would favour the least noise. What remains different: fewer rows generalise worse, and at equal q
smaller Poisson batches scatter more. Both are alike for all twins, which are only compared with each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from infra.canonical import sha256_hex
from tasks.data import Rows, Splits
from tasks.recipes import CandidateRecipe, Recipe
from tasks.training import PRIVATE, train_candidate
from tasks.training.recording import TrainingFailed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FIT, SCORE = 2, 1  # of three public-train rows, two are for fitting and one is for scoring
SCORE_METRIC = "score_rows_accuracy"
# How fast a twin was is not a fact about its recipe.
NOT_OF_TWINS = ("steps_per_second", f"{PRIVATE}records_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTwin:
    """A finished twin. Everything in it is computed from public rows, public constants and public seeds."""

    name: str  # the candidate's
    recipe: CandidateRecipe  # as trained: with the batch size and noise multiplier for the fitting rows
    model: bytes = field(repr=False)  # contents of model.safetensors
    metrics: tuple[dict[str, float], ...] = field(repr=False)  # one mapping for each step, by metric name
    score: float  # accuracy on the scoring rows, in [0, 1]


def train_twin(
    candidate: CandidateRecipe,
    *,
    recipe: Recipe,
    splits: Splits,
    initial: Mapping[str, Tensor],
    on_step: Callable[[int], None] = lambda step: None,
) -> TrainedTwin:
    """Train the public twin of one candidate; the same arguments give the same twin.

    All twins of a portfolio share the standard normal variables behind their noise, so that they differ by
    their recipes rather than by luck.

    Args:
        splits: from `tasks.data.load_splits`; its private rows, if it has any, are not touched.
        initial: the portfolio's public initial parameters.
        on_step: called after each step with the number of steps done, to show progress.

    Raises:
        TrainingFailed: the parameters are not finite at the end.
        InvalidInput: the network does not fit the data, or there are too few public-train rows to split.
    """
    fitting, scoring = split_public(splits.public_train)
    own = twin_recipe(candidate, len(fitting))
    try:
        trained = train_candidate(
            own,
            recipe=recipe,
            splits=replace(splits, private=fitting, public_train=scoring),
            initial=initial,
            run_id=f"twin-{candidate.name}",
            data_digest=sha256_hex(fitting.content()),
            noise_generator=_public_generator(recipe, "noise"),
            sampling_generator=_public_generator(recipe, "coins"),
            on_step=on_step,
        )
    except TrainingFailed as error:
        raise TrainingFailed(f"The public twin failed: {error.message}") from None
    return TrainedTwin(
        name=candidate.name,
        recipe=own,
        model=trained.model,
        metrics=tuple(_as_public(step) for step in trained.metrics),
        score=trained.public_train_accuracy,
    )


def twin_recipe(candidate: CandidateRecipe, rows: int) -> CandidateRecipe:
    """The candidate's recipe for another number of rows, see the module's docstring.

    Args:
        rows: number of fitting rows, at least 1.
    """
    expected = candidate.sampling_probability * rows
    return candidate.model_copy(
        update={
            "expected_batch_size": expected,
            "noise_multiplier": candidate.noise_multiplier * expected / candidate.expected_batch_size,
            "keep_checkpoints": (),
            "early_stopping": None,
        }
    )


def split_public(rows: Rows) -> tuple[Rows, Rows]:
    """Public-train rows for fitting and for scoring, by the order of their features' SHA-256.

    Returns:
        About two thirds and one third of the rows; no row of the one has the features of a row of the other.

    Raises:
        InvalidInput: all rows, or too many of them, are copies of each other.
    """
    keys = [hashlib.sha256(features.astype("<f4").tobytes()).digest() for features in rows.features]
    order = sorted(range(len(rows)), key=lambda row: (keys[row], int(rows.labels[row])))
    boundary = -(-len(rows) * FIT // (FIT + SCORE))
    while boundary < len(rows) and keys[order[boundary]] == keys[order[boundary - 1]]:
        boundary += 1
    if boundary == len(rows):
        raise InvalidInput(
            f"Public twins need public-train rows to fit and others to score, but the loader returned {len(rows)}, "
            "too few of them different; give it more public-train rows, or set public_twins to false."
        )

    def part(chosen: list[int]) -> Rows:
        return Rows(features=rows.features[chosen], labels=rows.labels[chosen])

    return part(order[:boundary]), part(order[boundary:])


def _public_generator(recipe: Recipe, purpose: str) -> torch.Generator:
    """Seeded by the recipe's public seed; nothing private may ever be drawn from it."""
    import torch

    seed = hashlib.sha256(f"public twins, {purpose}: {recipe.initialisation_seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(seed[:4], "big"))


def _as_public(step: Mapping[str, float]) -> dict[str, float]:
    """The trainer's metrics under names that say what they are for a twin: nothing in them is private."""
    names = {"public_train_accuracy": SCORE_METRIC}
    return {
        names.get(name, name.removeprefix(PRIVATE)): value
        for name, value in step.items()
        if name not in NOT_OF_TWINS
    }
