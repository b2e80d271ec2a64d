"""Selection rules in the pipeline: what each looks at, what ledger and certificate say of it, who accepts it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy

from accounting.errors import BudgetInfeasible, InvalidInput
from accounting.joint_release import joint_release, single_run
from accounting.plan import Plan
from accounting.recheck import recheck
from accounting.selection_rules import SCORES_UNACCOUNTED, STATED_UTILITIES, TWIN_UTILITIES
from infra.documents import CandidateRecord, Draw, Policy, PortfolioManifest, Provenance
from tasks import compliance, decision_page, promotion, report
from tasks.candidates import LoadedCandidate, accountable, require_utilities
from tasks.certifying import certify
from tasks.data import Rows, Splits, data_record, load_splits
from tasks.models import initial_state
from tasks.recipes import parse_recipe
from tasks.solving import consulted_names, consulted_scores, solve_policy
from tasks.training import train_candidate
from tasks.validation import gate
from tests.tasks.conftest import random_rows

RECIPE = """
name: small
lineage: small
data: {loader: users_own:rows}
network: {factory: tasks.models:softmax_regression, arguments: {features: 5, classes: 3}}
feature_radius: 1.0
n_max: 50
initialisation_seed: 7
delta: 1e-5
defaults: {steps: 4, max_grad_norm: 1.4143, learning_rate: 0.5, expected_batch_size: 40}
candidates:
  quiet: {noise_multiplier: 40}
  medium: {noise_multiplier: 12, learning_rate: 0.1}
  loud: {noise_multiplier: 4}
