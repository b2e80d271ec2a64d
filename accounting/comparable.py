"""Which candidates may be compared by their noise alone: those identical in everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from accounting.errors import InvalidInput
from accounting.trajectory import Candidate, Segment

_TRAJECTORY_FIELDS = ("data_digest", "initialisation_digest", "feature_radius", "n_max")
# Names of a stretch of noise, and what is measured rather than chosen.
_IGNORED = ("id", "parent", "noise_multiplier", "update_lipschitz", "update_lipschitz_reason")
_SEGMENT_FIELDS = tuple(f.name for f in fields(Segment) if f.name not in _IGNORED)


def recipe(candidate: Candidate) -> dict[str, object]:
    """All public choices of a run but its noise, by field name."""
    found: dict[str, object] = {name: getattr(candidate.trajectory, name) for name in _TRAJECTORY_FIELDS}
    segments = candidate.trajectory.segments
    for name in _SEGMENT_FIELDS:
        found[name] = tuple(getattr(segment, name) for segment in segments)
    return found


def comparable_class(candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """The largest set of candidates that differ in nothing but their noise, and why the others do not belong.

    Depends on public hyper-parameters only, so it reveals nothing about the records. Among sets of equal
    size the one with the earliest candidate is taken.

    Args:
        candidates: at least one.

    Returns:
        (members in candidate order, reason by name of each other candidate).

    Raises:
        InvalidInput: several candidates, no two of which are comparable.
    """
    classes: dict[tuple[tuple[str, object], ...], list[Candidate]] = {}
    for candidate in candidates:
        classes.setdefault(tuple(recipe(candidate).items()), []).append(candidate)
    members = max(classes.values(), key=len)  # max keeps the first of equals
    if len(members) == 1 and len(candidates) > 1:
        raise InvalidInput(
            "These candidates differ in more than their noise (here in "
            f"{_differences(candidates[0], candidates[1])}), so their noise alone does not say which is "
            "better; offer at least two candidates of one recipe or a single candidate, or compare them by stated "
            "utilities, for example the scores of public twins (selection 'stated' or 'public_twin'), or by scores "
            "that the budget pays for (selection 'validation')."
        )
    reference = members[0]
    names = {candidate.name for candidate in members}
    reasons = {
        candidate.name: f"not comparable by noise alone: it differs from {reference.name} in "
        f"{_differences(reference, candidate)}"
        for candidate in candidates
        if candidate.name not in names
    }
    return members, reasons


def _differences(first: Candidate, second: Candidate) -> str:
    """Names of the fields, those that are alike but for the number of segments aside, unless there are no others."""
    one, other = recipe(first), recipe(second)
    names = [name for name in one if one[name] != other[name]]
    plain = [name for name in names if _each_once(one[name]) != _each_once(other[name])]
    return ", ".join(plain or names)


def _each_once(value: object) -> object:
    return tuple(dict.fromkeys(value)) if isinstance(value, tuple) else value
