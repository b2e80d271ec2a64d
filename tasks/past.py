"""What a lineage's ledger says is out, or may be: the past of a release that is being made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from accounting.ledger import Outcome, PastRelease
from accounting.plan import Mechanism, Plan
from accounting.trajectory import Candidate, Segment, Trajectory, parse_relation, segment_from_dict
from infra.documents import LedgerEntry, Policy
from infra.ledger_documents import LedgerOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The releases of a lineage that are out, or may be, for all that the ledger says."""

    releases: tuple[PastRelease, ...]
    entries: int  # of the ledger, that were read
    is_new: bool = True  # no certificate of the release that is being made is in the ledger yet
    held: Past | None = (
        None  # as it was when that release took its share of a budget; None: it has taken none
    )
    grown: bool = False  # something has come out since then that it could not count

    def of_scope(self, policy: Policy) -> tuple[PastRelease, ...]:
        """Those whose cost the policy's budget must cover beside the new release."""
        if policy.scope == "release":
            return ()
        return tuple(r for r in self.releases if in_scope(policy, r.region))

    def up_to(self, entry: LedgerEntry) -> Past:
        """The same past, after an entry of the release itself was added."""
        return replace(self, entries=max(self.entries, entry.serial))


def in_scope(policy: Policy, region: str) -> bool:
    """Whether the policy's budget covers a region's releases beside its own."""
    return policy.scope == "all_regions" or (policy.scope == "region" and region == policy.region)


def past_of(entries: Sequence[LedgerEntry], release_id: str, policy: Policy | None = None) -> Past:
    """The past of a release: all others in the ledger before the entry that names its certificate, or now.

    Every kind of entry counts, failed checks and merely intended releases too: more may have been seen than the
    ledger can tell. A release of which only a reservation is known counts with everything that it could be; but
    where the release at hand has reserved before it, not at all: nothing of it is out, and it counts this one.

    Args:
        entries: of one lineage, oldest first.
        release_id: of the release that is being made, which is not its own past; a retry after its certificate was
            written down finds the same past.
        policy: in whose scope `grown` is asked; None: everywhere.
    """
    own = [entry for entry in entries if entry.release_id == release_id]
    certified = next((entry for entry in own if entry.certificate_digest is not None), None)
    reserved = [entry for entry in own if entry.kind == "reserved"]
    turn = reserved[0].serial if reserved else None
    counted = entries if certified is None else entries[: certified.counted]
    held = None
    if reserved:
        then = entries[: reserved[-1].counted]
        held = Past(releases=_releases(then, release_id, turn), entries=len(then))
    return Past(
        releases=_releases(counted, release_id, turn),
        entries=len(counted),
        is_new=certified is None,
        held=held,
        grown=held is not None and has_grown(counted, reserved, policy),
    )


def has_grown(
    entries: Sequence[LedgerEntry], reserved: Sequence[LedgerEntry], policy: Policy | None = None
) -> bool:
    """Whether something came out after a release's newest reservation that this reservation could not count.

    Args:
        entries: of the lineage, oldest first.
        reserved: the reservations of one release, at least one, oldest first.
        policy: of the scope that is asked about; None: everything.
    """
    first, newest = reserved[0].serial, reserved[-1].serial
    for name, group in by_release(entries).items():
        if name == reserved[0].release_id or (policy is not None and not in_scope(policy, group[0].region)):
            continue
        before = [entry for entry in group if entry.serial < newest]
        counted = is_out(before) or group[0].serial < first
        known = [entry.outcomes for entry in before] if counted else []
        after = [entry for entry in group if entry.serial > newest and entry.kind != "reserved"]
        if any(entry.outcomes not in known for entry in after):
            return True
    return False


def by_release(entries: Sequence[LedgerEntry]) -> dict[str, list[LedgerEntry]]:
    """The entries of each release, by its id, in the order of their first ones."""
    found: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        found.setdefault(entry.release_id, []).append(entry)
    return found


def is_out(group: Sequence[LedgerEntry]) -> bool:
    """Whether anything of a release may have been seen: a reservation shows nothing."""
    return any(entry.kind != "reserved" for entry in group)


