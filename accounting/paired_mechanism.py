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
from dataclasses import replace

from accounting.ascent import (
    PREVIOUS_ASCENT,
    PUBLIC_ANCHOR,
    SAME_BATCH_ASCENT,
    SOURCE_PAIRED,
    Ascent,
    accounted_multiplier,
)
from accounting.bounds import Bound
from accounting.budget import NeighboringRelation, require_non_negative
from accounting.joint_release import single_run
from accounting.rounding import ULP
from accounting.trajectory import Trajectory

__all__ = [
    "PREVIOUS_ASCENT",
    "PUBLIC_ANCHOR",
    "SAME_BATCH_ASCENT",
    "SOURCE_PAIRED",
    "Ascent",
    "accounted_multiplier",
    "multiplier_of_equal_privacy",
    "paired_run",
]


def paired_run(trajectory: Trajectory, relation: NeighboringRelation | None = None) -> Bound:
    """Bound the release of a run of paired steps, everything it noised included.

    Args:
        trajectory: segments whose `optimizer` is one of `Ascent`, with a base optimizer or without, or plain ones
            before or after them; `noise_multiplier` is that of one release.
        relation: the neighbouring relation of the claim; the recorded one by default.

    Returns:
        `joint_release.single_run` of it, named "paired": a closed form (`mu` set) where all steps are full batch,
        a PLD otherwise; exact up to rounding and its measured error. Full batch:
        `mu^2 = sum_t 2 (k / noise_multiplier_t)^2`.

    Raises:
        IncompatibleCandidates: another relation, or an optimizer of which it is not known what it releases.

    Source: arXiv 2608.26655; theorem in the module's docstring.
    """
    return replace(single_run(trajectory, relation), name="paired")


def multiplier_of_equal_privacy(noise_multiplier: float) -> float:
    """What a same-batch step needs, so as to be as private as a previous-gradient step: sqrt(2) times it.

    Args:
        noise_multiplier: of the previous-gradient step, >= 0, finite.

    Returns:
        Rounded up, so that the same-batch run's epsilon is not above the other one's. The same under every
        relation, with and without Poisson sampling.
    """
    return require_non_negative("noise_multiplier", noise_multiplier) * math.sqrt(2) * (1 + 6 * ULP)
