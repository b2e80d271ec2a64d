"""One comparison of a verification: what was compared, both values, and whether they agree."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIGEST = re.compile("[0-9a-f]{64}")
AGREEMENT = 1e-9  # relative; another machine may round a little differently


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A line of a verification's table."""

    what: str
    stated: str  # by the document
    found: str  # from its source
    holds: bool | None  # None: could not be compared, `note` says why
    note: str = ""  # what differs, or why nothing was compared, in a sentence


def compare(what: str, stated: object, found: object) -> Check:
    """Texts, names and whole documents: equal or not."""
    note = f"The document has {in_words(stated, 300)}, but {in_words(found, 300)} was found."
    return Check(
        what=what,
        stated=in_words(stated),
        found=in_words(found),
        holds=stated == found,
        note="" if stated == found else note,
    )


def compare_numbers(what: str, stated: float, found: float, relative: float = AGREEMENT) -> Check:
    """Numbers, equal within a relative difference."""
    return within(what, stated, (found * (1 - relative), found * (1 + relative)), found)


def within(what: str, stated: float, allowed: tuple[float, float], found: float) -> Check:
    """A number that must lie in a range about the recomputed one; NaN never does."""
    low, high = allowed
    holds = low <= stated <= high
    note = ""
    if not holds:
        note = (
            f"The document states {stated:.12g}, but {found:.12g} was recomputed (at least {low:.12g} and at most "
            f"{high:.12g} would agree)."
        )
    return Check(what=what, stated=f"{stated:.6g}", found=f"{found:.6g}", holds=holds, note=note)


def failed(what: str, reason: str) -> Check:
    """A comparison that could not even be made because of the documents."""
    return Check(what=what, stated="", found="", holds=False, note=reason)


def not_compared(what: str, reason: str) -> Check:
    """A comparison for which something is not at hand."""
    return Check(what=what, stated="", found="", holds=None, note=reason)


def in_words(value: object, length: int = 40) -> str:
    """A value in at most so many characters."""
    if isinstance(value, float):
        return f"{value:.6g}" if length <= 40 else repr(value)
    if isinstance(value, dict):
        text = ", ".join(f"{name} {in_words(entry, length)}" for name, entry in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        text = ", ".join(in_words(entry, length) for entry in value)
    else:
        text = str(value)
    text = _DIGEST.sub(lambda found: found.group()[:12], text) or "nothing"
    return text if len(text) <= length else f"{text[: length - 3]}..."
