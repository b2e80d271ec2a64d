"""The trajectory as executed: what the optimizer really did, step by step, read off the optimizer itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from accounting.ascent import Ascent
from accounting.errors import RemergeError
from accounting.trajectory import ParentStep, Segment
from tasks.data import Enforced
from tasks.objective import Objective
from tasks.recipes import DpMerging
from tasks.training.clippers import NORM_SLACK

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer


class TrainingFailed(RemergeError):
    """A run ended without a usable model; it is never a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedStep:
    """The settings that one step really used; of a paired step, those of each of its two releases."""

    noise_multiplier: float
    max_grad_norm: float
    learning_rate: float
    expected_batch_size: float
    momentum: float
    weight_decay: float
    optimizer: str
    clipping: str = "flat"
    ascent_radius: float = 0.0
    anchor_strength: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps executed by one process: their noise comes from one source and is never drawn again.

    A resumed run begins a new stretch. The token makes its segment ids differ from those of any other process that
    goes on from the same checkpoint, so the two are accounted as what they are: a shared prefix, then two suffixes.
    """

    run_id: str
    token: str
    first_step: int = 0  # steps executed before it


class StepRecorder:
    """Opacus's step hook: called after clipping and noise, before the parameters move.

    It hears of every release. Where a step makes two from one batch, they are one entry.

    Attributes:
        steps: one entry for each step executed so far, those before a resumption included.
    """

    def __init__(self, steps: Sequence[ExecutedStep] = (), dp_merging: DpMerging | None = None) -> None:
        self.steps: list[ExecutedStep] = list(steps)
        self._merging = dp_merging
        self._first: ExecutedStep | None = None  # release of a pair that is not complete

    def __call__(self, optimizer: DPOptimizer) -> None:
        groups = optimizer.param_groups
        if len(groups) != 1:
            raise TrainingFailed("Different settings for different parameters are not supported.")
        if optimizer.loss_reduction != "mean":
            raise TrainingFailed("The summed gradient must be divided by expected_batch_size.")
        group = groups[0]
        processes = int(getattr(optimizer, "world_size", 1))  # each divides by its share
        merging = self._merging
        step = ExecutedStep(
            noise_multiplier=float(optimizer.noise_multiplier),
            max_grad_norm=float(optimizer.max_grad_norm),
            learning_rate=float(group["lr"]),
            expected_batch_size=float(
                optimizer.expected_batch_size * optimizer.accumulated_iterations * processes
            ),
            momentum=float(group.get("momentum", 0.0)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            optimizer=_with_ascent(_optimizer_name(optimizer.original_optimizer, group), merging),
            clipping="per_layer" if hasattr(optimizer, "max_grad_norms") else "flat",
            ascent_radius=(merging and merging.radius) or 0.0,
            anchor_strength=merging.anchor if merging else 0.0,
        )
        if merging and merging.ascent == "same_batch" and self._first is None:
            self._first = step
            return
        if self._first not in (None, step):
            raise TrainingFailed("The two releases of a paired step must be made with the same settings.")
        self._first = None
        self.steps.append(step)


def segments(
    steps: Sequence[ExecutedStep],
    *,
    stretches: Sequence[Stretch],
    sampling_probability: float,
    regression: bool,
    objective: Objective,
    enforced: Enforced,
    adapted: bool = False,
) -> tuple[Segment, ...]:
    """Run-length encode the executed steps; a prefix of the steps gets the same ids.

    Args:
        stretches: in order; the first one begins at step 0.
        regression, objective: whether the network is a regression (`tasks.models.is_regression`) and what it was
            trained on, for `update_lipschitz`.
        adapted: whether anything about the run was adapted to its data, such as when it stopped.
    """
    encoded: list[Segment] = []
    run_before = ""
    for stretch, step, count in _runs(steps, stretches):
        previous = encoded[-1] if encoded else None
        lipschitz, reason = update_lipschitz(
            step,
            sampling_probability=sampling_probability,
            regression=regression,
            objective=objective,
            enforced=enforced,
            adapted=adapted,
        )
        encoded.append(
            Segment(
                id=":".join(filter(None, (stretch.run_id, stretch.token, str(len(encoded))))),
                steps=count,
                noise_multiplier=step.noise_multiplier,
                max_grad_norm=step.max_grad_norm,
                learning_rate=step.learning_rate,
                expected_batch_size=step.expected_batch_size,
                sampling_probability=sampling_probability,
                parent=ParentStep(run=run_before, segment=previous.id, step=previous.steps)
                if previous
                else None,
                clipping=step.clipping,
                optimizer=step.optimizer,
                momentum=step.momentum,
                weight_decay=step.weight_decay,
                ascent_radius=step.ascent_radius,
                anchor_strength=step.anchor_strength,
                sampler="full_batch" if sampling_probability == 1 else "poisson",
                schedule="adapted" if adapted else "fixed",
                update_lipschitz=lipschitz,
                update_lipschitz_reason=reason,
            )
        )
        run_before = stretch.run_id
    return tuple(encoded)


def _runs(
    steps: Sequence[ExecutedStep], stretches: Sequence[Stretch]
) -> Iterator[tuple[Stretch, ExecutedStep, int]]:
    """Equal steps of one stretch in a row, and how many they are."""
    starts = {stretch.first_step: stretch for stretch in stretches}
    of_step = list(accumulate(range(len(steps)), lambda one, step: starts.get(step, one), initial=starts[0]))
    for (stretch, step), group in groupby(zip(of_step[1:], steps, strict=True)):
        yield stretch, step, len(list(group))


def update_lipschitz(
    step: ExecutedStep,
    *,
    sampling_probability: float,
    regression: bool,
    objective: Objective,
    enforced: Enforced,
    adapted: bool = False,
) -> tuple[float, str]:
    """How far the noiseless update can pull two parameter vectors apart, for every data set allowed.

    A regression's loss on a row of norm at most R is convex and beta-smooth (beta = R^2/2 for softmax, R^2/4 for
    logistic regression), so a full-batch step with weight decay m is Lipschitz with
    max(|1 - eta m|, |1 - eta m - eta beta n_max / B|). Of softmax regression that holds only where clipping never
    acts: a row's gradient is (p - y) x, of norm at most sqrt(2) R. A clipped gradient of logistic regression is
    still a number times x, non-decreasing in the score with a slope of at most 1/4, so any limit will do. This is
    a statement about real-number arithmetic, as is every number of the accounting; the float32 execution differs
    from it by rounding.

    Args:
        regression: whether the network is one linear map of the row and nothing else.

    Returns:
        An upper bound, rounded up, and the reason with its checks; infinity where a condition does not hold.

    Source: Boehning 1992 (softmax's Hessian has norm at most 1/2 for a row of norm 1); Hardt, Recht and Singer
    2016, lemma 3.7 (a gradient step on a smooth convex loss), with weight decay added.
    """
    radius, limit = enforced.feature_radius, objective.steepness_in_words
    if radius is None:
        return math.inf, "unknown: the loader does not project rows to a norm"
    unclipped = step.max_grad_norm >= objective.steepness * radius + NORM_SLACK
    conditions = (
        (not adapted, "when the run stops depends on its data"),
        (step.clipping == "flat", "each layer is clipped apart"),
        (sampling_probability == 1, "Poisson batches have no enforced cap on their size"),
        (step.optimizer == "sgd", f"the optimizer is {step.optimizer}, not plain SGD"),
        (step.anchor_strength == 0, "the pull towards the public start is not covered by the theorem"),
        (step.momentum == 0, "momentum carries earlier gradients along"),
        (regression, f"the network is not {objective.regression}, the case that is proven"),
        (
            unclipped or objective.clipping_keeps_it,
            f"clipping can act: max_grad_norm {step.max_grad_norm} is below {limit} + 1e-6 for R = {radius}",
        ),
    )
    for holds, otherwise in conditions:
        if not holds:
            return math.inf, f"unknown: {otherwise}"
    eta, decay = Fraction(step.learning_rate), Fraction(step.weight_decay)
    smoothness = objective.smoothness * Fraction(radius) ** 2
    slowest = 1 - eta * decay
    fastest = slowest - eta * smoothness * enforced.n_max / Fraction(step.expected_batch_size)
    bound = max(abs(slowest), abs(fastest))
    rounded = float(bound)
    if Fraction(rounded) < bound:
        rounded = math.nextafter(rounded, math.inf)
    return rounded, (
        "max(|1 - eta m|, |1 - eta m - eta beta n_max / B|) with beta = R^2/"
        f"{objective.smoothness.denominator}: {objective.regression} on {objective.loss_name}, full batch, plain "
        f"SGD without momentum, rows projected to norm {radius} and at most {enforced.n_max} of them in either "
        f"neighbour (both enforced by the loader), {_clipping(step, limit, unclipped=unclipped)}, in real-number "
        "arithmetic (the run was executed in float32)"
    )


def _clipping(step: ExecutedStep, limit: str, *, unclipped: bool) -> str:
    if unclipped:
        return f"flat clipping at {step.max_grad_norm} >= {limit} + 1e-6, which never acts"
    return f"flat clipping at {step.max_grad_norm}, which leaves the gradient of a convex, as smooth loss"


def _with_ascent(base: str, merging: DpMerging | None) -> str:
    """The name of `accounting.ascent`, followed by the base optimizer where it is not SGD."""
    if merging is None or merging.ascent == "none":
        return base
    ascent = Ascent.SAME_BATCH if merging.ascent == "same_batch" else Ascent.PREVIOUS_GRADIENT
    return ascent.value if base == "sgd" else f"{ascent.value}+{base}"


def _optimizer_name(optimizer: object, group: dict[str, object]) -> str:
    import torch

    plain = not (group.get("nesterov") or group.get("dampening") or group.get("maximize"))
    if type(optimizer) is torch.optim.SGD and plain:
        return "sgd"
    return type(optimizer).__name__.lower() + ("" if plain else " (modified)")
