"""State a certificate anew from its runs and weights, by the product's own functions, and compare every number.

`recheck` refuses a claim that is too strong. This also finds one that is too weak, a word that was changed, or a
number that is merely not the one that the runs and weights give. A number of a closed form may differ by 1e-9,
relative. A Poisson delta may differ by the composition's measured error, which each machine measures anew, and an
epsilon by what that makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accounting.bounds import Bound
from accounting.certificate import Certificate, profile_grid
from accounting.checks import AGREEMENT, Check, compare, compare_numbers, failed, within
from accounting.errors import RemergeError
from accounting.joint_release import single_run
from accounting.other_bounds import other_bounds
from accounting.plan import Mechanism, OtherBound
from accounting.recheck import component_bound, recompute
from accounting.selection_rules import worded
from accounting.trajectory import Trajectory

_POISSON_EPSILON = 1e-6  # relative, of the other accountants' epsilons where some step is sampled


def restate(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> list[Check]:
    """Compare everything in a certificate that follows from its runs, its weights and its budget.

    Args:
        certificate: the claim.
        trajectories: by candidate name, all that the certificate names.

    Returns:
        One check for each field or number.
    """
    checks = [
        compare(
            f"{label} of candidate {name}", getattr(certificate, label), getattr(trajectories[name], label)
        )
        for name in certificate.candidates
        for label in ("lineage", "unit", "neighboring_relation")
    ]
    checks.append(compare("delta is the budget's", certificate.delta, certificate.budget.delta))
    for what, find in (
        ("bound", _bound_checks),
        ("draw and components", _outcome_checks),
        ("other bounds", _others),
    ):
        try:
            checks += find(certificate, trajectories)
        except RemergeError as error:
            checks.append(failed(what, error.message))
    return checks


def _bound_checks(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> list[Check]:
    bound = recompute(certificate, trajectories)
    checks = [
        compare("bound", certificate.bound, bound.name),
        compare("theorem", certificate.source, bound.source),
        compare("assumptions", certificate.assumptions, worded(certificate.selection, bound.assumptions)),
    ]
    if certificate.mu is None or bound.mu is None:
        checks.append(compare("mu", certificate.mu, bound.mu))
    else:
        checks.append(compare_numbers("mu", certificate.mu, bound.mu))
    checks.append(_epsilon("epsilon", certificate.epsilon, bound, certificate.delta))
    grid = profile_grid(certificate.budget.epsilon)
    checks.append(compare("points of the profile", len(certificate.profile), len(grid)))
    for number, ((epsilon, delta), expected) in enumerate(zip(certificate.profile, grid, strict=False)):
        checks.append(compare_numbers(f"profile[{number}] epsilon", epsilon, expected))
        found = bound.delta(expected)
        slack = AGREEMENT * found + _error(bound)
        checks.append(
            within(f"profile[{number}] delta at {expected:.6g}", delta, (found - slack, found + slack), found)
        )
    return checks


def _outcome_checks(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> list[Check]:
    """Each component's own epsilon, and that of what was drawn."""
    checks = []
    if certificate.mechanism in (Mechanism.RANDOM_SELECTION, Mechanism.OPERATOR):
        what = f"fresh noise, of which releases by {str(certificate.mechanism).replace('_', ' ')} have none"
        checks.append(compare(what, certificate.fresh_noise, 0.0))
    numbered = [f"merge-{number}" for number in range(1, len(certificate.components) + 1)]
    checks.append(compare("names of components", [part.name for part in certificate.components], numbered))
    parts = {component.name: component for component in certificate.components}
    bounds = {name: component_bound(part, trajectories, certificate) for name, part in parts.items()}
    for name, part in parts.items():
        checks.append(compare(f"bound of component {name}", part.bound, bounds[name].name))
        checks.append(_epsilon(f"epsilon of component {name}", part.epsilon, bounds[name], certificate.delta))
    outcomes = list(parts or certificate.weights)
    several = certificate.mechanism.is_draw and len(outcomes) > 1
    realised = certificate.realised
    if several and realised is None:
        checks.append(
            failed("realised outcome", "Something was drawn, but the certificate does not say what.")
        )
    if not certificate.mechanism.is_draw:
        checks.append(compare("realised outcome", None if realised is None else realised.candidate, None))
    elif realised is not None:
        own = bounds.get(realised.candidate) or single_run(
            trajectories[realised.candidate], certificate.neighboring_relation
        )
        checks.append(compare("delta of what was drawn", realised.delta, certificate.delta))
        checks.append(
            _epsilon(f"epsilon of {realised.candidate}, drawn", realised.epsilon, own, realised.delta)
        )
    return checks


def _others(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> list[Check]:
    """What other accountants say, or why they say nothing."""
    names = list(certificate.weights)
    found = _other_bounds(certificate, trajectories, names)
    checks = [compare("other bounds", sorted(certificate.other_bounds), sorted(found))]
    sampled = any(not segment.is_full_batch for run in trajectories.values() for segment in run.segments)
    for name in sorted(set(certificate.other_bounds) & set(found)):
        stated, other = certificate.other_bounds[name], found[name]
        if stated.epsilon is not None and other.epsilon is not None:
            relative = _POISSON_EPSILON if sampled else AGREEMENT
            checks.append(compare_numbers(f"epsilon by {name}", stated.epsilon, other.epsilon, relative))
            continue
        reasons = {other.reason}
        if (
            stated.reason not in reasons
        ):  # a reason names the first segment at fault, in the order of the runs
            for first in names:
                turned = [first, *(each for each in names if each != first)]
                reasons.add(_other_bounds(certificate, trajectories, turned)[name].reason)
        agreed = stated.reason if stated.reason in reasons and stated.epsilon is None else other
        checks.append(compare(f"why {name} says nothing", stated.reason if stated.reason else stated, agreed))
    return checks


def _other_bounds(
    certificate: Certificate, trajectories: Mapping[str, Trajectory], names: Sequence[str]
) -> dict[str, OtherBound]:
    covered = [trajectories[name] for name in certificate.consulted]
    return other_bounds(
        Mechanism.MIXTURE if covered else certificate.mechanism,
        [certificate.weights[name] for name in names],
        covered or [trajectories[name] for name in names],
        certificate.neighboring_relation,
        certificate.delta,
        certified=certificate.bound,
        fresh_noise=certificate.fresh_noise,
    )


def _epsilon(what: str, stated: float, bound: Bound, delta: float) -> Check:
    """The least epsilon at a delta, as nearly as the bound's own error lets it be known."""
    found, error = bound.epsilon(delta), _error(bound)
    low = bound.epsilon(min(delta + error, 1 - 1e-16)) if error else found
    high = bound.epsilon(delta - error) if error and delta - error >= bound.profile.smallest_delta else found
    return within(what, stated, (low * (1 - AGREEMENT), high * (1 + AGREEMENT)), found)


def _error(bound: Bound) -> float:
    """The measured error of a Poisson composition, of delta; 0 for a closed form."""
    return bound.profile.smallest_delta / 100
