"""The documents in S3: each with a schema version, validated strictly, unknown fields refused.

Their JSON Schemas are published in `infra/schemas/` (written by `python -m infra.documents`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from accounting.budget import LARGEST_EPSILON, LEAST_DELTA, LEAST_EPSILON
from infra.canonical import digest
from infra.ledger_documents import LedgerEntry
from infra.strict_document import Digest, Document, Name, Relation, Time

Selection = Literal["noise", "stated", "public_twin", "validation", "validation_unaccounted"]
# The operators of `tasks.merging`, which this folder may not ask.
Merge = Literal[
    "linear", "average", "task_arithmetic", "ties", "dare", "fisher", "regmean", "pcb", "wudi", "slerp"
]
Option = bool | int | float | str  # of a merge operator
MechanismName = Literal["linear_combination", "random_selection", "mixture"]
DEFAULT_MECHANISMS: tuple[MechanismName, ...] = ("linear_combination", "random_selection")

FileName = Annotated[str, Field(pattern=r"^[a-z_]+\.[a-z]+$")]  # of a release: never a path


class Policy(Document):
    """What a region allows, from `effective_at` on. Append-only: a change is a new document."""

    schema_: Literal["remerge/policy/1"] = Field("remerge/policy/1", alias="schema")
    region: Name
    serial: Annotated[int, Field(ge=1)]
    epsilon: Annotated[float, Field(ge=LEAST_EPSILON, le=LARGEST_EPSILON)]  # nats
    delta: Annotated[float, Field(ge=LEAST_DELTA, lt=1)]
    neighboring_relation: Relation = "replace_one"
    unit: Literal["record"] = "record"
    portfolio: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}@(?:[1-9][0-9]*|latest)$")]
    mechanisms: Annotated[tuple[MechanismName, ...], Field(min_length=1)] = DEFAULT_MECHANISMS
    # With another one than linear no mechanism is asked: what it makes of several candidates is released.
    merge: Merge = "linear"
    merge_options: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")], Option] = Field(
        default_factory=dict
    )  # of the operator, see tasks.merging.checked_options
    selection: Selection = "noise"  # what the weights may depend on, see accounting.selection_rules
    # What the budget must cover: this release, all releases of this region, or all of the lineage in any region.
    scope: Literal["release", "region", "all_regions"] = "release"
    min_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.0  # on the public-gate rows
    realised_epsilon_cap: Annotated[float, Field(gt=0)] | None = None  # nats; None: 4 x epsilon
    approval: Literal["none"] = "none"
    effective_at: Time
    grace_seconds: Annotated[float, Field(ge=0, le=315_360_000)] = (
        0.0  # after effective_at the old model may be read so long
    )
    author: Annotated[str, Field(min_length=1, max_length=200)]
    reason: Annotated[str, Field(max_length=1000)] = ""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @field_validator("mechanisms")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("each mechanism may be named once")
        return value

    @field_validator("merge")
    @classmethod
    def _asks_no_mechanism(cls, value: str, found: ValidationInfo) -> str:
        mechanisms = found.data.get("mechanisms", DEFAULT_MECHANISMS)
        if value != "linear" and set(mechanisms) != set(DEFAULT_MECHANISMS):
            raise ValueError(
                f"{value} releases what it makes of several candidates, so it goes without mechanisms: leave them "
                "out, or merge by linear"
            )
        return value

    @model_serializer(mode="wrap")
    def _as_before_without_options(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out options where there are none, so that policies of before keep their bytes and digests."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "merge_options" or value}

    @property
    def cap(self) -> float:
        """The largest epsilon that a drawn candidate itself may have, nats."""
        return self.realised_epsilon_cap if self.realised_epsilon_cap is not None else 4 * self.epsilon

    def terms(self) -> dict[str, Any]:
        """What the policy demands, without who set it and when: equal terms are the same policy."""
        fields = self.model_dump(mode="json")
        return {key: fields[key] for key in fields if key not in {"serial", "author", "effective_at"}}


class Split(Document):
    """One set of rows of a data set, by its digest."""

    rows: Annotated[int, Field(ge=1)] | None  # None for private rows: their number may itself be private
    digest: Digest  # keyed (HMAC) for private rows


class DataRecord(Document):
    """Which data a portfolio was trained and is checked on."""

    loader: str  # import path, "module:function"
    arguments: dict[str, Any] = Field(default_factory=dict)
    split_rule: str
    private: Split
    public_train: Split
    public_gate: Split


class NetworkRecord(Document):
    """How to build the network: a factory by import path and its arguments."""

    factory: str  # import path, "module:function"
    arguments: dict[str, Any] = Field(default_factory=dict)


class CandidateRecord(Document):
    """One trained model of a portfolio, by version and digests."""

    name: Name
    registered_model: str
    version: Annotated[int, Field(ge=1)]
    run_id: str
    model_sha256: Digest
    trajectory_sha256: Digest
    utility: float | None = (
        None  # higher is better; computed neither from private records nor from their models
    )
    utility_source: Literal["stated", "public_twin"] | None = None  # the recipe's, or the twin's score
    twin_run_id: str | None = None  # MLflow run of the public twin

    @model_validator(mode="after")
    def _utility_with_its_source(self) -> Self:
        if (self.utility is None) != (self.utility_source is None):
            raise ValueError("utility and utility_source go together")
        if (self.twin_run_id is None) != (self.utility_source != "public_twin"):
            raise ValueError("twin_run_id goes with the utility_source public_twin")
        return self

    @model_serializer(mode="wrap")
    def _as_before_without_utility(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not known, so that manifests without utilities keep their bytes and digests: a
        release is named by its manifest's digest, and another name would mean another draw."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if value is not None}


GROUP_FIELDS = ("tasks", "records", "task_data")  # of a manifest, only where there are several tasks


class PortfolioManifest(Document):
    """A portfolio version: only its candidates exist for the solver."""

    schema_: Literal["remerge/portfolio/1"] = Field("remerge/portfolio/1", alias="schema")
    name: Name
    serial: Annotated[int, Field(ge=1)]
    created_at: Time
    lineage: Name
    unit: Literal["record"]
    neighboring_relation: Relation
    recipe_digest: Digest
    data: DataRecord
    network: NetworkRecord
    initialisation_digest: Digest
    feature_radius: Annotated[float, Field(gt=0)] | None
    n_max: Annotated[int, Field(ge=1)] | None
    flow_run_id: str | None
    candidates: Annotated[tuple[CandidateRecord, ...], Field(min_length=1)]
    # Of a group: several tasks, each trained on data of its own from one public start. All three or none.
    tasks: dict[Name, Name] | None = None  # by candidate
    records: Literal["disjoint", "shared"] | None = None  # disjoint: no record was found in two tasks' data
    task_data: dict[Name, DataRecord] | None = None  # by task; `data` is what `load_tasks` makes of them all

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @model_validator(mode="after")
    def _whole_tasks(self) -> Self:
        given = [name for name in GROUP_FIELDS if getattr(self, name) is not None]
        if given and len(given) < len(GROUP_FIELDS):
            raise ValueError(f"{', '.join(GROUP_FIELDS)} go together")
        if self.tasks is None or self.task_data is None:
            return self
        if set(self.tasks) != {candidate.name for candidate in self.candidates}:
            raise ValueError("tasks names the task of every candidate, and of no other")
        if set(self.tasks.values()) != set(self.task_data) or len(self.task_data) < 2:
            raise ValueError("tasks and task_data name the same tasks, at least two")
        digests = [data.private.digest for data in self.task_data.values()]
        if self.records == "disjoint" and len(set(digests)) < len(digests):
            raise ValueError("two tasks have the same private data, so their records are not disjoint")
        return self

    @model_serializer(mode="wrap")
    def _as_before_without_tasks(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what only groups have, so that other manifests keep their bytes and digests."""
        fields: dict[str, Any] = write(self)
        return {
            name: value for name, value in fields.items() if name not in GROUP_FIELDS or value is not None
        }

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.serial}"

    def private_digest_of(self, candidate: str) -> str:
        """The digest of the private rows that a candidate was trained on: of its task's, where there are tasks."""
        if self.tasks is None or self.task_data is None:
            return self.data.private.digest
        return self.task_data[self.tasks[candidate]].private.digest


