"""What a certificate speaks of, changed: the model, the draw, the ledger, the policy, the portfolio; and its schema."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import safetensors.numpy

from accounting.certificate import Certificate
from infra.canonical import canonical_json
from infra.documents import LedgerEntry, certificate_schema_path, certificate_schema_text
from tasks.verifying import Evidence, verify
from tests.tasks.certified import KINDS, evidence_of


@cache
def made(name: str) -> tuple[Certificate, Evidence]:
    return evidence_of(KINDS[name])


def faults(evidence: Evidence) -> set[str]:
    return {check.what for check in verify(evidence) if check.holds is False}


@pytest.mark.parametrize("name", ["generic", "random_selection", "mixture"])
def test_another_model_is_found(name: str) -> None:
    _, evidence = made(name)
    other = safetensors.numpy.save({"weight": np.full(3, 1.5, dtype=np.float32)})
    assert faults(replace(evidence, model=other)) == {
        "digest of model.safetensors",
        "released model, merged again",
    }
    assert faults(replace(evidence, model=other, release=None)) == {"released model, merged again"}


def test_another_candidate_s_model_is_found() -> None:
    _, evidence = made("generic")
    exchanged = {**evidence.candidates, "c0": evidence.candidates["c1"]}
    assert faults(replace(evidence, candidates=exchanged)) == {
        "digest of the model of c0",
        "released model, merged again",
    }


def test_another_draw_is_found() -> None:
    certificate, evidence = made("random_selection")
    assert evidence.draw is not None
    names = sorted(certificate.weights)
    first = evidence.draw.model_copy(update={"point": "0" * 64, "drawn_index": 0, "drawn": names[0]})
    last = evidence.draw.model_copy(update={"point": "f" * 64, "drawn_index": 1, "drawn": names[1]})
    other = last if evidence.draw.drawn == names[0] else first
    assert "drawn outcome" in faults(replace(evidence, draw=other, release=None))
    # A point that falls on the other candidate, with the drawn one's name left as it was.
    moved = evidence.draw.model_copy(update={"point": other.point})
    assert faults(replace(evidence, draw=moved, release=None)) == {"outcome at the drawn point"}
    even = evidence.draw.model_copy(update={"weights": dict.fromkeys(names, 0.5)})
    assert "weights of the draw" in faults(replace(evidence, draw=even, release=None))
    alone = made("generic")[1]
    assert "draw" in faults(replace(alone, draw=other, release=None))


def with_entry(evidence: Evidence, **changes: Any) -> Evidence:
    assert evidence.ledger is not None
    before, own = evidence.ledger
    fields = json.loads(own.content()) | changes
    return replace(evidence, ledger=(before, LedgerEntry.from_fields(fields, "entry")))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kind": "failed_check"}, "ledger entry of this release"),
        ({"certificate_digest": "0" * 64}, "digest of the certificate in the ledger"),
        ({"region": "us"}, "region of the ledger entry"),
        ({"neighboring_relation": "add_or_remove_one"}, "relation of the ledger entry"),
        ({"selection": "stated"}, "selection of the ledger entry"),
        ({"counted": 0}, "releases that they count"),
    ],
)
def test_another_ledger_entry_is_found(change: dict[str, Any], fault: str) -> None:
    _, evidence = made("generic")
    assert fault in faults(with_entry(evidence, **change))


def test_other_steps_in_the_ledger_are_found() -> None:
    _, evidence = made("generic")
    assert evidence.ledger is not None
    outcomes = json.loads(evidence.ledger[1].content())["outcomes"]
    outcomes[0]["segments"][0]["noise_multiplier"] *= 2
    assert "steps in the ledger of c0, c1" in faults(with_entry(evidence, outcomes=outcomes))
    outcomes = json.loads(evidence.ledger[1].content())["outcomes"]
    outcomes[0]["coefficients"] = {"c0": 0.5, "c1": 0.5}
    assert "outcomes in the ledger" in faults(with_entry(evidence, outcomes=outcomes))
    assert "ledger entry of this release" in faults(replace(evidence, ledger=evidence.ledger[:1]))


@pytest.mark.parametrize(
    ("field", "edit", "fault"),
    [
        ("data_digests", lambda old: dict.fromkeys(old, "9" * 64), "data in the ledger of c0, c1"),
        ("tasks", lambda old: dict.fromkeys(old, "left"), "tasks in the ledger of c0, c1"),
        (
            "paths",
            lambda old: {name: [[path[0][0], 1]] for name, path in old.items()},
            "paths in the ledger of c0, c1",
        ),
    ],
)
def test_what_the_cumulative_figures_are_made_of_is_compared_with_the_runs(
    field: str, edit: Any, fault: str
) -> None:
    _, evidence = made("tasks")
    assert evidence.ledger is not None
    outcomes = json.loads(evidence.ledger[1].content())["outcomes"]
    outcomes[0][field] = edit(outcomes[0][field])
    assert fault in faults(with_entry(evidence, outcomes=outcomes))


def test_tasks_of_a_ledger_entry_without_tasks_are_found() -> None:
    """An entry of shared records that claims disjoint tasks would make the cumulative figures too small."""
    _, evidence = made("operator")
    assert evidence.ledger is not None
    outcomes = json.loads(evidence.ledger[1].content())["outcomes"]
    names = outcomes[0]["candidates"]
    outcomes[0]["tasks"] = {name: f"task-{name}" for name in names}
    outcomes[0]["data_digests"] = {name: f"{k}" * 64 for k, name in enumerate(names)}
    found = faults(with_entry(evidence, outcomes=outcomes))
    assert {
        f"tasks in the ledger of {', '.join(names)}",
        f"data in the ledger of {', '.join(names)}",
    } <= found


def test_a_certificate_that_names_fewer_consulted_candidates_than_the_ledger_is_found() -> None:
    certificate, evidence = made("validation")
    assert evidence.ledger is not None
    outcomes = json.loads(evidence.ledger[1].content())["outcomes"]
    own, extra = outcomes[0], "looked-at-too"
    own["candidates"].append(extra)
    own["paths"][extra] = own["paths"][own["candidates"][0]]
    assert extra not in certificate.consulted
    assert "candidates that only the ledger names" in faults(with_entry(evidence, outcomes=outcomes))


def test_a_portfolio_of_other_data_is_found() -> None:
    _, evidence = made("tasks")
    assert evidence.portfolio is not None
    fields = json.loads(evidence.portfolio.content())
    fields["task_data"]["left"]["private"]["digest"] = "9" * 64
    fields["initialisation_digest"] = "8" * 64
    other = type(evidence.portfolio).from_fields(fields, "manifest")
    found = faults(replace(evidence, portfolio=other))
    assert {"data_digest of the trajectory of c0", "initialisation_digest of the trajectory of c0"} <= found


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"epsilon": 2.3}, "budget of the policy"),
        ({"delta": 2e-5}, "budget of the policy"),
        ({"serial": 4}, "serial of the policy"),
        ({"mechanisms": ("random_selection",)}, "mechanism is one the policy allows"),
        ({"selection": "stated"}, "selection of the policy"),
        ({"author": "somebody else"}, "digest of the policy"),
    ],
)
def test_another_policy_is_found(change: dict[str, Any], fault: str) -> None:
    _, evidence = made("generic")
    assert evidence.policy is not None
    assert fault in faults(replace(evidence, policy=evidence.policy.model_copy(update=change)))


def test_a_drawn_outcome_over_the_cap_is_found() -> None:
    _, evidence = made("random_selection")
    assert evidence.policy is not None
    capped = evidence.policy.model_copy(update={"realised_epsilon_cap": 0.5})
    assert "drawn outcome within the policy's cap" in faults(replace(evidence, policy=capped))


def test_another_portfolio_is_found() -> None:
    _, evidence = made("generic")
    assert evidence.portfolio is not None
    renamed = [c.model_copy(update={"name": f"{c.name}x"}) for c in evidence.portfolio.candidates]
    other = evidence.portfolio.model_copy(update={"candidates": tuple(renamed), "serial": 2})
    found = faults(replace(evidence, portfolio=other))
    assert {"candidate c0", "candidate c1", "portfolio", "digest of the portfolio manifest"} <= found


def test_without_a_trajectory_nothing_is_proven() -> None:
    _, evidence = made("generic")
    some = {"c0": evidence.trajectories["c0"]}
    assert faults(replace(evidence, trajectories=some)) == {"trajectory of c1", "numbers"}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"schema": "remerge/certificate/1"}', b"\xff"]
)
def test_what_is_no_certificate_fails(content: bytes) -> None:
    _, evidence = made("generic")
    assert faults(replace(evidence, certificate=content)) == {"the certificate can be read"}


def test_certificates_of_before_the_cumulative_figures_read_as_they_were() -> None:
    certificate, evidence = made("generic")
    document = certificate.to_dict()
    del document["cumulative"]
    old = Certificate.from_dict(document)
    assert old.cumulative is None
    assert canonical_json(old.to_dict()) == canonical_json(document)
    assert Certificate.from_dict(document | {"cumulative": None}) == old
    assert "cumulative figures" in faults(replace(evidence, certificate=canonical_json(document)))


# The schema


def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(certificate_schema_path().read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_published_schema_is_this_version() -> None:
    assert certificate_schema_path().read_text() == certificate_schema_text(), "run `make schemas`"


@pytest.mark.parametrize("name", KINDS)
def test_every_certificate_is_valid_by_the_schema(name: str) -> None:
    certificate, evidence = made(name)
    checker = validator()
    document = json.loads(evidence.certificate)
    assert list(checker.iter_errors(document)) == []
    assert set(document) == set(certificate.to_dict())
    optional = {"merge", "merge_options", "tasks", "records"}  # left out of certificates that have none
    published = set(json.loads(certificate_schema_text())["properties"])
    assert published - set(document) == optional - set(document)
    assert set(document) <= published
    del document["cumulative"]
    assert checker.is_valid(document)
    for field in set(document) - optional:
        assert not checker.is_valid({key: value for key, value in document.items() if key != field}), field
        if isinstance(document[field], dict) and field not in ("weights", "versions", "other_bounds"):
            assert not checker.is_valid(document | {field: document[field] | {"surprise": 1}}), field
    assert not checker.is_valid(document | {"surprise": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "remerge/certificate/2"},
        {"epsilon": -1.0},
        {"epsilon": None},
        {"delta": 1.0},
        {"mu": -1.0},
        {"bound": "stepwise"},
        {"mechanism": "averaging"},
        {"neighboring_relation": "substitute"},
        {"selection": "luck"},
        {"assumptions": []},
        {"weights": {}},
        {"weights": {"c0": 0.0}},
        {"profile": [[1.0, 0.5]]},
        {"profile": [[1.0, 0.5, 0.1]] * 20},
        {"profile": [[1.0, 1.5]] * 20},
        {"other_bounds": {"joint": {"epsilon": 1.0, "reason": "both"}}},
        {"other_bounds": {"joint": {}}},
        {"realised": {"candidate": "c0", "epsilon": 1.0}},
        {"policy_serial": "3"},
        {"region": ""},
        {"versions": {"numpy": 2}},
        {"cumulative": {"epsilon_region": 1.0}},
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(change: dict[str, Any]) -> None:
    document = json.loads(made("generic")[1].certificate) | change
    assert not validator().is_valid(document)
    refused = faults(replace(made("generic")[1], certificate=canonical_json(document)))
    assert refused
