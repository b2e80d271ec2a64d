"""The claim as a document: JSON-ready, closed against unknown fields, and usable on its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.bounds import INDEPENDENT_RUNS, LAST_MERGED_ONLY, WEIGHTS_BLIND
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate import (
    Certificate,
    build_certificate,
    profile_grid,
    satisfies,
)
from accounting.certificate_parts import CandidateReference
from accounting.errors import (
    AccountingError,
    BudgetInfeasible,
    IncompatibleCandidates,
    InvalidInput,
    RemergeError,
)
from accounting.plan import CHOICES, Mechanism, Plan
from accounting.recheck import recheck, recompute
from accounting.solver import solve
from accounting.trajectory import Candidate, Trajectory

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
LC, RS = Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION
Maker = Callable[..., Any]


def reference(name: str) -> CandidateReference:
    return CandidateReference(
        registered_model="clinic", version=name[1:], model_sha256="aa" + name, trajectory_sha256="bb" + name
    )


def certify(plan: Plan, realised: str | None = None, **changes: Any) -> Certificate:
    arguments: dict[str, Any] = {
        "release_id": "release",
        "region": "eu",
        "policy_digest": "policy-digest",
        "policy_serial": 3,
        "manifest_digest": "manifest-digest",
        "portfolio": "clinic@1",
        "lineage": "patients",
        "unit": "record",
        "candidates": {f"c{i}": reference(f"c{i}") for i in range(5)},
        "versions": {"remerge": "0.1.0"},
        "realised": realised,
    }
    return build_certificate(plan, **(arguments | changes))


@pytest.fixture(scope="module")
def candidates(make_candidates: Maker) -> list[Candidate]:
    return make_candidates([8.0, 16.0, 32.0])


@pytest.fixture(scope="module")
def runs(candidates: list[Candidate]) -> dict[str, Trajectory]:
    return {candidate.name: candidate.trajectory for candidate in candidates}


@pytest.fixture(scope="module")
def merged(candidates: list[Candidate]) -> Certificate:
    return certify(
        solve(PrivacyBudget(epsilon=3.0, delta=1e-5), candidates, relation=REPLACE, mechanisms=[LC])
    )


@pytest.fixture(scope="module")
def drawn(candidates: list[Candidate]) -> Certificate:
    plan = solve(PrivacyBudget(epsilon=1.5, delta=1e-5), candidates, relation=REPLACE, mechanisms=[RS])
    return certify(plan, realised="c1")


def test_a_certificate_survives_json(merged: Certificate, drawn: Certificate) -> None:
    for certificate in (merged, drawn):
        text = json.dumps(certificate.to_dict(), allow_nan=False)
        assert Certificate.from_dict(json.loads(text)) == certificate


def test_what_it_says(merged: Certificate, drawn: Certificate) -> None:
    document = merged.to_dict()
    assert document["schema"] == "remerge/certificate/1"
    assert document["mechanism"] == "linear_combination"
    assert document["bound"] in ("joint", "generic")
    assert set(document["candidates"]) == set(document["weights"]) == {"c1", "c2"}
    assert document["epsilon"] <= document["budget"]["epsilon"] == 3.0
    assert document["mu"] > 0
    assert document["realised"] is None
    assert len(document["profile"]) == 20
    assert [3.0, merged.profile[10][1]] in document["profile"]
    assert all(sentence.endswith(".") for sentence in document["assumptions"])
    assert drawn.mu is None
    assert drawn.realised is not None
    assert drawn.realised.candidate == "c1"
    assert drawn.realised.epsilon == pytest.approx(2.258145, abs=1e-5)  # its own, above the mechanism's 1.5
    assert set(drawn.other_bounds) >= {"joint", "random_selection_rdp"}


def test_profile_is_an_upper_bound_that_falls(merged: Certificate, drawn: Certificate) -> None:
    for certificate in (merged, drawn):
        epsilons = [pair[0] for pair in certificate.profile]
        deltas = [pair[1] for pair in certificate.profile]
        assert epsilons == sorted(epsilons)
        assert deltas == sorted(deltas, reverse=True)
        assert certificate.budget.epsilon in epsilons


@given(epsilon=st.floats(min_value=1e-3, max_value=100))
def test_profile_grid(epsilon: float) -> None:
    grid = profile_grid(epsilon)
    assert len(grid) == len(set(grid)) == 20
    assert epsilon in grid
    assert grid == sorted(grid)
    assert grid[0] == 0.0


def test_satisfies_by_closed_form(merged: Certificate) -> None:
    ask = {"neighboring_relation": REPLACE, "unit": "record"}
    assert satisfies(merged, epsilon=merged.epsilon, delta=1e-5, **ask)
    assert satisfies(merged, epsilon=10.0, delta=1e-20, **ask)
    assert satisfies(merged, epsilon=1.0, delta=0.03, **ask)
    assert not satisfies(merged, epsilon=merged.epsilon * 0.99, delta=1e-5, **ask)
    assert not satisfies(merged, epsilon=merged.epsilon, delta=0.9e-5, **ask)


def test_satisfies_by_pairs(drawn: Certificate) -> None:
    ask = {"neighboring_relation": REPLACE, "unit": "record"}
    assert satisfies(drawn, epsilon=1.5, delta=1e-5, **ask)
    assert satisfies(drawn, epsilon=2.0, delta=1e-5, **ask)
    assert not satisfies(drawn, epsilon=1.49, delta=1e-5, **ask)
    for epsilon, delta in drawn.profile:
        if 0 < delta < 1 and epsilon > 0:
            assert satisfies(drawn, epsilon=epsilon, delta=delta, **ask)
            assert not satisfies(drawn, epsilon=epsilon, delta=delta * 0.5, **ask) or epsilon > 1.5


@given(epsilon=st.floats(min_value=0.01, max_value=30), exponent=st.floats(min_value=-30, max_value=-0.5))
def test_satisfies_never_claims_too_much(
    epsilon: float, exponent: float, merged: Certificate, drawn: Certificate, runs: dict[str, Trajectory]
) -> None:
    for certificate in (merged, drawn):
        if satisfies(
            certificate, epsilon=epsilon, delta=10.0**exponent, neighboring_relation=REPLACE, unit="record"
        ):
            assert recompute(certificate, runs).delta(epsilon) <= 10.0**exponent * (1 + 1e-9)


def test_another_relation_or_unit_proves_nothing(merged: Certificate) -> None:
    assert not satisfies(merged, epsilon=50.0, delta=0.1, neighboring_relation=ADD_OR_REMOVE, unit="record")
    assert not satisfies(merged, epsilon=50.0, delta=0.1, neighboring_relation=REPLACE, unit="person")


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0), (math.inf, 0.1)]
)
def test_satisfies_refuses_what_is_no_budget(epsilon: float, delta: float, merged: Certificate) -> None:
    with pytest.raises(InvalidInput):
        satisfies(merged, epsilon=epsilon, delta=delta, neighboring_relation=REPLACE, unit="record")


def test_recheck_accepts_what_the_solver_certified(
    merged: Certificate, drawn: Certificate, runs: dict[str, Trajectory]
) -> None:
    recheck(merged, runs)
    recheck(drawn, runs)
    recheck(Certificate.from_dict(merged.to_dict()), runs)


@settings(max_examples=25)
@given(
    noises=st.lists(
        st.one_of(st.floats(min_value=0.1, max_value=1e4), st.just(0.0)), min_size=1, max_size=18
    ),
    steps=st.sampled_from([1, 20, 10**6]),
    epsilon=st.floats(min_value=1e-3, max_value=100),
    exponent=st.floats(min_value=-300, max_value=-0.1),
    relation=st.sampled_from(list(NeighboringRelation)),
    mechanisms=st.sampled_from([[LC], [RS], [Mechanism.MIXTURE], list(CHOICES)]),
    lipschitz=st.sampled_from([math.inf, 1.0, 0.5, 1.01]),
    fresh=st.booleans(),
)
def test_every_plan_survives_its_certificate_and_the_recheck(
    noises: list[float],
    steps: int,
    epsilon: float,
    exponent: float,
    relation: NeighboringRelation,
    mechanisms: list[Mechanism],
    lipschitz: float,
    fresh: bool,
    make_candidates: Maker,
) -> None:
    scaled = [noise * steps**0.5 for noise in noises]
    candidates = make_candidates(scaled, steps=steps, relation=relation, update_lipschitz=lipschitz)
    budget = PrivacyBudget(epsilon=epsilon, delta=10.0**exponent)
    try:
        plan = solve(budget, candidates, relation=relation, mechanisms=mechanisms, allow_fresh_noise=fresh)
    except BudgetInfeasible:
        return
    drawn = len(plan.outcomes) > 1
    references = {candidate.name: reference(candidate.name) for candidate in candidates}
    certificate = certify(plan, realised=next(iter(plan.outcomes)) if drawn else None, candidates=references)
    assert (
        Certificate.from_dict(json.loads(json.dumps(certificate.to_dict(), allow_nan=False))) == certificate
    )
    recheck(certificate, {candidate.name: candidate.trajectory for candidate in candidates})
    assert satisfies(
        certificate, epsilon=epsilon, delta=budget.delta, neighboring_relation=relation, unit="record"
    )


def test_recheck_of_poisson_runs(make_candidates: Maker) -> None:
    candidates = make_candidates([1.0, 2.0], sampling_probability=0.05, relation=ADD_OR_REMOVE, steps=100)
    runs = {candidate.name: candidate.trajectory for candidate in candidates}
    for mechanism, epsilon in ((LC, 4.0), (RS, 1.5)):
        plan = solve(
            PrivacyBudget(epsilon=epsilon, delta=1e-5),
            candidates,
            relation=ADD_OR_REMOVE,
            mechanisms=[mechanism],
        )
        certificate = certify(plan, realised="c0" if mechanism is RS else None)
        recheck(certificate, runs)
        with pytest.raises(AccountingError):
            recheck(replace(certificate, epsilon=certificate.epsilon * 0.999), runs)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 2.0},
        {"mu": 0.1},
        {"weights": {"c1": 0.9, "c2": 0.1 - 1e-6}},
        {"profile": ((0.5, 1e-9),)},
        {"lineage": "others"},
        {"unit": "person"},
        {"bound": "advanced_composition", "mu": None},
        {"bound": "random_selection_pld", "mu": None},
        {"neighboring_relation": ADD_OR_REMOVE},
    ],
)
def test_recheck_finds_tampering(
    change: dict[str, Any], merged: Certificate, runs: dict[str, Trajectory]
) -> None:
    with pytest.raises(RemergeError):
        recheck(replace(merged, **change), runs)


def test_recheck_finds_a_tampered_draw(drawn: Certificate, runs: dict[str, Trajectory]) -> None:
    assert drawn.realised is not None
    with pytest.raises(AccountingError, match="delta"):
        recheck(replace(drawn, realised=replace(drawn.realised, epsilon=2.0)), runs)
    with pytest.raises(AccountingError, match="delta"):
        recheck(replace(drawn, weights={"c1": 0.5, "c2": 0.5}), runs)


def test_recheck_finds_exchanged_and_missing_runs(
    merged: Certificate, runs: dict[str, Trajectory], make_run: Maker
) -> None:
    with pytest.raises(AccountingError):
        recheck(merged, runs | {"c1": runs["c0"]})
    with pytest.raises(AccountingError, match="'c2' is missing"):
        recheck(merged, {"c1": runs["c1"]})
    with pytest.raises(IncompatibleCandidates):
        recheck(merged, runs | {"c1": make_run("s1", 16.0, relation=ADD_OR_REMOVE)})


def test_recheck_covers_every_bound_that_may_be_certified(
    merged: Certificate, drawn: Certificate, runs: dict[str, Trajectory]
) -> None:
    blind = replace(
        merged, assumptions=(*merged.assumptions, WEIGHTS_BLIND, INDEPENDENT_RUNS, LAST_MERGED_ONLY)
    )
    recheck(replace(blind, bound="generic", epsilon=2.99, mu=merged.mu), runs)
    loose = replace(merged, epsilon=3.0, budget=PrivacyBudget(epsilon=3.0, delta=1e-5), mu=None, profile=())
    recheck(replace(loose, bound="joint_rdp"), runs)
    renyi = replace(drawn, bound="random_selection_rdp", epsilon=2.0, profile=(), budget=loose.budget)
    recheck(renyi, runs)
    with pytest.raises(AccountingError):
        recheck(replace(renyi, epsilon=1.5), runs)


def test_recheck_wants_every_assumption_of_the_bound(
    merged: Certificate, drawn: Certificate, runs: dict[str, Trajectory]
) -> None:
    for certificate in (merged, drawn):
        for left_out in certificate.assumptions:
            kept = tuple(text for text in certificate.assumptions if text != left_out)
            with pytest.raises(AccountingError, match="leaves out an assumption"):
                recheck(replace(certificate, assumptions=kept), runs)
    with pytest.raises(AccountingError, match="leaves out an assumption"):
        recheck(replace(merged, assumptions=("Trust us.",)), runs)


def test_a_draw_is_stated_where_there_was_one(merged: Certificate, drawn: Certificate) -> None:
    with pytest.raises(InvalidInput, match="exactly where something was drawn"):
        replace(drawn, realised=None)
    with pytest.raises(InvalidInput, match=r"drawn|no weight"):
        replace(merged, realised=drawn.realised)
    with pytest.raises(InvalidInput, match="Fresh noise belongs to a linear combination"):
        replace(drawn, fresh_noise=1e9)


def test_a_draw_must_be_named(candidates: list[Candidate]) -> None:
    plan = solve(PrivacyBudget(epsilon=1.5, delta=1e-5), candidates, relation=REPLACE, mechanisms=[RS])
    with pytest.raises(InvalidInput, match="name the realised candidate"):
        certify(plan)
    with pytest.raises(InvalidInput, match="not part of the plan"):
        certify(plan, realised="c0")
    average = solve(PrivacyBudget(epsilon=3.0, delta=1e-5), candidates, relation=REPLACE, mechanisms=[LC])
    with pytest.raises(InvalidInput, match="Only a random selection"):
        certify(average, realised="c1")
    alone = solve(PrivacyBudget(epsilon=3.0, delta=1e-5), candidates[1:2], relation=REPLACE, mechanisms=[RS])
    assert certify(alone).realised is None


def test_every_used_candidate_needs_a_reference(candidates: list[Candidate]) -> None:
    plan = solve(PrivacyBudget(epsilon=3.0, delta=1e-5), candidates, relation=REPLACE, mechanisms=[LC])
    with pytest.raises(InvalidInput, match="No reference was given for candidate 'c2'"):
        certify(plan, candidates={"c1": reference("c1")})


DROP = object()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "remerge/certificate/2"),
        (("surprise",), 1),
        (("epsilon",), DROP),
        (("epsilon",), None),
        (("epsilon",), "1"),
        (("epsilon",), math.nan),
        (("epsilon",), math.inf),
        (("epsilon",), 4.0),
        (("delta",), 0.0),
        (("delta",), 2e-5),
        (("mu",), -1.0),
        (("mu",), math.inf),
        (("region",), ""),
        (("policy_serial",), 1.5),
        (("policy_serial",), True),
        (("bound",), "stepwise"),
        (("bound",), "guess"),
        (("bound",), "random_selection_pld"),
        (("mechanism",), "averaging"),
        (("neighboring_relation",), "substitute"),
        (("versions",), {"numpy": 2}),
        (("assumptions",), []),
        (("assumptions",), "All is well."),
        (("weights",), {}),
        (("weights",), [0.5, 0.5]),
        (("weights", "c1"), 0.9),
        (("weights", "c1"), math.nan),
        (("weights", "c0"), 0.0),
        (("candidates", "c1"), DROP),
        (("candidates", "c1", "surprise"), 1),
        (("candidates", "c1", "version"), DROP),
        (("budget", "epsilon"), 0.0),
        (("budget", "surprise"), 1),
        (("profile",), "flat"),
        (("profile",), [[1.0]]),
        (("profile",), [[1.0, 1.5]]),
        (("profile",), [[-1.0, 0.5]]),
        (("profile",), [[1.0, math.nan]]),
        (("other_bounds",), {"joint_rdp": {"epsilon": 1.0, "reason": "both"}}),
        (("other_bounds",), {"joint_rdp": {"epsilon": math.inf}}),
        (("other_bounds",), {"joint_rdp": {}}),
        (("other_bounds",), {"joint_rdp": {"reason": ""}}),
        (("realised",), {"candidate": "c0", "epsilon": 1.0, "delta": 1e-5}),
        (("realised",), {"candidate": "c1", "epsilon": 1.0}),
    ],
)
def test_bad_documents_are_refused(path: tuple[str, ...], value: object, merged: Certificate) -> None:
    document = json.loads(json.dumps(merged.to_dict()))
    target = document
    for name in path[:-1]:
        target = target[name]
    if value is DROP:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    with pytest.raises(InvalidInput):
        Certificate.from_dict(document)


@pytest.mark.parametrize("document", [None, [], "certificate", 3, {}])
def test_what_is_no_document_is_refused(document: object) -> None:
    with pytest.raises(InvalidInput):
        Certificate.from_dict(document)