class Draw(Document):
    """A draw of a candidate, or of a mixture's component, made once, stored before it is used."""

    schema_: Literal["remerge/draw/1"] = Field("remerge/draw/1", alias="schema")
    release_id: Digest
    weights: dict[str, float]  # the candidates or components lie along [0, 1) in the order of their names
    point: Digest  # the point drawn in [0, 1): 256 random bits as hexadecimal, over 2**256
    drawn_index: Annotated[int, Field(ge=0)]  # into weights
    drawn: str
    drawn_at: Time
    entropy_source: str

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Provenance(Document):
    """Who started the run that made a release."""

    started_by: Literal["automation", "reconcile", "hand"]
    automation_id: str | None = None
    automation_name: str | None = None
    event_id: str | None = None
    flow_run_id: str | None = None
    flow_run_name: str | None = None


class ReleaseManifest(Document):
    """The last object of a release to be written: a release without it is not one."""

    schema_: Literal["remerge/release/1"] = Field("remerge/release/1", alias="schema")
    release_id: Digest
    region: Name
    policy_serial: Annotated[int, Field(ge=1)]
    policy_digest: Digest
    portfolio: str
    manifest_digest: Digest  # of the portfolio manifest
    network: NetworkRecord
    files: dict[FileName, Digest]  # sha256 by file name: model.safetensors, certificate.json[, draw.json]
    accuracy: Annotated[float, Field(ge=0, le=1)]  # of the merged model, on the public-gate rows
    gate_rows: Annotated[int, Field(ge=1)]
    registered_model: str
    registered_version: Annotated[int, Field(ge=1)]
    provenance: Provenance

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Pointer(Document):
    """What production serves in a region; replaced only by a conditional write."""

    schema_: Literal["remerge/pointer/1"] = Field("remerge/pointer/1", alias="schema")
    region: Name
    release_id: Digest
    release_manifest_digest: Digest
    policy_serial: Annotated[int, Field(ge=1)]
    previous_release_id: Digest | None
    switched_at: Time

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Attempt(Document):
    """How the last attempt at a policy ended: for people; to a decision it is at most a hint that saves a run."""

    schema_: Literal["remerge/attempt/1"] = Field("remerge/attempt/1", alias="schema")
    region: Name
    policy_serial: Annotated[int, Field(ge=1)]
    outcome: Literal["promoted", "failed_check", "infeasible", "superseded", "not_in_effect", "error"]
    portfolio: str | None = None  # name@serial that was tried; None where it was not found
    release_id: Digest | None
    reason: str
    at: Time
    provenance: Provenance

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


