"""Does a certificate hold? Everything in it is compared with the documents, runs and files that it speaks of.

Three layers: documents (digests, names, the policy, the draw, the ledger); the product's own functions, stated anew
from trajectories and weights (`accounting.restate`); and a second derivation that shares no code with the solver's
bounds (`accounting.independent`). Nothing is read here: see `tasks.evidence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from accounting.certificate import Certificate
from accounting.checks import Check, compare, failed, not_compared, within
from accounting.errors import RemergeError
from accounting.independent import derive_again
from accounting.plan import Mechanism
from accounting.restate import restate
from accounting.trajectory import Trajectory
from infra.canonical import digest, sha256_hex, strict_json
from infra.documents import Draw, LedgerEntry, Policy, PortfolioManifest, ReleaseManifest
from infra.releases import CERTIFICATE, DRAW, MODEL
from tasks.candidates import recorded_of
from tasks.drawing import drawn_index
from tasks.policy_merges import allows, merge_rule, options_of
from tasks.release_merging import ROUNDING, Material, merged, relative_difference, rounds_alike
from tasks.verifying_ledger import of_ledger, of_scope, outcomes_of


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a certificate is held against; None or empty for what is not at hand."""

    certificate: bytes
    trajectories: Mapping[str, bytes]  # by candidate name, as stored
    policy: Policy | None = None
    portfolio: PortfolioManifest | None = None
    release: ReleaseManifest | None = None
    draw: Draw | None = None
    model: bytes | None = None  # that was released
    candidates: Mapping[str, bytes] = field(default_factory=dict)  # models by candidate name
    material: Material | None = (
        None  # that the certificate's merge operator needs; None where it is not at hand
    )
    ledger: tuple[LedgerEntry, ...] | None = None  # of the lineage, its chain checked
    faults: tuple[Check, ...] = ()  # met while gathering all this


def verify(evidence: Evidence) -> Iterator[Check]:
    """Every comparison that the evidence allows, in the order in which a reader would ask for them.

    The numbers come last, each when it is asked for. The certificate holds if no check has failed.
    """
    yield from evidence.faults
    try:
        certificate = Certificate.from_dict(strict_json(evidence.certificate))
    except (RemergeError, ValueError, TypeError) as error:
        yield failed("the certificate can be read", _sentence(error))
        return
    runs, read = _runs(certificate, evidence.trajectories)
    sections: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("release", lambda: _of_release(certificate, evidence)),
        ("policy", lambda: _of_policy(certificate, evidence.policy)),
        ("portfolio", lambda: _of_portfolio(certificate, evidence.portfolio)),
        ("draw", lambda: _of_draw(certificate, evidence)),
        ("model", lambda: _of_model(certificate, evidence)),
        ("trajectories", lambda: [*read, *_of_runs(evidence.portfolio, runs)]),
        ("ledger", lambda: _of_ledger(certificate, evidence, runs)),
    ]
    if len(runs) == len(certificate.candidates):
        sections += [
            ("numbers", lambda: restate(certificate, runs)),
            ("numbers, derived again", lambda: derive_again(certificate, runs)),
        ]
    for what, find in sections:
        try:
            yield from find()
        except RemergeError as error:  # documents that contradict themselves
            yield failed(what, error.message)
    if len(runs) < len(certificate.candidates):
        yield failed("numbers", "Without every trajectory no number can be recomputed.")


def _sentence(error: Exception) -> str:
    return (
        error.message if isinstance(error, RemergeError) else f"It is not JSON of the right form ({error})."
    )


def _of_release(certificate: Certificate, evidence: Evidence) -> list[Check]:
    named = {"policy": certificate.policy_digest, "portfolio": certificate.manifest_digest}
    checks = [
        compare("release_id is the digest of policy and portfolio", certificate.release_id, digest(named))
    ]
    release = evidence.release
    if release is None:
        return [*checks, not_compared("release manifest", "No manifest.json is at hand.")]
    checks += [
        compare(f"{name} of the release manifest", getattr(certificate, name), getattr(release, name))
        for name in ("release_id", "region", "policy_serial", "policy_digest", "portfolio", "manifest_digest")
    ]
    files = {CERTIFICATE: evidence.certificate}
    files |= {} if evidence.model is None else {MODEL: evidence.model}
    files |= {} if evidence.draw is None else {DRAW: evidence.draw.content()}
    checks += [
        compare(f"digest of {name}", sha256_hex(content), release.files.get(name))
        for name, content in files.items()
    ]
    return checks


