"""Recompute a certificate's claim from the executed trajectories and the weights alone."""

from __future__ import annotations

from collections.abc import Mapping

from accounting.bounds import Bound
from accounting.budget import NeighboringRelation
from accounting.certificate import Certificate
from accounting.certificate_parts import CertifiedComponent
from accounting.errors import AccountingError
from accounting.joint_release import executed_steps, joint_release, single_run
from accounting.linear_combination import generic
from accounting.merges import DISJOINT
from accounting.mixtures import mixture_bound
from accounting.other_bounds import joint_rdp
from accounting.parallel_tasks import parallel_tasks
from accounting.plan import Mechanism
from accounting.random_selection import random_selection_bound, random_selection_rdp_bound
from accounting.selection_rules import worded
from accounting.shifted_interpolation import shifted
from accounting.trajectory import Trajectory

_AGREEMENT = 1e-9  # relative; another machine may round a little differently


def recheck(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> None:
    """Refuse a certificate that claims more privacy than its runs and weights give.

    Args:
        certificate: the claim.
        trajectories: by candidate name, at least those that the certificate names. Whether they are the recorded ones
            (`trajectory_sha256`) is for the caller, who holds the documents, to check.

    Raises:
        AccountingError: with the figure that does not hold.
        IncompatibleCandidates: runs recorded under another relation, or that the bound does not cover.
    """
    names = list(certificate.candidates)
    missing = sorted(set(names) - set(trajectories))
    if missing:
        raise AccountingError(
            f"The trajectory of candidate {missing[0]!r} is missing, so nothing is checked."
        )
    for name in names:
        trajectory = trajectories[name]
        for label in ("lineage", "unit"):
            if getattr(trajectory, label) != getattr(certificate, label):
                raise AccountingError(f"The certificate's {label} is not that of candidate {name!r}.")
    bound = recompute(certificate, trajectories)
    for sentence in worded(certificate.selection, bound.assumptions):
        if sentence not in certificate.assumptions:
            raise AccountingError(
                f"The certificate leaves out an assumption that its bound rests on: {sentence}"
            )
    _require_holds(bound, certificate.epsilon, certificate.delta)
    if certificate.mu is not None and not certificate.mu >= (bound.mu or 0.0) * (1 - _AGREEMENT):
        raise AccountingError(
            f"The certificate states mu {certificate.mu:.9g}, but its runs and weights give {bound.mu:.9g}."
        )
    if certificate.mu is not None and bound.mu is None:
        raise AccountingError("The certificate states a mu, but its bound is not that of a Gaussian.")
    for epsilon, delta in certificate.profile:
        _require_holds(bound, epsilon, delta)
    for component in certificate.components:
        own = component_bound(component, trajectories, certificate)
        _require_holds(own, component.epsilon, certificate.delta)
    if certificate.realised is not None:
        realised = certificate.realised
        drawn = next((c for c in certificate.components if c.name == realised.candidate), None)
        if drawn is None:
            own = single_run(trajectories[realised.candidate], certificate.neighboring_relation)
        else:
            own = component_bound(drawn, trajectories, certificate)
        _require_holds(own, realised.epsilon, realised.delta)


def recompute(certificate: Certificate, trajectories: Mapping[str, Trajectory]) -> Bound:
    """The bound that the certificate names, from the runs and weights.

    Raises:
        AccountingError: the bound does not go with the mechanism.
    """
    weights = list(certificate.weights.values())
    runs = [trajectories[name] for name in certificate.weights]
    relation = certificate.neighboring_relation
    covered = certificate.consulted or tuple(certificate.weights)  # the weights may depend on all consulted
    if certificate.records == DISJOINT:
        tasks = [certificate.tasks[name] for name in covered]
        return parallel_tasks([trajectories[name] for name in covered], relation, tasks)
    if certificate.consulted or certificate.mechanism is Mechanism.OPERATOR:
        return joint_release([trajectories[name] for name in covered], relation)
    match certificate.bound:
        case "joint":
            return joint_release(runs, relation)
        case "joint_rdp":
            return joint_rdp(runs, relation, certificate.delta)
        case "generic" | "shifted" as name if certificate.mechanism is Mechanism.LINEAR_COMBINATION:
            return _of_merge(name, runs, weights, relation, certificate.fresh_noise)
        case "random_selection_pld" if certificate.mechanism is Mechanism.RANDOM_SELECTION:
            return random_selection_bound(weights, runs, relation)
        case "random_selection_rdp" if certificate.mechanism is Mechanism.RANDOM_SELECTION:
            return random_selection_rdp_bound(weights, runs, relation, certificate.delta)
        case "mixture" if certificate.components:
            executed_steps(runs, relation)
            parts = [
                (c.weight, component_bound(c, trajectories, certificate)) for c in certificate.components
            ]
            return mixture_bound(parts)
    raise AccountingError(
        f"The bound {certificate.bound!r} cannot be rechecked for the mechanism {certificate.mechanism}."
    )


def component_bound(
    component: CertifiedComponent, trajectories: Mapping[str, Trajectory], certificate: Certificate
) -> Bound:
    """The bound of one merge of a mixture alone."""
    runs = [trajectories[name] for name in component.weights]
    relation = certificate.neighboring_relation
    return _of_merge(component.bound, runs, list(component.weights.values()), relation, component.fresh_noise)


def _of_merge(
    name: str,
    runs: list[Trajectory],
    weights: list[float],
    relation: NeighboringRelation,
    fresh_noise: float,
) -> Bound:
    if name == "generic":
        return generic(runs, weights, relation, fresh_noise)
    if name == "shifted":
        return shifted(runs, weights, relation, fresh_noise)
    return joint_release(runs, relation)


def _require_holds(bound: Bound, epsilon: float, delta: float) -> None:
    """Refuse a pair that the bound does not give.

    A PLD's error is measured anew on each machine, so a stated delta may fall short of the recomputed one
    by the recomputed error, and any by one part in 10^9.
    """
    recomputed = bound.delta(epsilon)
    if delta < recomputed * (1 - _AGREEMENT) - bound.profile.smallest_delta / 100:
        raise AccountingError(
            f"The certificate states delta {delta:.9g} at epsilon {epsilon:.9g}, but its runs and weights give "
            f"{recomputed:.9g}."
        )