DOCUMENTS: tuple[type[Document], ...] = (
    Policy,
    PortfolioManifest,
    Draw,
    LedgerEntry,
    ReleaseManifest,
    Pointer,
    Attempt,
)

DocumentT = TypeVar("DocumentT", bound=Document)


def release_id_of(policy: Policy, manifest: PortfolioManifest) -> str:
    """The same policy and portfolio version always name the same release, so a retry finds itself again."""
    return digest({"policy": policy.sha256(), "portfolio": manifest.sha256()})


def schema_path(kind: type[Document]) -> Path:
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()
    return Path(__file__).parent / "schemas" / f"{name}.json"


def schema_text(kind: type[Document]) -> str:
    return json.dumps(kind.model_json_schema(), indent=2, sort_keys=True) + "\n"


def certificate_schema_path() -> Path:
    return Path(__file__).parent / "schemas" / "certificate.json"


def certificate_schema_text() -> str:
    """The schema of the one document that is not defined here; readers of the others need no accounting."""
    from accounting.certificate_schema import certificate_schema

    return json.dumps(certificate_schema(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    for document in DOCUMENTS:
        schema_path(document).parent.mkdir(exist_ok=True)
        schema_path(document).write_text(schema_text(document))
    certificate_schema_path().write_text(certificate_schema_text())
