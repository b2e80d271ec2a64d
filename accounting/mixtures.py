"""Mixtures of merges: release one of several averages, drawn by fixed weights.

A merged model is itself a candidate with a privacy profile of its own, so random selection over merges is sound
(the hockey-stick divergence is jointly convex), contains random selection and linear combination, and uses up
budgets that either misses. Of the infinitely many merges a pool is laid out: every run alone, pairs, and the
best average at budgets below and above the one asked for. The exact linear program of random selection chooses
among them; then averages at budgets near those chosen are added, and it chooses again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accounting import gaussian
from accounting.ascent import SOURCE_PAIRED
from accounting.averages import (
    Averaging,
    averaging_of,
    best_set,
    families,
    merged_worth,
    on_simplex,
)
from accounting.bounds import WEIGHTS_BLIND, WEIGHTS_FREE, Bound
from accounting.budget import LARGEST_EPSILON, NeighboringRelation, PrivacyBudget
from accounting.linear_combination import inverse_variance_weights
from accounting.members import Member, epsilon_within, least_bound
from accounting.plan import Component, Mechanism, expected_weights
from accounting.random_selection import random_selection_profile, solve_random_selection
from accounting.release import Release

SOURCE = (
    "arXiv 2604.20985, random selection, with merged models as the candidates: the hockey-stick divergence is "
    "jointly convex"
)
MERGE_DRAWN = (
    "One of the stated merges is released, drawn once with the stated weights from a secure source; everybody may "
    "learn which one it was. A draw that failed its check is a release of its own: whoever draws again counts both."
)

_RATIOS = (0.4, 0.6, 0.75, 0.87, 1.0, 1.15, 1.35, 1.7, 2.2, 3.0)  # of the budget's mu
_NEAR = (0.06, 0.02, 0.006)  # relative changes of mu round a chosen merge, one refinement each
_MOST_PAIRS = 66
_EQUAL = 1e-9  # relative difference of expected worths that does not count


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge in the pool."""

    weights: tuple[tuple[float, Member], ...]  # lambda > 0
    fresh_noise: float
    worth: float
    bound: Bound | None  # None: certified only once it is chosen
    mu: float  # where bound is None: as the search sees it

    def deltas(self, epsilon: float) -> tuple[float, float]:
        if self.bound is not None:
            return self.bound.profile.deltas(epsilon)
        value = gaussian.delta(self.mu, epsilon)
        return value, value

    def epsilon(self, delta: float) -> float:
        return gaussian.epsilon(self.mu, delta) if self.bound is None else self.bound.epsilon(delta)


def mixture_bound(parts: Sequence[tuple[float, Bound]]) -> Bound:
    """The bound "mixture" of releasing one of several merges, drawn by weight.

    Args:
        parts: (probability, the merge's own sound bound), all under one neighbouring relation.
    """
    paired = any(SOURCE_PAIRED in bound.source for _, bound in parts)
    sentences = [s for _, bound in parts for s in bound.assumptions if s not in (WEIGHTS_BLIND, WEIGHTS_FREE)]
    return Bound(
        name="mixture",
        profile=random_selection_profile([w for w, _ in parts], [bound.profile for _, bound in parts]),
        assumptions=(*dict.fromkeys(sentences), WEIGHTS_BLIND, MERGE_DRAWN),
        source=f"{SOURCE}; {SOURCE_PAIRED}" if paired else SOURCE,
    )


def best_mixture(
    members: Sequence[Member],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    *,
    average: Release | None,
    cap: float | None = None,
    fresh_allowed: bool = False,
) -> Release | None:
    """The mixture of the best expected worth.

    Args:
        average: the best linear combination within the budget, if there is one.
        cap: nats; merges whose own epsilon at the budget's delta exceeds it are never drawn.
    """
    by_name = {member.name: member for member in members}
    singles = [_single(member) for member in sorted(members, key=lambda member: member.order)]
    if average is not None:
        singles.append(_of_release(average, by_name))
    certain = [m for m in singles if cap is None or m.epsilon(budget.delta) <= cap]
    pool = list(certain)
    averagings = [a for runs in families(members, budget, relation) if (a := averaging_of(runs, relation))]
    target = gaussian.mu_for(budget.epsilon, budget.delta)

    def add(found: Iterable[Merged]) -> None:
        pool.extend(m for m in found if cap is None or m.epsilon(budget.delta) <= cap)

    for averaging in averagings:
        add(_pairs(averaging))
        for ratio in _RATIOS:
            add(_best_at(averaging, ratio * target, fresh_allowed))
    if not averagings:
        add(_sets(members, budget, relation, by_name))
    chosen = _program(pool, budget)
    for step in _NEAR:
        mus = [merged.mu for _, merged in chosen if merged.bound is None]
        for averaging, mu, sign in itertools.product(averagings, mus, (-1, 1)):
            add(_best_at(averaging, mu * (1 + sign * step), fresh_allowed))
        chosen = _program(pool, budget)
    exact = [m for _, merged in chosen if (m := _certified(merged, budget, relation, cap)) is not None]
    return _release(_program([*exact, *certain], budget), budget, [m.name for m in members])


