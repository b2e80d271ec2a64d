"""Fields of valid documents."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

Fields = Callable[..., dict[str, Any]]


@pytest.fixture
def name() -> str:
    """A region, portfolio or lineage that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def policy_fields(name: str) -> Fields:
    def make(**changes: Any) -> dict[str, Any]:
        fields = {"region": name, "epsilon": 3.0, "delta": 1e-5, "portfolio": "digits@1", "author": "test"}
        return {**fields, **changes}

    return make


@pytest.fixture
def manifest_fields(name: str) -> Fields:
    def make(**changes: Any) -> dict[str, Any]:
        split = {"rows": 10, "digest": "1" * 64}
        fields = {
            "name": name,
            "created_at": "2026-01-01T00:00:00Z",
            "lineage": "digits",
            "unit": "record",
            "neighboring_relation": "replace_one",
            "recipe_digest": "2" * 64,
            "data": {
                "loader": "module:function",
                "split_rule": "a rule",
                "private": {**split, "rows": None},
                "public_train": split,
                "public_gate": split,
            },
            "network": {"factory": "module:function"},
            "initialisation_digest": "3" * 64,
            "feature_radius": 1.0,
            "n_max": 1200,
            "flow_run_id": None,
            "candidates": [
                {
                    "name": "epsilon-1",
                    "registered_model": name,
                    "version": 1,
                    "run_id": "run",
                    "model_sha256": "4" * 64,
                    "trajectory_sha256": "5" * 64,
                }
            ],
        }
        return {**fields, **changes}

    return make


@pytest.fixture
def ledger_fields(name: str) -> Fields:
    def make(release: int = 0, **changes: Any) -> dict[str, Any]:
        fields = {
            "lineage": name,
            "release_id": f"{release:064x}",
            "region": "eu",
            "kind": "intended",
            "neighboring_relation": "replace_one",
            "unit": "record",
            "outcomes": [
                {
                    "name": "linear_combination",
                    "weight": 1.0,
                    "candidates": ["epsilon-1"],
                    "segments": [{"steps": 160}],
                    "paths": {"epsilon-1": [["s", 160]]},
                    "coefficients": {"epsilon-1": 1.0},
                }
            ],
            "drawn": None,
            "selection": "noise",
            "certificate_digest": "6" * 64,
            "counted": 0,
        }
        return {**fields, **changes}

    return make


@pytest.fixture
def release_fields(name: str) -> Fields:
    def make(**changes: Any) -> dict[str, Any]:
        fields = {
            "release_id": uuid.uuid4().hex * 2,
            "region": name,
            "policy_serial": 1,
            "policy_digest": "1" * 64,
            "portfolio": "digits@1",
            "manifest_digest": "2" * 64,
            "network": {"factory": "module:function"},
            "files": {},
            "accuracy": 0.75,
            "gate_rows": 297,
            "registered_model": f"digits-{name}",
            "registered_version": 1,
            "provenance": {"started_by": "hand"},
        }
        return {**fields, **changes}

    return make
