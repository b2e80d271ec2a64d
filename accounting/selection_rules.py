"""What the weights may depend on: choosing them is part of the mechanism.

| rule | the weights depend on | what covers that |
|---|---|---|
| `noise` | hyper-parameters: of comparable releases the one with the least noise | nothing to cover |
| `stated` | utilities stated beside the candidates, not computed from protected records | nothing to cover |
| `public_twin` | scores of the same recipes trained on public data, stated as utilities | nothing to cover |
| `validation` | scores of the private candidates | the joint release of every candidate with a score |
| `validation_unaccounted` | the same | nothing: the plan and its certificate say so |

Scores on public validation data are functions of the private models: whoever sees the weights sees something
of every model whose score was consulted, also of those that got no weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from accounting.bounds import WEIGHTS_BLIND, WEIGHTS_FREE
from accounting.budget import require_number
from accounting.errors import InvalidInput
from accounting.trajectory import Candidate

SELECTIONS = ("noise", "stated", "public_twin", "validation", "validation_unaccounted")
VALIDATION, UNACCOUNTED = "validation", "validation_unaccounted"

STATED_UTILITIES = (
    "The weights were chosen from public hyper-parameters, the budget and stated utilities; those utilities were "
    "computed neither from the protected records nor from any model trained on them."
)
TWIN_UTILITIES = (
    "The weights were chosen from public hyper-parameters, the budget and the scores of models trained by the same "
    "recipes on public data alone; recipes and candidates were fixed without looking at any private outcome."
)
SCORES_UNACCOUNTED = (
    "NOT COVERED: the weights were chosen by looking at scores of privately trained models, and the stated epsilon "
    "does not account for that, so it is not a guarantee."
)
SURROGATE = (
    "The utility of an average of several models is not known; the average of their utilities stands in for it. "
    "Where utility is minus a convex loss, the merged model is at least that good."
)


def utilities_by(
    selection: str, candidates: Sequence[Candidate], scores: Mapping[str, float] | None
) -> dict[str, float] | None:
    """The utilities that a rule goes by, of the candidates that it considers; None for noise alone.

    Args:
        selection: one of SELECTIONS.
        candidates: on offer.
        scores: by candidate name; for the two rules by validation, and only for them.

    Raises:
        InvalidInput: an unknown rule, or utilities or scores missing, out of place, not finite or of unknown
            candidates.
    """
    if selection not in SELECTIONS:
        raise InvalidInput(f"selection must be one of {', '.join(SELECTIONS)}, but {selection!r} was given.")
    by_scores = selection in (VALIDATION, UNACCOUNTED)
    if scores is not None and not by_scores:
        raise InvalidInput(f"Selection {selection!r} looks at no scores of candidates, but some were given.")
    if selection == "noise":
        return None
    if by_scores:
        return _scores(selection, [candidate.name for candidate in candidates], scores)
    silent = [candidate.name for candidate in candidates if candidate.utility is None]
    if silent:
        raise InvalidInput(
            f"Selection {selection!r} compares candidates by their utilities, but none is stated for "
            f"{', '.join(silent[:3])}{' and others' if len(silent) > 3 else ''}: state one for every candidate, or "
            "select by 'noise'."
        )
    return {c.name: _finite(f"utility of {c.name}", c.utility) for c in candidates}


def worded(selection: str, assumptions: tuple[str, ...]) -> tuple[str, ...]:
    """A bound's assumptions with that on the choice of the weights as the rule needs it.

    Utilities decide which candidates are used at all, which neither the bound of a single run nor the joint release
    of those used would cover: their rules always state where the utilities come from.
    """
    if selection == UNACCOUNTED:
        kept = tuple(text for text in assumptions if text not in (WEIGHTS_BLIND, WEIGHTS_FREE))
        return (SCORES_UNACCOUNTED, *kept)
    utilities = {"stated": STATED_UTILITIES, "public_twin": TWIN_UTILITIES}.get(selection)
    if utilities is None:
        return assumptions
    return (*(text for text in assumptions if text not in (WEIGHTS_BLIND, WEIGHTS_FREE)), utilities)


def _scores(selection: str, names: Sequence[str], scores: Mapping[str, float] | None) -> dict[str, float]:
    if not scores:
        raise InvalidInput(f"Selection {selection!r} needs the scores that were consulted, by candidate.")
    unknown = sorted(set(scores) - set(names))
    if unknown:
        raise InvalidInput(f"A score was given for {unknown[0]!r}, which is not among the candidates.")
    return {name: _finite(f"score of {name}", scores[name]) for name in names if name in scores}


def _finite(name: str, value: object) -> float:
    number = require_number(name, value)
    if not math.isfinite(number):
        raise InvalidInput(f"{name} must be a finite number, but {value!r} was given.")
    return number