def _program(pool: Sequence[Merged], budget: PrivacyBudget) -> list[tuple[float, Merged]]:
    """The best weights over a pool; none where nothing fits."""
    if not pool:
        return []
    deltas = np.array([merged.deltas(budget.epsilon) for merged in pool]).T
    weights = solve_random_selection(deltas, np.array([merged.worth for merged in pool]), budget.delta)
    if weights is None:
        return []
    chosen = [(float(w), merged) for w, merged in zip(weights, pool, strict=True) if w > 0]
    value = math.fsum(weight * merged.worth for weight, merged in chosen)
    fitting = [m for m, column in zip(pool, deltas.T, strict=True) if column.max() <= budget.delta]
    alone = max(fitting, key=lambda merged: merged.worth, default=None)
    if alone is not None and alone.worth >= value - _EQUAL * abs(value):  # no draw for nothing
        return [(1.0, alone)]
    return chosen


def _release(
    chosen: Sequence[tuple[float, Merged]], budget: PrivacyBudget, names: Sequence[str]
) -> Release | None:
    parts = [(weight, merged.bound) for weight, merged in chosen if merged.bound is not None]
    if not parts:
        return None
    bound = mixture_bound(parts)
    own = epsilon_within(bound, budget)
    if own is None:
        return None
    components = tuple(
        Component(
            name=f"merge-{number}",
            weight=weight,
            weights={member.name: share for share, member in _ordered(merged, names)},
            bound=part,
            epsilon=part.epsilon(budget.delta),
            fresh_noise=merged.fresh_noise,
        )
        for number, ((weight, merged), (_, part)) in enumerate(zip(chosen, parts, strict=True), start=1)
    )
    expected = expected_weights(components)
    used = [name for name in names if name in expected]
    shares = on_simplex(np.array([expected[name] for name in used]))
    return Release(
        mechanism=Mechanism.MIXTURE,
        weights={name: max(share, 5e-324) for name, share in zip(used, shares, strict=True)},
        bound=bound,
        epsilon=own,
        objective=math.fsum(weight * merged.worth for weight, merged in chosen),
        components=components,
    )


def _ordered(merged: Merged, names: Sequence[str]) -> list[tuple[float, Member]]:
    return sorted(merged.weights, key=lambda pair: names.index(pair[1].name))


def _single(member: Member) -> Merged:
    return Merged(((1.0, member),), 0.0, member.worth, member.bound, math.inf)


def _of_release(release: Release, by_name: Mapping[str, Member]) -> Merged:
    weights = tuple((weight, by_name[name]) for name, weight in release.weights.items())
    return Merged(weights, release.fresh_noise, release.objective, release.bound, math.inf)


def _merged(averaging: Averaging, weights: Sequence[float], fresh_noise: float) -> Merged:
    used = tuple((w, run) for w, run in zip(weights, averaging.runs, strict=True) if w > 0)
    costs = averaging.problem.costs
    square = float(costs.squares(np.array([weights]), (fresh_noise * averaging.scale) ** 2)[0])
    return Merged(used, fresh_noise, merged_worth(used, fresh_noise), None, math.sqrt(square))


def _best_at(averaging: Averaging, mu: float, fresh_allowed: bool) -> Iterable[Merged]:
    """The best average with a given mu, by a quick search."""
    first = next(averaging.merges(mu * mu, fresh_allowed=fresh_allowed, quick=True), None)
    if first is not None:
        yield _merged(averaging, *first)


def _pairs(averaging: Averaging) -> Iterable[Merged]:
    """Pairs of runs with weights of least noise."""
    count = len(averaging.runs)
    for pair in itertools.islice(itertools.combinations(range(count), 2), _MOST_PAIRS):
        weights = np.zeros(count)
        weights[list(pair)] = inverse_variance_weights([averaging.runs[i].variance for i in pair])
        yield _merged(averaging, on_simplex(weights), 0.0)


def _sets(
    members: Sequence[Member],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    by_name: Mapping[str, Member],
) -> Iterable[Merged]:
    """Averages of runs that only the joint release covers, at a few larger budgets."""
    for ratio in (1.3, 1.8):
        larger = PrivacyBudget(epsilon=min(ratio * budget.epsilon, LARGEST_EPSILON), delta=budget.delta)
        for runs in families(members, larger, relation):
            found = best_set(runs, larger, relation)
            if found is not None:
                yield _of_release(found, by_name)


def _certified(
    merged: Merged, budget: PrivacyBudget, relation: NeighboringRelation, cap: float | None
) -> Merged | None:
    """The same merge under its least bound, if it may still be drawn."""
    if merged.bound is not None:
        return merged
    bound = least_bound(
        [member.candidate.trajectory for _, member in merged.weights],
        [weight for weight, _ in merged.weights],
        relation,
        budget.delta,
        merged.fresh_noise,
    )
    if bound is None or (cap is not None and not bound.epsilon(budget.delta) <= cap):
        return None
    return Merged(merged.weights, merged.fresh_noise, merged.worth, bound, math.inf)