"""
NAMES = ("quiet", "medium", "loud")


@dataclass(frozen=True)
class Case:
    manifest: PortfolioManifest
    loaded: dict[str, LoadedCandidate]
    splits: Splits
    asked: list[bool]  # what the loader was asked for `with_private`, call by call

    def policy(self, selection: str, epsilon: float = 2.0, **changes: Any) -> Policy:
        fields = {
            "region": "eu",
            "serial": 1,
            "epsilon": epsilon,
            "delta": 1e-5,
            "portfolio": self.manifest.reference,
            "effective_at": "2026-01-01T00:00:00Z",
            "author": "test",
            "selection": selection,
        }
        return Policy.from_fields({**fields, **changes}, "policy")

    def with_utilities(self, source: str | None) -> Case:
        known = {"utility_source": source, "twin_run_id": "twin" if source == "public_twin" else None}
        records = [
            record.model_copy(update={**known, "utility": None if source is None else 0.1 * place})
            for place, record in enumerate(self.manifest.candidates, start=1)
        ]
        manifest = self.manifest.model_copy(update={"candidates": tuple(records)})
        return Case(manifest, self.loaded, self.splits, self.asked)

    def scores(self, policy: Policy) -> dict[str, float] | None:
        candidates = accountable(self.manifest, policy, self.loaded)
        return consulted_scores(policy, self.manifest, candidates, self.loaded)

    def plan(self, policy: Policy) -> Plan:
        candidates = accountable(self.manifest, policy, self.loaded)
        return solve_policy(policy, candidates, self.scores(policy))


@pytest.fixture
def case(users_loader: Callable[[Callable[..., Any]], None]) -> Case:
    """Three real candidates of unlike recipes, without utilities."""
    asked: list[bool] = []

    def loader(*, with_private: bool) -> Splits:
        asked.append(with_private)
        return Splits(
            private=random_rows(1, 40) if with_private else None,
            public_train=random_rows(2, 60),
            public_gate=random_rows(3, 60),
            classes=3,
            split_rule="three different seeds",
        )

    users_loader(loader)
    recipe = parse_recipe(RECIPE, "small.yaml")
    splits = load_splits(recipe.data, feature_radius=1.0, n_max=50, neighboring_relation="replace_one")
    data = data_record(recipe.data, splits, b"key")
    trained = [
        train_candidate(
            candidate,
            recipe=recipe,
            splits=splits,
            initial=initial_state(recipe.network, recipe.initialisation_seed),
            run_id=candidate.name,
            data_digest=data.private.digest,
        )
        for candidate in recipe.candidates
    ]
    records = tuple(
        CandidateRecord(
            name=one.name,
            registered_model="small",
            version=place,
            run_id=one.name,
            model_sha256="1" * 64,
            trajectory_sha256="2" * 64,
        )
        for place, one in enumerate(trained, start=1)
    )
    manifest = PortfolioManifest(
        name="small",
        serial=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        lineage="small",
        unit="record",
        neighboring_relation="replace_one",
        recipe_digest=recipe.sha256(),
        data=data,
        network=recipe.network,
        initialisation_digest=trained[0].trajectory.initialisation_digest,
        feature_radius=1.0,
        n_max=50,
        flow_run_id=None,
        candidates=records,
    )
    loaded = {
        one.name: LoadedCandidate(name=one.name, model=one.model, trajectory=one.trajectory)
        for one in trained
    }
    asked.clear()
    return Case(manifest, loaded, splits, asked)


def by_hand(model: bytes, rows: Rows) -> float:
    weights = safetensors.numpy.load(model)["weight"].astype(np.float64)
    scores = rows.features.astype(np.float64) @ weights.T
    return float(np.mean(scores.argmax(axis=1) == rows.labels))


def test_scores_are_accuracies_on_rows_that_nobody_else_uses(case: Case) -> None:
    policy = case.policy("validation_unaccounted")
    scores = case.scores(policy)
    expected = {name: by_hand(one.model, case.splits.public_train) for name, one in case.loaded.items()}
    assert scores == expected
    assert scores != {name: by_hand(one.model, case.splits.public_gate) for name, one in case.loaded.items()}
    assert case.scores(policy) == scores  # a retry sees the same, and so makes the same plan
    assert case.plan(policy) == case.plan(policy)
    assert case.asked
    assert not any(case.asked)  # the private rows need not exist where policies are carried out


@pytest.mark.parametrize("selection", ["noise", "stated", "public_twin"])
def test_the_other_rules_look_at_no_model(case: Case, selection: str) -> None:
    assert case.with_utilities(selection).scores(case.policy(selection)) is None
    assert case.asked == []


def test_changed_public_rows_are_noticed(case: Case, users_loader: Callable[..., None]) -> None:
    changed = Splits(
        private=None,
        public_train=random_rows(4, 60),
        public_gate=random_rows(3, 60),
        classes=3,
        split_rule="another seed",
    )
    users_loader(lambda *, with_private: changed)
    with pytest.raises(
        InvalidInput, match="The public-train rows from users_own:rows are not those of small@1"
    ):
        case.scores(case.policy("validation"))


def test_as_many_are_consulted_as_the_budget_covers(case: Case) -> None:
    """Decided by the runs alone: every larger set of the most private candidates would exceed the budget."""
    candidates = accountable(case.manifest, case.policy("validation"), case.loaded)
    runs = {c.name: c.trajectory for c in candidates}
    for count in (1, 2, 3):
        joint = joint_release([runs[name] for name in NAMES[:count]], runs["quiet"].neighboring_relation)
        for epsilon, expected in ((joint.epsilon(1e-5), count), (joint.epsilon(1e-5) * 0.999, count - 1)):
            names = consulted_names(case.policy("validation", epsilon), candidates[::-1])
            assert names == list(NAMES[: max(expected, 1)])[::-1]
    assert consulted_names(case.policy("validation_unaccounted", 0.01), candidates) == list(NAMES)
    alone = single_run(runs["quiet"]).epsilon(1e-5)
    with pytest.raises(BudgetInfeasible, match="noisier candidates"):
        case.plan(case.policy("validation", alone / 2))


@pytest.mark.parametrize(
    ("selection", "source", "sentence"),
    [
        (
            "stated",
            None,
            "quiet, medium, loud of small@1 have no stated utility: state a `utility` for every",
        ),
        ("stated", "public_twin", "no stated utility"),
        (
            "public_twin",
            None,
            "have no public twin: set `public_twins: true` in its recipe and train the portf",
        ),
        ("public_twin", "stated", "no public twin"),
    ],
)
def test_utilities_of_the_right_source_are_needed(
    case: Case, selection: str, source: str | None, sentence: str
) -> None:
    lacking = case.with_utilities(source)
    for refuse in (
        lambda: require_utilities(lacking.manifest, selection),
        lambda: accountable(lacking.manifest, lacking.policy(selection), lacking.loaded),
    ):
        with pytest.raises(InvalidInput) as caught:
            refuse()
        assert sentence in caught.value.message
        assert "`--selection noise`" in caught.value.message
        assert "\n" not in caught.value.message


def test_one_candidate_without_a_utility_is_named(case: Case) -> None:
    stated = case.with_utilities("stated").manifest
    silent = case.manifest.candidates[1]
    mixed = stated.model_copy(update={"candidates": (stated.candidates[0], silent)})
    with pytest.raises(InvalidInput, match="but medium of small@1 has no stated utility"):
        require_utilities(mixed, "stated")


def test_utilities_reach_the_solver_only_where_they_count(case: Case) -> None:
    for selection in ("stated", "public_twin"):
        known = case.with_utilities(selection)
        plan = known.plan(known.policy(selection, 5.0, mechanisms=["random_selection"]))
        assert plan.set_aside == {}
        expected = sum(weight * 0.1 * (NAMES.index(name) + 1) for name, weight in plan.weights.items())
        assert plan.expected_utility == pytest.approx(expected)
        assumption = STATED_UTILITIES if selection == "stated" else TWIN_UTILITIES
        assert assumption in plan.bound.assumptions
        unused = accountable(known.manifest, known.policy("noise"), known.loaded)
        assert [candidate.utility for candidate in unused] == [None, None, None]


def draw_of(plan: Plan) -> Draw | None:
    if len(plan.outcomes) < 2:
        return None
    return Draw(
        release_id="a" * 64,
        weights=plan.outcomes,
        point="0" * 64,
        drawn_index=0,
        drawn=sorted(plan.outcomes)[0],
        drawn_at=datetime.now(UTC),
        entropy_source="test",
    )


@pytest.mark.parametrize("selection", ["validation", "validation_unaccounted"])
@pytest.mark.parametrize("mechanism", ["linear_combination", "random_selection"])
def test_every_consulted_run_enters_the_ledger(case: Case, selection: str, mechanism: str) -> None:
    epsilon = 30.0 if selection == "validation" else 5.0  # the first must cover the joint release of all
    policy = case.policy(selection, epsilon, mechanisms=[mechanism])
    plan, scores = case.plan(policy), case.scores(policy)
    assert scores is not None
    fields = promotion.ledger_fields(
        kind="intended",
        release_id="a" * 64,
        policy=policy,
        manifest=case.manifest,
        plan=plan,
        candidates=accountable(case.manifest, policy, case.loaded),
        draw=draw_of(plan),
        certificate_sha256="b" * 64,
        counted=0,
        consulted=tuple(scores),
    )
    assert all(outcome["coefficients"] is None for outcome in fields["outcomes"])
    assert set(plan.weights) != set(NAMES)  # so that some are looked at without getting a weight
    assert [outcome["weight"] for outcome in fields["outcomes"]] == list(plan.outcomes.values())
    for outcome, name in zip(fields["outcomes"], plan.outcomes, strict=True):
        assert set(outcome["candidates"]) == set(NAMES)
        assert outcome["candidates"][: len(plan.merged_weights(name))] == list(plan.merged_weights(name))
        ids = sorted(segment["id"] for segment in outcome["segments"])
        assert [re.sub("[0-9a-f]{16}", "*", id) for id in ids] == sorted(f"{name}:*:0" for name in NAMES)
    assert fields["selection"] == selection


@pytest.mark.parametrize("selection", ["stated", "public_twin", "validation", "validation_unaccounted"])
def test_people_and_certificates_are_told_the_rule(case: Case, selection: str) -> None:
    known = case.with_utilities(selection if selection in ("stated", "public_twin") else None)
    policy = known.policy(selection, 30.0 if selection == "validation" else 5.0)
    plan = known.plan(policy)
    draw = draw_of(plan)
    certificate = certify("a" * 64, policy, known.manifest, plan, draw)
    recheck(certificate, {name: one.trajectory for name, one in known.loaded.items()})
    assert certificate.selection == selection
    verdict = gate(accuracy=0.9, min_accuracy=0.0, live_accuracy=None)
    provenance = Provenance(started_by="hand")
    page = decision_page.decision_page(policy, known.manifest, plan, certificate, draw, verdict, provenance)
    sentence = report.one_sentence(policy, certificate, draw, verdict)
    assert f"| weights chosen by | {selection}: " in page
    assert "noise variance" not in page
    assert ("| scores consulted of | quiet, medium, loud |" in page) == (selection == "validation")
    for text in (page, sentence, " ".join(certificate.assumptions)):
        assert ("NOT COVERED" in text) == (selection == "validation_unaccounted")
    assert (SCORES_UNACCOUNTED in page) == (selection == "validation_unaccounted")


def test_who_accepts_which_rule(case: Case) -> None:
    """What the certificate covers satisfies everybody, the rest only whoever asked for it."""
    epsilon = 30.0
    for made_by in ("stated", "public_twin", "validation", "validation_unaccounted"):
        known = case.with_utilities(made_by if made_by in ("stated", "public_twin") else None)
        policy = known.policy(made_by, epsilon)
        plan = known.plan(policy)
        certificate = certify("a" * 64, policy, known.manifest, plan, draw_of(plan))
        live = compliance.LiveRelease(
            manifest=cast(Any, SimpleNamespace(accuracy=0.9)), certificate=certificate
        )
        for asked in ("noise", "stated", "public_twin", "validation", "validation_unaccounted"):
            fault = compliance.fault_of(live, known.policy(asked, epsilon))
            assert (fault is None) == (made_by in (asked, "validation")), (made_by, asked)
            if fault:
                assert f"chosen by {made_by}, which the policy's selection {asked} does not allow" in fault
        judged = compliance.assess(policy, live)
        assert judged.state is compliance.State.COMPLIANT
        assert ("NOT COVERED" in judged.reason) == (made_by == "validation_unaccounted")
        stricter = compliance.fault_of(live, known.policy(made_by, certificate.epsilon * 0.5))
        assert stricter is not None
        assert "does not satisfy the policy's epsilon" in stricter
