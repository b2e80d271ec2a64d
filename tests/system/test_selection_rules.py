"""Selection rules on the real stack: public twins are trained and chosen by, scores are paid for or marked."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from accounting.certificate import Certificate
from accounting.recheck import recheck
from accounting.selection_rules import SCORES_UNACCOUNTED, TWIN_UTILITIES
from infra.documents import LedgerEntry, PortfolioManifest
from tasks.data import load_public_gate, load_public_train
from tasks.public_twins import split_public
from tasks.registry import load_all
from tasks.services import Services
from tests.conftest import SharedStack
from tests.system.conftest import Ended, keys_of, read, read_json, run_policy

pytestmark = pytest.mark.system

Change = Callable[..., Ended]
Remerge = Callable[..., subprocess.CompletedProcess[str]]

# Two recipes that noise alone cannot compare: one learns with much smaller steps.
RECIPE = """
name: twins
lineage: twins
public_twins: true
data: {loader: tasks.data:digits}
network: {factory: tasks.models:softmax_regression, arguments: {features: 65, classes: 10}}
feature_radius: 1.0
n_max: 1200
initialisation_seed: 1
delta: 1.0e-5
defaults: {steps: 20, max_grad_norm: 1.4143, learning_rate: 3.9, expected_batch_size: 1200}
candidates:
  slow: {noise_multiplier: 20, learning_rate: 0.1}
  noisy: {noise_multiplier: 40}
  sampled: {noise_multiplier: 2, sampling_probability: 0.25, expected_batch_size: 300}
