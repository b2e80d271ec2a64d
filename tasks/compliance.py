"""Does what production serves satisfy the region's current policy? Computed from documents, never stored."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from accounting.budget import NeighboringRelation
from accounting.certificate import Certificate, satisfies
from accounting.selection_rules import SCORES_UNACCOUNTED, UNACCOUNTED, VALIDATION
from accounting.words import rounded_up
from infra.documents import Policy, ReleaseManifest
from tasks.policy_merges import allows, how_made

# Rules that need nobody's word: the certificate covers what they look at. Releases made by them satisfy every policy
# whose numbers they meet; the other rules only a policy that asks for them.
COVERED_RULES = ("noise", VALIDATION)


class State(StrEnum):
    NO_RELEASE = "no release"
    COMPLIANT = "compliant"
    NON_COMPLIANT = "non-compliant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compliance:
    """The answer, and whether the live model may be read."""

    state: State
    readable: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRelease:
    """What the pointer of a region names."""

    manifest: ReleaseManifest
    certificate: Certificate


def fault_of(live: LiveRelease, policy: Policy) -> str | None:
    """Why a release does not satisfy a policy, in a sentence; None where it does.

    Only the certificate is consulted, so a release made for another policy may satisfy this one.
    """
    certificate, manifest = live.certificate, live.manifest
    if not allows(policy, certificate):
        return f"The live release was made by {how_made(certificate)}, which the policy does not allow."
    if certificate.selection not in (policy.selection, *COVERED_RULES):
        return (
            f"The live release's weights were chosen by {certificate.selection}, which the policy's selection "
            f"{policy.selection} does not allow."
        )
    if not satisfies(
        certificate,
        epsilon=policy.epsilon,
        delta=policy.delta,
        neighboring_relation=NeighboringRelation(policy.neighboring_relation),
        unit=policy.unit,
        accept_unaccounted=policy.selection == UNACCOUNTED,
    ):
        return (
            f"The live release has epsilon {rounded_up(certificate.epsilon)} at delta {certificate.delta:g} "
            f"({certificate.neighboring_relation}), which does not satisfy the policy's epsilon "
            f"{policy.epsilon:g} at delta {policy.delta:g} ({policy.neighboring_relation})."
        )
    realised = certificate.realised
    if realised is not None and (realised.delta > policy.delta or realised.epsilon > policy.cap):
        return (
            f"The candidate drawn for the live release has epsilon {rounded_up(realised.epsilon)} itself, above the "
            f"policy's realised_epsilon_cap {policy.cap:g}."
        )
    if not manifest.accuracy >= policy.min_accuracy:
        return (
            f"The live release has accuracy {manifest.accuracy:.3f}, below the policy's min_accuracy "
            f"{policy.min_accuracy:g}."
        )
    return None


def assess(
    policy: Policy, live: LiveRelease | None, now: datetime | None = None, *, scope_fault: str | None = None
) -> Compliance:
    """Judge a region. A policy that is not yet in effect must not be passed.

    Args:
        scope_fault: why the releases that the policy's budget must cover together do not fit it, from
            `tasks.cumulative.scope_fault`; None where they do, or where it covers the live one alone.
    """
    now = now or datetime.now(UTC)
    if live is None:
        return Compliance(
            state=State.NO_RELEASE, readable=False, reason="No model has been promoted in this region yet."
        )
    fault = fault_of(live, policy) or scope_fault
    if fault is None:
        return Compliance(
            state=State.COMPLIANT,
            readable=True,
            reason="The live release satisfies the current policy."
            if live.certificate.selection != UNACCOUNTED
            else f"The live release is what the policy's selection {UNACCOUNTED} allows. {SCORES_UNACCOUNTED}",
        )
    until = policy.effective_at + timedelta(seconds=policy.grace_seconds)
    if now < until:
        return Compliance(
            state=State.NON_COMPLIANT,
            readable=True,
            reason=f"{fault} The policy's grace period allows reading it until {until:%Y-%m-%d %H:%M:%S} UTC.",
        )
    return Compliance(state=State.NON_COMPLIANT, readable=False, reason=fault)
