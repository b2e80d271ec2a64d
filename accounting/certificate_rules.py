"""What no certificate may say: values out of range, and fields that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accounting.bounds import BOUND_NAMES
from accounting.budget import require_non_negative, require_number, require_open_unit
from accounting.certificate_parts import MERGE_BOUNDS
from accounting.documents import require_text
from accounting.errors import InvalidInput
from accounting.merges import require_merge, task_bound
from accounting.plan import Mechanism, require_components, require_weights
from accounting.selection_rules import SCORES_UNACCOUNTED, SELECTIONS, UNACCOUNTED, VALIDATION

if TYPE_CHECKING:
    from accounting.certificate import Certificate

_AVERAGE = Mechanism.LINEAR_COMBINATION


def require_consistent(certificate: Certificate) -> None:
    """Refuse a certificate that contradicts itself.

    Raises:
        InvalidInput: with the field at fault.
    """
    for name in ("release_id", "region", "policy_digest", "manifest_digest", "portfolio", "lineage"):
        require_text(name, getattr(certificate, name))
    for name in ("unit", "merge_rule", "source", "selection"):
        require_text(name, getattr(certificate, name))
    if isinstance(certificate.policy_serial, bool) or not isinstance(certificate.policy_serial, int):
        raise InvalidInput(
            f"policy_serial must be a whole number, but {certificate.policy_serial!r} was given."
        )
    if certificate.bound not in BOUND_NAMES or certificate.bound == "stepwise":
        raise InvalidInput(f"{certificate.bound!r} is not the name of a bound that can be certified.")
    if not certificate.assumptions or not all(
        isinstance(text, str) and text for text in certificate.assumptions
    ):
        raise InvalidInput("A certificate states its assumptions, each a sentence.")
    require_weights(certificate.weights)
    if bool(certificate.components) != (certificate.mechanism is Mechanism.MIXTURE):
        raise InvalidInput("The certificate of a mixture states its components, and no other one does.")
    if certificate.components:
        require_components(certificate.weights, certificate.components)
        if certificate.fresh_noise > 0:
            raise InvalidInput("Fresh noise of a mixture is stated with its components.")
    if not all(isinstance(name, str) for name in certificate.consulted):
        raise InvalidInput("consulted of a certificate must be a list of names.")
    if {*certificate.weights, *certificate.consulted} != set(certificate.candidates):
        raise InvalidInput("candidates of a certificate must be exactly those with a weight or consulted.")
    if certificate.selection not in SELECTIONS:
        raise InvalidInput(
            f"selection of a certificate must be one of {', '.join(SELECTIONS)}, but {certificate.selection!r} was "
            "given."
        )
    if (certificate.selection == UNACCOUNTED) != (SCORES_UNACCOUNTED in certificate.assumptions):
        raise InvalidInput(
            "A certificate says that the choice of its weights is not covered exactly where they were chosen by "
            f"{UNACCOUNTED}."
        )
    if bool(certificate.consulted) != (certificate.selection == VALIDATION):
        raise InvalidInput(
            "A certificate lists consulted candidates if its weights were chosen by validation."
        )
    if certificate.consulted and certificate.bound != (
        "joint" if certificate.records is None else task_bound(certificate.records)
    ):
        raise InvalidInput(
            "Weights chosen by scores are covered by the joint release of all consulted alone."
        )
    require_merge(
        is_operator=certificate.mechanism is Mechanism.OPERATOR,
        names=certificate.candidates,
        weighted=certificate.weights,
        merge=certificate.merge,
        merge_options=certificate.merge_options,
        tasks=certificate.tasks,
        records=certificate.records,
        bound=certificate.bound,
    )
    if certificate.consulted and not set(certificate.weights) <= set(certificate.consulted):
        raise InvalidInput(
            "Where candidates were consulted, only they can have a weight: the bound covers them."
        )
    require_non_negative("epsilon", certificate.epsilon)
    if require_non_negative("fresh_noise", certificate.fresh_noise) and certificate.mechanism is not _AVERAGE:
        raise InvalidInput(f"Fresh noise belongs to a linear combination, not to a {certificate.mechanism}.")
    require_open_unit("delta", certificate.delta)
    if certificate.epsilon > certificate.budget.epsilon or certificate.delta > certificate.budget.delta:
        raise InvalidInput("A certificate's epsilon and delta must lie within the budget it names.")
    if certificate.mu is not None:
        require_non_negative("mu", certificate.mu)
        if certificate.bound not in (*MERGE_BOUNDS, "parallel_tasks"):
            raise InvalidInput(f"The bound {certificate.bound!r} is not that of a Gaussian and has no mu.")
    for epsilon, delta in certificate.profile:
        require_non_negative("epsilon of the profile", epsilon)
        if not 0 <= require_number("delta of the profile", delta) <= 1:
            raise InvalidInput(f"delta of the profile must lie in [0, 1], but {delta!r} was given.")
    if not all(isinstance(text, str) for pair in certificate.versions.items() for text in pair):
        raise InvalidInput("versions of a certificate must map texts to texts.")
    outcomes = [component.name for component in certificate.components] or list(certificate.weights)
    if certificate.realised is not None and certificate.realised.candidate not in outcomes:
        raise InvalidInput(f"The realised candidate {certificate.realised.candidate!r} has no weight.")
    drawn = certificate.mechanism.is_draw and len(outcomes) > 1
    if drawn != (certificate.realised is not None):
        raise InvalidInput(
            "A certificate says what was drawn, and its own guarantee, exactly where something was drawn."
        )
