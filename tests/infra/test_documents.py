"""Documents: strict, canonical, and published as JSON Schemas."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import pytest

from accounting.errors import InvalidInput
from accounting.selection_rules import SELECTIONS
from infra.canonical import canonical_json, strict_json
from infra.documents import (
    DOCUMENTS,
    CandidateRecord,
    LedgerEntry,
    Policy,
    Selection,
    schema_path,
    schema_text,
)
from infra.ledger_documents import LedgerOutcome
from infra.strict_document import Document

GOOD: dict[str, Any] = {
    "region": "eu",
    "serial": 1,
    "epsilon": 2,
    "delta": 1e-5,
    "portfolio": "digits@1",
    "effective_at": "2026-01-01T00:00:00Z",
    "author": "test",
}
ABSENT = object()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("epsilon", bad)
            for bad in (ABSENT, 0, -1, -0.0, math.nan, math.inf, -math.inf, "2", True, None, [2])
        ],
        *[("delta", bad) for bad in (ABSENT, 0, -1e-5, math.nan, math.inf, 1, 1.5, "1e-5", False, None)],
        *[
            ("region", bad)
            for bad in (ABSENT, "", "EU", "e u", "eu/de", "../eu", "-eu", "eu\n", "é", 7, "e" * 64)
        ],
        *[
            ("portfolio", bad)
            for bad in (ABSENT, "digits", "digits@", "digits@0", "digits@-1", "digits@01", "a/b@1")
        ],
        *[("serial", bad) for bad in (0, -1, 1.5, "1", True)],
        *[("mechanisms", bad) for bad in ([], ["best"], ["random_selection"] * 2, "random_selection")],
        *[("min_accuracy", bad) for bad in (-0.1, 1.1, math.nan, "0.5")],
        *[("realised_epsilon_cap", bad) for bad in (0, -1, math.inf)],
        *[("grace_seconds", bad) for bad in (-1, math.inf)],
        *[("effective_at", bad) for bad in ("yesterday", "2026-01-01T00:00:00", None)],
        ("neighboring_relation", "replace"),
        ("unit", "user"),
        *[("merge", bad) for bad in ("tie", "", None, ["ties"])],
        *[
            ("merge_options", bad)
            for bad in (
                {"Density": 1},
                {"density": [1]},
                {"density": math.nan},
                {"density": None},
                {"": 1},
                [],
            )
        ],
        ("selection", "accuracy"),
        ("scope", "lifetime"),
        ("approval", "two"),
        ("author", ""),
        ("schema", "remerge/policy/2"),
        ("epsilom", 2),
    ],
)
def test_a_bad_policy_is_refused_by_field(field: str, value: object) -> None:
    fields = {**GOOD, field: value}
    if value is ABSENT:
        del fields[field]
    with pytest.raises(InvalidInput) as caught:
        Policy.from_fields(fields, "policy")
    assert caught.value.message.startswith(f"policy: {field}")
    assert "\n" not in caught.value.message


def test_a_good_policy_reads_back_to_the_same_bytes() -> None:
    policy = Policy.from_fields(GOOD, "policy")
    again = Policy.from_content(policy.content(), "policy")
    assert again == policy
    assert again.sha256() == policy.sha256()
    assert policy.cap == 8


def test_policies_of_before_merge_operators_keep_their_bytes() -> None:
    """A release is named by its policy's digest. The digest here is that of the version before operators."""
    policy = Policy.from_fields(GOOD, "policy")
    assert policy.sha256() == "ff300ca8239ebd5bfa8a41953bbcbc6dc436de3188a1beb16af5156a8a504911"
    assert "merge_options" not in policy.terms()
    assert policy.terms()["merge"] == "linear"
    empty = Policy.from_fields({**GOOD, "merge": "linear", "merge_options": {}}, "policy")
    assert empty.content() == policy.content()


def test_options_of_a_merge_are_read_back_as_they_were() -> None:
    options = {"density": 0.3, "scale": 1, "rescale": True, "sign": "total"}
    policy = Policy.from_fields({**GOOD, "merge": "ties", "merge_options": options}, "policy")
    again = Policy.from_content(policy.content(), "policy")
    assert again == policy
    assert again.content() == policy.content()
    assert [(name, type(value)) for name, value in again.merge_options.items()] == [
        (name, type(options[name])) for name in again.merge_options
    ]
    assert policy.terms()["merge_options"] == options
    assert policy.terms() != Policy.from_fields({**GOOD, "merge": "ties"}, "policy").terms()


def test_an_operator_goes_without_mechanisms() -> None:
    for mechanisms in (["mixture"], ["linear_combination"], ["random_selection"]):
        with pytest.raises(InvalidInput, match=r"^policy: merge: ties .*leave them out, or merge by linear"):
            Policy.from_fields({**GOOD, "merge": "ties", "mechanisms": mechanisms}, "policy")
    stated = ["random_selection", "linear_combination"]
    assert Policy.from_fields({**GOOD, "merge": "ties", "mechanisms": stated}, "policy").merge == "ties"


def test_policies_know_the_solver_s_selection_rules() -> None:
    assert get_args(Selection) == SELECTIONS
    for selection in SELECTIONS:
        assert Policy.from_fields({**GOOD, "selection": selection}, "policy").selection == selection


RECORD: dict[str, Any] = {
    "name": "a",
    "registered_model": "m",
    "version": 1,
    "run_id": "r",
    "model_sha256": "0" * 64,
    "trajectory_sha256": "1" * 64,
}


