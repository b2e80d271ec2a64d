"""How a recipe says how much noise a candidate gets: a noise multiplier, a target epsilon, or a preset for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.calibration import PRESETS, TrainingShape, calibrated_noise
from accounting.errors import InvalidInput, RemergeError
from tasks.randomness import executed_probability

CHOICES = ("noise_multiplier", "target_epsilon", "preset")  # a candidate gives exactly one


def with_defaults(
    name: str, own: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """A candidate's fields over those shared by all; its own choice of noise replaces a shared one of any kind.

    Args:
        name: the candidate's.
        where: the recipe's file, for errors.

    Raises:
        InvalidInput: one sentence that names the candidate, where not exactly one choice is left.
    """
    chosen = [choice for choice in CHOICES if own.get(choice) is not None]
    shared = {key: value for key, value in defaults.items() if not (chosen and key in CHOICES)}
    fields = {**shared, **own}
    given = [choice for choice in CHOICES if fields.get(choice) is not None]
    if not given:
        raise InvalidInput(
            f"{where}: the field noise_multiplier of candidate {name} is missing; give it, or a target_epsilon or a "
            "preset instead."
        )
    if len(given) > 1:
        raise InvalidInput(f"{where}: candidate {name} gives both {' and '.join(given)}; keep one of them.")
    return {key: value for key, value in fields.items() if key not in CHOICES or value is not None}


def resolved_noise(
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float,
    relation: str,
) -> float:
    """The noise multiplier for a candidate's target, for the run as it will be executed.

    Args:
        target_epsilon: nats, of the candidate alone, at `delta`.
        sampling_probability: q as the recipe states it; the coins that training tosses fall a little more often,
            and that is what counts.

    Raises:
        RemergeError: see `accounting.calibration.calibrated_noise`.
    """
    shape = TrainingShape(
        steps=steps,
        relation=NeighboringRelation(relation),
        sampling_probability=executed_probability(sampling_probability),
    )
    return calibrated_noise(PrivacyBudget(epsilon=target_epsilon, delta=delta), shape)


def target_of(target_epsilon: float | None, preset: str | None) -> float | None:
    """nats; None where the candidate states its noise multiplier."""
    return PRESETS[preset] if preset is not None else target_epsilon


def named(error: RemergeError, name: str, where: str) -> InvalidInput:
    """Say which candidate of which recipe it is about."""
    return InvalidInput(f"{where}: candidate {name}: {error.message}")
