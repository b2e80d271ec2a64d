"""What a certificate is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from accounting.budget import require_count, require_non_negative, require_number, require_open_unit
from accounting.documents import fields_of, fields_to_dict, list_of, mapping_of, require_text
from accounting.errors import InvalidInput
from accounting.plan import Component, OtherBound, require_weights

MERGE_BOUNDS = (
    "joint",
    "generic",
    "shifted",
)  # of one merge; the last two, and the first at times, have a mu


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
    """What was drawn, and its own guarantee, which whoever sees the index sees."""

    candidate: str  # of a mixture the component's name
    epsilon: float  # nats
    delta: float

    def __post_init__(self) -> None:
        require_text("realised.candidate", self.candidate)
        require_non_negative("realised.epsilon", self.epsilon)
        require_open_unit("realised.delta", self.delta)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedComponent:
    """One merge of a mixture: its probability, its weights and its own guarantee."""

    name: str
    weight: float  # probability, > 0
    weights: Mapping[str, float]  # lambda by candidate name, > 0
    fresh_noise: float  # standard deviation per coordinate of the noise added to this merge, once; 0 for none
    bound: str  # name of the theorem's bound for this merge alone
    epsilon: float  # nats, at the certificate's delta

    def __post_init__(self) -> None:
        require_text("name of a component", self.name)
        require_weights(self.weights)
        if not 0 < require_number("weight of a component", self.weight) <= 1:
            raise InvalidInput(f"weight of a component must lie in (0, 1], but {self.weight!r} was given.")
        require_non_negative("fresh_noise of a component", self.fresh_noise)
        require_non_negative("epsilon of a component", self.epsilon)
        if self.bound not in MERGE_BOUNDS:
            raise InvalidInput(f"{self.bound!r} is not the name of a bound of one merge.")

    @staticmethod
    def of(component: Component) -> CertifiedComponent:
        """What a plan says of a component."""
        return CertifiedComponent(
            name=component.name,
            weight=component.weight,
            weights=dict(component.weights),
            fresh_noise=component.fresh_noise,
            bound=component.bound.name,
            epsilon=component.epsilon,
        )

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self) | {"weights": dict(self.weights)}

    @staticmethod
    def from_dict(document: object) -> CertifiedComponent:
        values = fields_of(document, "component", CertifiedComponent)
        return CertifiedComponent(**values | {"weights": mapping_of("weights", values["weights"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cumulative:
    """What all releases from the lineage together cost, this one included: for whoever holds them all."""

    epsilon_all_regions: float  # nats, at `delta`: somebody who holds the releases of every region
    epsilon_region: float  # nats, at `delta`: somebody who holds those of this region
    delta: float
    releases: int  # that were counted, this one included
    after_ledger_entry: int  # serial of the last ledger entry that was counted; 0 for none

    def __post_init__(self) -> None:
        require_non_negative("cumulative.epsilon_all_regions", self.epsilon_all_regions)
        require_non_negative("cumulative.epsilon_region", self.epsilon_region)
        require_open_unit("cumulative.delta", self.delta)
        require_count("cumulative.releases", self.releases)
        serial = self.after_ledger_entry
        if isinstance(serial, bool) or not isinstance(serial, int) or serial < 0:
            raise InvalidInput(
                f"cumulative.after_ledger_entry must be a whole number of at least 0, but {serial!r} was given."
            )

    @staticmethod
    def from_dict(document: object) -> Cumulative:
        return Cumulative(**fields_of(document, "cumulative", Cumulative))


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
