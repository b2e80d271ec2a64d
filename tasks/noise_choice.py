"""How a recipe says how much noise a candidate gets: a noise multiplier, a target epsilon, or a preset for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from accounting.ascent import Ascent
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.calibration import PRESETS, TrainingShape, calibrated_noise
from accounting.errors import InvalidInput, RemergeError
from tasks.randomness import executed_probability

LEAST_NOISE = 0.01  # noise multiplier of a candidate; epsilons of such runs are in the thousands
CHOICES = ("noise_multiplier", "target_epsilon", "preset")  # a candidate gives exactly one


class Chosen(Protocol):
    """A candidate as its author wrote it."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def sampling_probability(self) -> float: ...
    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def target_epsilon(self) -> float | None: ...
    @property
    def preset(self) -> str | None: ...
    @property
    def is_paired(self) -> bool: ...


def with_defaults(
    name: str, own: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """A candidate's fields over those shared by all; its own choice of noise replaces a shared one of any kind.

    Args:
        name: the candidate's.
        where: the recipe's file, for errors.

    Raises:
        InvalidInput: one sentence that names the candidate, where more than one choice is left.
    """
    chosen = [choice for choice in CHOICES if own.get(choice) is not None]
    shared = {key: value for key, value in defaults.items() if not (chosen and key in CHOICES)}
    fields = {**shared, **own}
    given = [choice for choice in CHOICES if fields.get(choice) is not None]
    if len(given) > 1:
        raise InvalidInput(f"{where}: candidate {name} gives both {' and '.join(given)}; keep one of them.")
    return {key: value for key, value in fields.items() if key not in CHOICES or value is not None}


def noise_of(candidate: Chosen, *, delta: float, relation: str, where: str) -> float:
    """The noise multiplier that a candidate states, or the one for its target: of the run as it will be executed.

    The coins that Poisson training tosses fall a little more often than the recipe's sampling_probability says, and
    that is what counts.

    Args:
        candidate: every field in range.
        delta: of the target.
        relation: the recipe's neighboring_relation.
        where: the recipe's file, for errors.

    Raises:
        InvalidInput: one sentence that names the candidate, where it chose nothing, or no noise meets its target.
    """
    if candidate.noise_multiplier is not None:
        return candidate.noise_multiplier
    target = candidate.target_epsilon if candidate.preset is None else PRESETS[candidate.preset]
    if target is None:
        raise InvalidInput(
            f"{where}: the field noise_multiplier of candidate {candidate.name} is missing; give it, or a "
            "target_epsilon or a preset instead."
        )
    try:
        shape = shape_of(candidate, relation=relation)
        return calibrated_noise(PrivacyBudget(epsilon=target, delta=delta), shape)
    except RemergeError as error:
        raise InvalidInput(f"{where}: candidate {candidate.name}: {error.message}") from None


class Shaped(Protocol):
    """What of a candidate decides, with its noise, what it costs."""

    @property
    def steps(self) -> int: ...
    @property
    def sampling_probability(self) -> float: ...
    @property
    def is_paired(self) -> bool: ...


def shape_of(candidate: Shaped, *, relation: str, sampling_probability: float | None = None) -> TrainingShape:
    """The run as it will be executed: with the coins as they fall, and two releases a step where it pairs them.

    Args:
        sampling_probability: as a recipe would state it; None for the candidate's own.
    """
    stated = candidate.sampling_probability if sampling_probability is None else sampling_probability
    return TrainingShape(
        steps=candidate.steps,
        relation=NeighboringRelation(relation),
        sampling_probability=executed_probability(stated),
        optimizer=Ascent.SAME_BATCH.value if candidate.is_paired else "sgd",
    )


class Noisy(Protocol):
    """A candidate whose noise is known."""

    @property
    def name(self) -> str: ...
    @property
    def noise_multiplier(self) -> float: ...


def require_noise(portfolio: str, candidates: Iterable[Noisy]) -> None:
    """Refuse candidates without noise: a candidate's digest is for all to see, whether it is released or not.

    Raises:
        InvalidInput: naming the first one.
    """
    for candidate in candidates:
        if candidate.noise_multiplier < LEAST_NOISE:
            raise InvalidInput(
                f"Candidate {candidate.name} of {portfolio} has next to no noise (noise_multiplier "
                f"{candidate.noise_multiplier:g}), and protects nobody; give it at least {LEAST_NOISE:g}."
            )
