"""The best random selection, certified by evaluating its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.members import Member, epsilon_within
from accounting.plan import Mechanism
from accounting.profile import deltas_at
from accounting.random_selection import random_selection_bound, solve_random_selection
from accounting.release import Release


def best_draw(
    members: Sequence[Member], budget: PrivacyBudget, relation: NeighboringRelation
) -> Release | None:
    """The random selection of least expected noise variance, or of largest expected utility."""
    if not members:
        return None
    ordered = sorted(members, key=lambda member: member.order)
    deltas = deltas_at([member.bound.profile for member in ordered], budget.epsilon)
    weights = solve_random_selection(deltas, np.array([member.worth for member in ordered]), budget.delta)
    if weights is None:
        return None
    used = [(float(w), member) for w, member in zip(weights, ordered, strict=True) if w > 0]
    bound = random_selection_bound(
        [w for w, _ in used], [member.candidate.trajectory for _, member in used], relation
    )
    own = epsilon_within(bound, budget)
    if own is None:
        return None
    return Release(
        mechanism=Mechanism.RANDOM_SELECTION,
        weights={member.name: w for w, member in used},
        bound=bound,
        epsilon=own,
        objective=math.fsum(w * member.worth for w, member in used),
    )
