"""What people see of a decision, in words and tables, and the documents of a release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accounting.certificate import Certificate
from accounting.plan import Mechanism, Plan
from accounting.selection_rules import SCORES_UNACCOUNTED, UNACCOUNTED, VALIDATION
from accounting.words import rounded_up
from infra.canonical import canonical_json, sha256_hex
from infra.documents import Draw, Policy, PortfolioManifest, Provenance, ReleaseManifest
from infra.releases import CERTIFICATE, DRAW, MODEL
from tasks.merged_models import registered_name
from tasks.scope import SCOPE_WORDS
from tasks.validation import Verdict

MECHANISM_WORDS = {
    Mechanism.LINEAR_COMBINATION: "linear combination",
    Mechanism.RANDOM_SELECTION: "random selection",
    Mechanism.MIXTURE: "mixture of merges",
}

BOUND_WORDS = {
    "joint": "joint release of the candidates used",
    "generic": "generic bound for independent runs",
    "shifted": "shifted interpolation for runs with Lipschitz updates",
    "joint_rdp": "joint release by Renyi DP",
    "random_selection_pld": "random selection, exact profiles",
    "random_selection_rdp": "random selection by Renyi DP",
    "mixture": "mixture of merges, exact profiles",
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


def release_in_words(certificate: Certificate) -> str:
    """The weights; of a mixture each component's probability and weights."""
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
    warning = f" {NOT_COVERED}." if certificate.selection == UNACCOUNTED else ""
    return (
        f"{policy.region} now serves a {MECHANISM_WORDS[Mechanism(certificate.mechanism)]} ({what}) with epsilon "
        f"{rounded_up(certificate.epsilon)} at delta {certificate.delta:g}, within the policy's {policy.epsilon:g}; "
        f"accuracy {verdict.accuracy:.3f} on the public-gate rows.{warning}"
    )


def decision_page(
    policy: Policy,
    manifest: PortfolioManifest,
    plan: Plan,
    certificate: Certificate,
    draw: Draw | None,
    verdict: Verdict,
    provenance: Provenance,
) -> str:
    """The Markdown page that the flow leaves in Prefect and MLflow. Nothing in it comes from private data
    except through the released model itself."""
    decision = one_sentence(policy, certificate, draw, verdict) if verdict.passed else verdict.reason
    parts = [
        f"# Policy {policy.serial} of {policy.region}: {'promoted' if verdict.passed else 'not promoted'}",
        decision,
        *([f"**{SCORES_UNACCOUNTED}**"] if plan.selection == UNACCOUNTED else []),
        why(plan),
        "## The release",
        table(
            ["what", "value"],
            [
                [
                    "budget",
                    f"epsilon {policy.epsilon:g} at delta {policy.delta:g}, {policy.neighboring_relation}",
                ],
                ["portfolio", manifest.reference],
                ["mechanism", MECHANISM_WORDS[plan.mechanism]],
                ["weights", release_in_words(certificate)],
                ["weights chosen by", SELECTION_WORDS[certificate.selection]],
                *(
                    [["scores consulted of", ", ".join(certificate.consulted)]]
                    if certificate.consulted
                    else []
                ),
                *([["drawn", f"{draw.drawn}, once, from {draw.entropy_source}"]] if draw else []),
                ["certified by", BOUND_WORDS.get(certificate.bound, certificate.bound)],
                ["certified epsilon", rounded_up(certificate.epsilon, 6)],
                *_realised_row(certificate),
                ["the budget covers", SCOPE_WORDS[policy.scope]],
                *_cumulative_rows(certificate),
                ["accuracy on public-gate rows", f"{verdict.accuracy:.3f} (needed {verdict.minimum:.3f})"],
                ["started by", provenance_in_words(provenance)],
                ["release", certificate.release_id],
            ],
        ),
        "## What else was possible",
        alternatives_table(plan),
    ]
    if plan.set_aside:
        parts += [
            "Set aside before solving:",
            "\n".join(f"- **{name}**: {reason}" for name, reason in plan.set_aside.items()),
        ]
    parts += list(plan.notes)
    parts += [
        "## The same release under other bounds",
        table(
            ["bound", "epsilon"],
            [
                [
                    BOUND_WORDS.get(name, name),
                    rounded_up(other.epsilon) if other.epsilon is not None else str(other.reason),
                ]
                for name, other in certificate.other_bounds.items()
            ],
        ),
        "## What the number rests on",
        "\n".join(f"- {assumption}" for assumption in certificate.assumptions),
    ]
    return "\n\n".join(parts) + "\n"