def _of_policy(certificate: Certificate, policy: Policy | None) -> list[Check]:
    if policy is None:
        return [not_compared("policy", "The policy's document is not at hand.")]
    budget = certificate.budget
    checks = [
        compare("digest of the policy", certificate.policy_digest, policy.sha256()),
        compare("region of the policy", certificate.region, policy.region),
        compare("serial of the policy", certificate.policy_serial, policy.serial),
        compare("budget of the policy", (budget.epsilon, budget.delta), (policy.epsilon, policy.delta)),
        compare(
            "relation of the policy", certificate.neighboring_relation.value, policy.neighboring_relation
        ),
        compare("unit of the policy", certificate.unit, policy.unit),
        compare("selection of the policy", certificate.selection, policy.selection),
        compare("portfolio is one the policy names", _names(policy.portfolio, certificate.portfolio), True),
        compare("mechanism is one the policy allows", allows(policy, certificate), True),
        compare("merge rule", certificate.merge_rule, merge_rule(certificate)),
        compare("fresh noise, which policies never allow", _fresh_noise(certificate), 0.0),
    ]
    if certificate.mechanism is Mechanism.OPERATOR:
        checks += [
            compare("merge operator of the policy", certificate.merge, policy.merge),
            compare("options of the merge operator", dict(certificate.merge_options), options_of(policy)),
        ]
    realised = certificate.realised
    if realised is not None:
        checks.append(compare("drawn outcome within the policy's cap", realised.epsilon <= policy.cap, True))
    return checks


def _names(wanted: str, found: str) -> bool:
    """Whether a policy's `name@serial` or `name@latest` names a portfolio version."""
    name, _, serial = wanted.partition("@")
    return wanted == found or (serial == "latest" and name == found.partition("@")[0])


def _fresh_noise(certificate: Certificate) -> float:
    return max([certificate.fresh_noise, *(part.fresh_noise for part in certificate.components)])


def _of_portfolio(certificate: Certificate, portfolio: PortfolioManifest | None) -> list[Check]:
    if portfolio is None:
        return [not_compared("portfolio manifest", "The portfolio's manifest is not at hand.")]
    checks = [
        compare("digest of the portfolio manifest", certificate.manifest_digest, portfolio.sha256()),
        compare("portfolio", certificate.portfolio, portfolio.reference),
        compare("lineage", certificate.lineage, portfolio.lineage),
        compare("unit", certificate.unit, portfolio.unit),
        compare("relation", certificate.neighboring_relation.value, portfolio.neighboring_relation),
    ]
    if certificate.tasks or portfolio.tasks is not None:
        known = portfolio.tasks or {}
        checks += [
            compare(
                "tasks of the candidates",
                dict(certificate.tasks),
                {name: known.get(name) for name in certificate.candidates},
            ),
            compare("what the tasks' records share", certificate.records, portfolio.records),
        ]
    records = {record.name: record for record in portfolio.candidates}
    for name, reference in certificate.candidates.items():
        record = records.get(name)
        if record is None:
            checks.append(failed(f"candidate {name}", f"{portfolio.reference} has no such candidate."))
            continue
        stated = (reference.registered_model, reference.version)
        found = (record.registered_model, str(record.version))
        checks += [
            compare(f"version of {name}", stated, found),
            compare(f"model digest of {name}", reference.model_sha256, record.model_sha256),
            compare(f"trajectory digest of {name}", reference.trajectory_sha256, record.trajectory_sha256),
        ]
    return checks


def _of_draw(certificate: Certificate, evidence: Evidence) -> list[Check]:
    outcomes = {name: weight for name, weight, _ in outcomes_of(certificate)}
    realised, draw = certificate.realised, evidence.draw
    if realised is None:
        return [] if draw is None else [failed("draw", "There is a draw, but the certificate names none.")]
    if draw is None:
        return [not_compared("draw", "The draw's document is not at hand.")]
    checks = [
        compare("release of the draw", certificate.release_id, draw.release_id),
        compare("weights of the draw", outcomes, draw.weights),
        compare("drawn outcome", realised.candidate, draw.drawn),
    ]
    try:
        index = drawn_index(draw.point, draw.weights)
    except (RemergeError, ValueError) as error:
        return [*checks, failed("outcome at the drawn point", _sentence(error))]
    at_point = (index, sorted(draw.weights)[index])
    return [*checks, compare("outcome at the drawn point", (draw.drawn_index, draw.drawn), at_point)]


