"""Numbers as they stand in the page's tables."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.dp_merging_experiment.summary import Difference, Spread


def percent(spread: Spread) -> str:
    return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}"


def number(spread: Spread, digits: int) -> str:
    return f"{spread.mean:.{digits}f} ± {spread.deviation:.{digits}f}"


def points(one: Difference) -> str:
    text = f"{100 * one.mean:+.1f} ± {100 * one.half_width:.1f}"
    return f"**{text}**" if one.sign else text


def arguments_in_words(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items())
