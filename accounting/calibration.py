"""From a target epsilon to the noise multiplier of a run that is yet to be trained.

The answer is a short decimal, rounded up, at which the run's own bound was evaluated: what is trained with it has
an epsilon of at most the target, and with 0.1 % less noise it would not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from accounting import gaussian
from accounting.ascent import Ascent, ascent_of
from accounting.bounds import Bound
from accounting.budget import (
    NeighboringRelation,
    PrivacyBudget,
    require_count,
    require_probability,
)
from accounting.errors import AccountingError, BudgetInfeasible, InvalidInput
from accounting.joint_release import single_run
from accounting.least_noise import LARGEST, SMALLEST, least_noise
from accounting.trajectory import Segment, Trajectory

# The usual guidance: epsilon 0.5 to 1 is strong, 1 to 3 medium, 3 to 8 weak. Each preset stands for the upper end of
# its range, the least noise that still has the name; a run's own epsilon never exceeds it.
PRESETS: Mapping[str, float] = MappingProxyType({"strong": 1.0, "medium": 3.0, "weak": 8.0})

_DIGITS = 6  # of a noise multiplier, significant
_WASTE = 1e-3  # relative: with so much less noise the target is overshot
_MOST_DIPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """What the privacy of a run depends on beside its noise: all steps are alike."""

    steps: int  # >= 1
    relation: NeighboringRelation
    sampling_probability: float = 1.0  # in (0, 1], as the coins really fall; 1 is full batch
    optimizer: str = "sgd"  # as in `Segment`: a paired step ("dp_sam") needs sqrt(2) times the noise

    def __post_init__(self) -> None:
        require_count("steps", self.steps)
        require_probability("sampling_probability", self.sampling_probability)

    @property
    def is_full_batch(self) -> bool:
        return self.sampling_probability == 1.0

    @property
    def chance_to_take_part(self) -> float:
        """The probability that a given record is in at least one step's batch."""
        if self.is_full_batch:
            return 1.0
        return -math.expm1(self.steps * math.log1p(-self.sampling_probability))

    def run(
        self, noise_multiplier: float, name: str = "planned", *, update_lipschitz: float = math.inf
    ) -> Trajectory:
        """The trajectory of such a run, as training would record it, in units of the learning rate and norm.

        Args:
            noise_multiplier: at least 0.
            name: of its stretch of noise; runs of one name share their noise.
            update_lipschitz: c of each update, as in `Segment`; infinity where it is not known.
        """
        segment = Segment(
            id=name,
            steps=self.steps,
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            learning_rate=1.0,
            expected_batch_size=1.0,
            sampling_probability=self.sampling_probability,
            sampler="full_batch" if self.is_full_batch else "poisson",
            optimizer=self.optimizer,
            update_lipschitz=update_lipschitz,
            update_lipschitz_reason="stated for a plan, not checked",
        )
        return Trajectory(
            portfolio="planned",
            lineage="planned",
            unit="record",
            neighboring_relation=self.relation,
            data_digest="not known",
            initialisation_digest="not known",
            feature_radius=None,
            n_max=None,
            segments=(segment,),
        )

    def bound(self, noise_multiplier: float) -> Bound:
        """The run's own bound: what its certificate would state."""
        return single_run(self.run(noise_multiplier))


@lru_cache(maxsize=1024)
def calibrated_noise(target: PrivacyBudget, shape: TrainingShape) -> float:
    """The least noise multiplier whose run satisfies a budget, rounded up to six significant digits.

    Args:
        target: the run's own epsilon, nats, and delta.
        shape: of the run.

    Returns:
        A multiplier at which the run's bound was evaluated: its epsilon at the target's delta is at most the
        target's, and at 0.999 times the multiplier it is more, or Poisson sampling cannot be accounted at this
        delta. The search takes up to some seconds for Poisson sampling and is remembered.

    Raises:
        InvalidInput: the target holds with practically no noise, as where a record is sampled with a probability
            below delta.
        AccountingError: the delta is too small for the accounting of Poisson sampling to resolve.
        BudgetInfeasible: no multiplier up to 1e9 is enough.

    Source: theory section 8: every calibration is verified by evaluating the forward bound at the answer.
    """
    if shape.chance_to_take_part <= target.delta:
        raise _needs_no_noise(target)
    refused: list[AccountingError] = []

    def epsilon_of(noise_multiplier: float) -> float:
        try:
            return shape.bound(noise_multiplier).epsilon(target.delta)
        except AccountingError as error:
            refused.append(error)
            return math.inf

    noise = least_noise(epsilon_of, target.epsilon, _first_guess(target, shape), _DIGITS)
    for _ in range(_MOST_DIPS):
        # A grid that changes with the noise can make epsilon dip below the target before it crosses it for good.
        if noise is None or noise <= SMALLEST or not epsilon_of(noise * (1 - _WASTE)) <= target.epsilon:
            break
        noise = least_noise(epsilon_of, target.epsilon, noise * (1 - _WASTE), _DIGITS)
    if noise is None:
        if refused:
            raise refused[-1]
        raise BudgetInfeasible(
            f"No noise multiplier up to {LARGEST:g} brings {shape.steps} steps within epsilon {target.epsilon:g} at "
            f"delta {target.delta:g}; train for fewer steps, or ask for a larger epsilon or delta.",
            target=target.epsilon,
            best=None,
            hint="train for fewer steps, or ask for a larger epsilon or delta",
        )
    if noise <= SMALLEST:
        raise _needs_no_noise(target)
    return noise


def _needs_no_noise(target: PrivacyBudget) -> InvalidInput:
    return InvalidInput(
        f"Epsilon {target.epsilon:g} at delta {target.delta:g} would allow training with practically no noise, "
        "because so few records take part or the budget is so large; ask for a smaller delta or epsilon, or state "
        "a noise_multiplier."
    )


def _first_guess(target: PrivacyBudget, shape: TrainingShape) -> float:
    """Exact for full batch; for Poisson sampling by the central limit theorem, and never above full batch.

    Source: Bu, Dong, Long and Su 2020 (Deep learning with Gaussian differential privacy), corollary 5.4, with the
    factor k beside q, which is right for much noise.
    """
    mu = gaussian.mu_for(target.epsilon, target.delta)
    factor = shape.relation.full_batch_factor * math.sqrt(shape.steps)
    if ascent_of(shape.run(1.0).segments[0]) is Ascent.SAME_BATCH:
        factor *= math.sqrt(2)
    full_batch = factor / mu
    if shape.is_full_batch:
        return full_batch
    ratio = mu / (factor * shape.sampling_probability)
    square = math.log1p(ratio * ratio) if ratio < 1e100 else math.inf
    return full_batch if square == 0 else min(full_batch, 1 / math.sqrt(square))
