"""Real certificates of every kind hold; whatever is changed in one, or in a trajectory, is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from accounting.certificate import Certificate
from accounting.checks import Check
from accounting.recheck import recompute
from accounting.trajectory import Trajectory
from infra.canonical import canonical_json, sha256_hex
from tasks.verifying import Evidence, verify
from tasks.verifying_ledger import CERTIFICATE_IN_LEDGER
from tests.tasks.certified import KINDS, evidence_of

Path = tuple[str | int, ...]

# What may be changed without being found, and why.
NOTES = {"versions": "the versions of the libraries are a note for people: no number depends on the text"}
# The same where only the trajectories are at hand.
DOCUMENTS = {
    **NOTES,
    "policy_serial": "only the policy's document knows it",
    "region": "only the policy's document knows it",
    "portfolio": "only the portfolio's manifest knows its serial",
    "candidates": "only the portfolio's manifest knows versions and digests of models",
    "cumulative": "only the ledger knows what else was released",
    "merge_rule": "words for people, fixed by the pipeline of policies",
    "merge": "only the policy's document knows the operator, and the bound is the same for each",
    "merge_options": "only the policy's document knows them, and the bound is the same whatever they are",
    "tasks": "only the portfolio's manifest knows their names",
    "fresh_noise": "what is added to a merge that the joint release covers changes no number; policies forbid it",
}


@cache
def made(name: str) -> tuple[Certificate, Evidence]:
    """One certificate of a kind with all its documents; the numbers it takes are cached by the accounting."""
    return evidence_of(KINDS[name])


def first_fault(evidence: Evidence) -> Check | None:
    """The first check that fails, but that of the whole file's digest in the ledger."""
    checks = (check for check in verify(evidence) if check.holds is False)
    return next((check for check in checks if check.what != CERTIFICATE_IN_LEDGER), None)


@pytest.mark.parametrize("name", KINDS)
def test_real_certificates_hold(name: str) -> None:
    certificate, evidence = made(name)
    checks = list(verify(evidence))
    assert [check for check in checks if check.holds is False] == []
    assert [check.what for check in checks if check.holds is None] == []
    assert certificate.cumulative is not None
    assert certificate.cumulative.epsilon_all_regions > certificate.cumulative.epsilon_region
    derived = [check.what for check in checks if "derived again" in check.what]
    assert len(derived) >= 1 + (certificate.realised is not None)
    assert sum("profile[" in check.what for check in checks) == 20 * 3
    assert any(check.what == "released model, merged again" for check in checks)


def leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, dict | list) and node:
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in entries:
            yield from leaves(value, (*path, key))
    else:
        yield path, node


def mutations(name: str, excused: Collection[str]) -> Iterator[tuple[Path, str, bytes]]:
    """(where, what was done, the changed document): every leaf changed, every entry removed, fields added."""
    certificate, evidence = made(name)
    document = certificate.to_dict()
    for path, done, changed in _all_mutations(document, name):
        content = canonical_json(changed)
        if content != evidence.certificate and not {path[0], path[-1]} & set(excused):
            yield path, done, content


def _all_mutations(document: Any, name: str) -> Iterator[tuple[Path, str, Any]]:
    for path, value in leaves(document):
        for done, other in _others(value, amount_for(name, path, value)):
            yield path, done, _with(document, path, other)
    for path, value in _inner(document):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield (*path, key), "removed", _without(document, (*path, key))
        if isinstance(value, dict):
            yield (*path, "surprise"), "added", _with(document, (*path, "surprise"), 1)


def amount_for(name: str, path: Path, value: object) -> float:
    """By how much to change a number, relative.

    The other accountants' epsilons of Poisson runs are compared to 1e-6, and Poisson deltas of the profile up to
    the composition's measured error, which differs between machines.
    """
    if not name.startswith("poisson"):
        return 1e-7
    if path[0] == "profile" and path[-1] == 1 and isinstance(value, float):
        return max(1e-4, 3 * composition_error(name) / value)
    return 1e-4


@cache
def composition_error(name: str) -> float:
    certificate, evidence = made(name)
    runs = {n: Trajectory.from_dict(json.loads(content)) for n, content in evidence.trajectories.items()}
    return recompute(certificate, runs).profile.smallest_delta / 100


def _others(value: Any, amount: float) -> list[tuple[str, Any]]:
    if isinstance(value, bool):
        return [("negated", not value)]
    if isinstance(value, int):
        return [("raised", value + 1), ("lowered", value - 1)]
    if isinstance(value, float):
        changed = [value * (1 + amount), value * (1 - amount)] if value else [amount, -amount]
        changed = [value + 5e-324, value - 5e-324] if changed[0] == value else changed  # the least doubles
        return list(zip(("raised", "lowered"), changed, strict=True))
    if isinstance(value, str):
        return [("extended", value + "x"), ("emptied", "")]
    if value is None:
        return [("filled", 1.0), ("filled", "x")]
    return [("filled", ["x"])]  # an empty list or mapping


def _inner(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, dict | list):
        yield path, node
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _inner(value, (*path, key))


def _with(document: Any, path: Path, value: Any) -> Any:
    changed = copy.deepcopy(document)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return changed


def _without(document: Any, path: Path) -> Any:
    changed = copy.deepcopy(document)
    target = changed
    for key in path[:-1]:
        target = target[key]
    del target[path[-1]]
    return changed


@pytest.mark.parametrize("name", KINDS)
def test_whatever_is_changed_in_a_certificate_is_found(name: str) -> None:
    """By its policy, its portfolio's manifest, its draw, the ledger and the runs: not by a digest of the file."""
    _, evidence = made(name)
    evidence = replace(evidence, release=None, model=None)
    assert unseen(name, evidence, NOTES) == []


