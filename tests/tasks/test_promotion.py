"""What is merged, drawn and written into the ledger for each mechanism."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.errors import InvalidInput
from accounting.plan import Mechanism, Plan
from accounting.solver import solve
from accounting.trajectory import Candidate, Segment, Trajectory
from infra.documents import Draw
from tasks import promotion
from tasks.candidates import LoadedCandidate

RELEASE = "a" * 64


def candidate(name: str, noise_multiplier: float, lipschitz: float) -> Candidate:
    segment = Segment(
        id=name,
        steps=20,
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        learning_rate=0.1,
        expected_batch_size=100.0,
        update_lipschitz=lipschitz,
    )
    trajectory = Trajectory(
        portfolio="clinic",
        lineage="patients",
        unit="record",
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
        data_digest="d",
        initialisation_digest="i",
        feature_radius=None,
        n_max=None,
        segments=(segment,),
    )
    return Candidate(name=name, trajectory=trajectory)


def plan_of(mechanism: Mechanism, epsilon: float, *, lipschitz: float = math.inf, **more: Any) -> Plan:
    candidates = [candidate(f"c{i}", s, lipschitz) for i, s in enumerate((64.0, 34.0, 18.0, 10.0))]
    return solve(
        PrivacyBudget(epsilon=epsilon, delta=1e-5),
        candidates,
        relation=NeighboringRelation.REPLACE_ONE,
        mechanisms=[mechanism],
        **more,
    )


def loaded() -> dict[str, LoadedCandidate]:
    return {
        f"c{i}": LoadedCandidate(
            name=f"c{i}",
            model=safetensors.numpy.save({"weight": np.full(3, float(i), dtype=np.float32)}),
            trajectory=candidate(f"c{i}", 10.0, math.inf).trajectory,
        )
        for i in range(4)
    }


def draw_of(plan: Plan, drawn: str) -> Draw:
    return Draw(
        release_id=RELEASE,
        weights=plan.outcomes,
        point="0" * 64,
        drawn_index=sorted(plan.outcomes).index(drawn),
        drawn=drawn,
        drawn_at=datetime.now(UTC),
        entropy_source="test",
    )


def value(model: bytes) -> float:
    return float(safetensors.numpy.load(model)["weight"][0])


def test_the_drawn_component_is_merged() -> None:
    plan = plan_of(Mechanism.MIXTURE, 1.6, realised_epsilon_cap=6.0)
    assert set(plan.outcomes) == {"merge-1", "merge-2"}
    for component in plan.components:
        merged = value(promotion.merge(plan, draw_of(plan, component.name), loaded()))
        assert merged == pytest.approx(sum(w * int(name[1:]) for name, w in component.weights.items()))


def test_one_candidate_or_the_average_is_merged() -> None:
    drawn = plan_of(Mechanism.RANDOM_SELECTION, 1.6)
    assert value(promotion.merge(drawn, draw_of(drawn, "c1"), loaded())) == 1.0
    average = plan_of(Mechanism.LINEAR_COMBINATION, 1.6)
    assert len(average.weights) > 1
    merged = value(promotion.merge(average, None, loaded()))
    assert merged == pytest.approx(sum(w * int(name[1:]) for name, w in average.weights.items()))


def test_fresh_noise_is_never_released_by_the_pipeline() -> None:
    plan = plan_of(Mechanism.LINEAR_COMBINATION, 0.3, lipschitz=1.0, allow_fresh_noise=True)
    assert plan.fresh_noise > 0
    with pytest.raises(InvalidInput, match="fresh noise"):
        promotion.merge(plan, None, loaded())


class Draws:
    """A store that keeps the first draw."""

    def __init__(self) -> None:
        self.stored: Draw | None = None

    def create_draw(self, draw: Draw) -> Draw:
        self.stored = self.stored or draw
        return self.stored


def test_a_mixture_is_drawn_once() -> None:
    plan, store = plan_of(Mechanism.MIXTURE, 1.6, realised_epsilon_cap=6.0), Draws()
    first = promotion.draw_if_need_be(cast(Any, store), RELEASE, plan)
    assert first is not None
    assert first.drawn in plan.outcomes
    assert promotion.draw_if_need_be(cast(Any, store), RELEASE, plan) == first
    average = plan_of(Mechanism.LINEAR_COMBINATION, 1.6)
    assert promotion.draw_if_need_be(cast(Any, Draws()), RELEASE, average) is None


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_the_ledger_has_one_outcome_for_each_that_may_be_released(mechanism: Mechanism) -> None:
    if mechanism is Mechanism.OPERATOR:
        plan = plan_of(Mechanism.LINEAR_COMBINATION, 1.6, merge="average")
    else:
        plan = plan_of(mechanism, 1.6, realised_epsilon_cap=6.0)
    assert plan.mechanism is mechanism
    name = next(iter(plan.outcomes))
    fields = promotion.ledger_fields(
        kind="intended",
        release_id=RELEASE,
        policy=cast(Any, SimpleNamespace(region="eu", selection="noise")),
        manifest=cast(
            Any, SimpleNamespace(lineage="patients", neighboring_relation="replace_one", unit="record")
        ),
        plan=plan,
        candidates=[candidate(f"c{i}", s, math.inf) for i, s in enumerate((64.0, 34.0, 18.0, 10.0))],
        draw=draw_of(plan, name) if len(plan.outcomes) > 1 else None,
        certificate_sha256="b" * 64,
        counted=7,
    )
    assert [outcome["weight"] for outcome in fields["outcomes"]] == list(plan.outcomes.values())
    for outcome, known in zip(fields["outcomes"], plan.outcomes, strict=True):
        assert outcome["candidates"] == list(plan.merged_weights(known))
        assert [segment["id"] for segment in outcome["segments"]] == outcome["candidates"]
        assert outcome["name"] == known
        operator = mechanism is Mechanism.OPERATOR  # which tells more than one average
        assert outcome["coefficients"] == (None if operator else plan.merged_weights(known))
        assert "tasks" not in outcome
        assert outcome["paths"] == {each: [[each, 20]] for each in outcome["candidates"]}
    assert fields["counted"] == 7
    assert fields["drawn"] == (name if len(plan.outcomes) > 1 else None)
