"""What is wrong with a calculator's file, as one sentence with the file, the run, the segment and the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

_SKIPPED = ("[key]",)  # pydantic's mark that a key, not its value, is at fault


def sentence(where: str, error: ValidationError, fields: Mapping[str, Any]) -> str:
    """The first fault in words; misspelt fields first, since they make other fields look missing.

    Args:
        where: the file's name.
        error: of validating `fields`.
        fields: as read, to name segments by their id and not their position.
    """
    faults = error.errors(include_url=False, include_context=False)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    field, owner = _place(fault["loc"], fields)
    message = re.sub(r"^(Value error, |Input )", "", fault["msg"])
    message = re.sub(r"\d*\.?\d{12,}", lambda found: f"{float(found[0]):g}", message)  # as a person writes it
    message = message[0].lower() + message[1:]
    subject = f"{field}{owner}"
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown field {subject}; check its spelling."
    if fault["type"] == "missing":
        return f"{where}: the field {subject} is missing."
    if fault["type"] == "value_error":
        return f"{where}: {subject} {message}." if subject else f"{where}: {message}."
    if fault["type"] == "string_pattern_mismatch" and "A-Za-z0-9" in fault["msg"]:
        message = "should be a name of letters, digits, dots, hyphens and underscores, at most 63"
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = "should be a mapping of its fields"
    if fault["type"] in ("too_short", "string_too_short"):
        return f"{where}: {subject} should not be empty."
    if fault["type"] == "tuple_type":
        message = "should be a list"
    return f"{where}: {subject} {message}, but {_shown(fault['input'])} was given."


def _place(location: tuple[int | str, ...], fields: Mapping[str, Any]) -> tuple[str, str]:
    """The field, and whose it is: (`steps`, ` of segment a0 of run a`)."""
    parts = [part for part in location if part not in _SKIPPED]
    owner = ""
    if len(parts) > 1 and parts[0] == "releases" and isinstance(parts[1], int):
        number, parts = f"release number {parts[1] + 1}", parts[2:]
        if not parts:
            return number, ""
        owner = f" of {number}"
    elif len(parts) > 1 and parts[0] == "runs":
        run, rest = str(parts[1]), parts[2:]
        if not rest:
            return f"run {run}", ""
        owner = f" of run {run}"
        if rest[0] == "segments" and len(rest) > 1:
            segment = f"segment {_segment_name(fields, run, rest[1])}"
            if len(rest) == 2:
                return segment, owner
            owner, rest = f" of {segment}{owner}", rest[2:]
        parts = rest
    return ".".join(map(str, parts)), owner


def _segment_name(fields: Mapping[str, Any], run: str, position: int | str) -> str:
    try:
        name = fields["runs"][run]["segments"][position]["id"]
    except (KeyError, TypeError, IndexError):
        name = None
    return name if isinstance(name, str) and name else f"number {int(position) + 1}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
