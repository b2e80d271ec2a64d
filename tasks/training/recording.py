"""The trajectory as executed: what the optimizer really did, step by step, read off the optimizer itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from accounting.errors import RemergeError
from accounting.trajectory import ParentStep, Segment
from tasks.data import Enforced
from tasks.objective import Objective

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer

OPACUS_NORM_SLACK = 1e-6  # Opacus clips by max_grad_norm / (norm + 1e-6), so shorter gradients shrink too


class TrainingFailed(RemergeError):
    """A run ended without a usable model; it is never a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedStep:
    """The settings that one optimizer step really used."""

    noise_multiplier: float
    max_grad_norm: float
    learning_rate: float
    expected_batch_size: float
    momentum: float
    weight_decay: float
    optimizer: str


class StepRecorder:
    """Opacus's step hook: called after clipping and noise, before the parameters move.

    Attributes:
        steps: one entry for each step executed so far.
        gradient_norms: L2 norms of the last step's per-record gradients before clipping, shape (batch,);
            private, never to leave the trust boundary without noise.
    """

    def __init__(self) -> None:
        import torch

        self.steps: list[ExecutedStep] = []
        self.gradient_norms = torch.zeros(0)

    def __call__(self, optimizer: DPOptimizer) -> None:
        import torch

        groups = optimizer.param_groups
        if len(groups) != 1:
            raise TrainingFailed("Different settings for different parameters are not supported.")
        if optimizer.loss_reduction != "mean":
            raise TrainingFailed("The summed gradient must be divided by expected_batch_size.")
        group = groups[0]
        self.steps.append(
            ExecutedStep(
                noise_multiplier=float(optimizer.noise_multiplier),
                max_grad_norm=float(optimizer.max_grad_norm),
                learning_rate=float(group["lr"]),
                expected_batch_size=float(optimizer.expected_batch_size * optimizer.accumulated_iterations),
                momentum=float(group.get("momentum", 0.0)),
                weight_decay=float(group.get("weight_decay", 0.0)),
                optimizer=_optimizer_name(optimizer.original_optimizer, group),
            )
        )
        norms = [gradients.flatten(1).norm(dim=1) for gradients in optimizer.grad_samples]
        self.gradient_norms = torch.stack(norms, dim=1).norm(dim=1)


def segments(
    steps: list[ExecutedStep],
    *,
    run_id: str,
    sampling_probability: float,
    regression: bool,
    objective: Objective,
    enforced: Enforced,
) -> tuple[Segment, ...]:
    """Run-length encode the executed steps.

    Args:
        run_id: unique to this attempt, so that segment ids are.
        regression, objective: whether the network is a regression (`tasks.models.is_regression`) and what it was
            trained on, for `update_lipschitz`.
    """
    encoded: list[Segment] = []
    for index, (step, group) in enumerate(groupby(steps)):
        lipschitz, reason = update_lipschitz(
            step,
            sampling_probability=sampling_probability,
            regression=regression,
            objective=objective,
            enforced=enforced,
        )
        previous = encoded[-1] if encoded else None
        encoded.append(
            Segment(
                id=f"{run_id}:{index}",
                steps=len(list(group)),
                noise_multiplier=step.noise_multiplier,
                max_grad_norm=step.max_grad_norm,
                learning_rate=step.learning_rate,
                expected_batch_size=step.expected_batch_size,
                sampling_probability=sampling_probability,
                parent=ParentStep(run=run_id, segment=previous.id, step=previous.steps) if previous else None,
                clipping="flat",
                optimizer=step.optimizer,
                momentum=step.momentum,
                weight_decay=step.weight_decay,
                sampler="full_batch" if sampling_probability == 1 else "poisson",
                schedule="fixed",
                update_lipschitz=lipschitz,
                update_lipschitz_reason=reason,
            )
        )
    return tuple(encoded)


def update_lipschitz(
    step: ExecutedStep,
    *,
    sampling_probability: float,
    regression: bool,
    objective: Objective,
    enforced: Enforced,
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
    unclipped = step.max_grad_norm >= objective.steepness * radius + OPACUS_NORM_SLACK
    conditions = (
        (sampling_probability == 1, "Poisson batches have no enforced cap on their size"),
        (step.optimizer == "sgd", f"the optimizer is {step.optimizer}, not plain SGD"),
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


def _optimizer_name(optimizer: object, group: dict[str, object]) -> str:
    import torch

    plain = not (group.get("nesterov") or group.get("dampening") or group.get("maximize"))
    if type(optimizer) is torch.optim.SGD and plain:
        return "sgd"
    return type(optimizer).__name__.lower() + ("" if plain else " (modified)")
