"""Every bound that applies to a release, side by side, and the least sound one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from accounting.bounds import INDEX_REVEALED, WEIGHTS_BLIND, Bound
from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError, IncompatibleCandidates, RemergeError
from accounting.joint_release import joint_release, single_run
from accounting.linear_combination import generic, stepwise
from accounting.members import CLEARLY
from accounting.other_bounds import joint_rdp
from accounting.profile import PrivacyProfile
from accounting.random_selection import (
    SOURCE_PLD,
    random_selection_bound,
    random_selection_profile,
    random_selection_rdp_bound,
)
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Trajectory
from tasks.account_composition import advanced, assumptions_of, basic, no_finite_epsilon
from tasks.account_runs import Release, Run

KIND_WORDS = {
    "linear_combination": "linear combination",
    "random_selection": "random selection",
    "joint": "joint release",
    "mixture": "mixture of merges",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One bound's answer: an epsilon, or the reason why there is none."""

    name: str
    bound: Bound | None  # None: it does not apply
    epsilon: float | None  # nats, finite, at the account's delta
    reason: str | None  # a sentence, where there is no epsilon
    covers_kind: bool  # whether it is about releases of this kind at all

    @property
    def mu(self) -> float | None:
        """Where the bound is that of a Gaussian mechanism."""
        return self.bound.mu if self.bound is not None and self.epsilon is not None else None

    @property
    def sound(self) -> bool:
        return self.epsilon is not None and self.bound is not None and self.bound.sound_for_dp_sgd


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What every accountant says of one release."""

    release: Release
    delta: float
    lines: Mapping[str, Line]  # by name, all of `BOUNDS` in their order

    @property
    def certified(self) -> Line | None:
        """The least of the sound bounds; among nearly equal ones that with the weakest assumptions."""
        best: Line | None = None
        for line in self.lines.values():
            if line.sound and line.epsilon is not None:
                better = best is None or line.epsilon < (best.epsilon or 0.0) * (1 - CLEARLY)
                best = line if better else best
        return best


def account_of(release: Release, delta: float) -> Account:
    """Evaluate every bound of a release at `delta`."""
    lines = {name: _line(name, release, delta) for name in BOUNDS}
    return Account(release=release, delta=delta, lines=lines)


def with_certified(account: Account, bound: Bound, epsilon: float) -> Account:
    """The account with the line of the bound that a plan rests on, as the plan states it."""
    line = Line(name=bound.name, bound=bound, epsilon=epsilon, reason=None, covers_kind=True)
    return replace(account, lines={**account.lines, bound.name: line})


def bound_of(name: str, release: Release, delta: float) -> Bound:
    """One bound by its name.

    Raises:
        RemergeError: it does not apply to this release, with the reason.
    """
    kinds, compute = BOUNDS[name]
    if release.kind not in kinds:
        covered = " or ".join(KIND_WORDS[kind] for kind in kinds)
        raise IncompatibleCandidates(f"It covers a {covered} only, and this is a {KIND_WORDS[release.kind]}.")
    return compute(release, delta)


def profile_of(run: Run, relation: NeighboringRelation) -> PrivacyProfile:
    """What is known of a run released on its own."""
    if isinstance(run.known_by, Trajectory):
        return single_run(run.known_by, relation).profile
    return run.known_by


def epsilon_of(bound: Bound, release: Release, delta: float) -> float:
    """nats, finite.

    Raises:
        AccountingError: there is no finite epsilon, or delta is below what the bound can resolve.
    """
    epsilon = bound.epsilon(delta)
    if not math.isfinite(epsilon):
        raise AccountingError(no_finite_epsilon(release.runs))
    return epsilon


def _line(name: str, release: Release, delta: float) -> Line:
    bound = epsilon = reason = None
    try:
        bound = bound_of(name, release, delta)
        epsilon = epsilon_of(bound, release, delta)
    except RemergeError as error:
        reason = error.message
    covers = release.kind in BOUNDS[name][0]
    return Line(name=name, bound=bound, epsilon=epsilon, reason=reason, covers_kind=covers)


def _known_only(release: Release) -> None:
    if release.stated:
        raise IncompatibleCandidates(
            f"It needs every run step by step, and of {', '.join(release.stated)} only a stated guarantee is known."
        )


def _joint(release: Release, delta: float) -> Bound:
    _known_only(release)
    return joint_release(release.trajectories, release.relation)


def _joint_rdp(release: Release, delta: float) -> Bound:
    _known_only(release)
    return joint_rdp(release.trajectories, release.relation, delta)


def _generic(release: Release, delta: float) -> Bound:
    return generic(release.trajectories, release.weights or (), release.relation, release.fresh_noise)


def _shifted(release: Release, delta: float) -> Bound:
    return shifted(release.trajectories, release.weights or (), release.relation, release.fresh_noise)


def _stepwise(release: Release, delta: float) -> Bound:
    if release.fresh_noise:
        raise IncompatibleCandidates("The published step-by-step formula knows no fresh noise.")
    return stepwise(release.trajectories, release.weights or (), release.relation)


def _selection_pld(release: Release, delta: float) -> Bound:
    weights = release.weights or ()
    if not release.stated:
        return random_selection_bound(weights, release.trajectories, release.relation)
    profiles = [profile_of(run, release.relation) for run in release.runs]
    return Bound(
        name="random_selection_pld",
        profile=random_selection_profile(weights, profiles),
        assumptions=(*assumptions_of(release), WEIGHTS_BLIND, INDEX_REVEALED),
        source=SOURCE_PLD,
    )


def _selection_rdp(release: Release, delta: float) -> Bound:
    _known_only(release)
    return random_selection_rdp_bound(release.weights or (), release.trajectories, release.relation, delta)


_ALL = tuple(KIND_WORDS)
Computation = Callable[[Release, float], Bound]

# Which releases each bound covers, and how it is computed; those with the weakest assumptions first.
BOUNDS: Mapping[str, tuple[tuple[str, ...], Computation]] = {
    "joint": (_ALL, _joint),
    "generic": (("linear_combination",), _generic),
    "shifted": (("linear_combination",), _shifted),
    "stepwise": (("linear_combination",), _stepwise),
    "random_selection_pld": (("random_selection",), _selection_pld),
    "random_selection_rdp": (("random_selection",), _selection_rdp),
    "joint_rdp": (_ALL, _joint_rdp),
    "basic_composition": (_ALL, basic),
    "advanced_composition": (_ALL, advanced),
}
