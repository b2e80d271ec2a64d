"""What a certificate is made of."""

from __future__ import annotations

from dataclasses import dataclass, fields

from accounting.budget import require_non_negative, require_number, require_open_unit
from accounting.documents import list_of, mapping_of, require_text
from accounting.errors import InvalidInput
from accounting.plan import OtherBound


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReference:
    """Which exact model and history a candidate's name stands for."""

    registered_model: str
    version: str
    model_sha256: str
    trajectory_sha256: str

    def __post_init__(self) -> None:
        for f in fields(self):
            require_text(f.name, getattr(self, f.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Realised:
    """The drawn candidate of a random selection, and its own guarantee, which whoever sees the index sees."""

    candidate: str
    epsilon: float  # nats
    delta: float

    def __post_init__(self) -> None:
        require_text("realised.candidate", self.candidate)
        require_non_negative("realised.epsilon", self.epsilon)
        require_open_unit("realised.delta", self.delta)


def pair_of(value: object) -> tuple[float, float]:
    pair = list_of("each point of the profile", value)
    if len(pair) != 2:
        raise InvalidInput("Each point of a certificate's profile is a pair of epsilon and delta.")
    return require_number("epsilon", pair[0]), require_number("delta", pair[1])


def other_bound_of(name: str, value: object) -> OtherBound:
    entry = mapping_of(f"other_bounds.{name}", value)
    if set(entry) not in ({"epsilon"}, {"reason"}):
        raise InvalidInput(f"other_bounds.{name} of a certificate states an epsilon or a reason.")
    if "epsilon" in entry:
        return OtherBound(epsilon=require_non_negative("epsilon", entry["epsilon"]))
    require_text("reason", entry["reason"])
    return OtherBound(reason=entry["reason"])
