"""The calculator's input: runs, and a release, several releases or a budget, read from a YAML or JSON file.

The JSON Schema is published in `infra/schemas/account.json` (written by `python -m tasks.account_file`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from accounting.errors import InvalidInput
from accounting.profile import require_simplex
from infra.documents import Relation
from infra.strict_document import Document
from tasks.account_errors import sentence
from tasks.plain_yaml import json_text, read_mapping

MOST_STEPS = 10**9  # catches a slipped exponent
MOST_RUNS = 1000
MOST_RELEASES = 1000
FARTHEST = 1e30  # magnitudes beyond are slips too; products of several stay within floating point

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
SegmentId = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S")]
Positive = Annotated[float, Field(gt=0, ge=1e-30, le=FARTHEST)]
Weight = Annotated[float, Field(ge=0, le=1)]
RegionName = RunName  # written alike
MechanismName = Literal["linear_combination", "random_selection", "mixture"]
MECHANISMS: tuple[MechanismName, ...] = ("linear_combination", "random_selection", "mixture")

RELEASE_KINDS = ("linear_combination", "random_selection", "joint")


def _infinity(value: object) -> object:
    return math.inf if value == "inf" else value


Lipschitz = Annotated[
    float,
    Field(ge=0, allow_inf_nan=True),
    BeforeValidator(_infinity),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "inf"}]}),
]


def _exactly_one(*names: str, **more: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in names], **more})


class ParentEntry(Document):
    """Where a segment branched off, as trajectories record it; checked against the segment before it."""

    run: str
    segment: SegmentId
    step: Annotated[int, Field(ge=1)]


class SegmentEntry(Document):
    """One uninterrupted stretch of DP-SGD. The same id in two runs is the same noise, counted once."""

    id: SegmentId
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)]  # of this segment that the run used, from its start
    noise_multiplier: Annotated[
        float,
        Field(
            ge=0,
            le=FARTHEST,
            description="noise on each step's sum, in units of max_grad_norm; 0 is not private",
        ),
    ]
    max_grad_norm: Annotated[Positive, Field(description="L2 norm that each gradient is clipped to")]
    learning_rate: Positive
    expected_batch_size: Annotated[
        Positive, Field(description="the public constant that each sum is divided by")
    ]
    sampling_probability: Annotated[float, Field(gt=0, le=1, description="1 is full batch")] = 1.0
    parent: ParentEntry | None = None
    clipping: Literal["flat", "per_layer"] = "flat"
    optimizer: Annotated[str, Field(min_length=1)] = "sgd"
    momentum: Annotated[float, Field(ge=0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    ascent_radius: Annotated[
        float,
        Field(ge=0, le=FARTHEST, description="of DP-SAM, with an optimizer such as dp_sam; changes no bound"),
    ] = 0.0
    anchor_strength: Annotated[
        float, Field(ge=0, le=FARTHEST, description="of the pull towards the public start; changes no bound")
    ] = 0.0
    sampler: Annotated[
        Literal["full_batch", "poisson"] | None,
        Field(description="default: by sampling_probability"),
    ] = None
    schedule: Annotated[
        Literal["fixed", "adapted"], Field(description="fixed before training, or adapted to the data")
    ] = "fixed"
    update_lipschitz: Annotated[
        Lipschitz, Field(description="Lipschitz constant of the noiseless update, for every data set allowed")
    ] = math.inf
    update_lipschitz_reason: Annotated[str, Field(min_length=1)] = "stated in the file, not checked"


class StatedEntry(Document):
    """A guarantee of which nothing else is known, under the file's neighbouring relation."""

    epsilon: Annotated[float, Field(ge=0)]  # nats
    delta: Annotated[float, Field(ge=0, lt=1)]


class RunEntry(Document):
    """A run: its executed segments in order, or only a stated guarantee."""

    utility: Annotated[float | None, Field(description="higher is better; must cost no privacy itself")] = (
        None
    )
    segments: Annotated[tuple[SegmentEntry, ...], Field(min_length=1)] | None = None
    stated: StatedEntry | None = None

    model_config = _exactly_one("segments", "stated")

    @model_validator(mode="after")
    def _one_description(self) -> RunEntry:
        if (self.segments is None) == (self.stated is None):
            raise ValueError("needs either segments or a stated guarantee, and not both")
        return self


class ReleaseEntry(Document):
    """What is shown to the world: one of three kinds."""

    linear_combination: Annotated[dict[RunName, Weight], Field(min_length=1)] | None = None
    random_selection: Annotated[dict[RunName, Weight], Field(min_length=1)] | None = None
    joint: Annotated[tuple[RunName, ...], Field(min_length=1)] | None = None
    fresh_noise: Annotated[
        float,
        Field(
            ge=0,
            le=FARTHEST,
            description="standard deviation per parameter of noise added to a linear combination",
        ),
    ] = 0.0

    model_config = _exactly_one(*RELEASE_KINDS)

    @property
    def kind(self) -> str:
        return next(name for name in RELEASE_KINDS if getattr(self, name) is not None)

    @property
    def weights(self) -> dict[str, float] | None:
        """By name of the run, on the simplex; None for a joint release."""
        return self.linear_combination if self.linear_combination is not None else self.random_selection

    @property
    def names(self) -> tuple[str, ...]:
        """The runs named, those of weight 0 included."""
        return self.joint if self.joint is not None else tuple(self.weights or ())

    @model_validator(mode="after")
    def _one_kind(self) -> ReleaseEntry:
        if sum(getattr(self, name) is not None for name in RELEASE_KINDS) != 1:
            raise ValueError("needs exactly one of linear_combination, random_selection and joint")
        if self.fresh_noise and self.linear_combination is None:
            raise ValueError("may name fresh_noise only beside linear_combination")
        if self.joint is not None and len(set(self.joint)) != len(self.joint):
            raise ValueError("names a run twice in joint; name each run once")
        return self


