"""Reading JSON documents strictly: unknown and missing fields are refused, and the sentence names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from accounting.errors import InvalidInput


def require_text(name: str, value: object) -> None:
    """Refuse what is not a non-empty text."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{name} must be a non-empty text, but {value!r} was given.")


def mapping_of(name: str, value: object) -> dict[str, Any]:
    """A copy of a mapping with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidInput(f"{name} must be a mapping.")
    return dict(value)


def list_of(name: str, value: object) -> list[Any]:
    """A copy of a list."""
    if not isinstance(value, list | tuple):
        raise InvalidInput(f"{name} must be a list.")
    return list(value)


def fields_of(value: object, name: str, kind: type, *extra: str) -> dict[str, Any]:
    """A mapping with exactly the fields of a dataclass, and `extra` ones."""
    values = mapping_of(name, value)
    known = {f.name for f in fields(kind)} | set(extra)
    for field in sorted(set(values) - known):
        raise InvalidInput(f"Unknown field {field!r} in {name}.")
    for field in sorted(known - set(values)):
        raise InvalidInput(f"Field {field!r} is missing from {name}.")
    return values


def fields_to_dict(value: Any) -> dict[str, Any]:
    """The fields of a flat dataclass by name."""
    return {f.name: getattr(value, f.name) for f in fields(value)}
