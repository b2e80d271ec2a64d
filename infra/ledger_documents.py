"""The ledger's documents: what each release of a data lineage stands for."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from infra.strict_document import Digest, Document, Name, Relation, Time

BEFORE_CERTIFICATE = ("consulted", "reserved")


class LedgerOutcome(Document):
    """One possible outcome of a release: the executed steps it stands for, and its probability."""

    name: str  # as the draw names it
    weight: Annotated[float, Field(gt=0, le=1)]
    candidates: tuple[str, ...]
    segments: tuple[dict[str, Any], ...]  # accounting.trajectory.segment_to_dict of the union
    paths: dict[
        str, tuple[tuple[str, int], ...]
    ]  # by candidate: its segments' ids, in order, and steps of each
    coefficients: (
        dict[str, float] | None
    )  # lambda of one average, of which alone it tells; None: of all candidates
    # By candidate, where different tasks trained them on data sets that share no record: then what is released of the
    # same data sets composes task by task. None: a record may be in all of them.
    tasks: dict[str, Name] | None = None
    data_digests: dict[str, Digest] | None = None  # by candidate, with tasks: keyed, of the private rows

    @model_validator(mode="after")
    def _a_path_each(self) -> Self:
        if set(self.paths) != set(self.candidates):
            raise ValueError("paths are of exactly the candidates")
        return self

    @model_validator(mode="after")
    def _a_task_each(self) -> Self:
        for given in (self.tasks, self.data_digests):
            if given is not None and set(given) != set(self.candidates):
                raise ValueError("tasks and data_digests are of every candidate, or there are none")
        if (self.tasks is None) != (self.data_digests is None):
            raise ValueError("tasks and data_digests go together")
        return self

    @model_serializer(mode="wrap")
    def _as_before_without_tasks(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out tasks where there are none, so that ledgers of before keep their chains."""
        fields: dict[str, Any] = write(self)
        late = {"tasks", "data_digests"}
        return {name: value for name, value in fields.items() if name not in late or value is not None}


class LedgerEntry(Document):
    """One line of the append-only record of everything ever released from a data lineage."""

    schema_: Literal["remerge/ledger-entry/1"] = Field("remerge/ledger-entry/1", alias="schema")
    serial: Annotated[int, Field(ge=1)]
    previous_digest: Digest | None  # None for the first entry of a lineage
    lineage: Name
    release_id: Digest
    region: Name
    # Before there is a certificate. consulted: scores of private models were looked at, and a draw may show the
    # weights that came of it. reserved: a share of a region's or all regions' budget was taken.
    kind: Literal["consulted", "reserved", "intended", "failed_check", "live", "rolled_back"]
    written_at: Time
    neighboring_relation: Relation
    unit: Literal["record"]
    outcomes: Annotated[tuple[LedgerOutcome, ...], Field(min_length=1)]  # before the draw, if any
    drawn: str | None
    selection: str
    certificate_digest: Digest | None  # None where there is no certificate yet: kinds consulted and reserved
    counted: Annotated[int, Field(ge=0)]  # entries before it that its release's cumulative figures count

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @model_validator(mode="after")
    def _certified_or_before_that(self) -> Self:
        if (self.certificate_digest is None) != (self.kind in BEFORE_CERTIFICATE):
            kinds = " and ".join(BEFORE_CERTIFICATE)
            raise ValueError(f"every kind but {kinds} names its certificate_digest, and these have none")
        return self
