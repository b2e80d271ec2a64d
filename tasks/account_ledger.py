"""What many releases from the same records tell together: over all regions, by region, and each alone.

The alone figures stand beside the others so that people see that they do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput, RemergeError
from accounting.ledger import Outcome, PastRelease, cumulative
from tasks.account_composition import no_finite_epsilon
from tasks.account_file import AccountFile, PastReleaseEntry
from tasks.account_runs import Release, Run, described

CHOSEN_APART = (
    "What was released there was chosen without looking at parameters that were released elsewhere: a choice made "
    "by looking at them would tell about them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """An epsilon for one set of releases, or the reason why there is none."""

    bound: Bound | None
    epsilon: float | None  # nats, finite, an upper bound at the account's delta
    reason: str | None  # a sentence, where there is no epsilon
    of_some: bool = False  # whether there are other releases, which it leaves out

    @property
    def mu(self) -> float | None:
        """Where everything is Gaussian and no draw is to come."""
        return self.bound.mu if self.bound is not None and self.epsilon is not None else None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it rests on; nothing where there is no epsilon."""
        if self.bound is None or self.epsilon is None:
            return ()
        return (*self.bound.assumptions, CHOSEN_APART) if self.of_some else self.bound.assumptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One release of the file, as it counts."""

    region: str
    release: Release
    drawn: str | None  # the run that was drawn; None where nothing is drawn, or the draw is still to come
    past: PastRelease

    @property
    def to_come(self) -> bool:
        """Whether a draw is still to come that could end in more than one way."""
        return len(self.past.possible) > 1

    @property
    def possible_runs(self) -> tuple[Run, ...]:
        """The runs that it tells or may tell about."""
        return tuple(run for run in self.release.runs if self.drawn in (None, run.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAccount:
    """The answer of `remerge account ledger`."""

    delta: float
    relation: NeighboringRelation
    releases: tuple[Told, ...]  # in the file's order
    alone: tuple[Figure, ...]  # of each release, as if there were no other
    together: Figure  # all releases of all regions: what colluding readers know
    by_region: Mapping[str, Figure]  # each region's own releases, sorted by region

    def further_assumptions(self, figure: Figure) -> tuple[str, ...]:
        """What a figure rests on beside the assumptions of the one over all regions."""
        known = set(self.together.assumptions)
        return tuple(text for text in figure.assumptions if text not in known)


def ledger_of(file: AccountFile, runs: Mapping[str, Run], where: str) -> LedgerAccount:
    """The cumulative figures of the file's releases at its delta.

    Args:
        file: as read.
        runs: of the file, by name.
        where: its name, for errors.

    Raises:
        InvalidInput: the file lists no releases.
    """
    if file.releases is None:
        instead = " `remerge account bounds` reads release." if file.release else ""
        raise InvalidInput(
            f"{where}: the field releases is missing; list what was released, for example "
            f"releases: [{{region: eu, joint: [{next(iter(runs))}]}}].{instead}"
        )
    relation = NeighboringRelation(file.neighboring_relation)
    told = tuple(_told(entry, runs, relation) for entry in file.releases)
    regions = sorted({each.region for each in told})

    def figure(some: Sequence[Told]) -> Figure:
        return _figure(some, relation, file.delta, of_some=len(some) < len(told))

    return LedgerAccount(
        delta=file.delta,
        relation=relation,
        releases=told,
        alone=tuple(figure([each]) for each in told),
        together=figure(told),
        by_region={region: figure([each for each in told if each.region == region]) for region in regions},
    )


def _told(entry: PastReleaseEntry, runs: Mapping[str, Run], relation: NeighboringRelation) -> Told:
    release = described(entry, runs, relation)
    names = [run.name for run in release.runs]
    return Told(
        region=entry.region,
        release=release,
        drawn=entry.drawn,
        past=PastRelease(
            region=entry.region,
            outcomes=_outcomes(release),
            drawn=None if entry.drawn is None else names.index(entry.drawn),
        ),
    )


def _outcomes(release: Release) -> tuple[Outcome, ...]:
    """What the release may show; of a run that is drawn, all its steps."""
    if release.kind == "random_selection":
        shares = zip(release.weights or (), release.trajectories, strict=True)
        return tuple(Outcome(probability=share, runs=(run,)) for share, run in shares)
    return (
        Outcome(
            probability=1.0,
            runs=release.trajectories,
            weights=release.weights,
            fresh_noise=release.fresh_noise,
        ),
    )


def _figure(told: Sequence[Told], relation: NeighboringRelation, delta: float, *, of_some: bool) -> Figure:
    bound = epsilon = reason = None
    try:
        bound = cumulative([each.past for each in told], relation)
        found = bound.epsilon(delta)
        if math.isfinite(found):
            epsilon = found
        else:
            reason = no_finite_epsilon(
                {run.name: run for each in told for run in each.possible_runs}.values()
            )
    except RemergeError as error:
        reason = error.message
    return Figure(bound=bound, epsilon=epsilon, reason=reason, of_some=of_some)
