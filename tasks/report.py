"""What people see of a decision, in words and tables, and the documents of a release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accounting.certificate import Certificate
from accounting.plan import Mechanism
from accounting.selection_rules import UNACCOUNTED, VALIDATION
from accounting.words import rounded_up
from infra.canonical import canonical_json, sha256_hex
from infra.documents import Draw, Policy, PortfolioManifest, Provenance, ReleaseManifest
from infra.releases import CERTIFICATE, DRAW, MODEL
from tasks.merged_models import registered_name
from tasks.policy_merges import merge_in_words
from tasks.validation import Verdict

MECHANISM_WORDS = {
    Mechanism.LINEAR_COMBINATION: "linear combination",
    Mechanism.RANDOM_SELECTION: "random selection",
    Mechanism.MIXTURE: "mixture of merges",
    Mechanism.OPERATOR: "merge by an operator",
}

BOUND_WORDS = {
    "joint": "joint release of the candidates used",
    "generic": "generic bound for independent runs",
    "shifted": "shifted interpolation for runs with Lipschitz updates",
    "joint_rdp": "joint release by Renyi DP",
    "random_selection_pld": "random selection, exact profiles",
    "random_selection_rdp": "random selection by Renyi DP",
    "mixture": "mixture of merges, exact profiles",
    "parallel_tasks": "parallel composition of tasks that share no record",
    "basic_composition": "basic composition",
    "advanced_composition": "advanced composition",
}


SELECTION_WORDS = {
    "noise": "noise: public hyper-parameters and the budget alone",
    "stated": "stated: utilities that the recipe states",
    "public_twin": "public_twin: scores of the same recipes trained on public rows",
    VALIDATION: "validation: scores of private candidates, whose joint release the certificate covers",
    UNACCOUNTED: "validation_unaccounted: scores of private candidates, NOT COVERED by the certificate",
}
RECORDS_WORDS = {
    "disjoint": "disjoint: no record is in the data of two tasks",
    "shared": "shared: a record may be in the data of every task",
}
NOT_COVERED = (
    "NOT COVERED: its weights were chosen by scores of private models, so its epsilon is not a guarantee"
)


def release_files(model: bytes, certificate: Certificate, draw: Draw | None) -> dict[str, bytes]:
    """The files of a release by name, as stored."""
    files = {MODEL: model, CERTIFICATE: canonical_json(certificate.to_dict())}
    return files if draw is None else {**files, DRAW: draw.content()}


def release_manifest(
    policy: Policy,
    manifest: PortfolioManifest,
    release_id: str,
    files: Mapping[str, bytes],
    verdict: Verdict,
    *,
    gate_rows: int,
    version: int,
    provenance: Provenance,
) -> ReleaseManifest:
    """The last document of a release, with the digest of every file."""
    return ReleaseManifest(
        release_id=release_id,
        region=policy.region,
        policy_serial=policy.serial,
        policy_digest=policy.sha256(),
        portfolio=manifest.reference,
        manifest_digest=manifest.sha256(),
        network=manifest.network,
        files={name: sha256_hex(content) for name, content in files.items()},
        accuracy=verdict.accuracy,
        gate_rows=gate_rows,
        registered_model=registered_name(manifest.name, policy.region),
        registered_version=version,
        provenance=provenance,
    )


def weights_in_words(weights: Mapping[str, float]) -> str:
    """For example `0.72 strong + 0.28 medium`: the heaviest first; a candidate that is all there is is only named."""
    if len(weights) == 1:
        return next(iter(weights))
    ordered = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    return " + ".join(f"{weight:.4g} {name}" for name, weight in ordered)


def candidates_in_words(weights: Mapping[str, float], tasks: Mapping[str, str]) -> str:
    """For example `strong (weight 0.72), medium (weight 0.28)`, with the task of each where there are several."""
    return ", ".join(
        f"{name} ({f'task {tasks[name]}, ' if name in tasks else ''}weight {weight:.4g})"
        for name, weight in weights.items()
    )


def release_in_words(certificate: Certificate) -> str:
    """The weights; of an operator also its name and options; of a mixture each component's probability and weights."""
    if certificate.mechanism is Mechanism.OPERATOR:
        named = merge_in_words(certificate.merge, certificate.merge_options)
        return f"{named} of {candidates_in_words(certificate.weights, certificate.tasks)}"
    if not certificate.components:
        return weights_in_words(certificate.weights)
    return "; ".join(
        f"{component.name} with probability {component.weight:.4g}: {weights_in_words(component.weights)}"
        for component in certificate.components
    )


def one_sentence(policy: Policy, certificate: Certificate, draw: Draw | None, verdict: Verdict) -> str:
    """What was promoted, for the state of the flow run."""
    what = release_in_words(certificate)
    if draw is not None:
        what = f"{draw.drawn}, drawn from {what}"
    what = f"{MECHANISM_WORDS[certificate.mechanism]} ({what})"
    if certificate.mechanism is Mechanism.OPERATOR:
        what = f"merge by {release_in_words(certificate)}"
    warning = f" {NOT_COVERED}." if certificate.selection == UNACCOUNTED else ""
    of_what = "lowest accuracy of a task" if verdict.by_task else "accuracy"
    return (
        f"{policy.region} now serves a {what} with epsilon "
        f"{rounded_up(certificate.epsilon)} at delta {certificate.delta:g}, within the policy's {policy.epsilon:g}; "
        f"{of_what} {verdict.accuracy:.3f} on the public-gate rows.{warning}"
    )


def provenance_in_words(provenance: Provenance) -> str:
    if provenance.started_by == "automation":
        return f"automation {provenance.automation_name}, event {provenance.event_id}"
    return provenance.started_by


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), "|" + " --- |" * len(header), *(line(row) for row in rows)])
