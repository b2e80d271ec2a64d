"""Which merge a policy asks for, whether a release is such a merge, and how people read it.

With an operator other than `linear` no mechanism is asked: what the operator makes of at least two candidates is
post-processing of their joint release. Where no two of them fit the budget together, one is released as it is.
The same holds for a portfolio of several tasks, whose candidates are merged into one model by any operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from accounting.certificate import MERGE_RULES
from accounting.errors import InvalidInput
from accounting.plan import Mechanism
from infra.canonical import strict_json
from infra.documents import DEFAULT_MECHANISMS, Option, Policy, PortfolioManifest
from tasks.merging import OPERATORS, checked_options, needs
from tasks.merging import merge_rule as operator_rule

MIXED = "of one component, drawn once with the components' weights as probabilities, "
BY_TASK = "the parameters that all tasks share are merged, and each task keeps its own head unchanged; of the merge: "


class Claim(Protocol):
    """A plan or a certificate."""

    @property
    def mechanism(self) -> Mechanism: ...
    @property
    def weights(self) -> Mapping[str, float]: ...
    @property
    def merge(self) -> str: ...
    @property
    def merge_options(self) -> Mapping[str, Option]: ...
    @property
    def tasks(self) -> Mapping[str, str]: ...


def options_of(policy: Policy) -> dict[str, Option]:
    """The policy's options of its operator, every default filled in.

    Raises:
        InvalidInput: the operator does not take them.
    """
    return dict(checked_options(policy.merge, policy.merge_options))


def with_checked_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's fields with every option of its merge operator filled in: another default later changes nothing.

    Raises:
        InvalidInput: the operator does not take one of the options; an unknown operator is left to the policy.
    """
    merge = fields.get("merge", "linear")
    if merge not in OPERATORS:
        return dict(fields)
    return {**fields, "merge_options": dict(checked_options(merge, fields.get("merge_options", {})))}


def parsed_options(texts: Sequence[str]) -> dict[str, Option]:
    """What was given as `NAME=VALUE`, each name once: numbers, true and false as such, anything else as text.

    Raises:
        InvalidInput: it was given otherwise.
    """
    found: dict[str, Option] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise InvalidInput(
                f"A merge option is given as NAME=VALUE, for example `--merge-option density=0.3`, not as {text!r}."
            )
        if name.strip() in found:
            raise InvalidInput(f"The merge option {name.strip()} was given twice; give it once.")
        found[name.strip()] = _value_of(value.strip())
    return found


def _value_of(text: str) -> Option:
    try:
        value = strict_json(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def require_mergeable(policy: Policy, manifest: PortfolioManifest) -> None:
    """Refuse a policy whose operator cannot merge the portfolio, or does not take the policy's options.

    Raises:
        InvalidInput: in one sentence that says what to do.
    """
    options_of(policy)
    if manifest.tasks is None:
        return
    count, exactly = len(set(manifest.tasks.values())), needs(policy.merge).models
    if exactly is not None and count != exactly:
        raise InvalidInput(
            f"{policy.merge} merges exactly {exactly} models, but {manifest.reference} has {count} tasks, each with a "
            "model in the merge: set the policy with another `--merge`."
        )
    if set(policy.mechanisms) != set(DEFAULT_MECHANISMS):
        raise InvalidInput(
            f"{manifest.reference} is a portfolio of several tasks, which are all merged, so its policies name no "
            "mechanisms: leave out `--mechanism`."
        )


def allows(policy: Policy, claim: Claim) -> bool:
    """Whether a release was made in a way that the policy allows."""
    if claim.mechanism is Mechanism.OPERATOR:
        return (claim.merge, dict(claim.merge_options)) == (policy.merge, options_of(policy))
    if policy.merge != "linear":  # nothing was merged, for no two candidates fitted the budget
        return claim.mechanism is Mechanism.LINEAR_COMBINATION and len(claim.weights) == 1
    return claim.mechanism.value in policy.mechanisms


def merge_rule(claim: Claim) -> str:
    """How the parameters were made, in words.

    Raises:
        InvalidInput: the operator does not take the claim's options.
    """
    if claim.mechanism is Mechanism.RANDOM_SELECTION:
        return MERGE_RULES[claim.mechanism]
    rule = operator_rule(claim.merge, claim.merge_options)
    if claim.tasks:
        return BY_TASK + rule
    return MIXED + rule if claim.mechanism is Mechanism.MIXTURE else rule


def merge_in_words(merge: str, options: Mapping[str, Option]) -> str:
    """For example `ties (density 0.3, scale 1)`."""
    stated = ", ".join(f"{name} {_shown(value)}" for name, value in sorted(options.items()))
    return f"{merge} ({stated})" if stated else merge


def how_made(claim: Claim) -> str:
    """The mechanism, or the operator with its options."""
    if claim.mechanism is Mechanism.OPERATOR:
        return merge_in_words(claim.merge, claim.merge_options)
    return claim.mechanism.value


def _shown(value: Option) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:.12g}"
