"""What was executed, step by step: the accountant reads trajectories, never a stored epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from accounting.budget import (
    NeighboringRelation,
    require_count,
    require_non_negative,
    require_number,
    require_positive,
    require_probability,
)
from accounting.errors import IncompatibleCandidates, InvalidInput

SCHEMA = "remerge/trajectory/1"
_LEFT_OUT_WHEN_ZERO = ("ascent_radius", "anchor_strength")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentStep:
    """Where a segment branched off: after `step` steps of the segment named `segment` of run `run`."""

    run: str
    segment: str
    step: int  # >= 1

    def __post_init__(self) -> None:
        _require_text("parent.run", self.run)
        _require_text("parent.segment", self.segment)
        require_count("parent.step", self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One uninterrupted stretch of DP-SGD with its own fresh noise (and its own Poisson coins).

    Each record in a step's batch contributes its gradient clipped to L2 norm `max_grad_norm`; Gaussian
    noise of standard deviation `noise_multiplier * max_grad_norm` is added to the sum; the result is
    divided by the public constant `expected_batch_size` and multiplied by `learning_rate`.

    Two runs share steps exactly when they name the same segment `id`; `steps` is how many of its steps
    this run used, counted from the segment's start. All other fields must then agree.
    """

    id: str  # unique to this stretch of noise
    steps: int  # >= 1
    noise_multiplier: float  # >= 0; 0 is not private
    max_grad_norm: float  # > 0
    learning_rate: float  # > 0
    expected_batch_size: float  # > 0, a public constant
    sampling_probability: float = 1.0  # in (0, 1]; 1 is full batch
    parent: ParentStep | None = None  # None: starts at the public initialisation
    clipping: str = "flat"  # "flat" or "per_layer"
    optimizer: str = "sgd"  # or adam, adamw; of paired steps dp_sam, dp_sam_previous_gradient, with "+adamw"
    momentum: float = 0.0
    weight_decay: float = 0.0
    sampler: str = "full_batch"  # "full_batch" or "poisson"
    schedule: str = "fixed"  # "fixed" before training, or "adapted" to the data
    update_lipschitz: float = math.inf  # c of theory 3.4; inf when unknown
    update_lipschitz_reason: str = "not checked"
    ascent_radius: float = 0.0  # rho of DP-SAM, in parameter norm; 0 where no step ascends
    anchor_strength: float = (
        0.0  # of the pull 2 * strength * (w - w0) to the public start; 0 where there is none
    )

    def __post_init__(self) -> None:
        _require_text("segment id", self.id)
        where = f"of segment {self.id}"
        require_count(f"steps {where}", self.steps)
        require_non_negative(f"noise_multiplier {where}", self.noise_multiplier)
        require_positive(f"max_grad_norm {where}", self.max_grad_norm)
        require_positive(f"learning_rate {where}", self.learning_rate)
        require_positive(f"expected_batch_size {where}", self.expected_batch_size)
        require_probability(f"sampling_probability {where}", self.sampling_probability)
        require_non_negative(f"momentum {where}", self.momentum)
        require_non_negative(f"weight_decay {where}", self.weight_decay)
        _require_choice(f"clipping {where}", self.clipping, ("flat", "per_layer"))
        _require_choice(f"sampler {where}", self.sampler, ("full_batch", "poisson"))
        _require_choice(f"schedule {where}", self.schedule, ("fixed", "adapted"))
        _require_text(f"optimizer {where}", self.optimizer)
        require_non_negative(f"ascent_radius {where}", self.ascent_radius)
        require_non_negative(f"anchor_strength {where}", self.anchor_strength)
        if self.ascent_radius and not self.optimizer.startswith("dp_sam"):
            raise InvalidInput(
                f"ascent_radius {where} is {self.ascent_radius:g}, but {self.optimizer} does not ascend; give 0, "
                "or an optimizer dp_sam or dp_sam_previous_gradient."
            )
        if not require_number(f"update_lipschitz {where}", self.update_lipschitz) >= 0:
            raise InvalidInput(f"update_lipschitz {where} must be at least 0 (inf when unknown).")
        if (self.sampler == "full_batch") != (self.sampling_probability == 1.0):
            raise InvalidInput(
                f"sampler {where} is {self.sampler}, which does not fit "
                f"sampling_probability {self.sampling_probability}; full_batch goes with 1."
            )

    @property
    def is_full_batch(self) -> bool:
        return self.sampling_probability == 1.0

    def mechanism_key(self) -> tuple[object, ...]:
        """Everything but the number of steps: must agree wherever the same segment id appears."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name != "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The executed history of one run, from a public initialisation to the released parameters."""

    portfolio: str
    lineage: str  # the records a person can be in, across regions, retrainings and policies
    unit: str  # unit of privacy, "record"
    neighboring_relation: NeighboringRelation  # what the training was designed and recorded for
    data_digest: str  # keyed digest of the private rows (a plain one would let anybody test a guess)
    initialisation_digest: str  # sha256 of the public initial parameters
    feature_radius: float | None  # R, where the data loader enforces it
    n_max: int | None  # public, enforced cap on the records in a step
    segments: tuple[Segment, ...]  # a path: segment j + 1 continues where segment j was left
    device: str = "cpu"
    library_versions: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)  # disclosures, e.g. the noise source

    def __post_init__(self) -> None:
        for name in ("portfolio", "lineage", "unit", "data_digest", "initialisation_digest", "device"):
            _require_text(name, getattr(self, name))
        if self.feature_radius is not None:
            require_positive("feature_radius", self.feature_radius)
        if self.n_max is not None:
            require_count("n_max", self.n_max)
        if not self.segments:
            raise InvalidInput("A trajectory needs at least one segment.")
        ids = [segment.id for segment in self.segments]
        if len(set(ids)) != len(ids):
            raise InvalidInput(
                "A trajectory names a segment twice; each stretch of fresh noise has its own id."
            )
        if self.segments[0].parent is not None:
            raise InvalidInput("A trajectory must begin with a segment that has no parent.")
        for earlier, later in zip(self.segments, self.segments[1:], strict=False):
            if (
                later.parent is None
                or later.parent.segment != earlier.id
                or later.parent.step != earlier.steps
            ):
                raise InvalidInput(
                    f"Segment {later.id} must have segment {earlier.id} at step {earlier.steps} as parent."
                )

    @property
    def steps(self) -> int:
        return sum(segment.steps for segment in self.segments)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; infinity is written as the string "inf"."""
        document: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "segments":
                document[f.name] = [segment_to_dict(segment) for segment in value]
            elif isinstance(value, Mapping):
                document[f.name] = dict(value)
            else:
                document[f.name] = str(value) if isinstance(value, NeighboringRelation) else value
        return document

    @staticmethod
    def from_dict(document: object) -> Trajectory:
        """Rebuild from `to_dict`; unknown and missing fields are refused.

        Raises:
            InvalidInput: with the field at fault.
        """
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            raise InvalidInput(f"This is not a trajectory: its schema must be {SCHEMA!r}.")
        values = {key: value for key, value in document.items() if key != "schema"}
        _check_fields("trajectory", Trajectory, values)
        if not isinstance(values["segments"], list):
            raise InvalidInput("segments of a trajectory must be a list.")
        values["segments"] = tuple(segment_from_dict(entry) for entry in values["segments"])
        values["neighboring_relation"] = parse_relation(values["neighboring_relation"])
        return Trajectory(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trained model that the solver may choose, known by its executed trajectory."""

    name: str
    trajectory: Trajectory
    utility: float | None = None  # higher is better; None where only the noise is compared

    def __post_init__(self) -> None:
        _require_text("candidate name", self.name)
        if self.utility is not None:
            require_number(f"utility of {self.name}", self.utility)


