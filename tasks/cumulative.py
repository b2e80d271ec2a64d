"""What a lineage's releases cost together: the figures for a certificate, and for whoever reads the ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accounting.budget import NeighboringRelation
from accounting.certificate_parts import Cumulative
from accounting.errors import AccountingError, IncompatibleCandidates, RemergeError
from accounting.ledger import PastRelease, cumulative
from accounting.plan import Plan
from accounting.trajectory import Candidate, parse_relation
from infra.documents import Draw, LedgerEntry, Policy
from tasks.past import Past, outcomes_of_plan, past_of


def figures_after(
    past: Past,
    policy: Policy,
    plan: Plan,
    draw: Draw | None,
    candidates: Sequence[Candidate],
    consulted: Sequence[str],
) -> Cumulative | None:
    """The cumulative figures after a plan was carried out, its draw known; see `figures`."""
    new = PastRelease(
        region=policy.region,
        outcomes=outcomes_of_plan(plan, candidates, consulted),
        drawn=None if draw is None else list(plan.outcomes).index(draw.drawn),
    )
    return figures(past, new, parse_relation(policy.neighboring_relation), policy.delta)


def figures(past: Past, new: PastRelease, relation: NeighboringRelation, delta: float) -> Cumulative | None:
    """The cumulative figures after a release, for its certificate; None where none can be computed.

    That is so where the lineage has releases under another neighbouring relation, or `delta` is too small.
    """
    here = [release for release in past.releases if release.region == new.region]
    try:
        everywhere = cumulative([*past.releases, new], relation).epsilon(delta)
        region = cumulative([*here, new], relation).epsilon(delta)
    except (AccountingError, IncompatibleCandidates):
        return None
    if not math.isfinite(everywhere):
        return None
    return Cumulative(
        epsilon_all_regions=everywhere,
        epsilon_region=region,
        delta=delta,
        releases=len(past.releases) + 1,
        after_ledger_entry=past.entries,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Cumulative epsilons of a lineage; None, and a reason, where there is no finite one."""

    everywhere: float | None  # nats
    by_region: Mapping[str, float | None]  # nats
    counts: Mapping[str, int]  # releases by region
    reason: str | None


def relations_of(releases: Sequence[PastRelease]) -> list[str]:
    """The neighbouring relations that releases were recorded under, sorted."""
    runs = (run for release in releases for outcome in release.outcomes for run in outcome.runs)
    return sorted({str(run.neighboring_relation) for run in runs})


def ledger_figures(entries: Sequence[LedgerEntry], delta: float) -> Figures:
    """What everything in a ledger costs together, over all regions and for each.

    Args:
        entries: of one lineage, oldest first, at least one.
        delta: where the epsilons are taken.
    """
    releases = past_of(entries, "").releases
    regions = sorted({release.region for release in releases})
    counts = {region: sum(release.region == region for release in releases) for region in regions}
    reasons: list[str] = []

    def epsilon(some: Sequence[PastRelease]) -> float | None:
        found_relations = relations_of(some)
        if len(found_relations) > 1:
            reasons.append(
                f"Releases under different neighbouring relations ({', '.join(found_relations)}) are never added up."
            )
            return None
        relation = parse_relation(found_relations[0])
        try:
            found = cumulative(some, relation).epsilon(delta)
        except RemergeError as error:
            reasons.append(error.message)
            return None
        if not math.isfinite(found):
            reasons.append("A run without noise was released, so there is no finite epsilon.")
            return None
        return found

    by_region = {region: epsilon([r for r in releases if r.region == region]) for region in regions}
    everywhere = epsilon(releases)
    return Figures(
        everywhere=everywhere, by_region=by_region, counts=counts, reason=reasons[0] if reasons else None
    )
