"""What all stored documents are: frozen, strictly typed JSON with one canonical form, and faults as sentences."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from accounting.errors import InvalidInput
from infra.canonical import canonical_json, sha256_hex, strict_json

NAME = r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$"
SHA256 = r"^[0-9a-f]{64}$"


def _require_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs its time zone, for example 2026-11-29T14:00:00Z")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("a time must lie in the years 1 to 9999, UTC") from None


Relation = Literal["replace_one", "add_or_remove_one", "replace_special"]
Name = Annotated[str, Field(pattern=NAME)]
Digest = Annotated[str, Field(pattern=SHA256)]
Time = Annotated[datetime, Field(strict=False), AfterValidator(_require_utc)]


class Document(BaseModel):
    """A frozen, strictly typed JSON document."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def content(self) -> bytes:
        """The canonical bytes, as stored."""
        return canonical_json(self.model_dump(mode="json"))

    def sha256(self) -> str:
        """Digest of the canonical bytes."""
        return sha256_hex(self.content())

    @classmethod
    def from_content(cls, content: bytes, where: str) -> Self:
        """Read a stored document.

        Raises:
            InvalidInput: one sentence that names the document and the first field at fault.
        """
        try:
            fields = strict_json(content)
        except ValueError as error:
            plain = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
            reason = "" if plain else f" of the right form ({error})"
            raise InvalidInput(
                f"{where} is not JSON{reason}; restore it from a backup or write it anew."
            ) from None
        return cls.from_fields(fields, where)

    @classmethod
    def from_fields(cls, fields: Any, where: str) -> Self:
        """Validate a mapping; lists stand for tuples, as in JSON."""
        try:
            return cls.model_validate_json(json.dumps(fields))
        except ValidationError as error:
            raise InvalidInput(f"{where}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first validation fault, as a sentence with the field's name and the value found."""
    fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in fault["loc"]) or "document"
    found = "" if fault["type"] == "missing" else f" (found {_short(fault['input'])})"
    message = re.sub(r"^Value error, ", "", fault["msg"])
    if fault["type"] == "string_pattern_mismatch" and NAME in message:
        message = "should be lower-case letters, digits and hyphens, at most 63"
    return f"{field}: {message[0].lower()}{message[1:]}{found}."


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