def union_of_segments(trajectories: tuple[Trajectory, ...]) -> tuple[Segment, ...]:
    """The distinct executed steps of several runs: a shared prefix is counted once.

    Returns:
        One segment for each id, with the largest number of steps any run used, in order of appearance.

    Raises:
        IncompatibleCandidates: the same id with different parameters, or mixed relations, units or lineages.
    """
    for name in ("neighboring_relation", "unit", "lineage"):
        found = sorted({str(getattr(trajectory, name)) for trajectory in trajectories})
        if len(found) > 1:
            raise IncompatibleCandidates(
                f"Candidates differ in {name} ({', '.join(found)}); only runs that agree in it may be "
                "accounted together."
            )
    union: dict[str, Segment] = {}
    for trajectory in trajectories:
        for segment in trajectory.segments:
            known = union.setdefault(segment.id, segment)
            if known.mechanism_key() != segment.mechanism_key():
                raise IncompatibleCandidates(
                    f"Segment {segment.id} is recorded with two different sets of parameters; one of the "
                    "trajectories was edited, so train those candidates again."
                )
            if segment.steps > known.steps:
                union[segment.id] = segment
    return tuple(union.values())


def segment_to_dict(segment: Segment) -> dict[str, Any]:
    """A JSON-ready mapping of one segment; fields of DP-Merging that are 0 are left out, as they always were."""
    document: dict[str, Any] = {}
    for f in fields(segment):
        value = getattr(segment, f.name)
        if f.name in _LEFT_OUT_WHEN_ZERO and not value:
            continue  # so that trajectories written before these fields existed keep their digests
        if isinstance(value, ParentStep):
            value = {"run": value.run, "segment": value.segment, "step": value.step}
        elif isinstance(value, float) and math.isinf(value):
            value = "inf"
        document[f.name] = value
    return document


def segment_from_dict(document: object) -> Segment:
    """Rebuild one segment from `segment_to_dict`; unknown and missing fields are refused."""
    if not isinstance(document, Mapping):
        raise InvalidInput("Each segment of a trajectory must be a mapping.")
    values = dict(document)
    _check_fields("segment", Segment, values)
    parent = values.get("parent")
    if parent is not None:
        if not isinstance(parent, Mapping):
            raise InvalidInput("parent of a segment must be a mapping.")
        _check_fields("parent", ParentStep, dict(parent))
        values["parent"] = ParentStep(**parent)
    if values.get("update_lipschitz") == "inf":
        values["update_lipschitz"] = math.inf
    return Segment(**values)


def parse_relation(value: object) -> NeighboringRelation:
    """Read a neighbouring relation by its name.

    Raises:
        InvalidInput: with the names accepted.
    """
    try:
        return NeighboringRelation(str(value))
    except ValueError:
        names = ", ".join(relation.value for relation in NeighboringRelation)
        raise InvalidInput(f"neighboring_relation must be one of {names}, but {value!r} was given.") from None


def _check_fields(what: str, kind: type, values: Mapping[str, object]) -> None:
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise InvalidInput(f"Unknown field {unknown[0]!r} in a {what}; known are {', '.join(known)}.")
    for name, f in known.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidInput(f"Field {name!r} is missing from a {what}.")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{name} must be a non-empty text, but {value!r} was given.")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(choices)}, but {value!r} was given.")
