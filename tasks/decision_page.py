"""The page that people read of a decision: what was chosen and why, what else there was, what it rests on."""

from __future__ import annotations

from accounting.certificate import Certificate
from accounting.plan import Mechanism, Plan
from accounting.selection_rules import SCORES_UNACCOUNTED, UNACCOUNTED, VALIDATION
from accounting.words import rounded_up
from infra.documents import Draw, Policy, PortfolioManifest, Provenance
from tasks.policy_merges import merge_in_words, options_of
from tasks.report import (
    BOUND_WORDS,
    MECHANISM_WORDS,
    RECORDS_WORDS,
    SELECTION_WORDS,
    candidates_in_words,
    one_sentence,
    provenance_in_words,
    release_in_words,
    table,
    weights_in_words,
)
from tasks.scope import SCOPE_WORDS
from tasks.validation import Verdict


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
                *_release_rows(certificate),
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
                *_accuracy_rows(verdict),
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


def _accuracy_rows(verdict: Verdict) -> list[list[str]]:
    """The gate's accuracy; of several tasks the lowest one, and then each one's."""
    lowest = "lowest accuracy of a task" if verdict.by_task else "accuracy"
    return [
        [f"{lowest} on public-gate rows", f"{verdict.accuracy:.3f} (needed {verdict.minimum:.3f})"],
        *([f"accuracy of task {task}", f"{share:.3f}"] for task, share in verdict.by_task.items()),
    ]


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
                allowed_row(policy),
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
    if plan.mechanism is Mechanism.OPERATOR:
        what = "one candidate for each task" if plan.tasks else "candidates"
        return (
            f"The choice depends on public hyper-parameters only: of the sets of {what} that fit the budget together "
            "it has the least noise, as an average of them would have it; what the operator makes of noise is not "
            "compared."
        )
    single = next((other for other in plan.alternatives if other.label == "best_single"), None)
    if (
        single is None and len(plan.weights) == 1
    ):  # the policy's operator found nothing to merge: the notes say so
        return f"{rule}; it is released alone."
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


def allowed_row(policy: Policy) -> list[str]:
    """What the policy allows to be done with the candidates."""
    if policy.merge == "linear":
        return ["mechanisms allowed", ", ".join(policy.mechanisms)]
    return ["merged by", merge_in_words(policy.merge, options_of(policy))]


def _release_rows(certificate: Certificate) -> list[list[str]]:
    """What was released of which candidates; of an operator how it merged, and what the tasks' records share."""
    if certificate.mechanism is not Mechanism.OPERATOR:
        return [["weights", release_in_words(certificate)]]
    rows = [
        ["merged by", merge_in_words(certificate.merge, certificate.merge_options)],
        ["candidates", candidates_in_words(certificate.weights, certificate.tasks)],
    ]
    if certificate.tasks:
        rows.append(["records of the tasks", RECORDS_WORDS[certificate.records or "shared"]])
    return rows


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
