"""What other accountants say of the same release: shown beside the certified number, never instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from accounting.ascent import with_paired_source
from accounting.bounds import Bound, run_assumptions
from accounting.budget import NeighboringRelation
from accounting.errors import RemergeError
from accounting.joint_release import (
    advanced_composition,
    basic_composition,
    executed_steps,
    joint_release,
    single_run,
)
from accounting.linear_combination import generic
from accounting.plan import Mechanism, OtherBound
from accounting.random_selection import random_selection_rdp_bound
from accounting.rdp import rdp_profile
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Trajectory


def other_bounds(
    mechanism: Mechanism,
    weights: Sequence[float],
    trajectories: Sequence[Trajectory],
    relation: NeighboringRelation,
    delta: float,
    *,
    certified: str,
    fresh_noise: float = 0.0,
) -> dict[str, OtherBound]:
    """Epsilon at `delta` by every other accountant that applies, or the reason why one does not.

    Args:
        mechanism: how the runs are released.
        weights: of the runs used, all > 0, shape (runs,).
        trajectories: of the runs used, shape (runs,).
        relation: neighbouring data sets.
        delta: in (0, 1).
        certified: the name of the bound that the certificate uses; it is left out.
        fresh_noise: tau of a linear combination; the bounds of single runs do not see it.

    Returns:
        By name of the bound. The composition theorems use only each run's own (epsilon, delta).
    """
    several = len(trajectories) > 1
    computations: dict[str, Callable[[], float]] = {
        "joint": lambda: joint_release(trajectories, relation).epsilon(delta),
        "joint_rdp": lambda: joint_rdp(trajectories, relation, delta).epsilon(delta),
    }
    if mechanism is Mechanism.LINEAR_COMBINATION:
        if several or fresh_noise > 0:
            computations["generic"] = lambda: generic(trajectories, weights, relation, fresh_noise).epsilon(
                delta
            )
        if any(math.isfinite(s.update_lipschitz) for t in trajectories for s in t.segments):
            computations["shifted"] = lambda: shifted(trajectories, weights, relation, fresh_noise).epsilon(
                delta
            )
    if several and mechanism is Mechanism.RANDOM_SELECTION:
        computations["random_selection_rdp"] = lambda: random_selection_rdp_bound(
            weights, trajectories, relation, delta
        ).epsilon(delta)
    if several:
        computations["basic_composition"] = lambda: _basic(trajectories, relation, delta)
        computations["advanced_composition"] = lambda: _advanced(trajectories, relation, delta)
    return {name: _value(compute) for name, compute in computations.items() if name != certified}


def joint_rdp(trajectories: Sequence[Trajectory], relation: NeighboringRelation, delta: float) -> Bound:
    """The joint release by the Renyi accountant, on orders that serve `delta`.

    Raises:
        AccountingError: see `rdp.rdp_profile`.
    """
    return Bound(
        name="joint_rdp",
        profile=rdp_profile(executed_steps(trajectories, relation), relation, delta),
        assumptions=run_assumptions(trajectories, relation),
        source=with_paired_source(
            "Mironov 2017, proposition 1 and 7; Canonne, Kamath and Steinke 2020, proposition 12",
            trajectories,
        ),
    )


def _value(compute: Callable[[], float]) -> OtherBound:
    try:
        value = compute()
    except RemergeError as error:
        return OtherBound(reason=error.message)
    if not math.isfinite(value):
        return OtherBound(reason="There is no finite epsilon at this delta.")
    return OtherBound(epsilon=value)


def _basic(trajectories: Sequence[Trajectory], relation: NeighboringRelation, delta: float) -> float:
    share = delta / len(trajectories) * (1 - 1e-15)
    guarantees = [(single_run(t, relation).epsilon(share), share) for t in trajectories]
    return basic_composition(guarantees)[0]


def _advanced(trajectories: Sequence[Trajectory], relation: NeighboringRelation, delta: float) -> float:
    """Half of delta for the runs, half for the theorem's slack."""
    share = delta / (2 * len(trajectories)) * (1 - 1e-15)
    guarantees = [(single_run(t, relation).epsilon(share), share) for t in trajectories]
    return advanced_composition(guarantees, delta / 2)[0]
