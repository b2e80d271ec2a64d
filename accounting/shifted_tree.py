"""Runs as a tree of steps: which steps are a run's own, and which prefixes it shares with others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from accounting.trajectory import Segment, Trajectory

Part = tuple[Segment, int]  # so many steps of the segment


def own_and_shared(runs: Sequence[Trajectory]) -> tuple[tuple[int, ...], list[list[Part]], list[list[Part]]]:
    """Cut runs at the steps where they part, also in the middle of a segment.

    Args:
        runs: checked to agree on the segments that they share (`union_of_segments`), shape (runs,).

    Returns:
        (for each run the number of its path: runs with the same steps stand on one; for each path the steps
        that no other path has, possibly none; the shared stretches between two partings, each once).
    """
    numbers: dict[tuple[tuple[str, int], ...], int] = {}
    owner = tuple(
        numbers.setdefault(tuple((s.id, s.steps) for s in run.segments), len(numbers)) for run in runs
    )
    paths: list[Trajectory | None] = [None] * len(numbers)
    for run, number in zip(runs, owner, strict=True):
        paths[number] = run
    distinct = [path for path in paths if path is not None]
    families: dict[str, list[int]] = {}
    for number, path in enumerate(distinct):
        families.setdefault(path.segments[0].id, []).append(number)

    own: list[list[Part]] = []
    shared: dict[tuple[str, int], list[Part]] = {}
    for number, path in enumerate(distinct):
        relatives = (distinct[j] for j in families[path.segments[0].id] if j != number)
        start = 0
        for parting in sorted({_common(path, relative) for relative in relatives}):
            edge = list(_between(path, start, parting))
            final, steps = edge[-1]
            # The parting is named by its segment and the step within it, which tells all steps before it.
            shared.setdefault((final.id, steps + _before(path, final, start)), edge)
            start = parting
        own.append(list(_between(path, start, path.steps)))
    return owner, own, list(shared.values())


def _common(first: Trajectory, second: Trajectory) -> int:
    """How many leading steps two runs share."""
    total = 0
    for one, other in zip(first.segments, second.segments, strict=False):
        if one.id != other.id:
            break
        total += min(one.steps, other.steps)
        if one.steps != other.steps:
            break
    return total


def _between(path: Trajectory, start: int, end: int) -> Iterable[Part]:
    """The steps after the first `start` up to the first `end`, by segment."""
    position = 0
    for segment in path.segments:
        steps = min(position + segment.steps, end) - max(position, start)
        if steps > 0:
            yield segment, steps
        position += segment.steps


def _before(path: Trajectory, segment: Segment, start: int) -> int:
    """How many steps of a segment of the path lie within its first `start` steps."""
    position = 0
    for earlier in path.segments:
        if earlier.id == segment.id:
            return max(start - position, 0)
        position += earlier.steps
    return 0