def test_candidates_of_before_utilities_keep_their_bytes() -> None:
    """A release is named by its manifest's digest: other bytes would be another release, and another draw."""
    old = canonical_json(RECORD)
    record = CandidateRecord.from_content(old, "record")
    assert record.content() == old
    assert (record.utility, record.utility_source, record.twin_run_id) == (None, None, None)
    stated = {**RECORD, "utility": 0.0, "utility_source": "stated"}
    assert CandidateRecord.from_fields(stated, "record").content() == canonical_json(stated)


@pytest.mark.parametrize(
    "change",
    [
        {"utility": 0.5},
        {"utility_source": "stated"},
        {"utility": 0.5, "utility_source": "public_twin"},
        {"utility": 0.5, "utility_source": "stated", "twin_run_id": "t"},
        {"utility": math.nan, "utility_source": "stated"},
        {"utility": math.inf, "utility_source": "stated"},
        {"utility": "0.5", "utility_source": "stated"},
        {"utility": 0.5, "utility_source": "validation"},
    ],
)
def test_a_utility_is_a_number_with_its_source(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"^record: "):
        CandidateRecord.from_fields({**RECORD, **change}, "record")


@pytest.mark.parametrize(("kind", "digest"), [("consulted", "2" * 64), ("intended", None), ("live", None)])
def test_only_what_precedes_a_certificate_names_none(kind: str, digest: str | None) -> None:
    entry = {
        "serial": 1,
        "previous_digest": None,
        "lineage": "digits",
        "release_id": "0" * 64,
        "region": "eu",
        "kind": "consulted",
        "written_at": "2026-01-01T00:00:00Z",
        "neighboring_relation": "replace_one",
        "unit": "record",
        "outcomes": [
            {
                "name": "a",
                "weight": 1.0,
                "candidates": ["a"],
                "segments": [],
                "paths": {"a": []},
                "coefficients": None,
            }
        ],
        "drawn": None,
        "selection": "validation_unaccounted",
        "certificate_digest": None,
        "counted": 0,
    }
    assert LedgerEntry.from_fields(entry, "entry").certificate_digest is None
    with pytest.raises(
        InvalidInput, match="every kind but consulted and reserved names its certificate_digest"
    ):
        LedgerEntry.from_fields({**entry, "kind": kind, "certificate_digest": digest}, "entry")


DIGESTS = {"a": "0" * 64, "b": "1" * 64}
OUTCOME: dict[str, Any] = {
    "name": "operator",
    "weight": 1.0,
    "candidates": ["a", "b"],
    "segments": [],
    "paths": {"a": [], "b": []},
    "coefficients": None,
}


def test_outcomes_of_before_tasks_keep_their_bytes() -> None:
    """Each ledger entry names the digest of the one before."""
    old = canonical_json(OUTCOME)
    outcome = LedgerOutcome.from_content(old, "outcome")
    assert outcome.content() == old
    assert (outcome.tasks, outcome.data_digests) == (None, None)
    labelled = {**OUTCOME, "tasks": {"a": "left", "b": "right"}, "data_digests": DIGESTS}
    assert LedgerOutcome.from_fields(labelled, "outcome").content() == canonical_json(labelled)


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": {"a": "left"}, "data_digests": DIGESTS},
        {"tasks": {"a": "left", "b": "right", "c": "left"}, "data_digests": DIGESTS},
        {"tasks": {"a": "left", "b": "right"}, "data_digests": {"a": "0" * 64}},
        {"tasks": {"a": "left", "b": "right"}, "data_digests": {"a": "0" * 64, "b": "ledger"}},
        {"tasks": {"a": "left", "b": "right"}},
        {"data_digests": DIGESTS},
    ],
)
def test_tasks_are_told_of_every_candidate_with_their_data(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"^outcome: "):
        LedgerOutcome.from_fields({**OUTCOME, **change}, "outcome")


def test_terms_leave_out_who_and_when() -> None:
    policy = Policy.from_fields(GOOD, "policy")
    later = Policy.from_fields(
        {**GOOD, "serial": 9, "author": "another", "effective_at": "2027-01-01T00:00:00+02:00"}, "policy"
    )
    assert later.terms() == policy.terms()
    for change in ({"epsilon": 2.5}, {"delta": 1e-6}, {"portfolio": "digits@2"}, {"selection": "stated"}):
        assert Policy.from_fields({**GOOD, **change}, "policy").terms() != policy.terms()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"region": "eu"}'])
def test_what_is_no_document_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidInput, match="the stored policy"):
        Policy.from_content(content, "the stored policy")


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.__name__)
def test_the_published_schema_is_this_version(kind: type[Document]) -> None:
    assert schema_path(kind).read_text() == schema_text(kind), "run `make schemas`"
    assert json.loads(schema_text(kind))["additionalProperties"] is False


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": 0.1, "a": "é"}) == '{"a":"é","b":0.1}'.encode()
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"a": math.nan})


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1, "a": 1}',
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b"[" * 100_000,
        b'{"a": "\xff"}',
    ],
)
def test_json_that_readers_may_take_differently_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        strict_json(content)


def test_json_with_escapes_is_read() -> None:
    assert strict_json(b'{"a": "\\u00e9\\ud83d\\ude00\\n"}') == {"a": "\u00e9\U0001f600\n"}