def infeasible_page(policy: Policy, manifest: PortfolioManifest, reason: str, provenance: Provenance) -> str:
    """The Markdown page of a policy that nothing in the portfolio satisfies."""
    budget = f"epsilon {policy.epsilon:g} at delta {policy.delta:g}, {policy.neighboring_relation}"
    parts = [
        f"# Policy {policy.serial} of {policy.region}: infeasible",
        reason,
        "Production is as it was.",
        table(
            ["what", "value"],
            [
                ["budget", budget],
                ["portfolio", manifest.reference],
                ["the budget covers", SCOPE_WORDS[policy.scope]],
                ["mechanisms allowed", ", ".join(policy.mechanisms)],
                ["weights chosen by", SELECTION_WORDS[policy.selection]],
                ["started by", provenance_in_words(provenance)],
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def why(plan: Plan) -> str:
    """The reason for the choice, in a sentence."""
    if plan.selection in (VALIDATION, UNACCOUNTED):
        covered = "the certificate covers the joint release of all that were consulted"
        return (
            "The choice depends on the accuracies of private candidates on public-train rows: of the releases found "
            "that fit the budget it has the best expected score; "
            f"{covered if plan.selection == VALIDATION else 'nothing covers that'}."
        )
    if plan.selection != "noise":
        source = "the recipe states" if plan.selection == "stated" else "the public twins scored"
        return (
            f"The choice depends on public hyper-parameters and the utilities that {source}: of the releases found "
            f"that fit the budget it has the best expected utility, {plan.objective:.4g}."
        )
    rule = (
        "The choice depends on public hyper-parameters only: of the releases found that fit the budget it has the "
        "least noise in its parameters (expected noise, where one is drawn)"
    )
    single = next((other for other in plan.alternatives if other.label == "best_single"), None)
    if single is None:
        return f"{rule}; no candidate fits the budget on its own."
    if len(plan.weights) == 1:
        return f"{rule}; no merge is better than this single candidate."
    saved = 1 - plan.objective / single.objective
    return f"{rule}: its variance is {saved:.1%} below that of the best single candidate, {next(iter(single.weights))}."


def alternatives_table(plan: Plan) -> str:
    """What the other mechanisms and the best single candidate would have given, by what the rule compares."""
    by_noise = plan.selection == "noise"
    rows = [[f"chosen: {MECHANISM_WORDS[plan.mechanism]}", plan.weights, plan.epsilon, plan.objective]]
    rows += [
        [alternative.label.replace("_", " "), alternative.weights, alternative.epsilon, alternative.objective]
        for alternative in plan.alternatives
    ]
    return table(
        ["choice", "weights", "epsilon", "noise variance" if by_noise else "expected utility"],
        [
            [
                str(label),
                weights_in_words(weights),
                rounded_up(epsilon),
                f"{-objective if by_noise else objective:.4g}",
            ]
            for label, weights, epsilon, objective in rows
        ],
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


def _cumulative_rows(certificate: Certificate) -> list[list[str]]:
    """What everything released from the lineage costs together; epsilons of single releases do not add up."""
    found = certificate.cumulative
    if found is None:
        return [["together with earlier releases", "could not be accounted"]]
    count = "the only one" if found.releases == 1 else f"{found.releases} of them"
    return [
        [f"all releases in {certificate.region} together", f"epsilon {rounded_up(found.epsilon_region, 6)}"],
        [
            "all releases in all regions together",
            f"epsilon {rounded_up(found.epsilon_all_regions, 6)} ({count})",
        ],
    ]


def _realised_row(certificate: Certificate) -> list[list[str]]:
    realised = certificate.realised
    if realised is None:
        return []
    return [
        [
            "who sees which candidate was drawn",
            f"sees epsilon {rounded_up(realised.epsilon)} at delta {realised.delta:g}, that candidate's own",
        ]
    ]
