"""Mixtures of merges: never worse than both mechanisms, within the budget, and rechecked from the certificate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate import Certificate, build_certificate, satisfies
from accounting.certificate_parts import CandidateReference
from accounting.errors import AccountingError, BudgetInfeasible, InvalidInput, RemergeError
from accounting.joint_release import single_run
from accounting.linear_combination import accumulated_noise_variance
from accounting.members import least_bound
from accounting.plan import CHOICES, Mechanism, Plan
from accounting.recheck import recheck, recompute
from accounting.solver import solve
from accounting.trajectory import Candidate, Trajectory

REPLACE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
LC, RS, MIXTURE = Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION, Mechanism.MIXTURE
Maker = Callable[..., Any]


def budget(epsilon: float, delta: float = 1e-5) -> PrivacyBudget:
    return PrivacyBudget(epsilon=epsilon, delta=delta)


def certified(plan: Plan, **changes: Any) -> Certificate:
    reference = {
        name: CandidateReference(
            registered_model="m", version="1", model_sha256="a" + name, trajectory_sha256="b" + name
        )
        for name in plan.weights
    }
    arguments: dict[str, Any] = {
        "release_id": "r",
        "region": "eu",
        "policy_digest": "p",
        "policy_serial": 1,
        "manifest_digest": "m",
        "portfolio": "clinic@1",
        "lineage": "patients",
        "unit": "record",
        "candidates": reference,
        "versions": {},
        "realised": next(iter(plan.outcomes)) if len(plan.outcomes) > 1 else None,
    }
    return build_certificate(plan, **(arguments | changes))


@pytest.fixture(scope="module")
def candidates(make_candidates: Maker) -> list[Candidate]:
    """Epsilon 0.5 to 8 or so, of unknown updates."""
    return make_candidates([64.0, 34.0, 18.0, 10.0, 5.5])


@pytest.fixture(scope="module")
def runs(candidates: list[Candidate]) -> dict[str, Trajectory]:
    return {candidate.name: candidate.trajectory for candidate in candidates}


@pytest.fixture(scope="module")
def drawn(candidates: list[Candidate]) -> Plan:
    return solve(
        budget(1.6), candidates, relation=REPLACE, mechanisms=list(CHOICES), realised_epsilon_cap=6.0
    )


def test_a_mixture_uses_up_what_both_mechanisms_leave(drawn: Plan, runs: dict[str, Trajectory]) -> None:
    assert drawn.mechanism is MIXTURE
    assert len(drawn.components) == 2
    assert max(len(component.weights) for component in drawn.components) == 2  # one of them is an average
    assert {a.label for a in drawn.alternatives} == {"linear_combination", "random_selection", "best_single"}
    assert all(a.objective < drawn.objective for a in drawn.alternatives)
    assert drawn.bound.name == "mixture"
    assert drawn.bound.delta(1.6) == pytest.approx(1e-5, rel=1e-9)
    assert math.fsum(c.weight for c in drawn.components) == pytest.approx(1, abs=1e-15)
    worth = 0.0
    for component in drawn.components:
        used = [runs[name] for name in component.weights]
        shares = list(component.weights.values())
        least = least_bound(used, shares, REPLACE, 1e-5)
        assert least is not None
        assert component.epsilon == least.epsilon(1e-5) <= 6.0
        worth -= component.weight * sum(
            w * w * accumulated_noise_variance(r) for w, r in zip(shares, used, strict=True)
        )
    assert drawn.objective == pytest.approx(worth)
    for name, weight in drawn.weights.items():
        assert weight == pytest.approx(sum(c.weight * c.weights.get(name, 0) for c in drawn.components))


@settings(max_examples=12)
@given(
    noises=st.lists(st.floats(min_value=5, max_value=100), min_size=1, max_size=5),
    c=st.sampled_from([1.0, 0.9, math.inf]),
    epsilon=st.floats(min_value=0.3, max_value=6),
    utilities=st.one_of(st.none(), st.lists(st.floats(0.1, 1), min_size=5, max_size=5)),
    capped=st.booleans(),
)
def test_never_worse_than_both_mechanisms(
    noises: list[float],
    c: float,
    epsilon: float,
    utilities: list[float] | None,
    capped: bool,
    make_candidates: Maker,
) -> None:
    candidates = make_candidates(noises, update_lipschitz=c)
    selection = "noise"
    if utilities is not None:
        selection = "stated"
        candidates = [replace(k, utility=u) for k, u in zip(candidates, utilities, strict=False)]
    arguments: dict[str, Any] = {
        "relation": REPLACE,
        "selection": selection,
        "realised_epsilon_cap": 2 * epsilon if capped else None,
    }
    found = {}
    for mechanism in CHOICES:
        try:
            found[mechanism] = solve(budget(epsilon), candidates, mechanisms=[mechanism], **arguments)
        except BudgetInfeasible:
            continue
    if MIXTURE not in found:
        assert found == {}
        return
    plan = found[MIXTURE]
    assert plan.mechanism is MIXTURE
    assert plan.bound.delta(epsilon) <= 1e-5
    for other in found.values():
        assert plan.objective >= other.objective - 1e-9 * abs(other.objective)
    if capped:
        assert all(component.epsilon <= 2 * epsilon for component in plan.components)
    everything = solve(budget(epsilon), candidates, mechanisms=list(CHOICES), **arguments)
    assert everything.objective >= plan.objective - 1.1e-3 * abs(plan.objective)
    backwards = solve(budget(epsilon), candidates[::-1], mechanisms=[MIXTURE], **arguments)
    assert backwards.objective == pytest.approx(plan.objective, rel=1e-9)
    certificate = certified(plan)
    assert (
        Certificate.from_dict(json.loads(json.dumps(certificate.to_dict(), allow_nan=False))) == certificate
    )
    recheck(certificate, {k.name: k.trajectory for k in candidates})


def test_poisson_sampled_runs(make_candidates: Maker) -> None:
    candidates = make_candidates(
        [1.0, 2.0, 4.0], sampling_probability=0.05, relation=ADD_OR_REMOVE, steps=100
    )
    plans = [
        solve(budget(1.5), candidates, relation=ADD_OR_REMOVE, mechanisms=[mechanism])
        for mechanism in (LC, RS, MIXTURE)
    ]
    assert plans[2].objective >= max(plans[0].objective, plans[1].objective) * (1 + 1e-9)
    assert plans[2].bound.delta(1.5) <= 1e-5
    recheck(certified(plans[2]), {k.name: k.trajectory for k in candidates})


def test_fresh_noise_within_a_mixture(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 32.0], update_lipschitz=1.0)
    runs = {k.name: k.trajectory for k in candidates}
    plan = solve(budget(0.4), candidates, relation=REPLACE, mechanisms=[MIXTURE], allow_fresh_noise=True)
    assert plan.fresh_noise == 0
    assert max(component.fresh_noise for component in plan.components) > 0
    certificate = certified(plan)
    assert (
        Certificate.from_dict(json.loads(json.dumps(certificate.to_dict(), allow_nan=False))) == certificate
    )
    recheck(certificate, runs)
    quieter = tuple(replace(c, fresh_noise=c.fresh_noise * 0.99) for c in certificate.components)
    with pytest.raises(AccountingError):
        recheck(replace(certificate, components=quieter), runs)


def test_fresh_noise_of_a_linear_combination_is_rechecked(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 32.0], update_lipschitz=1.0)
    runs = {k.name: k.trajectory for k in candidates}
    plan = solve(budget(0.4), candidates, relation=REPLACE, mechanisms=[LC], allow_fresh_noise=True)
    certificate = certified(plan)
    assert certificate.fresh_noise == plan.fresh_noise > 0
    assert certificate.bound == "shifted"
    assert (
        Certificate.from_dict(json.loads(json.dumps(certificate.to_dict(), allow_nan=False))) == certificate
    )
    recheck(certificate, runs)
    for less in (0.0, plan.fresh_noise * 0.999):
        with pytest.raises(AccountingError):
            recheck(replace(certificate, fresh_noise=less), runs)
    with pytest.raises(InvalidInput):
        replace(certificate, fresh_noise=-1.0)


def test_the_shifted_bound_is_rechecked(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 24.0, 48.0], update_lipschitz=1.0)
    runs = {k.name: k.trajectory for k in candidates}
    plan = solve(budget(1.5), candidates, relation=REPLACE, mechanisms=[LC])
    certificate = certified(plan)
    assert certificate.bound == "shifted"
    assert len(certificate.weights) > 1
    recheck(certificate, runs)
    unknown = {
        name: replace(run, segments=tuple(replace(s, update_lipschitz=math.inf) for s in run.segments))
        for name, run in runs.items()
    }
    with pytest.raises(AccountingError):
        recheck(certificate, unknown)


def test_what_a_mixture_certifies(drawn: Plan, runs: dict[str, Trajectory]) -> None:
    certificate = certified(drawn)
    assert certificate.realised is not None
    assert certificate.realised.candidate == "merge-1"
    assert certificate.realised.epsilon == drawn.components[0].epsilon
    assert certificate.mu is None
    assert recompute(certificate, runs).delta(1.6) <= 1e-5
    assert satisfies(certificate, epsilon=1.6, delta=1e-5, neighboring_relation=REPLACE, unit="record")
    assert not satisfies(certificate, epsilon=1.59, delta=1e-5, neighboring_relation=REPLACE, unit="record")
    with pytest.raises(InvalidInput, match="name the realised"):
        certified(drawn, realised=None)
    with pytest.raises(InvalidInput, match="not part of the plan"):
        certified(drawn, realised="c1")


def _components(certificate: Certificate, **changes: Any) -> dict[str, Any]:
    first, *rest = certificate.components
    return {"components": (replace(first, **changes), *rest)}


@pytest.mark.parametrize(
    "change",
    [
        lambda c: {"components": ()},
        lambda c: {"mechanism": LC},
        lambda c: {"mechanism": RS},
        lambda c: {"bound": "random_selection_pld"},
        lambda c: {"fresh_noise": 0.1},
        lambda c: {"components": c.components[:1]},
        lambda c: {"components": tuple(replace(k, name="same") for k in c.components)},
        lambda c: _components(c, weight=c.components[0].weight / 2),
        lambda c: _components(c, epsilon=c.components[0].epsilon * 0.99),
        lambda c: {"components": tuple(replace(k, bound="stepwise") for k in c.components)},
        lambda c: {"realised": replace(c.realised, candidate="c1")},
        lambda c: {"realised": replace(c.realised, epsilon=0.1)},
        lambda c: {"epsilon": c.epsilon * 0.99},
    ],
)
def test_a_tampered_mixture_is_found(change: Any, drawn: Plan, runs: dict[str, Trajectory]) -> None:
    certificate = certified(drawn)
    with pytest.raises(RemergeError):
        recheck(replace(certificate, **change(certificate)), runs)


def test_exchanged_probabilities_are_found(drawn: Plan, runs: dict[str, Trajectory]) -> None:
    certificate = certified(drawn)
    first, second = certificate.components
    swapped = (replace(first, weight=second.weight), replace(second, weight=first.weight))
    names = list(certificate.weights)
    expected = {n: sum(c.weight * c.weights.get(n, 0.0) for c in swapped) for n in names}
    rest = 1 - math.fsum(list(expected.values())[1:])
    with pytest.raises(AccountingError):
        recheck(replace(certificate, components=swapped, weights=expected | {names[0]: rest}), runs)


def test_single_candidates(make_candidates: Maker) -> None:
    (candidate,) = make_candidates([40.0])
    plan = solve(budget(3.0), [candidate], relation=REPLACE, mechanisms=[MIXTURE])
    assert plan.outcomes == {"merge-1": 1.0}
    assert plan.merged_weights("merge-1") == {"c0": 1.0}
    assert plan.epsilon == pytest.approx(single_run(candidate.trajectory).epsilon(1e-5))
    everything = solve(budget(3.0), [candidate], relation=REPLACE, mechanisms=list(CHOICES))
    assert everything.mechanism is LC  # the simplest of equals