def _of_model(certificate: Certificate, evidence: Evidence) -> list[Check]:
    """The released parameters are what the candidates and weights make."""
    checks = [
        compare(
            f"digest of the model of {name}", certificate.candidates[name].model_sha256, sha256_hex(content)
        )
        for name, content in evidence.candidates.items()
        if name in certificate.candidates
    ]
    what = "released model, merged again"
    if evidence.model is None:
        return [*checks, not_compared(what, "The released model is not at hand.")]
    drawn = None if certificate.realised is None else certificate.realised.candidate
    weights = next(merged for name, _, merged in outcomes_of(certificate) if drawn in (None, name))
    absent = [name for name in weights if name not in evidence.candidates]
    if absent or evidence.portfolio is None:
        return [*checks, not_compared(what, "The candidates' models are not at hand.")]
    order = [record.name for record in evidence.portfolio.candidates if record.name in weights]
    if evidence.material is None and certificate.mechanism is Mechanism.OPERATOR:
        return [*checks, not_compared(what, f"What {certificate.merge} merges with is not at hand.")]
    try:
        again = merged(
            certificate,
            {name: weights[name] for name in order},
            evidence.candidates,
            evidence.material or Material(),
        )
    except RemergeError as error:
        return [*checks, failed(what, error.message)]
    return [*checks, _same_model(certificate, what, evidence.model, again)]


def _same_model(certificate: Certificate, what: str, released: bytes, again: bytes) -> Check:
    """The same bytes; of operators whose numbers another machine rounds otherwise, nearly the same parameters."""
    check = compare(what, sha256_hex(released), sha256_hex(again))
    if check.holds or certificate.mechanism is not Mechanism.OPERATOR or rounds_alike(certificate.merge):
        return check
    difference = relative_difference(released, again)
    return check if not difference <= ROUNDING else within(what, difference, (0.0, ROUNDING), 0.0)


def _runs(certificate: Certificate, stored: Mapping[str, bytes]) -> tuple[dict[str, Trajectory], list[Check]]:
    runs, checks = {}, []
    for name, reference in certificate.candidates.items():
        what = f"trajectory of {name}"
        if name not in stored:
            checks.append(
                failed(
                    what,
                    "It is not at hand: if the stack is down start it, or name a folder by --trajectories.",
                )
            )
            continue
        checks.append(compare(f"digest of the {what}", reference.trajectory_sha256, sha256_hex(stored[name])))
        try:
            runs[name] = Trajectory.from_dict(strict_json(stored[name]))
        except (RemergeError, ValueError, TypeError) as error:
            checks.append(failed(what, _sentence(error)))
            continue
        whole, _, _ = certificate.portfolio.partition("@")
        checks.append(compare(f"portfolio of the {what}", whole, runs[name].portfolio.partition("@")[0]))
    return runs, checks


def _of_runs(portfolio: PortfolioManifest | None, runs: Mapping[str, Trajectory]) -> list[Check]:
    """The trajectories are of this portfolio's data, start and lineage."""
    if portfolio is None:
        return []
    known = {record.name for record in portfolio.candidates}
    return [
        compare(f"{field} of the trajectory of {name}", value, str(getattr(run, field)))
        for name, run in runs.items()
        if name in known
        for field, value in recorded_of(portfolio, name).items()
        if field != "portfolio"  # compared where the trajectory was read
    ]


def _of_ledger(
    certificate: Certificate, evidence: Evidence, runs: Mapping[str, Trajectory]
) -> Iterable[Check]:
    if evidence.ledger is None:
        return [not_compared("ledger and cumulative figures", "The ledger is not at hand.")]
    checks = list(of_ledger(certificate, evidence.certificate, evidence.ledger, runs))
    if evidence.policy is not None and evidence.policy.scope != "release":
        checks += of_scope(evidence.policy, certificate, evidence.ledger)
    return checks