@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_found_by_the_runs_alone(name: str) -> None:
    _, evidence = made(name)
    alone = Evidence(certificate=evidence.certificate, trajectories=evidence.trajectories)
    excused = {**DOCUMENTS}
    if name in ("generic", "shifted"):
        del excused["fresh_noise"]
    assert unseen(name, alone, excused) == []


def unseen(name: str, evidence: Evidence, excused: Collection[str]) -> list[tuple[Path, str]]:
    """Changes that no check fails for, but those that only lower a Poisson delta within its measured error."""
    found = [
        (path, done)
        for path, done, changed in mutations(name, excused)
        if first_fault(replace(evidence, certificate=changed)) is None
    ]
    profile = made(name)[0].profile
    error = composition_error(name) if name.startswith("poisson") else 0.0
    return [
        (path, done)
        for path, done in found
        if not (path[0] == "profile" and done == "lowered" and profile[int(path[1])][1] <= 3 * error)
    ]


@pytest.mark.parametrize("name", ["generic", "shifted", "random_selection", "mixture", "poisson_selection"])
def test_shifting_weight_is_found_by_the_numbers(name: str) -> None:
    """Weights that still add up to 1."""
    certificate, evidence = made(name)
    alone = Evidence(certificate=evidence.certificate, trajectories=evidence.trajectories)
    document = certificate.to_dict()
    if name == "mixture":
        first, second, *_ = document["components"]
        for expected in document["weights"]:
            moved = first["weights"].get(expected, 0.0) - second["weights"].get(expected, 0.0)
            document["weights"][expected] += 2.0**-12 * moved
        first["weight"] += 2.0**-12
        second["weight"] -= 2.0**-12
    else:
        first, second = list(document["weights"])[:2]
        document["weights"][first] += 2.0**-12
        document["weights"][second] -= 2.0**-12
    fault = first_fault(replace(alone, certificate=canonical_json(document)))
    assert fault is not None
    assert fault.note.startswith("The document states")


@pytest.mark.parametrize("name", ["joint", "poisson", "validation"])
def test_shifted_weights_that_no_number_depends_on_are_found_by_the_model(name: str) -> None:
    """The joint release covers every average; the released parameters are still not what the document says."""
    certificate, evidence = made(name)
    document = certificate.to_dict()
    document["weights"] = {"c0": 0.75, "c1": 0.25}
    changed = replace(evidence, certificate=canonical_json(document), release=None, ledger=None)
    fault = first_fault(changed)
    assert fault is not None
    assert fault.what == "released model, merged again"


@pytest.mark.parametrize("name", KINDS)
def test_whatever_is_changed_in_a_trajectory_is_found(name: str) -> None:
    certificate, evidence = made(name)
    for candidate in certificate.candidates:
        stored = json.loads(evidence.trajectories[candidate])
        for _, _, changed in _all_mutations(stored, name):
            content = canonical_json(changed)
            if content != evidence.trajectories[candidate]:
                trajectories = {**evidence.trajectories, candidate: content}
                assert first_fault(replace(evidence, trajectories=trajectories)) is not None


# What a bound depends on, of a segment.
OF_THE_NOISE = {"steps", "noise_multiplier"}
OF_A_SCALE = {"max_grad_norm", "learning_rate", "expected_batch_size", "update_lipschitz"}
OF_A_MERGE = {
    *OF_THE_NOISE,
    *OF_A_SCALE - {"update_lipschitz"},
    "clipping",
    "optimizer",
    "momentum",
    "schedule",
}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("generic", OF_A_MERGE),
        ("shifted", {*OF_A_MERGE, "update_lipschitz"}),
        ("joint", OF_THE_NOISE),
        ("random_selection", OF_THE_NOISE),
        ("mixture", OF_THE_NOISE),
        ("poisson", {*OF_THE_NOISE, "sampling_probability"}),
        ("poisson_selection", {*OF_THE_NOISE, "sampling_probability"}),
        ("validation", OF_THE_NOISE),
        ("unaccounted", OF_THE_NOISE),
    ],
)
def test_a_changed_run_is_found_even_where_every_digest_was_changed_with_it(
    name: str, fields: set[str]
) -> None:
    """Somebody who edits a run and the certificate's digests of it is caught by the numbers."""
    certificate, evidence = made(name)
    other = {"clipping": "per_layer", "optimizer": "adam", "schedule": "adapted", "momentum": 0.5}
    for candidate in certificate.candidates:
        stored = json.loads(evidence.trajectories[candidate])
        for number, segment in enumerate(stored["segments"]):
            if name.startswith("poisson") and (number, candidate) != (0, "c0"):
                continue  # a composition for each change takes long, and the others are like this one
            # Scales cancel where each step is paid at once: before the last one by the generic bound, and by the
            # shifted one in the run that is not left anything to hide.
            paid_at_once = (name == "generic" and number == 0) or (name == "shifted" and candidate == "c2")
            relevant = fields - (OF_A_SCALE if paid_at_once else set())
            for field in sorted(relevant):
                value = other.get(field, segment[field] + 1 if field == "steps" else None)
                changed = copy.deepcopy(stored)
                changed["segments"][number][field] = segment[field] * 0.99 if value is None else value
                if field == "steps" and number == 0:
                    changed["segments"][1]["parent"]["step"] += 1
                content = canonical_json(changed)
                document = certificate.to_dict()
                document["candidates"][candidate]["trajectory_sha256"] = sha256_hex(content)
                alone = Evidence(
                    certificate=canonical_json(document),
                    trajectories={**evidence.trajectories, candidate: content},
                )
                fault = first_fault(alone)
                assert fault is not None, (candidate, number, field)
