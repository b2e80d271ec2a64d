"""From a calculator's file to what the accountant reads: trajectories, stated guarantees, and a release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from accounting.profile import StatedProfile
from accounting.trajectory import ParentStep, Segment, Trajectory
from tasks.account_file import AccountFile, ReleaseEntry, SegmentEntry

_NO_DELTA = 1e-300  # a guarantee at delta 0 also holds with this delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the file: known step by step, or only by a stated guarantee."""

    name: str
    known_by: Trajectory | StatedProfile
    utility: float | None

    @property
    def trajectory(self) -> Trajectory | None:
        return self.known_by if isinstance(self.known_by, Trajectory) else None

    @property
    def stated(self) -> StatedProfile | None:
        return self.known_by if isinstance(self.known_by, StatedProfile) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What is shown to the world."""

    kind: str  # "linear_combination", "random_selection" or "joint"; of a plan also "mixture"
    runs: tuple[Run, ...]  # those with a weight above 0
    weights: (
        tuple[float, ...] | None
    )  # all > 0, summing to 1; None for a joint release; of a mixture expected
    relation: NeighboringRelation
    fresh_noise: float = 0.0  # per parameter, of a linear combination

    @property
    def known(self) -> tuple[Run, ...]:
        """The runs known step by step."""
        return tuple(run for run in self.runs if run.trajectory is not None)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Of the known runs."""
        return tuple(run.known_by for run in self.runs if isinstance(run.known_by, Trajectory))

    @property
    def stated(self) -> dict[str, StatedProfile]:
        """The runs of which only a stated guarantee is known, by name."""
        return {run.name: run.known_by for run in self.runs if isinstance(run.known_by, StatedProfile)}


def runs_of(file: AccountFile, where: str) -> dict[str, Run]:
    """All runs of a file, by name, in its order.

    Args:
        file: as read.
        where: its name, for errors.

    Raises:
        InvalidInput: segments that do not form runs, with the run and the segment.
    """
    relation = NeighboringRelation(file.neighboring_relation)
    segments: dict[str, tuple[Segment, str]] = {}  # by id, with the first run that uses it
    runs = {}
    for name, entry in file.runs.items():
        known_by: Trajectory | StatedProfile
        if entry.stated is None:
            known_by = _trajectory(name, entry.segments or (), segments, relation, where)
        else:
            known_by = StatedProfile(
                stated_epsilon=entry.stated.epsilon, stated_delta=max(entry.stated.delta, _NO_DELTA)
            )
        runs[name] = Run(name=name, known_by=known_by, utility=entry.utility)
    return runs


def release_of(file: AccountFile, runs: Mapping[str, Run], where: str) -> Release:
    """The release that the file describes; runs of weight 0 are dropped.

    Raises:
        InvalidInput: the file describes none.
    """
    if file.release is None:
        instead = " `remerge account ledger` reads releases." if file.releases else ""
        raise InvalidInput(
            f"{where}: the field release is missing; say what is released, for example "
            f"release: {{random_selection: {{{next(iter(runs))}: 1}}}}.{instead}"
        )
    return described(file.release, runs, NeighboringRelation(file.neighboring_relation))


def described(entry: ReleaseEntry, runs: Mapping[str, Run], relation: NeighboringRelation) -> Release:
    """The release that an entry of the file describes; runs of weight 0 are dropped."""
    weights = entry.weights
    names = entry.names if weights is None else [name for name in weights if weights[name] > 0]
    return Release(
        kind=entry.kind,
        runs=tuple(runs[name] for name in names),
        weights=None if weights is None else tuple(weights[name] for name in names),
        relation=relation,
        fresh_noise=entry.fresh_noise,
    )


def _trajectory(
    name: str,
    entries: tuple[SegmentEntry, ...],
    segments: dict[str, tuple[Segment, str]],
    relation: NeighboringRelation,
    where: str,
) -> Trajectory:
    path: list[Segment] = []
    for entry in entries:
        segment = _segment(name, entry, path, segments, where)
        known, owner = segments.setdefault(segment.id, (segment, name))
        if known.mechanism_key() != segment.mechanism_key():
            raise InvalidInput(f"{where}: {_difference(known, owner, segment, name)}.")
        path.append(segment)
    try:
        return Trajectory(
            portfolio="calculator",
            lineage="calculator",
            unit="record",
            neighboring_relation=relation,
            data_digest="not known",
            initialisation_digest="not known",
            feature_radius=None,
            n_max=None,
            segments=tuple(path),
        )
    except InvalidInput as error:
        raise InvalidInput(f"{where}, run {name}: {error.message}") from None


def _segment(
    run: str,
    entry: SegmentEntry,
    path: list[Segment],
    segments: Mapping[str, tuple[Segment, str]],
    where: str,
) -> Segment:
    """The segment, branching off from the end of the one before it in the file's list."""
    parent = None
    if path:
        before = path[-1]
        parent = ParentStep(run=segments[before.id][1], segment=before.id, step=before.steps)
    stated = entry.parent
    if stated is not None and (
        parent is None or (stated.segment, stated.step) != (parent.segment, parent.step)
    ):
        place = "it comes first" if parent is None else f"it follows step {parent.step} of {parent.segment}"
        raise InvalidInput(
            f"{where}: parent of segment {entry.id} of run {run} says that it follows step {stated.step} of "
            f"{stated.segment}, but in the list of segments {place}; list every segment of a run from its start."
        )
    values = {f.name: getattr(entry, f.name) for f in fields(Segment) if f.name != "parent"}
    values["sampler"] = entry.sampler or ("full_batch" if entry.sampling_probability == 1 else "poisson")
    try:
        return Segment(**values, parent=parent)
    except InvalidInput as error:
        raise InvalidInput(f"{where}, run {run}: {error.message}") from None


def _difference(known: Segment, owner: str, other: Segment, run: str) -> str:
    """Why two segments of one id cannot be the same noise."""
    if known.parent != other.parent:
        found = [
            "at the start of" if s.parent is None else f"after step {s.parent.step} of {s.parent.segment} in"
            for s in (known, other)
        ]
        facts = f"stands {found[0]} run {owner} and {found[1]} run {run}"
    else:
        field = next(
            f.name
            for f in fields(Segment)
            if f.name != "steps" and getattr(known, f.name) != getattr(other, f.name)
        )
        facts = f"has {field} {getattr(known, field)} in run {owner} and {getattr(other, field)} in run {run}"
    return f"segment {known.id} {facts}; one id is one stretch of noise, so give the second another id"
