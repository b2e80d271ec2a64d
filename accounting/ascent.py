"""How many noisy sums a step released, read off its optimizer's name: one, or the two of DP-SAM's paired step.

A segment's `optimizer` is the base optimizer ("sgd", "adam", ...), which turns the step's noisy gradient into an
update by a public rule and costs no privacy; or an `Ascent`, followed by "+" and the base where that is not SGD
("dp_sam+adamw"). What a paired step costs is proved in `paired_mechanism`.

Every accountant of executed steps reads the noise through `accounted_multiplier`, so a paired step is nowhere
counted as a plain one. Theorems on merges, which are about plain SGD, refuse these steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

from accounting.errors import IncompatibleCandidates
from accounting.rounding import ULP
from accounting.trajectory import Segment, Trajectory


class Ascent(StrEnum):
    """Where a step takes its direction of ascent from; the first part of a segment's `optimizer`."""

    SAME_BATCH = "dp_sam"  # a second noisy gradient of the same batch: the paired step
    PREVIOUS_GRADIENT = "dp_sam_previous_gradient"  # the noisy gradient that the step before released


SAME_BATCH_ASCENT = (
    "Each step of DP-SAM released two noisy sums of clipped gradients of one batch, each with fresh noise of the "
    "recorded multiplier, the second at a point computed from the first and public values; both clipped every "
    "record's gradient to the recorded norm."
)
PREVIOUS_ASCENT = (
    "Each step of DP-SAM with the previous gradient computed the point of its gradient from the noisy gradients of "
    "earlier steps and public values alone, and released a single noisy sum of clipped gradients."
)
PUBLIC_ANCHOR = (
    "The radius of ascent, the anchor and its strength are public and do not depend on the records; the pull "
    "towards the anchor was added after the noise."
)
SOURCE_PAIRED = (
    "arXiv 2608.26655, paired step: two releases of one batch are one Gaussian of sensitivity sqrt(2) C; under "
    "sampling, one subsampled Gaussian, by monotonicity of the divergence in the Gram matrix of the shifts"
)

_SHARPNESS_AWARE = "sam"  # optimizers of such names look at a batch more than once


def ascent_of(segment: Segment) -> Ascent | None:
    """The kind of a segment's steps; None for plain steps, which release one noisy sum each.

    Raises:
        IncompatibleCandidates: a sharpness-aware optimizer of which it is not known what its steps release.
    """
    kind, plus, base = segment.optimizer.partition("+")
    if kind in (Ascent.SAME_BATCH, Ascent.PREVIOUS_GRADIENT) and (not plus or _is_plain(base)):
        return Ascent(kind)
    if _is_plain(segment.optimizer):
        return None
    raise IncompatibleCandidates(
        f"Segment {segment.id} was trained by {segment.optimizer!r}, of which it is not known how many noisy "
        f"gradients a step releases; known are {', '.join(Ascent)}, these followed by a base optimizer as in "
        "dp_sam+adamw, and optimizers that use each batch once, such as sgd, adam and adamw."
    )


def accounted_multiplier(segment: Segment) -> float:
    """The noise multiplier of a plain step that is exactly as private as one step of the segment, rounded down.

    The recorded one where a step releases one noisy sum, and that over sqrt(2) for a paired step: full batch and
    under Poisson sampling, where the pair is one sampled Gaussian, and under every neighbouring relation.

    Raises:
        IncompatibleCandidates: see `ascent_of`.
    """
    if ascent_of(segment) is Ascent.SAME_BATCH:
        return segment.noise_multiplier / math.sqrt(2) * (1 - 2 * ULP)
    return segment.noise_multiplier


def ascent_assumptions(trajectories: Iterable[Trajectory]) -> tuple[str, ...]:
    """What must be true of steps that climb or are anchored, beyond those of plain steps, as full sentences."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    kinds = {ascent_of(segment) for segment in segments}
    sentences = {Ascent.SAME_BATCH: SAME_BATCH_ASCENT, Ascent.PREVIOUS_GRADIENT: PREVIOUS_ASCENT}
    extra = [sentence for kind, sentence in sentences.items() if kind in kinds]
    anchored = any(segment.anchor_strength > 0 for segment in segments)
    return (*extra, PUBLIC_ANCHOR) if extra or anchored else ()


def with_paired_source(source: str, trajectories: Iterable[Trajectory]) -> str:
    """A bound's source, with that of the paired step where one was taken."""
    paired = any(
        ascent_of(s) is Ascent.SAME_BATCH for trajectory in trajectories for s in trajectory.segments
    )
    return f"{source}; {SOURCE_PAIRED}" if paired else source


def _is_plain(optimizer: str) -> bool:
    return bool(optimizer.strip()) and "+" not in optimizer and _SHARPNESS_AWARE not in optimizer.lower()