class PastReleaseEntry(ReleaseEntry):
    """One of several releases from the same records: where to, and what was drawn where that is known."""

    region: RegionName
    drawn: Annotated[
        RunName | None,
        Field(description="the run that random_selection drew; left out where the draw is still to come"),
    ] = None

    model_config = _exactly_one(*RELEASE_KINDS, dependentRequired={"drawn": ["random_selection"]})

    @model_validator(mode="after")
    def _drawn_by_a_draw(self) -> PastReleaseEntry:
        if self.drawn is None:
            return self
        if self.random_selection is None:
            raise ValueError("may name drawn only beside random_selection; nothing else is drawn")
        if self.drawn not in self.random_selection:
            known = ", ".join(self.random_selection)
            raise ValueError(
                f"names {self.drawn} as drawn, which is not among its random_selection ({known})"
            )
        if self.random_selection[self.drawn] == 0:
            raise ValueError(f"names {self.drawn} as drawn, whose weight is 0, so that it cannot have been")
        return self


class BudgetEntry(Document):
    """What `solve` may spend, at the file's delta."""

    epsilon: Annotated[float, Field(gt=0)]  # nats
    realised_epsilon_cap: (
        Annotated[
            float,
            Field(gt=0, description="largest epsilon that a run drawn by random selection may have itself"),
        ]
        | None
    ) = None


class AccountFile(Document):
    """Input of `remerge account`: what was trained, and what is released, was released, or is allowed."""

    neighboring_relation: Relation
    delta: Annotated[float, Field(gt=0, ge=1e-300, lt=1)]
    mechanisms: Annotated[tuple[MechanismName, ...], Field(min_length=1)] = MECHANISMS
    runs: Annotated[dict[RunName, RunEntry], Field(min_length=1, max_length=MOST_RUNS)]
    release: ReleaseEntry | None = None
    releases: Annotated[
        tuple[PastReleaseEntry, ...] | None,
        Field(min_length=1, max_length=MOST_RELEASES, description="all from the same records, in any order"),
    ] = None
    budget: BudgetEntry | None = None

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["release", "releases"]}})

    @model_validator(mode="after")
    def _names_fit(self) -> AccountFile:
        if len(set(self.mechanisms)) != len(self.mechanisms):
            raise ValueError("mechanisms names a mechanism twice; name each once")
        if self.release is not None and self.releases is not None:
            raise ValueError("has both release and releases; keep release for bounds, or releases for ledger")
        if self.release is not None:
            self._fits("release", self.release)
        for number, entry in enumerate(self.releases or (), start=1):
            self._fits(f"release number {number}", entry)
        return self

    def _fits(self, place: str, release: ReleaseEntry) -> None:
        """Refuse weights off the simplex, and runs that are unknown or not known well enough."""
        if release.weights is not None:
            try:
                require_simplex(tuple(release.weights.values()))
            except InvalidInput as error:
                text = error.message.rstrip(".")
                field = f"{place}.{release.kind}" if place == "release" else f"{release.kind} of {place}"
                raise ValueError(f"{field}: {text[0].lower()}{text[1:]}") from None
        for name in release.names:
            if name not in self.runs:
                raise ValueError(
                    f"{place} names the run {name}, which is not among runs ({', '.join(self.runs)})"
                )
            if not self.runs[name].stated:
                continue
            if isinstance(release, PastReleaseEntry):
                raise ValueError(
                    f"{place} names the run {name}, of which only a stated guarantee is known; cumulative "
                    "figures count executed steps, so give its segments, or leave the release out and add the "
                    "stated epsilon and delta to the answer by basic composition"
                )
            if release.linear_combination:
                raise ValueError(
                    f"{place}.linear_combination names the run {name}, of which only a stated guarantee is "
                    "known; such a run may take part in random_selection and in joint, which covers every "
                    "merge of the runs"
                )


def load_account_file(path: Path | str) -> AccountFile:
    """Read and check a file.

    Raises:
        InvalidInput: one sentence that names the file and the field at fault.
    """
    fields = read_mapping(path)
    try:
        return AccountFile.model_validate_json(json_text(fields))
    except ValidationError as error:
        raise InvalidInput(sentence(str(path), error, fields)) from None


def schema_path() -> Path:
    """Where the schema is published, inside the package."""
    return Path(__file__).parent.parent / "infra" / "schemas" / "account.json"


def account_schema() -> str:
    """The JSON Schema of a file, as published."""
    return json.dumps(_published(AccountFile.model_json_schema()), indent=2, sort_keys=True) + "\n"


def _published(node: Any) -> Any:
    """Valid JSON, without the nulls that only mean "left out", and with names checked by their pattern."""
    if isinstance(node, list):
        return [_published(entry) for entry in node if entry != {"type": "null"}]
    if not isinstance(node, dict):
        return "inf" if node == math.inf else node
    kept = {key: _published(value) for key, value in node.items() if (key, value) != ("default", None)}
    if len(kept.get("anyOf", ())) == 1:
        kept |= kept.pop("anyOf")[0]
    return {**kept, "additionalProperties": False} if "patternProperties" in kept else kept


if __name__ == "__main__":
    schema_path().write_text(account_schema())