def _releases(entries: Sequence[LedgerEntry], release_id: str, turn: int | None) -> tuple[PastRelease, ...]:
    return tuple(
        release_of(group)
        for name, group in by_release(entries).items()
        if name != release_id and (turn is None or is_out(group) or group[0].serial < turn)
    )


def tasks_of(plan: Plan, names: Sequence[str]) -> dict[str, str] | None:
    """The tasks of candidates that a plan uses or consulted, where no record is in the data of two tasks."""
    if plan.records != "disjoint" or not set(names) <= set(plan.tasks):
        return None
    return {name: plan.tasks[name] for name in names}


def outcomes_of_plan(
    plan: Plan, candidates: Sequence[Candidate], consulted: Sequence[str]
) -> tuple[Outcome, ...]:
    """What a plan may release; consulted candidates are known with every outcome."""
    trajectories = {candidate.name: candidate.trajectory for candidate in candidates}
    found = []
    for name, probability in plan.outcomes.items():
        merged = plan.merged_weights(name)
        names = list(dict.fromkeys([*merged, *consulted, *plan.consulted]))
        tasks = tasks_of(plan, names)
        alone = plan.mechanism is not Mechanism.OPERATOR and not (consulted or plan.consulted)
        found.append(
            Outcome(
                probability=probability,
                runs=tuple(trajectories[each] for each in names),
                weights=tuple(merged.values()) if alone else None,
                tasks=None if tasks is None else tuple(tasks.values()),
            )
        )
    return tuple(found)


def release_of(entries: Sequence[LedgerEntry]) -> PastRelease:
    """One release from all its entries."""
    certified = [entry for entry in entries if entry.certificate_digest is not None]
    told = {(entry.drawn, *(outcome.sha256() for outcome in entry.outcomes)) for entry in certified}
    if len(told) == 1:
        entry = certified[0]
        outcomes = tuple(_outcome(entry, outcome) for outcome in entry.outcomes)
        names = [outcome.name for outcome in entry.outcomes]
        if len(names) == 1 or entry.drawn in names:
            drawn = None if len(names) == 1 else names.index(str(entry.drawn))
            return PastRelease(region=entry.region, outcomes=outcomes, drawn=drawn)
    # Nobody can tell which of these came out: all of them may have.
    found = [_outcome(entry, outcome) for entry in entries for outcome in entry.outcomes]
    everything = Outcome(
        probability=1.0,
        runs=tuple(run for outcome in found for run in outcome.runs),
        tasks=None
        if any(outcome.tasks is None for outcome in found)
        else tuple(task for outcome in found for task in outcome.tasks or ()),
    )
    return PastRelease(region=entries[0].region, outcomes=(everything,))


def _outcome(entry: LedgerEntry, outcome: LedgerOutcome) -> Outcome:
    segments = {segment.id: segment for segment in map(segment_from_dict, outcome.segments)}
    data = outcome.data_digests or {}
    runs = {
        name: _run(entry, path, segments, data.get(name, "ledger")) for name, path in outcome.paths.items()
    }
    if outcome.coefficients is None:
        return Outcome(
            probability=outcome.weight,
            runs=tuple(runs.values()),
            tasks=None if outcome.tasks is None else tuple(outcome.tasks[name] for name in runs),
        )
    return Outcome(
        probability=outcome.weight,
        runs=tuple(runs[name] for name in outcome.coefficients),
        weights=tuple(outcome.coefficients.values()),
    )


def _run(
    entry: LedgerEntry, path: Sequence[tuple[str, int]], segments: Mapping[str, Segment], data_digest: str
) -> Trajectory:
    """A run as the ledger knows it: its steps, and whose records it used."""
    return Trajectory(
        portfolio="ledger",
        lineage=entry.lineage,
        unit=entry.unit,
        neighboring_relation=parse_relation(entry.neighboring_relation),
        data_digest=data_digest,
        initialisation_digest="ledger",
        feature_radius=None,
        n_max=None,
        segments=tuple(replace(segments[name], steps=steps) for name, steps in path),
    )
