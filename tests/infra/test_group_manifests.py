"""Manifests of several tasks, and those of one, which keep the bytes that they had before there were groups."""

from __future__ import annotations

from typing import Any

import pytest

from accounting.errors import InvalidInput
from infra.canonical import canonical_json, strict_json
from infra.documents import PortfolioManifest

SPLIT = {"rows": 10, "digest": "1" * 64}


def data_of(digest: str) -> dict[str, Any]:
    private = {"rows": None, "digest": digest}
    return {
        "loader": "module:function",
        "arguments": {},
        "split_rule": "a rule",
        "private": private,
        "public_train": SPLIT,
        "public_gate": SPLIT,
    }


def candidate(name: str) -> dict[str, Any]:
    digests = {"model_sha256": "3" * 64, "trajectory_sha256": "4" * 64}
    return {"name": name, "registered_model": "digits", "version": 1, "run_id": name, **digests}


ONE: dict[str, Any] = {
    "schema": "remerge/portfolio/1",
    "name": "digits",
    "serial": 1,
    "created_at": "2026-01-01T00:00:00Z",
    "lineage": "digits",
    "unit": "record",
    "neighboring_relation": "replace_one",
    "recipe_digest": "2" * 64,
    "data": data_of("a" * 64),
    "network": {"factory": "module:function", "arguments": {}},
    "initialisation_digest": "e" * 64,
    "feature_radius": 1.0,
    "n_max": 100,
    "flow_run_id": None,
    "candidates": [candidate("a"), candidate("b")],
}
GROUP = {
    **ONE,
    "tasks": {"a": "left", "b": "right"},
    "records": "disjoint",
    "task_data": {"left": data_of("b" * 64), "right": data_of("c" * 64)},
}


def test_manifests_of_one_task_keep_their_bytes() -> None:
    """A release is named by its manifest's digest: other bytes would be another release, and another draw."""
    manifest = PortfolioManifest.from_content(canonical_json(ONE), "manifest")
    assert manifest.content() == canonical_json(ONE)
    assert (manifest.tasks, manifest.records, manifest.task_data) == (None, None, None)
    assert manifest.private_digest_of("a") == "a" * 64


def test_a_groups_manifest_tells_whose_data_each_candidate_was_trained_on() -> None:
    manifest = PortfolioManifest.from_fields(GROUP, "manifest")
    assert {name: manifest.private_digest_of(name)[0] for name in "ab"} == {"a": "b", "b": "c"}
    stored = strict_json(manifest.content())
    assert {name: stored[name] for name in ("tasks", "records")} == {
        "tasks": GROUP["tasks"],
        "records": "disjoint",
    }
    assert PortfolioManifest.from_content(manifest.content(), "manifest") == manifest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"records": None}, "tasks, records, task_data go together"),
        ({"tasks": None}, "tasks, records, task_data go together"),
        ({"task_data": None}, "tasks, records, task_data go together"),
        ({"records": "apart"}, "records"),
        ({"tasks": {"a": "left"}}, "tasks names the task of every candidate"),
        ({"tasks": {"a": "left", "b": "right", "c": "right"}}, "tasks names the task of every candidate"),
        ({"tasks": {"a": "left", "b": "left"}}, "name the same tasks, at least two"),
        ({"tasks": {"a": "left", "b": "middle"}}, "name the same tasks, at least two"),
        ({"tasks": {"a": "left", "b": "Right"}}, "tasks"),
        (
            {"task_data": {"left": data_of("b" * 64), "right": data_of("b" * 64)}},
            "two tasks have the same private data",
        ),
    ],
)
def test_half_a_group_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PortfolioManifest.from_fields({**GROUP, **change}, "manifest")
    assert sentence in refused.value.message
    assert "\n" not in refused.value.message
