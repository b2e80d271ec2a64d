"""Releasing every run at once: always sound, whatever is computed from the runs afterwards.

Anything computed from a set of runs (an average, TIES, Fisher merging, several merges, weights chosen by
looking at the models) is post-processing of releasing all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from accounting.ascent import ascent_of, with_paired_source
from accounting.bounds import WEIGHTS_FREE, Bound, run_assumptions
from accounting.budget import NeighboringRelation, require_non_negative, require_open_unit
from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.pld import profile_of
from accounting.profile import GaussianProfile
from accounting.rounding import sum_up, up
from accounting.trajectory import Segment, Trajectory, union_of_segments

_SOURCE_GAUSSIAN = "Dong, Roth and Su 2022, corollary 3.3: Gaussian mechanisms compose to sqrt(sum of mu^2)"
_SOURCE_PLD = "Zhu, Dong and Wang 2022: dominating pairs compose; Doroshenko et al. 2022, discretisation"


def joint_release(trajectories: Sequence[Trajectory], relation: NeighboringRelation) -> Bound:
    """Bound the release of all runs together, a shared prefix counted once.

    Args:
        trajectories: at least one; checkpoints of one run may be among them.
        relation: the neighbouring relation the claim is to be made for; must be the one recorded.

    Returns:
        Closed form (`mu` set) where all steps are full batch, a PLD otherwise. A run without noise gives
        mu = infinity, with delta 1 everywhere.

    Raises:
        IncompatibleCandidates: another relation, mixed units or lineages, edited segments, or an optimizer of
            which it is not known what its steps release.

    Source: composition; Dong, Roth and Su 2022, corollary 3.3.
    """
    segments = executed_steps(trajectories, relation)
    profile = profile_of(segments, relation)
    assumptions = run_assumptions(trajectories, relation)
    if len(trajectories) > 1:
        assumptions = (*assumptions, WEIGHTS_FREE)
    closed_form = isinstance(profile, GaussianProfile)
    return Bound(
        name="joint",
        profile=profile,
        assumptions=assumptions,
        source=with_paired_source(_SOURCE_GAUSSIAN if closed_form else _SOURCE_PLD, trajectories),
        mu=profile.mu if isinstance(profile, GaussianProfile) else None,
    )


def single_run(trajectory: Trajectory, relation: NeighboringRelation | None = None) -> Bound:
    """Bound the release of one run alone: `joint_release` of it. The recorded relation by default."""
    return joint_release((trajectory,), relation or trajectory.neighboring_relation)


def executed_steps(trajectories: Sequence[Trajectory], relation: NeighboringRelation) -> tuple[Segment, ...]:
    """The distinct executed steps of runs that may be accounted together under `relation`, as recorded.

    Their noise is to be read through `ascent.accounted_multiplier`, as `pld` and `rdp` do.

    Raises:
        IncompatibleCandidates: a run recorded for another relation, an optimizer of which it is not known what
            its steps release, or see `union_of_segments`.
        InvalidInput: no run at all.
    """
    if not trajectories:
        raise InvalidInput("At least one trajectory is needed.")
    for trajectory in trajectories:
        if trajectory.neighboring_relation is not relation:
            raise IncompatibleCandidates(
                f"A guarantee under {relation} was asked for, but a run was recorded under "
                f"{trajectory.neighboring_relation}; neighbouring relations are never mixed, so train and "
                "record candidates under the relation that the policy asks for."
            )
        for segment in trajectory.segments:
            ascent_of(segment)  # refuses steps of which it is not known how often they use a record
    return union_of_segments(tuple(trajectories))


def basic_composition(guarantees: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Sum the epsilons and the deltas of mechanisms released together.

    Args:
        guarantees: (epsilon in nats, delta) of each, finite.

    Returns:
        (epsilon, delta), rounded up.

    Source: Dwork et al. 2006.
    """
    epsilons = [require_non_negative("epsilon", epsilon) for epsilon, _ in guarantees]
    deltas = [require_open_unit("delta", delta) for _, delta in guarantees]
    return sum_up(epsilons), sum_up(deltas)


def advanced_composition(guarantees: Sequence[tuple[float, float]], slack: float) -> tuple[float, float]:
    """Compose different (epsilon_i, delta_i) by the heterogeneous advanced composition theorem.

    Args:
        guarantees: (epsilon_i in nats, delta_i) of each, finite.
        slack: the extra delta~ in (0, 1) given up for a smaller epsilon.

    Returns:
        (epsilon, 1 - (1 - slack) * prod(1 - delta_i)), rounded up: the least of the three epsilons of the
        theorem, never above basic composition.

    Source: Kairouz, Oh and Viswanath 2015, theorem 3.5.
    """
    basic, _ = basic_composition(guarantees)
    require_open_unit("slack", slack)
    epsilons = [epsilon for epsilon, _ in guarantees]
    drift = sum_up(up(math.tanh(epsilon / 2) * epsilon, 8) for epsilon in epsilons)
    squares = sum_up(up(epsilon * epsilon) for epsilon in epsilons)
    logarithm = -math.log(slack)
    second = drift + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / slack))
    third = drift + math.sqrt(2 * squares * logarithm)
    log_complement = math.log1p(-slack) + math.fsum(math.log1p(-delta) for _, delta in guarantees)
    return min(basic, up(second, 16), up(third, 16)), min(up(-math.expm1(log_complement), 16), 1.0)
