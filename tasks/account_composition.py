"""Composition theorems for a release: baselines for known runs, and all there is where a guarantee is stated.

Without stated guarantees each run enters with its own (epsilon, delta), as the theorems are usually quoted.
With them, the runs known step by step are accounted together first and enter as one mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from accounting.bounds import WEIGHTS_FREE, Bound, run_assumptions, unit_sentence
from accounting.budget import LEAST_DELTA
from accounting.errors import AccountingError
from accounting.joint_release import advanced_composition, basic_composition, joint_release, single_run
from accounting.profile import StatedProfile
from tasks.account_runs import Release, Run

SOURCE_BASIC = "Dwork et al. 2006: epsilons and deltas add up"
SOURCE_ADVANCED = "Kairouz, Oh and Viswanath 2015, theorem 3.5"
INDEPENDENT_NOISE = "The noise of different runs is independent."
_BELOW = 1 - 1e-14  # so that shares of delta, added up in floating point, do not exceed it


def basic(release: Release, delta: float) -> Bound:
    """The bound "basic_composition" of releasing all runs.

    Raises:
        AccountingError: one run only, no delta left beside the stated ones, or no finite epsilon.
    """
    parts = _guarantees(release, delta, slack=0.0)
    return _bound("basic_composition", release, basic_composition(parts)[0], delta, SOURCE_BASIC)


def advanced(release: Release, delta: float) -> Bound:
    """The bound "advanced_composition" of releasing all runs; half of what is left of delta is its slack.

    Raises:
        AccountingError: as `basic`.
    """
    slack = surplus(release, delta) * (0.5 if release.known else 1.0) * _BELOW
    if not slack > 0:
        raise AccountingError("The stated deltas leave no delta for the slack of advanced composition.")
    _require_representable(slack, "slack")
    parts = _guarantees(release, delta, slack=slack)
    epsilon, total = advanced_composition(parts, slack)
    if total > delta:
        raise AccountingError(
            f"Advanced composition holds only at delta {total:.6g}, above the one asked for."
        )
    return _bound("advanced_composition", release, epsilon, delta, SOURCE_ADVANCED)


def surplus(release: Release, delta: float) -> float:
    """What the stated guarantees leave of delta; decimals in the file are taken as written.

    Raises:
        AccountingError: nothing is left, but something is needed.
    """
    exact = Fraction(repr(delta)) - sum(
        (Fraction(repr(stated.stated_delta)) for stated in release.stated.values()), Fraction(0)
    )
    if exact < 0 or (exact == 0 and release.known):
        raise AccountingError(
            f"The stated deltas add up to {float(Fraction(repr(delta)) - exact):.3g}, which leaves nothing of "
            f"the delta {delta:g} asked for; ask for a larger delta."
        )
    return float(exact)


def assumptions_of(release: Release) -> tuple[str, ...]:
    """What must be true of the runs themselves, known and stated."""
    own: tuple[str, ...] = (unit_sentence("record", release.relation),)
    if release.known:
        own = run_assumptions(release.trajectories, release.relation)
    believed = [
        f"Run {name} has epsilon {stated.stated_epsilon:g} at delta {stated.stated_delta:g} under "
        f"{release.relation}: the file states it, and nothing here could check it."
        for name, stated in release.stated.items()
    ]
    return (*own, *believed)


def _guarantees(release: Release, delta: float, *, slack: float) -> list[tuple[float, float]]:
    """(epsilon, delta) of each mechanism composed; the deltas and the slack add up to at most `delta`."""
    if len(release.runs) == 1 and not release.stated:
        raise AccountingError("Composition needs at least two runs.")
    left = (surplus(release, delta) - slack) * _BELOW
    if not release.stated:
        share = _require_representable(left / len(release.known), "share of each run")
        parts = [(single_run(t, release.relation).epsilon(share), share) for t in release.trajectories]
    elif release.known:
        _require_representable(left, "share of the known runs")
        parts = [(joint_release(release.trajectories, release.relation).epsilon(left), left)]
        parts += [(stated.stated_epsilon, stated.stated_delta) for stated in release.stated.values()]
    else:
        more = left / len(release.stated)
        parts = [(s.epsilon(s.stated_delta + more), s.stated_delta + more) for s in release.stated.values()]
    if not all(math.isfinite(epsilon) for epsilon, _ in parts):
        raise AccountingError(no_finite_epsilon(release.runs))
    return parts


def _require_representable(share: float, what: str) -> float:
    if share < LEAST_DELTA:
        raise AccountingError(
            f"Composition splits the delta asked for, and its {what} would be below {LEAST_DELTA:g}, the least that "
            "is computed with; ask for a larger delta."
        )
    return share


def no_finite_epsilon(runs: Iterable[Run]) -> str:
    """Why there is none, as a sentence."""
    silent = [
        run.name
        for run in runs
        if run.trajectory and any(segment.noise_multiplier == 0 for segment in run.trajectory.segments)
    ]
    if silent:
        return f"No finite epsilon: a run without noise ({', '.join(silent)})."
    return "No finite epsilon at this delta: there is far too little noise."


def _bound(name: str, release: Release, epsilon: float, delta: float, source: str) -> Bound:
    extra = (INDEPENDENT_NOISE,) if release.stated else ()
    return Bound(
        name=name,
        profile=StatedProfile(stated_epsilon=epsilon, stated_delta=delta),
        assumptions=(*assumptions_of(release), *extra, WEIGHTS_FREE),
        source=source,
    )
