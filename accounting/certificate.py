"""The machine-readable claim that goes with a release, and whether it alone proves a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from accounting import gaussian
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate_parts import (
    CandidateReference,
    CertifiedComponent,
    Cumulative,
    Realised,
    other_bound_of,
    pair_of,
)
from accounting.certificate_rules import require_consistent
from accounting.documents import fields_of, fields_to_dict, list_of, mapping_of
from accounting.errors import InvalidInput
from accounting.merges import LINEAR, Option
from accounting.plan import Mechanism, OtherBound, Plan
from accounting.selection_rules import UNACCOUNTED
from accounting.trajectory import parse_relation

SCHEMA = "remerge/certificate/1"
MERGE_RULES = {
    Mechanism.LINEAR_COMBINATION: "The released parameters are the sum of the candidates' parameters times "
    "their weights.",
    Mechanism.RANDOM_SELECTION: "The released parameters are those of one candidate, drawn once with the "
    "weights as probabilities.",
    Mechanism.MIXTURE: "The released parameters are the sum of the candidates' parameters times the weights of one "
    "component, drawn once with the components' weights as probabilities.",
    Mechanism.OPERATOR: "The released parameters are what the named operator, with the stated options, makes of the "
    "candidates' parameters and their weights; of several tasks, each task's own parameters are kept beside it.",
}
_LEFT_OUT: Mapping[str, Any] = {"merge": LINEAR, "merge_options": {}, "tasks": {}, "records": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One release's claim. Everything in it is JSON-ready, finite and an upper bound."""

    release_id: str
    region: str
    policy_digest: str
    policy_serial: int
    manifest_digest: str
    portfolio: str  # name@serial
    lineage: str
    unit: str
    neighboring_relation: NeighboringRelation
    mechanism: Mechanism
    weights: Mapping[str, float]  # candidate name -> weight > 0; of a mixture, expected over the draw
    candidates: Mapping[str, CandidateReference]  # exactly those with a weight or consulted
    merge_rule: str
    bound: str  # name of the theorem's bound
    assumptions: tuple[str, ...]
    source: str
    budget: PrivacyBudget
    epsilon: float  # nats, at `delta`
    delta: float
    mu: float | None  # where the bound is that of a Gaussian mechanism
    profile: tuple[tuple[float, float], ...]  # (epsilon, delta) pairs, each of which holds
    other_bounds: Mapping[str, OtherBound]
    selection: str
    realised: Realised | None  # of a draw
    fresh_noise: float  # standard deviation per coordinate of the noise added to the merge, once; 0 for none
    consulted: tuple[
        str, ...
    ]  # candidates whose scores the weights may depend on, and which the bound covers
    components: tuple[CertifiedComponent, ...]  # of a mixture
    versions: Mapping[str, str]
    cumulative: Cumulative | None = None  # of all releases, this one included; None where nobody computed it
    merge: str = LINEAR  # the operator, see `merges`
    merge_options: Mapping[str, Option] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)  # candidate -> task; empty where all are of one
    records: str | None = None  # of the tasks: "disjoint" or "shared"

    def __post_init__(self) -> None:
        require_consistent(self)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping with the schema's name."""
        document: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            document[f.name] = getattr(self, f.name)
        document["neighboring_relation"] = self.neighboring_relation.value
        document["mechanism"] = self.mechanism.value
        document["weights"] = dict(self.weights)
        document["candidates"] = {name: fields_to_dict(entry) for name, entry in self.candidates.items()}
        document["assumptions"] = list(self.assumptions)
        document["budget"] = {"epsilon": self.budget.epsilon, "delta": self.budget.delta}
        document["profile"] = [list(pair) for pair in self.profile]
        document["other_bounds"] = {
            name: {"reason": b.reason} if b.epsilon is None else {"epsilon": b.epsilon}
            for name, b in self.other_bounds.items()
        }
        document["realised"] = None if self.realised is None else fields_to_dict(self.realised)
        document["versions"] = dict(self.versions)
        document["consulted"] = list(self.consulted)
        document["components"] = [component.to_dict() for component in self.components]
        if self.cumulative is None:  # left out, so that certificates of before keep their bytes
            del document["cumulative"]
        else:
            document["cumulative"] = fields_to_dict(self.cumulative)
        for name, default in _LEFT_OUT.items():  # for the same reason
            value = getattr(self, name)
            if value == default:
                del document[name]
            elif isinstance(value, Mapping):
                document[name] = dict(value)
        return document

    @staticmethod
    def from_dict(document: object) -> Certificate:
        """Rebuild from `to_dict`.

        Raises:
            InvalidInput: another schema, an unknown or missing field, or a value out of range.
        """
        given = mapping_of("certificate", document)
        values = fields_of({"cumulative": None, **_LEFT_OUT, **given}, "certificate", Certificate, "schema")
        if values.pop("schema") != SCHEMA:
            raise InvalidInput(f"This is not a certificate: its schema must be {SCHEMA!r}.")
        values["neighboring_relation"] = parse_relation(values["neighboring_relation"])
        try:
            values["mechanism"] = Mechanism(values["mechanism"])
        except ValueError:
            raise InvalidInput(f"Unknown mechanism {values['mechanism']!r} in a certificate.") from None
        for name in ("weights", "candidates", "other_bounds", "versions", "merge_options", "tasks"):
            values[name] = mapping_of(name, values[name])
        values["candidates"] = {
            name: CandidateReference(**fields_of(entry, "candidate", CandidateReference))
            for name, entry in values["candidates"].items()
        }
        values["budget"] = PrivacyBudget(**fields_of(values["budget"], "budget", PrivacyBudget))
        values["other_bounds"] = {
            name: other_bound_of(name, entry) for name, entry in values["other_bounds"].items()
        }
        if values["realised"] is not None:
            values["realised"] = Realised(**fields_of(values["realised"], "realised", Realised))
        if values["cumulative"] is not None:
            values["cumulative"] = Cumulative.from_dict(values["cumulative"])
        values["assumptions"] = tuple(list_of("assumptions", values["assumptions"]))
        components = list_of("components", values["components"])
        values["components"] = tuple(CertifiedComponent.from_dict(entry) for entry in components)
        values["consulted"] = tuple(list_of("consulted", values["consulted"]))
        values["profile"] = tuple(pair_of(entry) for entry in list_of("profile", values["profile"]))
        return Certificate(**values)


