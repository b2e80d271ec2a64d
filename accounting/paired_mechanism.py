"""The paired step of DP-Merging (DP-SAM): two noisy clipped gradients from one batch.

Each step releases the noisy clipped gradient sum g at w, climbs to `w + rho * g / ||g||`, releases the noisy
clipped gradient sum h there, **on the same batch**, and descends: `w - eta * (h + 2 * anchor * (w - w0))`.

A record of the batch enters both releases, so the pair (g, h) is one Gaussian mechanism of sensitivity
`sqrt(2) * C` with the noise of one gradient: a step at `noise_multiplier / sqrt(2)`. Under Poisson sampling
both see one coin: it is *one* subsampled Gaussian at that multiplier. Two subsampled Gaussians with a coin
each would be more private (noise multiplier 1, q = 0.01, 1,000 steps, delta 1e-5, add-or-remove: epsilon 2.58,
where the truth is 4.48).

*Theorem.* With m = 1 / noise_multiplier, the pair on neighbouring data is dominated by the pair of mixtures of
`sampled_gaussian` at sqrt(2) m, under every relation; a record of constant gradient attains it.

*Proof.* Condition on the batch's other records (joint convexity) and let P0, P1, P2 be the outputs without
the differing record, with it, and with its replacement. The divergence at e^eps = c >= 1 is the integral of
`(q P1 - (c - 1)(1 - q) P0 - c q P2)_+` under replace-one, and a similar one with one of the three missing
otherwise. Given g, the three laws of h are N(u1), N(0), N(u2) up to a common shift, with norms at most m that
may depend on g. For weights a, b, d >= 0 the integral of `(a N(u1) - b N(0) - d N(u2))_+` is the expectation of
`f(y) = (a - b y1 - d y2)_+` where (log y1, log y2) is Gaussian, each y of mean 1, with covariance the Gram matrix
K of -u1 and u2 - u1. Since `d/dK_ij E f = E[y_i y_j f_ij] / 2` and f_ij >= 0, it grows with every entry of K, and
u2 = -u1 of norm m maximises all of them together. So h may be replaced by the antipodal release whatever g was;
it then does not depend on g, and given h the same argument holds for g. Two antipodal releases in fixed
directions are one along the diagonal, with sqrt(2) m.

Advanced joint convexity (Balle, Barthe and Gaboardi 2018) gives a simpler bound under replace-one, which is
about twice as large in epsilon after composition; the tests keep it as a second opinion.

A variant costs nothing extra: climb along the *previous* step's noisy gradient. Only h is then released, at
the plain multiplier. At equal epsilon it needs 1 / sqrt(2) of the noise, with and without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, require_non_negative
from accounting.errors import IncompatibleCandidates
from accounting.joint_release import single_run
from accounting.rounding import ULP
from accounting.trajectory import Segment, Trajectory


class Ascent(StrEnum):
    """Where a step takes its direction of ascent from; recorded as a segment's `optimizer`."""

    SAME_BATCH = "dp_sam"  # a second noisy gradient of the same batch: the paired step
    PREVIOUS_GRADIENT = "dp_sam_previous_gradient"  # the noisy gradient that the step before released


SAME_BATCH_ASCENT = (
    "Each step released two noisy sums of clipped gradients of one batch, each with fresh noise of the recorded "
    "multiplier, the second at a point computed from the first and public values; both clipped every record's "
    "gradient to the recorded norm."
)
PREVIOUS_ASCENT = (
    "Each step computed the point of its gradient from the noisy gradients of earlier steps and public values "
    "alone, and released a single noisy sum of clipped gradients."
)
PUBLIC_ANCHOR = (
    "The radius of ascent, the anchor and its strength are public and do not depend on the records; the pull "
    "towards the anchor was added after the noise."
)
SOURCE_PAIRED = (
    "arXiv 2608.26655, paired step: two releases of one batch are one Gaussian of sensitivity sqrt(2) C; under "
    "sampling, one subsampled Gaussian, by monotonicity of the divergence in the Gram matrix of the shifts"
)


def paired_run(trajectory: Trajectory, relation: NeighboringRelation | None = None) -> Bound:
    """Bound the release of a run of paired steps, everything it noised included.

    Args:
        trajectory: segments whose `optimizer` is one of `Ascent`, or "sgd" for plain steps before or after
            them; `noise_multiplier` is that of one release.
        relation: the neighbouring relation of the claim; the recorded one by default.

    Returns:
        The bound "paired", as `joint_release`: a closed form (`mu` set) where all steps are full batch, a PLD
        otherwise; exact up to rounding and its measured error. Full batch: `mu^2 = sum_t 2 (k /
        noise_multiplier_t)^2`.

    Raises:
        IncompatibleCandidates: another relation, or an optimizer of which this module knows nothing.

    Source: arXiv 2608.26655; theorem in the module's docstring.
    """
    bound = single_run(as_plain_steps(trajectory), relation)
    extra = ascent_assumptions([trajectory])
    source = f"{bound.source}; {SOURCE_PAIRED}" if SAME_BATCH_ASCENT in extra else bound.source
    return replace(bound, name="paired", assumptions=(*bound.assumptions, *extra), source=source)


def as_plain_steps(trajectory: Trajectory) -> Trajectory:
    """The same run with every paired step replaced by the plain step that is exactly as private.

    For accounting only: the noise multipliers of the result are not those of the training.

    Raises:
        IncompatibleCandidates: an optimizer that is neither one of `Ascent` nor "sgd".
    """
    return replace(trajectory, segments=tuple(as_plain_step(s) for s in trajectory.segments))


def as_plain_step(segment: Segment) -> Segment:
    """One segment of `as_plain_steps`; the noise multiplier is rounded down."""
    if segment.optimizer in (Ascent.PREVIOUS_GRADIENT, "sgd"):
        return replace(segment, optimizer="sgd")
    if segment.optimizer != Ascent.SAME_BATCH:
        raise IncompatibleCandidates(
            f"Segment {segment.id} was trained by {segment.optimizer!r}, of which it is not known how many noisy "
            f"gradients a step releases; known are {', '.join(Ascent)} and sgd."
        )
    lowered = segment.noise_multiplier / math.sqrt(2) * (1 - 2 * ULP)
    return replace(segment, noise_multiplier=lowered, optimizer="sgd")


def multiplier_of_equal_privacy(noise_multiplier: float) -> float:
    """What a same-batch step needs, so as to be as private as a previous-gradient step: sqrt(2) times it.

    Args:
        noise_multiplier: of the previous-gradient step, >= 0, finite.

    Returns:
        Rounded up, so that the same-batch run's epsilon is not above the other one's. The same under every
        relation, with and without Poisson sampling.
    """
    return require_non_negative("noise_multiplier", noise_multiplier) * math.sqrt(2) * (1 + 6 * ULP)


def ascent_assumptions(trajectories: Sequence[Trajectory]) -> tuple[str, ...]:
    """What must be true of the runs' steps beyond `run_assumptions`, as full sentences."""
    kinds = {segment.optimizer for trajectory in trajectories for segment in trajectory.segments}
    sentences = {Ascent.SAME_BATCH: SAME_BATCH_ASCENT, Ascent.PREVIOUS_GRADIENT: PREVIOUS_ASCENT}
    extra = [sentence for kind, sentence in sentences.items() if kind in kinds]
    return (*extra, PUBLIC_ANCHOR) if extra else ()
