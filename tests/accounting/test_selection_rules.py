"""What the weights may depend on, and what covers it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.bounds import WEIGHTS_BLIND, WEIGHTS_FREE
from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate import Certificate, build_certificate, satisfies
from accounting.certificate_parts import CandidateReference
from accounting.errors import AccountingError, BudgetInfeasible, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.plan import Mechanism, Plan
from accounting.random_selection import random_selection_profile
from accounting.recheck import recheck
from accounting.selection_rules import SCORES_UNACCOUNTED, STATED_UTILITIES, SURROGATE, TWIN_UTILITIES
from accounting.solver import solve
from accounting.trajectory import Candidate

REPLACE = NeighboringRelation.REPLACE_ONE
LC, RS = Mechanism.LINEAR_COMBINATION, Mechanism.RANDOM_SELECTION
Maker = Callable[..., Any]


def budget(epsilon: float) -> PrivacyBudget:
    return PrivacyBudget(epsilon=epsilon, delta=1e-5)


def scored(candidates: list[Candidate], utilities: list[float]) -> list[Candidate]:
    return [replace(c, utility=u) for c, u in zip(candidates, utilities, strict=True)]


def certified(plan: Plan) -> Certificate:
    names = [*plan.weights, *plan.consulted]
    reference = {
        name: CandidateReference(
            registered_model="m", version="1", model_sha256="a" + name, trajectory_sha256="b" + name
        )
        for name in names
    }
    return build_certificate(
        plan,
        release_id="r",
        region="eu",
        policy_digest="p",
        policy_serial=1,
        manifest_digest="m",
        portfolio="clinic@1",
        lineage="patients",
        unit="record",
        candidates=reference,
        versions={},
        realised=next(iter(plan.weights)) if plan.mechanism is not LC and len(plan.weights) > 1 else None,
    )


@pytest.fixture
def unlike(make_run: Maker) -> list[Candidate]:
    """Runs of different recipes, one of them sampled by Poisson coins."""
    runs = {
        "short": make_run("a", 10.0, 10),
        "long": make_run("b", 40.0, 80),
        "sampled": make_run("c", 2.0, 100, sampling_probability=0.05),
        "quiet": make_run("d", 60.0, 20, learning_rate=0.5),
    }
    utilities = {"short": 0.9, "long": 0.8, "sampled": 0.85, "quiet": 0.6}
    return [Candidate(name=n, trajectory=t, utility=utilities[n]) for n, t in runs.items()]


@pytest.mark.parametrize("epsilon", [0.6, 1.0, 2.0])
def test_random_selection_by_utility_needs_no_comparable_runs(
    epsilon: float, unlike: list[Candidate]
) -> None:
    plan = solve(budget(epsilon), unlike, relation=REPLACE, mechanisms=[RS], selection="stated")
    assert plan.bound.delta(epsilon) <= 1e-5
    assert plan.set_aside == {}
    assert plan.expected_utility == plan.objective
    utilities = np.array([c.utility for c in unlike])
    profiles = [single_run(c.trajectory, REPLACE).profile for c in unlike]
    random = np.random.default_rng(0)
    for _ in range(300):
        point = random.dirichlet(np.full(4, 0.3))
        point = 0.01 * point + 0.99 * np.eye(4)[random.integers(4)]
        point[3] = 1 - math.fsum(point[:3])
        if random_selection_profile(point, profiles).delta(epsilon) <= 1e-5:
            assert plan.objective >= float(point @ utilities) - 1e-12
    recheck(certified(plan), {c.name: c.trajectory for c in unlike})


def test_every_utility_must_be_stated(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 32.0])
    with pytest.raises(InvalidInput, match="none is stated for c0, c1: state one for every candidate"):
        solve(budget(3.0), candidates, relation=REPLACE, selection="stated")
    with pytest.raises(InvalidInput, match="none is stated for c1"):
        solve(
            budget(3.0),
            [replace(candidates[0], utility=1.0), candidates[1]],
            relation=REPLACE,
            selection="public_twin",
        )
    with pytest.raises(InvalidInput, match="finite"):
        solve(budget(3.0), scored(candidates, [1.0, math.inf]), relation=REPLACE, selection="stated")


def test_fresh_noise_has_no_stated_utility(make_candidates: Maker) -> None:
    candidates = scored(make_candidates([16.0, 32.0]), [1.0, 0.5])
    with pytest.raises(InvalidInput, match="Fresh noise"):
        solve(budget(3.0), candidates, relation=REPLACE, selection="stated", allow_fresh_noise=True)


@given(
    noises=st.lists(st.floats(min_value=8, max_value=100), min_size=2, max_size=5),
    epsilon=st.floats(min_value=0.5, max_value=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_averages_by_the_surrogate(
    noises: list[float], epsilon: float, seed: int, make_candidates: Maker
) -> None:
    """Louder runs are better: an average fills the budget between the best that fits and the next."""
    random = np.random.default_rng(seed)
    noises = sorted(noises)
    utilities = sorted(random.uniform(0, 1, len(noises)), reverse=True)
    candidates = scored(make_candidates(noises, update_lipschitz=1.0), utilities)
    try:
        plan = solve(budget(epsilon), candidates, relation=REPLACE, mechanisms=[LC], selection="stated")
    except BudgetInfeasible:
        assert min(single_run(c.trajectory).epsilon(1e-5) for c in candidates) > epsilon
        return
    assert plan.bound.delta(epsilon) <= 1e-5
    own = {c.name: c.utility or 0.0 for c in candidates}
    assert plan.expected_utility == pytest.approx(sum(w * own[n] for n, w in plan.weights.items()))
    fitting = [c.utility or 0.0 for c in candidates if single_run(c.trajectory).epsilon(1e-5) <= epsilon]
    assert plan.objective >= max(fitting) - 1e-9
    assert (SURROGATE in plan.notes) == (len(plan.weights) > 1)
    again = solve(budget(epsilon), candidates[::-1], relation=REPLACE, mechanisms=[LC], selection="stated")
    assert dict(again.weights) == dict(plan.weights)


def test_an_average_of_known_updates_beats_the_draw_in_the_surrogate(make_candidates: Maker) -> None:
    noises = [14.0, 24.0, 48.0]
    for c, averaged in ((1.0, True), (math.inf, False)):
        candidates = scored(make_candidates(noises, update_lipschitz=c), [9.0, 3.0, 1.0])
        plan = solve(budget(1.5), candidates, relation=REPLACE, selection="stated")
        assert (plan.mechanism is LC and len(plan.weights) > 1) == averaged
        assert any(
            a.label == ("random_selection" if averaged else "linear_combination") for a in plan.alternatives
        )


def test_public_twins_are_stated_utilities_under_another_name(make_candidates: Maker) -> None:
    candidates = scored(make_candidates([16.0, 24.0, 48.0]), [0.9, 0.8, 0.6])
    stated = solve(budget(1.5), candidates, relation=REPLACE, selection="stated")
    twin = solve(budget(1.5), candidates, relation=REPLACE, selection="public_twin")
    assert (stated.weights, stated.epsilon) == (twin.weights, twin.epsilon)
    assert STATED_UTILITIES in stated.bound.assumptions
    assert TWIN_UTILITIES in twin.bound.assumptions
    assert WEIGHTS_BLIND not in stated.bound.assumptions + twin.bound.assumptions
    for epsilon in (1.5, 20.0):  # an average, and the one best candidate: the utilities chose it too
        for mechanisms in ([LC], [RS]):
            plan = solve(
                budget(epsilon), candidates, relation=REPLACE, mechanisms=mechanisms, selection="public_twin"
            )
            assert plan.bound.assumptions.count(TWIN_UTILITIES) == 1
            assert not {WEIGHTS_BLIND, WEIGHTS_FREE} & set(plan.bound.assumptions)
            recheck(certified(plan), {c.name: c.trajectory for c in candidates})
    assert (
        WEIGHTS_BLIND in solve(budget(1.5), candidates, relation=REPLACE, mechanisms=[RS]).bound.assumptions
    )


def test_validation_covers_every_consulted_run(make_candidates: Maker) -> None:
    """The best score wins; the price is the joint release of all that were looked at."""
    candidates = make_candidates([30.0, 40.0, 50.0, 20.0])
    runs = {c.name: c.trajectory for c in candidates}
    scores = {"c0": 0.7, "c1": 0.9, "c2": 0.8}
    plan = solve(budget(3.0), candidates, relation=REPLACE, selection="validation", scores=scores)
    assert dict(plan.weights) == {"c1": 1.0}
    assert plan.consulted == ("c0", "c1", "c2")
    assert plan.epsilon == joint_release([runs[n] for n in scores], REPLACE).epsilon(1e-5)
    assert plan.epsilon > single_run(runs["c1"]).epsilon(1e-5)
    assert "no score was consulted" in plan.set_aside["c3"]
    certificate = certified(plan)
    assert Certificate.from_dict(json.loads(json.dumps(certificate.to_dict()))) == certificate
    recheck(certificate, runs)
    with pytest.raises(AccountingError, match="'c0' is missing"):
        recheck(certificate, {"c1": runs["c1"]})
    with pytest.raises(AccountingError):
        recheck(replace(certificate, epsilon=single_run(runs["c1"]).epsilon(1e-5), mu=None), runs)
    with pytest.raises(InvalidInput, match="consulted"):
        replace(certificate, consulted=())
    with pytest.raises(InvalidInput, match="joint release of all consulted"):
        replace(certificate, bound="generic")
    # c3 was never looked at, so the joint release of those that were says nothing about it.
    forged = {**certificate.candidates, "c3": certificate.candidates["c1"]}
    with pytest.raises(InvalidInput, match="only they can have a weight"):
        replace(certificate, weights={"c3": 1.0}, candidates=forged)
    alone = {"c1": certificate.candidates["c1"]}
    with pytest.raises(AccountingError, match="leaves out an assumption"):
        recheck(replace(certificate, selection="public_twin", consulted=(), candidates=alone), runs)


def test_validation_beyond_the_budget_says_what_would_fit(make_candidates: Maker) -> None:
    candidates = make_candidates([30.0, 40.0, 50.0])
    with pytest.raises(BudgetInfeasible, match=r"Scores of 3 private candidates.*epsilon 1\.613.*fewer"):
        solve(
            budget(1.5),
            candidates,
            relation=REPLACE,
            selection="validation",
            scores={"c0": 0.7, "c1": 0.9, "c2": 0.1},
        )
    with_one = solve(budget(1.5), candidates, relation=REPLACE, selection="validation", scores={"c0": 0.7})
    assert dict(with_one.weights) == {"c0": 1.0}


def test_unaccounted_validation_proves_nothing(make_candidates: Maker) -> None:
    candidates = make_candidates([16.0, 24.0, 48.0])
    plan = solve(
        budget(1.5),
        candidates,
        relation=REPLACE,
        mechanisms=[RS],
        selection="validation_unaccounted",
        scores={"c0": 0.9, "c1": 0.8, "c2": 0.6},
    )
    assert plan.bound.assumptions[0] == SCORES_UNACCOUNTED
    certificate = certified(plan)
    assert SCORES_UNACCOUNTED in certificate.assumptions
    recheck(certificate, {c.name: c.trajectory for c in candidates})
    assert not satisfies(certificate, epsilon=50.0, delta=0.1, neighboring_relation=REPLACE, unit="record")
    for epsilon, met in ((1.5, True), (0.5, False)):  # for whoever asked for it, at its word
        terms = {"epsilon": epsilon, "delta": 1e-5, "neighboring_relation": REPLACE, "unit": "record"}
        assert satisfies(certificate, **terms, accept_unaccounted=True) is met
    kept = tuple(text for text in certificate.assumptions if text != SCORES_UNACCOUNTED)
    with pytest.raises(InvalidInput, match="not covered exactly where"):
        replace(certificate, assumptions=kept)
    with pytest.raises(InvalidInput, match="not covered exactly where"):
        replace(certificate, selection="noise")
    with pytest.raises(InvalidInput, match="selection of a certificate must be one of"):
        replace(certificate, selection="by eye")


@pytest.mark.parametrize(
    ("selection", "scores", "message"),
    [
        ("validation", None, "needs the scores"),
        ("validation", {}, "needs the scores"),
        ("validation", {"x": 1.0}, "'x', which is not among"),
        ("validation_unaccounted", {"c0": math.nan}, "NaN"),
        ("noise", {"c0": 1.0}, "looks at no scores"),
        ("stated", {"c0": 1.0}, "looks at no scores"),
    ],
)
def test_scores_out_of_place(
    selection: str, scores: dict[str, float] | None, message: str, make_candidates: Maker
) -> None:
    candidates = scored(make_candidates([16.0, 32.0]), [1.0, 2.0])
    with pytest.raises(InvalidInput, match=message):
        solve(budget(3.0), candidates, relation=REPLACE, selection=selection, scores=scores)


def test_an_infeasible_budget_names_what_would_help(make_candidates: Maker, make_run: Maker) -> None:
    lipschitz = make_candidates([8.0, 32.0], update_lipschitz=1.0)
    with pytest.raises(
        BudgetInfeasible, match=r"c1 with Gaussian noise of standard deviation 0\.242 "
    ) as caught:
        solve(budget(0.5), lipschitz, relation=REPLACE)
    assert "noise_multiplier >= " in caught.value.hint
    amount = float(caught.value.hint.split("standard deviation ")[1].split(" ")[0])
    plan = solve(budget(0.5), lipschitz, relation=REPLACE, allow_fresh_noise=True)
    assert plan.fresh_noise == pytest.approx(amount, rel=1e-2)
    odd = Candidate(name="odd", trajectory=make_run("odd", 200.0, 40))
    with pytest.raises(BudgetInfeasible, match="state utilities of all candidates: odd"):
        solve(budget(0.5), [*make_candidates([8.0, 32.0]), odd], relation=REPLACE)
    contracting = make_candidates([30.0, 31.0], update_lipschitz=0.5)  # the past is forgotten: hidden state
    with pytest.raises(BudgetInfeasible, match="allow linear_combination"):
        solve(budget(0.5), contracting, relation=REPLACE, mechanisms=[RS])
    assert solve(budget(0.5), contracting, relation=REPLACE, mechanisms=[LC]).bound.name == "shifted"
