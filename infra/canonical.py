"""One way to write a JSON document, and the digests of what is stored."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any, NoReturn


def canonical_json(document: Any) -> bytes:
    """The one byte form of a JSON document: sorted keys, no spaces, no NaN or infinity, UTF-8.

    Floats are written so that they read back to the same float64.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode()


def strict_json(content: bytes | str) -> Any:
    """Read JSON in which every key stands once, every number is finite and every text can be written down again.

    Of a key given twice, one reader would take the first value and another the last.

    Raises:
        ValueError: it is not that; a short reason.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is given twice")
        return found

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        found = json.loads(content, object_pairs_hook=once, parse_constant=no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if (b"\\" if isinstance(content, bytes) else "\\") in content:  # type: ignore[operator]
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half of a character (a lone surrogate)") from None
    return found


def sha256_hex(content: bytes) -> str:
    """SHA-256 of the bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def digest(document: Any) -> str:
    """SHA-256 of a document's canonical form."""
    return sha256_hex(canonical_json(document))


def keyed_digest(content: bytes, key: bytes) -> str:
    """HMAC-SHA-256, for digests of private rows: without the key nobody can test a guess of the rows."""
    return hmac.new(key, content, hashlib.sha256).hexdigest()
