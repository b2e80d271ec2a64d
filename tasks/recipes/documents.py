"""Portfolio recipes: what to train, in public literals only.

A recipe speaks in steps and public constants. Nothing in it may be computed from private data, utilities
included: the accountant takes these numbers as known to everybody.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from accounting.budget import LARGEST_EPSILON, LEAST_EPSILON
from infra.canonical import canonical_json
from infra.documents import NetworkRecord, Relation
from infra.strict_document import NAME, Document, Name
from tasks.noise_choice import noise_of

MAX_STEPS = 100_000  # far beyond what a portfolio trained step by step needs; catches a slipped zero


LARGEST = 1e38  # beyond it lies what a float32 cannot hold
# Of a candidate, added since recipes were first digested.
LATER_FIELDS = (
    "optimizer",
    "learning_rate_schedule",
    "warmup_steps",
    "schedule_stages",
    "keep_checkpoints",
    "early_stopping",
    "dp_merging",
)


class DataRecipe(Document):
    """Which data loader to call, by import path (see tasks.data for what it must return)."""

    loader: str  # import path, "module:function"
    arguments: dict[str, Any] = Field(default_factory=dict)


class EarlyStopping(Document):
    """Stop once public-train rows say that a run no longer gets better, and keep its best parameters.

    When that is depends on private data, so the accounting charges all of the recipe's steps and marks the run as
    adapted: time is saved, not privacy.
    """

    every: Annotated[int, Field(ge=1)]  # steps between two looks
    patience: Annotated[int, Field(ge=1)]  # so many looks in a row without an improvement end the run
    min_improvement: Annotated[float, Field(ge=0, le=1)] = 0.0  # of accuracy on the public-train rows


class DpMerging(Document):
    """How a step departs from plain DP-SGD, so that the models of several tasks merge well (tasks.training.descent).

    Each step climbs by `radius` before it takes its gradient, so that flat regions are found, and is pulled towards
    the public start with `2 * anchor * (w - w0)`.
    """

    # Along which gradient: a noisy one of the same batch, released for this alone and paid for; the one that the
    # step before released; or not at all.
    ascent: Literal["same_batch", "previous_gradient", "none"]
    radius: Annotated[float, Field(ge=0, le=LARGEST)] | None = None  # L2, of all parameters together
    anchor: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0

    @model_validator(mode="after")
    def _a_radius_with_an_ascent(self) -> Self:
        # A sentence begins with "dp_merging of candidate x".
        if self.ascent != "none" and self.radius is None:
            raise ValueError(f"needs a radius with the ascent {self.ascent}, such as 0.05")
        if self.ascent == "none" and self.radius is not None:
            raise ValueError("has no use for a radius with the ascent none")
        if self.ascent == "none" and not self.anchor:
            raise ValueError("changes nothing with the ascent none and no anchor")
        return self


class Execution(Document):
    """How a training is carried out: time and memory only, never a part of what is guaranteed."""

    grad_sample_mode: Literal["auto", "hooks", "functorch", "ghost", "closed_form"] = "auto"
    physical_batch_size: Annotated[int, Field(ge=1)] | None = (
        None  # rows at once; None: by the network's size
    )
    processes: Annotated[int, Field(ge=1, le=64)] = 1  # that train one candidate together
    parallel_candidates: Annotated[int, Field(ge=1, le=64)] | None = None  # None: as many as cores
    monitor_every: Annotated[int, Field(ge=1)] | None = None  # steps; None: about 50 looks a run
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None  # steps; None: about every 30 seconds


class CandidateRecipe(Document):
    """One DP-SGD run: the noise on each step's sum has standard deviation noise_multiplier x max_grad_norm."""

    name: Name
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    noise_multiplier: Annotated[
        float, Field(gt=0)
    ]  # without noise, the digest of a model would give rows away
    max_grad_norm: Annotated[float, Field(gt=0)]
    # flat: one limit for the whole gradient. per_layer: each of L parameters is clipped to max_grad_norm / sqrt(L).
    clipping: Literal["flat", "per_layer"] = "flat"
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, le=LARGEST)]  # the highest, where a schedule is given
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # before the schedule; the rate rises in even plateaus
    # A schedule is a staircase of so many plateaus: a trajectory holds one segment for each rate.
    schedule_stages: Annotated[int, Field(ge=1, le=50)] = 10
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of SGD
    weight_decay: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    expected_batch_size: Annotated[float, Field(gt=0)]  # the public constant that each sum is divided by
    sampling_probability: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1 is full batch
    # How good the model is expected to be, higher is better. Stated beforehand: never computed from private
    # records, nor from any model trained on them, for policies with `selection: stated` choose by it.
    utility: float | None = None
    # After these steps a copy is kept as a candidate of its own, `<name>-at-<step>`, which shares the run's prefix.
    keep_checkpoints: Annotated[tuple[int, ...], Field(max_length=16)] = ()
    early_stopping: EarlyStopping | None = None
    dp_merging: DpMerging | None = None  # None: plain DP-SGD

    @field_validator("keep_checkpoints", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _settings_that_fit_each_other(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps must be below steps, which is {self.steps}")
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(f"momentum belongs to sgd; remove it, or the optimizer {self.optimizer}")
        kept = self.keep_checkpoints
        if list(kept) != sorted(set(kept)) or any(not 0 < step < self.steps for step in kept):
            raise ValueError(
                f"keep_checkpoints must be rising numbers of steps from 1 to {self.steps - 1}, the last but one"
            )
        if any(not re.fullmatch(NAME, name) for name in self.kept_names):
            raise ValueError(
                f"keep_checkpoints makes a candidate named {self.kept_names[-1]}, and names have at most 63 letters; "
                "shorten this candidate's name"
            )
        if self.early_stopping and self.early_stopping.every > self.steps:
            raise ValueError(
                f"early_stopping looks every {self.early_stopping.every} steps, but there are {self.steps}"
            )
        if kept and self.early_stopping:
            raise ValueError("keep_checkpoints and early_stopping exclude each other; remove one of them")
        return self

    @model_serializer(mode="wrap")
    def _as_before_without_news(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was added later and is not used, so that recipes of before keep their digests."""
        return _without_defaults(write(self), self, LATER_FIELDS)

    @property
    def kept_names(self) -> tuple[str, ...]:
        """What the candidates made of `keep_checkpoints` are called, in their order."""
        return tuple(f"{self.name}-at-{step}" for step in self.keep_checkpoints)

    @property
    def is_full_batch(self) -> bool:
        return self.sampling_probability == 1.0

    @property
    def is_paired(self) -> bool:
        """Whether each step releases two noisy gradients of one batch, each with the noise multiplier's noise."""
        return self.dp_merging is not None and self.dp_merging.ascent == "same_batch"


class Recipe(Document):
    """A portfolio: independent runs from one public initialisation on one data set."""

    name: Name
    lineage: Name  # the records a person can be in, across regions, retrainings and policies
    unit: Literal["record"] = "record"
    neighboring_relation: Relation = "replace_one"
    data: DataRecipe
    network: NetworkRecord
    # R: each row is projected to this L2 norm. None: rows stay as they are, and no update is proven Lipschitz.
    feature_radius: Annotated[float, Field(gt=0)] | None
    n_max: Annotated[int, Field(ge=1)]  # public, enforced cap on the private rows
    initialisation_seed: Annotated[int, Field(ge=0, lt=2**32)]  # public, shared by all candidates
    delta: Annotated[float, Field(gt=0, lt=1)]  # only for the epsilon shown beside each candidate
    public_twins: bool = (
        False  # score each candidate by its recipe, trained on public rows (tasks.public_twins)
    )
    execution: Execution = Field(default_factory=Execution)
    candidates: Annotated[tuple[CandidateRecipe, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _names_once_one_utility_and_plain_arguments(self) -> Recipe:
        names = [name for one in self.candidates for name in (one.name, *one.kept_names)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"candidate {name} is named twice; give each candidate its own name")
        stated = [candidate.name for candidate in self.candidates if candidate.utility is not None]
        if self.public_twins and stated:
            raise ValueError(
                f"candidate {stated[0]} states a utility although public_twins would measure it; remove one of them"
            )
        for what, arguments in (("data", self.data.arguments), ("network", self.network.arguments)):
            try:
                canonical_json(arguments)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{what}.arguments may hold texts, finite numbers, lists and mappings only"
                ) from None
        return self

    @model_serializer(mode="wrap")
    def _as_before_without_news(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_defaults(write(self), self, ("execution",))

    def candidate(self, name: str) -> CandidateRecipe:
        return next(candidate for candidate in self.candidates if candidate.name == name)


class WrittenCandidate(CandidateRecipe):
    """A candidate as its author wrote it: its noise stated, or left to a target."""

    noise_multiplier: Annotated[float, Field(gt=0)] | None = None  # type: ignore[assignment]
    # The run's own epsilon, nats, at the recipe's delta; or a name for one, see accounting.calibration.PRESETS.
    target_epsilon: Annotated[float, Field(ge=LEAST_EPSILON, le=LARGEST_EPSILON)] | None = None
    preset: Literal["strong", "medium", "weak"] | None = None


class WrittenRecipe(Recipe):
    """A recipe as its author wrote it."""

    candidates: Annotated[tuple[WrittenCandidate, ...], Field(min_length=1, max_length=64)]

    def resolved(self, where: str) -> Recipe:
        """The recipe with every noise multiplier as if it had been written, which is what is trained and digested.

        Raises:
            InvalidInput: one sentence that names the candidate without a choice, or whose target no noise meets.
        """
        candidates = []
        for candidate in self.candidates:
            fields = candidate.model_dump(exclude={"target_epsilon", "preset"})
            fields["noise_multiplier"] = noise_of(
                candidate, delta=self.delta, relation=self.neighboring_relation, where=where
            )
            candidates.append(CandidateRecipe(**fields))
        return Recipe(**{**dict(self), "candidates": tuple(candidates)})


def _without_defaults(written: dict[str, Any], document: Document, names: tuple[str, ...]) -> dict[str, Any]:
    unused = {
        name
        for name in names
        if getattr(document, name) == type(document).model_fields[name].get_default(call_default_factory=True)
    }
    return {name: value for name, value in written.items() if name not in unused}