def build_certificate(
    plan: Plan,
    *,
    release_id: str,
    region: str,
    policy_digest: str,
    policy_serial: int,
    manifest_digest: str,
    portfolio: str,
    lineage: str,
    unit: str,
    candidates: Mapping[str, CandidateReference],
    versions: Mapping[str, str],
    realised: str | None = None,
    merge_rule: str | None = None,
    cumulative: Cumulative | None = None,
) -> Certificate:
    """State a plan's claim for one release.

    Args:
        plan: certified by the solver.
        candidates: references of at least the plan's candidates; others are left out.
        realised: the drawn candidate's or component's name; required for, and only for, a draw among several.
        merge_rule: in words; the mechanism's own by default.
        cumulative: what all releases of the lineage cost together, this one included.
        release_id, region, policy_digest, policy_serial, manifest_digest, portfolio, lineage, unit, versions:
            copied.

    Raises:
        InvalidInput: a candidate without reference, or `realised` missing or out of place.
    """
    if not plan.mechanism.is_draw and realised is not None:
        raise InvalidInput("Only a random selection or a mixture has a realised candidate.")
    if len(plan.outcomes) > 1 and realised is None:
        raise InvalidInput("A random selection is certified after its draw: name the realised candidate.")
    if realised is not None and realised not in plan.outcomes:
        raise InvalidInput(f"The realised candidate {realised!r} is not part of the plan.")
    named = [*plan.weights, *(name for name in plan.consulted if name not in plan.weights)]
    missing = sorted(set(named) - set(candidates))
    if missing:
        raise InvalidInput(f"No reference was given for candidate {missing[0]!r}.")
    mu = plan.bound.mu
    return Certificate(
        release_id=release_id,
        region=region,
        policy_digest=policy_digest,
        policy_serial=policy_serial,
        manifest_digest=manifest_digest,
        portfolio=portfolio,
        lineage=lineage,
        unit=unit,
        neighboring_relation=plan.relation,
        mechanism=plan.mechanism,
        weights=dict(plan.weights),
        candidates={name: candidates[name] for name in named},
        merge_rule=merge_rule or MERGE_RULES[plan.mechanism],
        bound=plan.bound.name,
        assumptions=plan.bound.assumptions,
        source=plan.bound.source,
        budget=plan.budget,
        epsilon=plan.epsilon,
        delta=plan.budget.delta,
        mu=mu,
        profile=tuple((e, plan.bound.delta(e)) for e in profile_grid(plan.budget.epsilon)),
        other_bounds=dict(plan.other_bounds),
        selection=plan.selection,
        realised=None
        if realised is None
        else Realised(candidate=realised, epsilon=plan.outcome_epsilon(realised), delta=plan.budget.delta),
        versions=dict(versions),
        fresh_noise=plan.fresh_noise,
        consulted=plan.consulted,
        components=tuple(CertifiedComponent.of(component) for component in plan.components),
        cumulative=cumulative,
        merge=plan.merge,
        merge_options=dict(plan.merge_options),
        tasks=dict(plan.tasks),
        records=plan.records,
    )


def profile_grid(epsilon: float) -> list[float]:
    """20 epsilons for a certificate's profile: 0, then a tenth to ten times `epsilon`, itself included."""
    below = [epsilon * 10 ** (-k / 9) for k in range(9, 0, -1)]
    above = [epsilon * 10 ** (k / 9) for k in range(1, 10)]
    return [0.0, *below, epsilon, *above]


def satisfies(
    certificate: Certificate,
    *,
    epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation,
    unit: str,
    accept_unaccounted: bool = False,
) -> bool:
    """Whether the certificate alone proves that its mechanism is (epsilon, delta)-private.

    By the closed form where mu is stated; otherwise where some stated pair, or pair of the profile, has an
    epsilon and a delta both no larger than those asked for. Another neighbouring relation or unit proves
    nothing, and neither does one whose weights were chosen by scores that it does not cover. The certificate
    is taken at its word: see `recheck.recheck` for a check against the runs.

    Args:
        epsilon: nats, >= 0, finite.
        delta: in (0, 1).
        accept_unaccounted: take the numbers of a certificate whose weights were chosen by scores that it does not
            cover as if the weights had been fixed beforehand. That is no proof: only for somebody who asked for
            exactly such a release.
    """
    PrivacyBudget(epsilon=epsilon, delta=delta)
    if certificate.selection == UNACCOUNTED and not accept_unaccounted:
        return False
    if certificate.neighboring_relation is not neighboring_relation or certificate.unit != unit:
        return False
    if certificate.mu is not None and gaussian.delta(certificate.mu, epsilon) <= delta:
        return True
    pairs = [(certificate.epsilon, certificate.delta), *certificate.profile]
    return any(known <= epsilon and at <= delta for known, at in pairs)
