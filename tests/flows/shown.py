"""What a command prints, held against what the documentation shows."""

from __future__ import annotations

import re


def is_as_shown(shown: str, printed: str) -> bool:
    """As in a doctest, `...` stands for anything; spaces at the ends of lines do not count."""
    pattern = ".*?".join(re.escape(part) for part in _plain(shown).split("..."))
    return re.fullmatch(pattern, _plain(printed), re.DOTALL) is not None


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
