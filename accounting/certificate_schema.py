"""The JSON Schema of a certificate, as published: every field, its type and range, and nothing else allowed.

What no schema can say (weights add up to 1, the budget holds, names fit together) `Certificate.from_dict` refuses.
"""

from __future__ import annotations

from typing import Any

from accounting.bounds import BOUND_NAMES
from accounting.budget import LARGEST_EPSILON, LEAST_DELTA, LEAST_EPSILON, NeighboringRelation
from accounting.certificate import SCHEMA
from accounting.certificate_parts import MERGE_BOUNDS
from accounting.merges import TASK_BOUNDS
from accounting.plan import Mechanism
from accounting.selection_rules import SELECTIONS

Schema = dict[str, Any]

PROFILE_POINTS = 20
_TEXT: Schema = {"type": "string", "minLength": 1, "pattern": "\\S"}
_AT_LEAST_ZERO: Schema = {"type": "number", "minimum": 0}
_EPSILON = _AT_LEAST_ZERO | {"description": "nats, an upper bound"}
_DELTA: Schema = {"type": "number", "minimum": LEAST_DELTA, "exclusiveMaximum": 1}
_WEIGHT: Schema = {"type": "number", "exclusiveMinimum": 0}
_WEIGHTS: Schema = {"type": "object", "minProperties": 1, "additionalProperties": _WEIGHT}


def certificate_schema() -> Schema:
    """The schema of one document, JSON Schema 2020-12."""
    properties: Schema = {
        "schema": {"const": SCHEMA},
        "release_id": _TEXT | {"description": "digest of policy_digest and manifest_digest"},
        "region": _TEXT,
        "policy_digest": _TEXT,
        "policy_serial": {"type": "integer"},
        "manifest_digest": _TEXT | {"description": "of the portfolio manifest"},
        "portfolio": _TEXT | {"description": "name@serial"},
        "lineage": _TEXT | {"description": "the records a person can be in"},
        "unit": _TEXT | {"description": "unit of privacy"},
        "neighboring_relation": {"enum": [relation.value for relation in NeighboringRelation]},
        "mechanism": {"enum": [mechanism.value for mechanism in Mechanism]},
        "weights": _WEIGHTS | {"description": "by candidate; of a mixture, expected over the draw"},
        "candidates": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": _closed(
                registered_model=_TEXT, version=_TEXT, model_sha256=_TEXT, trajectory_sha256=_TEXT
            ),
        },
        "merge_rule": _TEXT,
        "bound": {"enum": [name for name in BOUND_NAMES if name != "stepwise"]},
        "assumptions": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        "source": _TEXT | {"description": "the theorem"},
        "budget": _closed(
            epsilon={"type": "number", "minimum": LEAST_EPSILON, "maximum": LARGEST_EPSILON}, delta=_DELTA
        ),
        "epsilon": _EPSILON,
        "delta": _DELTA,
        "mu": {"anyOf": [_AT_LEAST_ZERO, {"type": "null"}], "description": "where the bound is Gaussian"},
        "profile": {
            "type": "array",
            "minItems": PROFILE_POINTS,
            "maxItems": PROFILE_POINTS,
            "items": {
                "type": "array",
                "prefixItems": [_EPSILON, {"type": "number", "minimum": 0, "maximum": 1}],
                "items": False,
                "minItems": 2,
            },
        },
        "other_bounds": {
            "type": "object",
            "additionalProperties": {"oneOf": [_closed(epsilon=_EPSILON), _closed(reason=_TEXT)]},
        },
        "selection": {"enum": list(SELECTIONS), "description": "what the weights depend on"},
        "realised": {
            "anyOf": [_closed(candidate=_TEXT, epsilon=_EPSILON, delta=_DELTA), {"type": "null"}],
            "description": "what was drawn, and its own guarantee",
        },
        "fresh_noise": _AT_LEAST_ZERO,
        "consulted": {"type": "array", "items": {"type": "string"}},
        "components": {
            "type": "array",
            "items": _closed(
                name=_TEXT,
                weight=_WEIGHT | {"maximum": 1},
                weights=_WEIGHTS,
                fresh_noise=_AT_LEAST_ZERO,
                bound={"enum": list(MERGE_BOUNDS)},
                epsilon=_EPSILON,
            ),
        },
        "versions": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    schema = _closed(**properties)
    schema["properties"]["cumulative"] = {
        "anyOf": [
            _closed(
                epsilon_all_regions=_EPSILON,
                epsilon_region=_EPSILON,
                delta=_DELTA,
                releases={"type": "integer", "minimum": 1},
                after_ledger_entry={"type": "integer", "minimum": 0},
            ),
            {"type": "null"},
        ],
        "description": "of all releases from the lineage, this one included",
    }
    # Left out of the certificates of linear merges of one task.
    schema["properties"]["merge"] = _TEXT | {"description": "the operator; linear where left out"}
    schema["properties"]["merge_options"] = {
        "type": "object",
        "additionalProperties": {"type": ["number", "string", "boolean"]},
    }
    schema["properties"]["tasks"] = {
        "type": "object",
        "minProperties": 2,
        "additionalProperties": _TEXT,
        "description": "by candidate",
    }
    schema["properties"]["records"] = {"enum": list(TASK_BOUNDS), "description": "of the tasks"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Certificate",
        "description": "What one release of remerge claims about privacy, and what that rests on.",
        **schema,
    }


def _closed(**properties: Schema) -> Schema:
    """An object with exactly these fields."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
