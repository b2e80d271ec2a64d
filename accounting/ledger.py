"""Many releases from one data lineage: what somebody knows who holds all of them and their certificates.

Certificates of single releases do not add up: two nearly equal averages of the same models determine both models.
So a release stands for every executed step of the models it was made of, and all of these are released jointly.
Three things are finer than that, and stay sound:

- Releases fall into groups that share no step, whose noises are independent. A group with one average in it, and
  nothing else, is bounded by that average's own theorem (`generic`, `shifted`); the groups then compose.
- A random selection whose draw is known counts as what was drawn. One whose draw is still to come counts as its
  mixture: for each outcome all that is known then, weighted by its probability.

- Where all that is known are merges of tasks with disjoint records, each record is in one task's steps alone, and the
  figure is that of `parallel_tasks` of everything known. That the tasks are disjoint was checked for the tasks of one
  release together, so a release of other tasks, or of the same tasks on other rows, makes it the joint figure again.

Where a design may depend on earlier draws (the certificate names the index drawn), weighting past draws by their
probabilities is wrong: one half over two runs of mu 0.8, then asking for the other one, gives delta 0.175 at
epsilon 1 and not 0.119. So past draws always count as realised; several draws still to come must have been fixed
before any of them.

Source: composition (Dong, Roth and Su 2022, corollary 3.3; Zhu, Dong and Wang 2022); joint convexity of the
hockey-stick divergence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accounting.ascent import with_paired_source
from accounting.bounds import Bound, run_assumptions
from accounting.budget import NeighboringRelation, require_non_negative
from accounting.errors import AccountingError, IncompatibleCandidates, InvalidInput
from accounting.joint_release import executed_steps
from accounting.linear_combination import generic
from accounting.parallel_tasks import parallel_tasks
from accounting.pld import ComposedProfile, PoissonGroup, composed_profile, full_batch_mu, poisson_groups
from accounting.profile import GaussianProfile, PrivacyProfile, require_simplex
from accounting.random_selection import random_selection_profile
from accounting.rounding import ULP, root_up, sum_up
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Trajectory, union_of_segments

SOURCE = (
    "Dong, Roth and Su 2022, corollary 3.3; Zhu, Dong and Wang 2022; joint convexity over the draws to come"
)
DRAWS_REALISED = (
    "Draws that were made count as what was drawn: the figure is conditional on them, and holds also where later "
    "releases were designed by somebody who had seen them."
)
DRAWS_BLIND = (
    "The probabilities of draws still to come were all fixed before any of those draws, and without looking at "
    "released parameters."
)
FILTER = (
    "Where runs were trained, or releases chosen, after earlier releases were seen, the figure is what has been "
    "spent, to be held against a budget that was fixed beforehand."
)

_MOST_UNIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One thing that a release may be: everything about its runs, or one average of them."""

    probability: float  # in (0, 1]
    runs: tuple[Trajectory, ...]
    weights: tuple[float, ...] | None = None  # of an average, on the simplex; None: all runs may be known
    fresh_noise: float = 0.0  # standard deviation per coordinate added to the average, once
    tasks: tuple[str, ...] | None = None  # by run, where tasks with *disjoint* records were merged; else None

    def __post_init__(self) -> None:
        if not self.runs:
            raise InvalidInput("An outcome of a release needs at least one run.")
        if not 0 < self.probability <= 1:
            raise InvalidInput(f"A probability must lie in (0, 1], but {self.probability!r} was given.")
        require_non_negative("fresh_noise", self.fresh_noise)
        if self.weights is not None:
            require_simplex(self.weights)
            if len(self.weights) != len(self.runs):
                raise InvalidInput(f"{len(self.weights)} weights were given for {len(self.runs)} runs.")

        if self.tasks is not None:
            if len(self.tasks) != len(self.runs) or not all(isinstance(t, str) and t for t in self.tasks):
                raise InvalidInput("Name one task for each run of an outcome, or none.")
            if self.weights is not None:
                raise InvalidInput(
                    "A merge of tasks keeps each task's own parameters, so all of its runs may be known: leave its "
                    "weights out."
                )

    @property
    def segment_ids(self) -> frozenset[str]:
        return frozenset(segment.id for run in self.runs for segment in run.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRelease:
    """A release from the lineage: where to, what it could have been, and what it was."""

    region: str
    outcomes: tuple[Outcome, ...]  # probabilities sum to 1
    drawn: int | None = None  # index into outcomes; None for a draw that is still to come

    def __post_init__(self) -> None:
        require_simplex(tuple(outcome.probability for outcome in self.outcomes))
        if self.drawn is not None and not 0 <= self.drawn < len(self.outcomes):
            raise InvalidInput("What was drawn is not among the release's outcomes.")

    @property
    def possible(self) -> tuple[Outcome, ...]:
        """What it may be, given the draw if it was made."""
        return self.outcomes if self.drawn is None else (self.outcomes[self.drawn],)


def cumulative(releases: Sequence[PastRelease], relation: NeighboringRelation) -> Bound:
    """Bound what all releases together tell about a record.

    Args:
        releases: of one lineage, at least one, in any order. Those without a draw are taken as fixed before any
            of their draws. For somebody who sees one region only, its releases alone; that figure holds where they
            were chosen without looking at parameters released elsewhere.
        relation: the recorded neighbouring relation of every run.

    Returns:
        The bound "ledger": an upper bound, with `mu` where everything is Gaussian and no draw is to come.

    Raises:
        IncompatibleCandidates: runs of different lineages, units or relations, or edited segments.
        AccountingError: draws still to come could end in more than 4,096 ways, or a composition needs too many
            grid points.
        InvalidInput: no release at all.
    """
    if not releases:
        raise InvalidInput("A cumulative figure needs at least one release.")
    runs = [run for release in releases for outcome in release.possible for run in outcome.runs]
    executed_steps(runs, relation)
    worlds = _worlds(releases)
    parts = [(probability, *_known(outcomes, relation)) for probability, outcomes in worlds]
    profiles = [profile for _, profile, _ in parts]
    profile = random_selection_profile([probability for probability, *_ in parts], profiles)
    assumptions = list(run_assumptions(runs, relation))
    assumptions += [text for *_, texts in parts for text in texts]
    if any(len(release.outcomes) > 1 and release.drawn is not None for release in releases):
        assumptions.append(DRAWS_REALISED)
    if any(len(release.possible) > 1 for release in releases):
        assumptions.append(DRAWS_BLIND)
    return Bound(
        name="ledger",
        profile=profile,
        assumptions=(*dict.fromkeys(assumptions), FILTER),
        source=with_paired_source(SOURCE, runs),
        mu=profile.mu if isinstance(profile, GaussianProfile) else None,
    )


def _worlds(releases: Sequence[PastRelease]) -> list[tuple[float, tuple[Outcome, ...]]]:
    """What may be known in the end, each with its probability; worlds in which the same is known are one."""
    worlds: dict[frozenset[object], tuple[list[float], tuple[Outcome, ...]]] = {frozenset(): ([1.0], ())}
    for number, release in enumerate(releases):
        grown: dict[frozenset[object], tuple[list[float], tuple[Outcome, ...]]] = {}
        for key, (chances, known) in worlds.items():
            for outcome in release.possible:
                share = 1.0 if len(release.possible) == 1 else outcome.probability
                # Fresh noise is drawn anew by each release, so two such averages are never the same.
                same = _key(outcome)
                name = same if outcome.fresh_noise == 0 else (number, outcome.fresh_noise, same)
                is_known = name in key
                entry = grown.setdefault(key | {name}, ([], known if is_known else (*known, outcome)))
                entry[0].append(math.fsum(chances) * share)
        worlds = grown
        if len(worlds) > _MOST_UNIONS:
            raise AccountingError(
                f"The draws still to come may end in more than {_MOST_UNIONS} ways; state what was drawn in the past "
                "releases, or account fewer draws to come together."
            )
    totals = [math.fsum(chances) for chances, _ in worlds.values()]
    scale = math.fsum(totals)
    return [
        (total / scale if len(worlds) > 1 else 1.0, known)
        for total, (_, known) in zip(totals, worlds.values(), strict=True)
    ]


def _key(outcome: Outcome) -> object:
    """Which average it is, or where all runs may be known, which steps: a later checkpoint has the same segments."""
    if outcome.weights is None:
        steps = frozenset((segment.id, segment.steps) for segment in union_of_segments(outcome.runs))
        return steps if outcome.tasks is None else (steps, _rows_of(outcome))
    tips = [run.segments[-1].id for run in outcome.runs]
    lengths = [run.steps for run in outcome.runs]
    return tuple(sorted(zip(tips, lengths, outcome.weights, strict=True)))


def _known(
    outcomes: Sequence[Outcome], relation: NeighboringRelation
) -> tuple[PrivacyProfile, tuple[str, ...]]:
    """The profile of knowing all these outcomes, and what it assumes beside the runs' own assumptions."""
    parallel = _of_disjoint_tasks(outcomes, relation)
    if parallel is not None:
        return parallel.profile, parallel.assumptions
    squares: list[float] = []
    groups: list[PoissonGroup] = []
    texts: tuple[str, ...] = ()
    for group in _groups(outcomes):
        segments = executed_steps([run for outcome in group for run in outcome.runs], relation)
        if any(segment.noise_multiplier == 0 for segment in segments):
            return GaussianProfile(mu=math.inf), ()
        mu, poisson = full_batch_mu(segments, relation), poisson_groups(segments)
        if len(group) == 1 and not poisson:
            for bound in _of_average(group[0], relation):
                if bound.mu is not None and bound.mu < mu * (1 - 1e-9):
                    mu, texts = bound.mu, (*texts, *bound.assumptions)
        squares.append(mu * mu * (1 + 4 * ULP))
        groups += poisson
    total = root_up(sum_up(squares))
    if not groups:
        return GaussianProfile(mu=total), texts
    steps: dict[tuple[float, float], int] = {}
    for each in groups:
        key = (each.noise_multiplier, each.sampling_probability)
        steps[key] = steps.get(key, 0) + each.steps
    gathered = tuple(
        sorted(
            PoissonGroup(noise_multiplier=noise, sampling_probability=q, steps=count)
            for (noise, q), count in steps.items()
        )
    )
    composed = composed_profile(total, gathered, relation)
    if isinstance(composed, GaussianProfile):
        return composed, texts
    smallest = composed.smallest_delta
    return ComposedProfile(mu=total, groups=gathered, relation=relation, smallest=smallest), texts


def _rows_of(outcome: Outcome) -> frozenset[tuple[str, str]]:
    """Each task with the digest of its rows."""
    return frozenset((t, run.data_digest) for t, run in zip(outcome.tasks or (), outcome.runs, strict=False))


def _of_disjoint_tasks(outcomes: Sequence[Outcome], relation: NeighboringRelation) -> Bound | None:
    """Parallel composition, where all outcomes are merges of tasks that one of them has all of; else None."""
    if any(outcome.tasks is None for outcome in outcomes):
        return None
    rows = [_rows_of(outcome) for outcome in outcomes]
    if frozenset[tuple[str, str]]().union(*rows) not in rows:
        return None
    runs = [run for outcome in outcomes for run in outcome.runs]
    tasks = [task for outcome in outcomes for task in outcome.tasks or ()]
    try:
        return parallel_tasks(runs, relation, tasks)
    except IncompatibleCandidates:  # the same rows or steps under two names: not disjoint after all
        return None


def _groups(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes that share a step, directly or through others, are in one group."""
    groups: list[tuple[set[str], list[Outcome]]] = []
    for outcome in outcomes:
        ids, members = set(outcome.segment_ids), [outcome]
        apart = []
        for group in groups:
            if group[0] & ids:
                ids |= group[0]
                members = [*group[1], *members]
            else:
                apart.append(group)
        groups = [*apart, (ids, members)]
    return [members for _, members in groups]


def _of_average(outcome: Outcome, relation: NeighboringRelation) -> list[Bound]:
    """The theorems of one average that cover it."""
    found = []
    if outcome.weights is not None:
        for theorem in (generic, shifted):
            try:
                found.append(theorem(outcome.runs, outcome.weights, relation, outcome.fresh_noise))
            except (IncompatibleCandidates, AccountingError, InvalidInput):
                continue  # not covered: the joint release is
    return found
