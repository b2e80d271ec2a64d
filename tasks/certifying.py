"""The certificate of one release: the plan's claim, tied to a policy, a portfolio version and its files."""

from __future__ import annotations

import importlib.metadata
import platform

from accounting.certificate import Certificate, build_certificate
from accounting.certificate_parts import CandidateReference, Cumulative
from accounting.plan import Plan
from infra.documents import Draw, Policy, PortfolioManifest
from tasks.policy_merges import merge_rule

PACKAGES = ("remerge", "dp-accounting", "numpy", "scipy", "safetensors")


def certify(
    release_id: str,
    policy: Policy,
    manifest: PortfolioManifest,
    plan: Plan,
    draw: Draw | None,
    cumulative: Cumulative | None = None,
) -> Certificate:
    """State what a plan claims for one release.

    Args:
        cumulative: what all releases of the lineage cost together, this one included, where it was computed.
    """
    references = {
        record.name: CandidateReference(
            registered_model=record.registered_model,
            version=str(record.version),
            model_sha256=record.model_sha256,
            trajectory_sha256=record.trajectory_sha256,
        )
        for record in manifest.candidates
    }
    return build_certificate(
        plan,
        release_id=release_id,
        region=policy.region,
        policy_digest=policy.sha256(),
        policy_serial=policy.serial,
        manifest_digest=manifest.sha256(),
        portfolio=manifest.reference,
        lineage=manifest.lineage,
        unit=manifest.unit,
        candidates=references,
        versions={
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
        realised=draw.drawn if draw is not None else None,
        merge_rule=merge_rule(plan),
        cumulative=cumulative,
    )
