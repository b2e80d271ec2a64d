"""A certificate against the ledger: it was written down before its model was released, with what it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from accounting.certificate import Certificate
from accounting.checks import AGREEMENT, Check, compare, compare_numbers, failed
from accounting.merges import DISJOINT
from accounting.plan import Mechanism
from accounting.selection_rules import UNACCOUNTED
from accounting.trajectory import Trajectory, segment_to_dict, union_of_segments
from infra.canonical import canonical_json, sha256_hex
from infra.documents import LedgerEntry, Policy
from infra.ledger_documents import LedgerOutcome
from tasks.cumulative import figures
from tasks.past import past_of
from tasks.scope import SCOPE_WORDS, scope_fault

CERTIFICATE_IN_LEDGER = "digest of the certificate in the ledger"
_POISSON = 1e-6  # relative, of a cumulative epsilon


def of_ledger(
    certificate: Certificate, content: bytes, ledger: Sequence[LedgerEntry], runs: Mapping[str, Trajectory]
) -> Iterator[Check]:
    """Compare a certificate with its own entry, and its cumulative figures with all entries.

    Args:
        content: the certificate's bytes.
        ledger: of its lineage, oldest first, the chain checked.
        runs: the trajectories at hand, by candidate name.
    """
    entry = _own_entry(certificate, content, ledger)
    if entry is None:
        reason = "The ledger has no entry that was written for this release before its model was released."
        yield failed("ledger entry of this release", reason)
        return
    yield from _of_entry(certificate, content, entry, runs)
    yield from _of_cumulative(certificate, ledger, entry)


def of_scope(policy: Policy, certificate: Certificate, ledger: Sequence[LedgerEntry]) -> list[Check]:
    """A budget that covers many releases covers them as the ledger has them now."""
    what = f"the policy's budget covers {SCOPE_WORDS[policy.scope]}"
    fault = scope_fault(policy, ledger, certificate.release_id)
    return [compare(what, True, True) if fault is None else failed(what, fault)]


def outcomes_of(certificate: Certificate) -> list[tuple[str, float, dict[str, float]]]:
    """(name, probability, lambda by candidate) of everything that may have been released."""
    if certificate.components:
        return [(part.name, part.weight, dict(part.weights)) for part in certificate.components]
    if certificate.mechanism is Mechanism.RANDOM_SELECTION:
        return [(name, weight, {name: 1.0}) for name, weight in certificate.weights.items()]
    return [(certificate.mechanism.value, 1.0, dict(certificate.weights))]


def _own_entry(certificate: Certificate, content: bytes, ledger: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """The entry that was written before this certificate's model was released, or the newest one like it."""
    own = [e for e in ledger if e.release_id == certificate.release_id and e.kind == "intended"]
    mine = [e for e in own if e.certificate_digest == sha256_hex(content)]
    return (mine or own or [None])[-1]


def _of_entry(
    certificate: Certificate, content: bytes, entry: LedgerEntry, runs: Mapping[str, Trajectory]
) -> list[Check]:
    """The ledger knew of this release before anybody saw it, with the steps that it stands for."""
    stated = {name: (weight, merged) for name, weight, merged in outcomes_of(certificate)}
    written = {
        outcome.name: (outcome.weight, outcome.coefficients or stated.get(outcome.name, (0.0, {}))[1])
        for outcome in entry.outcomes
    }
    missing = [
        name
        for outcome in entry.outcomes
        for name in {*stated.get(outcome.name, (0.0, {}))[1], *certificate.consulted}
        - set(outcome.candidates)
    ]
    only = [
        name
        for outcome in entry.outcomes
        for name in set(outcome.candidates)
        - {*stated.get(outcome.name, (0.0, {}))[1], *certificate.consulted}
        if certificate.selection != UNACCOUNTED  # whose certificate names no model that was looked at
    ]
    drawn = None if certificate.realised is None else certificate.realised.candidate
    checks = [
        compare(CERTIFICATE_IN_LEDGER, sha256_hex(content), entry.certificate_digest),
        compare("region of the ledger entry", certificate.region, entry.region),
        compare("unit of the ledger entry", certificate.unit, entry.unit),
        compare(
            "relation of the ledger entry", certificate.neighboring_relation.value, entry.neighboring_relation
        ),
        compare("selection of the ledger entry", certificate.selection, entry.selection),
        compare("drawn outcome in the ledger", drawn, entry.drawn),
        compare("outcomes in the ledger", stated, written),
        compare("candidates that the ledger leaves out", missing, []),
        compare("candidates that only the ledger names", only, []),
    ]
    for outcome in entry.outcomes:
        checks += _of_outcome(certificate, outcome, runs)
    return checks


def _of_outcome(
    certificate: Certificate, outcome: LedgerOutcome, runs: Mapping[str, Trajectory]
) -> list[Check]:
    """What the cumulative figures are computed from is what the certificate and the runs say."""
    whose = ", ".join(outcome.candidates)
    apart = certificate.records == DISJOINT and set(outcome.candidates) <= set(certificate.tasks)
    tasks = {name: certificate.tasks[name] for name in outcome.candidates} if apart else None
    checks = [compare(f"tasks in the ledger of {whose}", tasks, outcome.tasks)]
    known = {name: runs[name] for name in outcome.candidates if name in runs}
    if len(known) < len(outcome.candidates):
        return checks
    steps = [segment_to_dict(segment) for segment in union_of_segments(tuple(known.values()))]
    same = sorted(map(canonical_json, steps)) == sorted(map(canonical_json, outcome.segments))
    paths = {name: tuple((one.id, one.steps) for one in run.segments) for name, run in known.items()}
    data = {name: run.data_digest for name, run in known.items()} if apart else None
    return [
        *checks,
        compare(f"steps in the ledger of {whose}", same, True),
        compare(f"paths in the ledger of {whose}", paths, outcome.paths),
        compare(f"data in the ledger of {whose}", data, outcome.data_digests),
    ]


def _of_cumulative(
    certificate: Certificate, ledger: Sequence[LedgerEntry], entry: LedgerEntry
) -> list[Check]:
    """What all releases together cost, from the ledger as it was when this one was written into it."""
    stated = certificate.cumulative
    past = past_of(ledger, certificate.release_id)
    (own,) = past_of([entry], "").releases
    found = figures(past, own, certificate.neighboring_relation, certificate.delta)
    if stated is None or found is None:
        return [compare("cumulative figures", stated, found)]
    sampled = any(s["sampler"] == "poisson" for e in ledger for o in e.outcomes for s in o.segments)
    relative = _POISSON if sampled else AGREEMENT
    return [
        compare_numbers(
            "cumulative epsilon of all regions",
            stated.epsilon_all_regions,
            found.epsilon_all_regions,
            relative,
        ),
        compare_numbers(
            "cumulative epsilon of the region", stated.epsilon_region, found.epsilon_region, relative
        ),
        compare("delta of the cumulative figures", stated.delta, found.delta),
        compare("releases that they count", stated.releases, found.releases),
        compare("ledger entries that they count", stated.after_ledger_entry, found.after_ledger_entry),
    ]