"""


@pytest.fixture(scope="module")
def twins(
    stack: SharedStack, services: Services, remerge: Remerge, tmp_path_factory: pytest.TempPathFactory
) -> PortfolioManifest:
    """The portfolio with public twins, trained once for the whole run by whichever worker asks first."""
    with (stack.settings.home / "twins.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if services.manifests.newest("twins") is None:
            recipe = tmp_path_factory.mktemp("twins") / "twins.yaml"
            recipe.write_text(RECIPE)
            ended = remerge("train", str(recipe))
            assert ended.returncode == 0, ended.stderr
    return services.manifests.read("twins", 1)


def live(s3: Any, region: str) -> tuple[str, Certificate]:
    release_id = read_json(s3, f"regions/{region}/current.json")["release_id"]
    return release_id, Certificate.from_dict(read_json(s3, f"releases/{release_id}/certificate.json"))


def ledger_of(services: Services, release_id: str) -> list[LedgerEntry]:
    return [entry for entry in services.ledger.entries("twins") if entry.release_id == release_id]


def accuracy_by_hand(model: bytes, features: np.ndarray, labels: np.ndarray) -> float:
    weights = safetensors.numpy.load(model)["weight"].astype(np.float64)
    return float(np.mean((features.astype(np.float64) @ weights.T).argmax(axis=1) == labels))


def test_twins_lie_beside_the_candidates(twins: PortfolioManifest, services: Services, s3: Any) -> None:
    stored = read_json(s3, "portfolios/twins/00000001.json")
    fitting, scoring = split_public(load_public_train(twins))
    assert (len(fitting), len(scoring)) == (200, 100)
    for record, fields in zip(twins.candidates, stored["candidates"], strict=True):
        assert fields["utility_source"] == "public_twin"
        run = services.mlflow.get_run(fields["twin_run_id"])
        assert run.info.status == "FINISHED"
        assert run.data.tags["remerge.public_twin_of"] == record.name
        assert "remerge.candidate" not in run.data.tags
        assert not any(name.startswith("private/") for name in run.data.metrics)
        [key] = [
            key
            for key in keys_of(s3, "", "mlflow")
            if key.endswith(f"{run.info.run_id}/artifacts/model.safetensors")
        ]
        model = read(s3, key, "mlflow")
        assert fields["utility"] == accuracy_by_hand(model, scoring.features, scoring.labels)
    versions = services.mlflow.search_model_versions("name = 'twins'")
    assert {version.run_id for version in versions} == {record.run_id for record in twins.candidates}
    utilities = {record.name: record.utility for record in twins.candidates}
    assert utilities["sampled"] > utilities["slow"]  # small steps do not get far in 20 of them


def test_weights_by_public_twins(
    twins: PortfolioManifest, change_policy: Change, services: Services, s3: Any, region: str
) -> None:
    ended = change_policy(
        epsilon=2.5, portfolio=twins.reference, selection="public_twin", mechanisms=["random_selection"]
    )
    assert ended.succeeded, ended.sentence
    release_id, certificate = live(s3, region)
    assert certificate.selection == "public_twin"
    assert TWIN_UTILITIES in certificate.assumptions
    assert certificate.consulted == ()
    recheck(certificate, {name: one.trajectory for name, one in load_all(services.mlflow, twins).items()})
    [intended, promoted] = ledger_of(services, release_id)
    assert (intended.kind, promoted.kind, intended.selection) == ("intended", "live", "public_twin")
    assert {name for outcome in intended.outcomes for name in outcome.candidates} == set(certificate.weights)
    assert len(certificate.weights) == 2

    by_noise = change_policy(epsilon=2.5, portfolio=twins.reference)
    assert not by_noise.succeeded
    assert "differ in more than their noise" in by_noise.sentence


def test_weights_by_validation_pay_for_every_score(
    twins: PortfolioManifest, change_policy: Change, services: Services, s3: Any, region: str
) -> None:
    ended = change_policy(epsilon=12.0, portfolio=twins.reference, selection="validation")
    assert ended.succeeded, ended.sentence
    release_id, certificate = live(s3, region)
    assert set(certificate.consulted) == {"slow", "noisy", "sampled"}
    assert certificate.bound == "joint"
    loaded = load_all(services.mlflow, twins)
    recheck(certificate, {name: one.trajectory for name, one in loaded.items()})
    rows = load_public_train(twins)
    scores = {name: accuracy_by_hand(one.model, rows.features, rows.labels) for name, one in loaded.items()}
    assert list(certificate.weights) == [max(scores, key=lambda name: scores[name])]
    for entry in ledger_of(services, release_id):
        [outcome] = entry.outcomes
        assert set(outcome.candidates) == set(scores)
        assert {segment["id"] for segment in outcome.segments} == {
            segment.id for one in loaded.values() for segment in one.trajectory.segments
        }
    manifest = read_json(s3, f"releases/{release_id}/manifest.json")
    gate = load_public_gate(twins)
    model = read(s3, f"releases/{release_id}/model.safetensors")
    assert manifest["accuracy"] == accuracy_by_hand(model, gate.features, gate.labels)


def test_validation_consults_no_more_than_the_budget_covers(
    twins: PortfolioManifest, change_policy: Change, s3: Any, region: str
) -> None:
    ended = change_policy(epsilon=1.5, portfolio=twins.reference, selection="validation")
    assert ended.succeeded, ended.sentence
    _, certificate = live(s3, region)
    assert certificate.consulted == ("noisy",)
    too_little = change_policy(epsilon=0.1, portfolio=twins.reference, selection="validation")
    assert not too_little.succeeded
    assert "noisier candidates" in too_little.sentence


def test_unaccounted_validation_is_marked_everywhere(
    twins: PortfolioManifest,
    change_policy: Change,
    services: Services,
    s3: Any,
    region: str,
    remerge: Remerge,
    tmp_path: Path,
) -> None:
    ended = change_policy(
        epsilon=2.5,
        portfolio=twins.reference,
        selection="validation_unaccounted",
        mechanisms=["random_selection"],
    )
    assert ended.succeeded, ended.sentence
    assert "NOT COVERED" in ended.sentence
    release_id, certificate = live(s3, region)
    assert SCORES_UNACCOUNTED in certificate.assumptions
    entries = ledger_of(services, release_id)
    assert [entry.kind for entry in entries] == ["consulted", "intended", "live"]
    for entry in entries:
        for outcome in entry.outcomes:
            assert set(outcome.candidates) == {"slow", "noisy", "sampled"}
            assert len(outcome.segments) == 3

    # A retry looks at the same scores, and so finds the same plan, its draw and its ledger entries.
    draw = read_json(s3, f"releases/{release_id}/draw.json")
    for lost in (f"regions/{region}/current.json", f"releases/{release_id}/manifest.json"):
        s3.delete_object(Bucket="production", Key=lost)
    assert run_policy(ended.policy).succeeded
    assert live(s3, region) == (release_id, certificate)
    assert read_json(s3, f"releases/{release_id}/draw.json") == draw
    assert ledger_of(services, release_id) == entries

    status = remerge("status")
    [row] = [line for line in status.stdout.splitlines() if line.startswith(region + "  ")]
    assert "(NOT COVERED)" in row
    assert " compliant" in row
    assert (
        f"{region}: The live release is what the policy's selection validation_unaccounted allows"
        in status.stdout
    )

    pulled = remerge("pull", region, "--to", str(tmp_path))
    assert pulled.returncode == 0
    assert "Warning" in pulled.stdout
    assert "NOT COVERED" in pulled.stdout

    # A policy that has not asked for it does not accept it, and says why.
    from tasks.live_release import region_compliance

    services.policies.append(
        {"region": region, "epsilon": 100, "delta": 1e-5, "portfolio": twins.reference, "author": "test"}
    )
    _, _, compliance = region_compliance(services, region)
    assert not compliance.readable
    assert "chosen by validation_unaccounted" in compliance.reason


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        ("public_twin", "set `public_twins: true` in its recipe"),
        ("stated", "state a `utility` for every candidate"),
        ("accuracy", "selection"),
    ],
)
def test_a_rule_without_its_utilities_is_refused(
    portfolio: PortfolioManifest,
    twins: PortfolioManifest,
    change_policy: Change,
    remerge: Remerge,
    s3: Any,
    region: str,
    selection: str,
    sentence: str,
) -> None:
    lacking = twins if selection == "stated" else portfolio
    ended = remerge(
        *("policy", "set", "--region", region, "--epsilon", "2.5", "--delta", "1e-5", "--yes"),
        *("--portfolio", lacking.reference, "--selection", selection),
    )
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert keys_of(s3, f"policies/{region}/") == []
    if selection != "accuracy":  # also where the policy came by another way than the command
        flow = change_policy(epsilon=2.5, portfolio=lacking.reference, selection=selection)
        assert not flow.succeeded
        assert sentence in flow.sentence
        assert keys_of(s3, f"regions/{region}/current.json") == []


def test_the_command_sets_the_rule(twins: PortfolioManifest, remerge: Remerge, region: str) -> None:
    arguments = ("policy", "set", "--region", region, "--epsilon", "2.5", "--delta", "1e-5", "--yes")
    ended = remerge(*arguments, "--portfolio", twins.reference, "--selection", "public_twin")
    assert ended.returncode == 0, ended.stderr
    assert "weights chosen by public_twin" in ended.stdout
    assert "now serves" in ended.stdout
    warned = remerge(
        *arguments, "--portfolio", twins.reference, "--selection", "validation_unaccounted", "--no-wait"
    )
    assert warned.returncode == 0, warned.stderr
    assert "will not be a guarantee" in warned.stdout
