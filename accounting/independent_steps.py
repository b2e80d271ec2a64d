"""Which steps were executed, and how many noisy sums each released, read anew for checking certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accounting.errors import AccountingError
from accounting.trajectory import Segment, Trajectory

_SUMS: Mapping[str, int] = {"dp_sam": 2, "dp_sam_previous_gradient": 1}


def distinct_steps(runs: Sequence[Trajectory]) -> dict[str, Segment]:
    """The executed segments of several runs by id, each with the most steps that a run used of it."""
    steps: dict[str, Segment] = {}
    for run in runs:
        for segment in run.segments:
            if segment.id not in steps or steps[segment.id].steps < segment.steps:
                steps[segment.id] = segment
    return steps


def released_sums(segment: Segment) -> int:
    """How many noisy sums of one batch each step of a segment released, by its recorded optimizer: 1, or 2.

    Raises:
        AccountingError: an optimizer that may look at a batch more often than is known.
    """
    kind, *bases = segment.optimizer.split("+")
    plain = bases if kind in _SUMS else [kind, *bases]
    if len(bases) > (kind in _SUMS) or any(not name.strip() or "sam" in name.lower() for name in plain):
        raise AccountingError(
            f"Segment {segment.id} was trained by {segment.optimizer!r}, of which it is not known what its steps "
            "released."
        )
    return _SUMS.get(kind, 1)
