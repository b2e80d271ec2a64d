"""The values everything is made of: validation, JSON form, unions and errors."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from accounting.bounds import BOUND_NAMES, Bound
from accounting.budget import NeighboringRelation, PrivacyBudget, require_count, require_number
from accounting.errors import AccountingError, BudgetInfeasible, IncompatibleCandidates, InvalidInput
from accounting.plan import Mechanism, OtherBound, Plan
from accounting.profile import GaussianProfile
from accounting.trajectory import (
    Candidate,
    ParentStep,
    Segment,
    Trajectory,
    parse_relation,
    union_of_segments,
)

Maker = Callable[..., Any]


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (0.0, 0.1),
        (-1.0, 0.1),
        (math.nan, 0.1),
        (math.inf, 0.1),
        (1.0, 0.0),
        (1.0, 1.0),
        (1.0, math.nan),
        ("1", 0.1),
    ],
)
def test_budgets_are_checked(epsilon: Any, delta: float) -> None:
    with pytest.raises(InvalidInput):
        PrivacyBudget(epsilon=epsilon, delta=delta)


def test_numbers_are_numbers() -> None:
    assert require_number("x", 3) == 3.0
    for bad in (True, "3", None, math.nan):
        with pytest.raises(InvalidInput, match="x must be a number"):
            require_number("x", bad)
    for bad in (0, -1, 1.0, True):
        with pytest.raises(InvalidInput):
            require_count("x", bad)


def test_the_factor_of_each_relation() -> None:
    assert [relation.full_batch_factor for relation in NeighboringRelation] == [1, 2, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"steps": 0},
        {"steps": 1.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"max_grad_norm": 0.0},
        {"learning_rate": math.nan},
        {"expected_batch_size": 0.0},
        {"sampling_probability": 0.0},
        {"sampling_probability": 0.5},  # with sampler full_batch
        {"sampler": "poisson"},  # with probability 1
        {"sampler": "shuffle"},
        {"clipping": "none"},
        {"schedule": "whatever"},
        {"optimizer": ""},
        {"momentum": -0.1},
        {"weight_decay": math.nan},
        {"update_lipschitz": math.nan},
        {"update_lipschitz": -1.0},
    ],
)
def test_segments_are_checked(change: dict[str, Any], make_segment: Maker) -> None:
    with pytest.raises(InvalidInput):
        replace(make_segment("a", 10.0), **change)


def test_values_are_frozen(make_segment: Maker) -> None:
    with pytest.raises(FrozenInstanceError):
        make_segment("a", 10.0).steps = 3


def test_a_trajectory_survives_json(make_segment: Maker, make_run: Maker) -> None:
    segments = [make_segment("a", 10.0, 5), make_segment("b", 20.0, 3, sampling_probability=0.1)]
    run = make_run(segments=segments)
    document = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    assert Trajectory.from_dict(document) == run
    assert run.steps == 8


@pytest.mark.parametrize("where", ["trajectory", "segment", "parent"])
def test_unknown_fields_are_refused(where: str, make_segment: Maker, make_run: Maker) -> None:
    document = make_run(segments=[make_segment("a", 10.0, 5), make_segment("b", 20.0)]).to_dict()
    target = {
        "trajectory": document,
        "segment": document["segments"][0],
        "parent": document["segments"][1]["parent"],
    }[where]
    target["surprise"] = 1
    with pytest.raises(InvalidInput, match="surprise"):
        Trajectory.from_dict(document)


def test_a_trajectory_is_one_path(make_segment: Maker, make_run: Maker) -> None:
    run = make_run(segments=[make_segment("a", 10.0, 5), make_segment("b", 20.0)])
    first, second = run.segments
    wrong = replace(second, parent=ParentStep(run="r", segment="a", step=4))
    for segments in ((), (second,), (first, first), (first, replace(second, parent=None)), (first, wrong)):
        with pytest.raises(InvalidInput):
            replace(run, segments=segments)


def test_unions_count_shared_steps_once(make_segment: Maker, make_run: Maker) -> None:
    long, short = make_run("a", 10.0, 9), make_run("a", 10.0, 4)
    union = union_of_segments((short, long, make_run("b", 10.0, 2)))
    assert [(segment.id, segment.steps) for segment in union] == [("a", 9), ("b", 2)]
    with pytest.raises(IncompatibleCandidates, match="edited"):
        union_of_segments((long, make_run("a", 10.0, 9, learning_rate=0.2)))


def test_relations_are_parsed_by_name() -> None:
    assert parse_relation("replace_one") is NeighboringRelation.REPLACE_ONE
    with pytest.raises(InvalidInput, match="add_or_remove_one"):
        parse_relation("swap")


def test_candidates_are_checked(make_run: Maker) -> None:
    for change in ({"name": ""}, {"utility": math.nan}, {"utility": "good"}):
        with pytest.raises(InvalidInput):
            replace(Candidate(name="a", trajectory=make_run()), **change)


def test_errors_survive_pickling() -> None:
    error = BudgetInfeasible("No.", target=1.0, best=2.0, hint="train more")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.message, copy.target, copy.best, copy.hint) == ("No.", 1.0, 2.0, "train more")
    assert not copy.retryable
    assert pickle.loads(pickle.dumps(AccountingError("No."))).message == "No."


def test_bounds_are_checked() -> None:
    values: dict[str, Any] = {
        "name": "joint",
        "profile": GaussianProfile(mu=1.0),
        "assumptions": ("A.",),
        "source": "a theorem",
        "mu": 1.0,
    }
    assert Bound(**values).is_private
    for change in ({"name": "guess"}, {"mu": math.nan}, {"mu": -1.0}, {"assumptions": ()}, {"source": ""}):
        with pytest.raises(InvalidInput):
            Bound(**(values | change))
    assert len(set(BOUND_NAMES)) == len(BOUND_NAMES)


def plan_values(**changes: Any) -> dict[str, Any]:
    bound = Bound(
        name="joint", profile=GaussianProfile(mu=1.0), assumptions=("A.",), source="a theorem", mu=1.0
    )
    values: dict[str, Any] = {
        "mechanism": Mechanism.LINEAR_COMBINATION,
        "weights": {"a": 0.5, "b": 0.5},
        "bound": bound,
        "budget": PrivacyBudget(epsilon=5.0, delta=1e-5),
        "relation": NeighboringRelation.REPLACE_ONE,
        "selection": "noise",
        "epsilon": 4.4,
        "objective": -1.0,
        "member_epsilons": {"a": 3.0, "b": 3.0},
    }
    return values | changes


def test_plans_are_checked() -> None:
    assert Plan(**plan_values()).weights == {"a": 0.5, "b": 0.5}
    unsound = replace(plan_values()["bound"], name="stepwise", sound_for_dp_sgd=False)
    for change in ({"bound": unsound}, {"epsilon": 5.1}, {"epsilon": math.nan}):
        with pytest.raises(AccountingError):
            Plan(**plan_values(**change))
    for change in (
        {"weights": {"a": 1.0, "b": 0.0}},
        {"weights": {"a": 0.4, "b": 0.5}},
        {"member_epsilons": {"a": 3.0}},
    ):
        with pytest.raises(InvalidInput):
            Plan(**plan_values(**change))


def test_other_bounds_state_one_thing() -> None:
    assert OtherBound(epsilon=1.0).reason is None
    for values in (
        {},
        {"epsilon": 1.0, "reason": "x"},
        {"epsilon": math.inf},
        {"epsilon": math.nan},
        {"epsilon": -1.0},
    ):
        with pytest.raises(InvalidInput):
            OtherBound(**values)


def test_segments_have_keys_without_their_length(make_segment: Maker) -> None:
    one: Segment = make_segment("a", 10.0, 5)
    assert one.mechanism_key() == replace(one, steps=7).mechanism_key()
    assert one.mechanism_key() != replace(one, noise_multiplier=11.0).mechanism_key()
