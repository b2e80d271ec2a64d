"""Candidates in and out of a real MLflow server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from mlflow import MlflowClient

from accounting.errors import InvalidInput
from infra.documents import CandidateRecord, PortfolioManifest
from infra.settings import StackDown
from tasks.candidate_runs import fail_run, finish_run, start_run
from tasks.data import data_record
from tasks.live_run import LiveRun
from tasks.mlflow_server import mlflow_client
from tasks.models import initial_state, state_bytes
from tasks.recipes import Recipe
from tasks.registry import (
    CandidateCorrupted,
    CandidateMissing,
    fetch_candidate,
    fetch_public_start,
    fetch_trajectory,
    register_candidate,
    require_up,
)
from tasks.release_merging import public_start
from tasks.training import TrainedCandidate, train_candidate

pytestmark = pytest.mark.system


@dataclass(frozen=True)
class Registered:
    """One candidate as it is in MLflow."""

    client: MlflowClient
    recipe: Recipe
    trained: TrainedCandidate
    record: CandidateRecord
    manifest: PortfolioManifest


@pytest.fixture
def trained(small_portfolio: Callable[..., Any]) -> Callable[[str], tuple[Recipe, TrainedCandidate, Any]]:
    def train(run_id: str) -> tuple[Recipe, TrainedCandidate, Any]:
        small = small_portfolio()
        recipe = small.recipe.model_copy(update={"name": f"small-{uuid.uuid4().hex[:8]}"})
        result = train_candidate(
            recipe.candidate("only"),
            recipe=recipe,
            splits=small.splits,
            initial=initial_state(recipe.network, recipe.initialisation_seed),
            run_id=run_id,
            data_digest="0" * 64,
        )
        return recipe, result, small.splits

    return train


@pytest.fixture
def registered(stack: Any, trained: Callable[[str], Any]) -> Registered:
    client = mlflow_client(stack.connections)
    recipe, result, splits = trained("run")
    run_id = start_run(client, recipe, recipe.candidate("only"), flow_run_id=None)
    LiveRun(client, run_id).finish(result.metrics)
    finish_run(client, run_id, recipe, result, initial=start_of(recipe))
    record = register_candidate(client, run_id, recipe, result)
    manifest = PortfolioManifest(
        name=recipe.name,
        serial=3,
        created_at="2026-01-01T00:00:00Z",
        lineage=recipe.lineage,
        unit="record",
        neighboring_relation=recipe.neighboring_relation,
        recipe_digest=recipe.sha256(),
        data=data_record(recipe.data, splits, b"key"),
        network=recipe.network,
        initialisation_digest=result.trajectory.initialisation_digest,
        feature_radius=recipe.feature_radius,
        n_max=recipe.n_max,
        flow_run_id=None,
        candidates=(record,),
    )
    return Registered(client=client, recipe=recipe, trained=result, record=record, manifest=manifest)


def start_of(recipe: Recipe) -> bytes:
    return state_bytes(initial_state(recipe.network, recipe.initialisation_seed))


def overwrite(found: Registered, name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    found.client.log_artifact(found.record.run_id, str(folder / name))


def test_a_candidate_comes_back_as_it_went_in(registered: Registered) -> None:
    found = fetch_candidate(registered.client, registered.manifest, registered.record)
    assert found.name == "only"
    assert found.model == registered.trained.model
    assert found.trajectory == registered.trained.trajectory
    trajectory = fetch_trajectory(registered.client, registered.manifest, registered.record)
    assert trajectory == registered.trained.trajectory


def test_the_public_start_comes_back_whatever_one_run_has_lost(
    registered: Registered, tmp_path: Path
) -> None:
    client, manifest = registered.client, registered.manifest
    start = start_of(registered.recipe)
    assert fetch_public_start(client, manifest) == start
    other = start_run(client, registered.recipe, registered.recipe.candidate("only"), flow_run_id=None)
    twice = manifest.model_copy(
        update={"candidates": (registered.record.model_copy(update={"run_id": other}), registered.record)}
    )
    assert fetch_public_start(client, twice) == start
    overwrite(registered, "initial.safetensors", registered.trained.model, tmp_path)
    for damaged in (manifest, twice):
        with pytest.raises(CandidateCorrupted, match="not the manifest's initialisation_digest"):
            fetch_public_start(client, damaged)
        group = damaged.model_copy(update={"tasks": {"only": "one"}})
        assert (
            public_start(client, group, "linear") is None
        )  # only to be compared with: no release fails for it
        with pytest.raises(CandidateCorrupted):
            public_start(client, group, "ties")
    before = manifest.model_copy(update={"candidates": twice.candidates[:1]})
    with pytest.raises(CandidateMissing, match=r"train the portfolio again with `remerge train`"):
        fetch_public_start(client, before)


def test_what_a_run_shows(registered: Registered) -> None:
    client, run_id = registered.client, registered.record.run_id
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["noise_multiplier"] == "2.0"
    assert run.data.params["n_max"] == "50"
    files = {entry.path for entry in client.list_artifacts(run_id)}
    assert files == {
        "model.safetensors",
        "initial.safetensors",
        "trajectory.json",
        "network.json",
        "recipe.json",
    }
    assert len(client.get_metric_history(run_id, "private/loss")) == 12
    plain = {name for name in run.data.metrics if not name.startswith("private/")}
    assert plain == {"public_train_accuracy", "epsilon_so_far", "learning_rate", "steps_per_second"}
    assert {metric.step for metric in client.get_metric_history(run_id, "private/loss")} == set(range(1, 13))
    version = client.get_model_version(registered.recipe.name, "1")
    assert version.run_id == run_id
    assert version.tags["remerge.candidate"] == "only"
    assert version.tags["remerge.model_sha256"] == registered.record.model_sha256


def test_only_finished_runs_are_registered(stack: Any, trained: Callable[[str], Any]) -> None:
    client = mlflow_client(stack.connections)
    recipe, result, _ = trained("run")
    run_id = start_run(client, recipe, recipe.candidate("only"), flow_run_id=None)
    with pytest.raises(InvalidInput, match="is RUNNING; only finished runs are candidates"):
        register_candidate(client, run_id, recipe, result)
    fail_run(client, run_id, "the power went out")
    with pytest.raises(InvalidInput, match="is FAILED; only finished runs are candidates"):
        register_candidate(client, run_id, recipe, result)
    assert client.get_run(run_id).data.tags["remerge.failure"] == "the power went out"
    assert not client.search_model_versions(f"name = '{recipe.name}'")


def test_a_replaced_model_is_noticed(registered: Registered, tmp_path: Path) -> None:
    overwrite(registered, "model.safetensors", registered.trained.model[:-1] + b"\0", tmp_path)
    with pytest.raises(CandidateCorrupted) as caught:
        fetch_candidate(registered.client, registered.manifest, registered.record)
    assert f"model.safetensors of candidate only of {registered.recipe.name}@3" in caught.value.message
    assert "replaced or corrupted" in caught.value.message
    assert fetch_trajectory(registered.client, registered.manifest, registered.record)


def test_an_edited_trajectory_is_noticed(registered: Registered, tmp_path: Path) -> None:
    path = registered.client.download_artifacts(registered.record.run_id, "trajectory.json", str(tmp_path))
    content = Path(path).read_bytes()
    edited = content.replace(b'"noise_multiplier":2.0', b'"noise_multiplier":9.0')
    assert edited != content
    overwrite(registered, "trajectory.json", edited, tmp_path)
    for fetch in (fetch_candidate, fetch_trajectory):
        with pytest.raises(CandidateCorrupted, match="was edited after training"):
            fetch(registered.client, registered.manifest, registered.record)


@pytest.mark.parametrize("name", ["model.safetensors", "trajectory.json"])
def test_a_missing_file_is_named(registered: Registered, stack: Any, name: str) -> None:
    s3 = boto3.client(
        "s3",
        endpoint_url=stack.connections.s3_endpoint,
        aws_access_key_id=stack.connections.s3_access_key.get_secret_value(),
        aws_secret_access_key=stack.connections.s3_secret_key.get_secret_value(),
        region_name=stack.connections.s3_region,
    )
    key = registered.client.get_run(registered.record.run_id).info.artifact_uri.split(":/", 1)[1].lstrip("/")
    s3.head_object(Bucket="mlflow", Key=f"artifacts/{key}/{name}")
    s3.delete_object(Bucket="mlflow", Key=f"artifacts/{key}/{name}")
    with pytest.raises(CandidateMissing, match=f"{name} of candidate only of .*@3 is not in MLflow"):
        fetch_candidate(registered.client, registered.manifest, registered.record)


def test_a_missing_version_is_named(registered: Registered) -> None:
    registered.client.delete_model_version(registered.recipe.name, "1")
    with pytest.raises(CandidateMissing, match="Version 1 of registered model"):
        fetch_candidate(registered.client, registered.manifest, registered.record)


def test_a_version_of_another_run_is_noticed(registered: Registered) -> None:
    record = registered.record.model_copy(update={"run_id": "0" * 32})
    with pytest.raises(CandidateCorrupted, match="now comes from another run"):
        fetch_candidate(registered.client, registered.manifest, record)


def test_an_mlflow_that_is_not_there_is_said_at_once() -> None:
    client = MlflowClient(tracking_uri="http://127.0.0.1:9", registry_uri="http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(StackDown, match="run `remerge up`"):
        require_up(client)
    assert time.monotonic() - started < 6
