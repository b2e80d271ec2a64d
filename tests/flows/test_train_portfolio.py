"""The train_portfolio flow against the real stack: all candidates, or no portfolio version at all."""

from __future__ import annotations

import hashlib
import sys
import types
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import SecretStr

from accounting.errors import InvalidInput
from infra.settings import OWN_SERVICES
from tasks.candidates import require_utilities
from tasks.data import Rows, Splits
from tasks.registry import fetch_candidate
from tasks.services import Services, open_services
from tasks.unfinished import OWN_DOING
from tests.faults.proxy import PASS, Fault, proxy_before

pytestmark = pytest.mark.system

RECIPE = """
name: NAME
lineage: tests
data: {loader: users_data:rows}
network: {factory: tasks.models:softmax_regression, arguments: {features: 4, classes: 2}}
feature_radius: 1
n_max: 30
initialisation_seed: 3
delta: 1e-5
defaults: {steps: 5, max_grad_norm: 1.4143, learning_rate: 0.5, expected_batch_size: 30}
candidates:
  noisy: {noise_multiplier: 20}
  clear: {noise_multiplier: 5}
  sampled: {noise_multiplier: 5, sampling_probability: 0.5, expected_batch_size: 15}
"""


@pytest.fixture
def services(stack: Any) -> Services:
    return open_services(stack.settings)


@pytest.fixture(autouse=True)
def users_data(monkeypatch: pytest.MonkeyPatch) -> Splits:
    numbers = np.random.default_rng(5)

    def rows(count: int) -> Rows:
        labels = numbers.integers(2, size=count)
        return Rows(features=numbers.normal(size=(count, 4)).astype(np.float32), labels=labels)

    splits = Splits(
        private=rows(30), public_train=rows(10), public_gate=rows(10), classes=2, split_rule="drawn"
    )
    module = types.ModuleType("users_data")
    module.rows = lambda *, with_private: splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_data", module)
    return splits


@pytest.fixture
def train(run_here: Callable[..., Any]) -> Callable[..., Any]:
    """Run the flow in this process; returns its final state."""
    from flows.train_portfolio import train_portfolio

    return partial(run_here, train_portfolio)


def named(text: str = RECIPE) -> tuple[str, str]:
    name = f"small-{uuid.uuid4().hex[:8]}"
    return name, text.replace("NAME", name)


def test_all_candidates_become_a_portfolio_version(
    services: Services, train: Callable[..., Any], users_data: Splits
) -> None:
    name, text = named()
    state = train(text)
    assert state.is_completed(), state.message
    assert state.message == f"Portfolio {name}@1 is ready with 3 candidates."
    manifest = services.manifests.newest(name)
    assert manifest is not None
    assert [(record.name, record.version) for record in manifest.candidates] == [
        ("noisy", 1),
        ("clear", 2),
        ("sampled", 3),
    ]
    assert manifest.data.private.rows is None
    candidates = [fetch_candidate(services.mlflow, manifest, record) for record in manifest.candidates]
    trajectories = [candidate.trajectory for candidate in candidates]
    assert {trajectory.initialisation_digest for trajectory in trajectories} == {
        manifest.initialisation_digest
    }
    assert {trajectory.data_digest for trajectory in trajectories} == {manifest.data.private.digest}
    assert len({segment.id for trajectory in trajectories for segment in trajectory.segments}) == 3
    assert [trajectory.segments[0].noise_multiplier for trajectory in trajectories] == [20, 5, 5]
    assert [trajectory.segments[0].update_lipschitz < 2 for trajectory in trajectories] == [True, True, False]
    assert len({candidate.model for candidate in candidates}) == 3
    for record in manifest.candidates:
        assert services.mlflow.get_run(record.run_id).info.status == "FINISHED"

    again = train(text)
    assert again.message == f"Portfolio {name}@2 is ready with 3 candidates."
    newest = services.manifests.newest(name)
    assert newest is not None
    assert [record.version for record in newest.candidates] == [4, 5, 6]
    assert newest.recipe_digest == manifest.recipe_digest
    assert not {c.model_sha256 for c in newest.candidates} & {c.model_sha256 for c in manifest.candidates}

    page = artifact(services, f"portfolio-{name}")
    assert f"# Portfolio {name}@" in page
    assert "| noisy | 5 | full batch | 20 | " in page
    assert "| sampled | 5 | Poisson 0.5 | 5 | " in page
    assert "private/" not in page
    everything = prefect_knows(services, manifest.flow_run_id)
    for value in users_data.private.features.ravel()[:40]:
        assert str(float(value))[:8] not in everything


def test_stated_utilities_and_twins_are_in_the_manifest(
    services: Services, train: Callable[..., Any], users_data: Splits
) -> None:
    name, text = named(RECIPE.replace("noise_multiplier: 20}", "noise_multiplier: 20, utility: 0.25}"))
    assert train(text).is_completed()
    manifest = services.manifests.newest(name)
    assert manifest is not None
    assert [record.utility for record in manifest.candidates] == [0.25, None, None]
    assert [record.utility_source for record in manifest.candidates] == ["stated", None, None]

    name, text = named("public_twins: true\n" + RECIPE)
    assert train(text).is_completed()
    manifest = services.manifests.newest(name)
    assert manifest is not None
    assert {record.utility_source for record in manifest.candidates} == {"public_twin"}
    runs = {services.mlflow.get_run(str(record.twin_run_id)).info.run_name for record in manifest.candidates}
    assert runs == {"noisy (public twin)", "clear (public twin)", "sampled (public twin)"}
    page = artifact(services, f"portfolio-{name}")
    assert f"| {manifest.candidates[0].utility:.3f} |" in page

    # Nothing to tell rows to fit from rows to score: one row, and then copies of another.
    rows = [np.array([value / 16, 0.5, 0, 0], dtype="<f4") for value in range(1, 9)]
    rows.sort(key=lambda row: hashlib.sha256(row.tobytes()).digest())
    users_data.public_train.features[:] = rows[-1]
    users_data.public_train.features[0] = rows[0]
    failed = train(text)
    assert failed.is_failed()
    assert (
        "more public-train rows, or set public_twins to false (and 2 more failed); no port" in failed.message
    )
    assert services.manifests.newest(name) == manifest


def test_one_failure_leaves_no_portfolio_version(services: Services, train: Callable[..., Any]) -> None:
    name, text = named(
        RECIPE.replace("clear: {noise_multiplier: 5}", "clear: {noise_multiplier: 1e30, learning_rate: 1e38}")
    )
    state = train(text)
    assert state.is_failed()
    assert state.message.startswith("Candidate clear diverged: its parameters are not finite after 5 steps;")
    assert state.message.endswith("no portfolio version was made.")
    assert services.manifests.newest(name) is None
    assert not services.mlflow.search_model_versions(f"name = '{name}'")
    experiment = services.mlflow.get_experiment_by_name(name)
    runs = services.mlflow.search_runs([experiment.experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {
        "noisy": "FINISHED",
        "clear": "FAILED",
        "sampled": "FINISHED",
    }
    # What had finished is not used again: whether a training diverges depends on its private rows and its noise.
    assert state.name == OWN_DOING
    assert train(text).name == OWN_DOING
    ids = [run.info.run_id for run in services.mlflow.search_runs([experiment.experiment_id])]
    assert len(set(ids)) == 6
    mended = train(text.replace("noise_multiplier: 1e30, learning_rate: 1e38", "noise_multiplier: 5"))
    assert mended.is_completed()


def test_kept_checkpoints_become_candidates(
    services: Services, train: Callable[..., Any], users_data: Splits
) -> None:
    name, text = named(
        "public_twins: true\n"
        + RECIPE.replace("noise_multiplier: 20}", "noise_multiplier: 20, keep_checkpoints: [2, 4]}")
    )
    state = train(text)
    assert state.message == f"Portfolio {name}@1 is ready with 5 candidates."
    manifest = services.manifests.newest(name)
    assert manifest is not None
    names = ["noisy", "noisy-at-2", "noisy-at-4", "clear", "sampled"]
    assert [record.name for record in manifest.candidates] == names
    whole, early, late, *_ = (
        fetch_candidate(services.mlflow, manifest, record) for record in manifest.candidates
    )
    assert [one.trajectory.steps for one in (early, late, whole)] == [2, 4, 5]
    assert {one.trajectory.segments[0].id for one in (early, late)} == {whole.trajectory.segments[0].id}
    assert len({one.model for one in (early, late, whole)}) == 3
    for record in manifest.candidates[1:3]:
        run = services.mlflow.get_run(record.run_id)
        assert run.data.tags["mlflow.parentRunId"] == manifest.candidates[0].run_id
        assert run.data.tags["remerge.candidate"] == record.name
        assert record.utility is None
    page = artifact(services, f"portfolio-{name}")
    assert "| noisy-at-2 | 2 | full batch | 20 | " in page
    with pytest.raises(InvalidInput) as caught:
        require_utilities(manifest, "public_twin")
    assert caught.value.message == (
        f"Selection public_twin compares candidates by utilities, but noisy-at-2, noisy-at-4 of {name}@1 are "
        "checkpoints kept on the way, which have none: train the portfolio without `keep_checkpoints`, or set the "
        "policy with `--selection noise`."
    )
    with pytest.raises(
        InvalidInput, match=r"but noisy, clear, sampled of .* have no stated utility: state a"
    ):
        require_utilities(manifest, "stated")


@pytest.mark.parametrize(
    ("change", "options", "used_again"),
    [("", {}, 2), ("", {"fresh": True}, 0), ("delta: 1e-6", {}, 0)],
    ids=["goes on", "fresh", "another recipe"],
)
def test_what_an_outage_left_is_used_by_the_same_training(
    stack: Any,
    services: Services,
    train: Callable[..., Any],
    users_data: Splits,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    options: dict[str, Any],
    used_again: int,
) -> None:
    name, text = named()
    with monkeypatch.context() as patch, proxy_before(services.connections.mlflow_url) as proxy:
        for field, value in services.connections:
            if field in OWN_SERVICES:
                patch.setenv(
                    f"REMERGE_{field.upper()}",
                    value.get_secret_value() if isinstance(value, SecretStr) else value,
                )
        patch.setenv("REMERGE_MLFLOW_URL", proxy.address)
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        models: list[str] = []

        def third_model_is_refused(method: str, path: str, writes: int) -> Fault:
            del writes
            if method == "PUT" and path.endswith("/model.safetensors"):
                models.append(path)
                return Fault(refuse=503) if len(models) == 3 else PASS
            return PASS

        proxy.obey(third_model_is_refused)
        state = train(text)
    assert state.message.startswith(
        "MLflow failed while trying to log a run; try again when it and its store are"
    )
    assert state.name == "Failed"
    experiment = services.mlflow.get_experiment_by_name(name)
    before = services.mlflow.search_runs([experiment.experiment_id])
    assert sorted(run.info.status for run in before) == ["FAILED", "FINISHED", "FINISHED"]

    assert train(text.replace("delta: 1e-5", change or "delta: 1e-5"), **options).is_completed()
    manifest = services.manifests.newest(name)
    assert manifest is not None
    finished = {run.info.run_id for run in before if run.info.status == "FINISHED"}
    assert len(finished & {record.run_id for record in manifest.candidates}) == used_again
    told = {
        services.mlflow.get_run(record.run_id).data.tags.get("remerge.resumed", "")
        for record in manifest.candidates
    }
    [sentence] = told  # each run of the training carries it
    assert ("2 of 3 candidates are done, 1 starts anew; `remerge train --fresh`" in sentence) == bool(
        used_again
    )
    trajectories = [fetch_candidate(services.mlflow, manifest, one).trajectory for one in manifest.candidates]
    assert [run.steps for run in trajectories] == [5, 5, 5]
    assert len({segment.id for run in trajectories for segment in run.segments}) == 3


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("noise_multiplier: 20", "noise_multiplier: -20", "noise_multiplier of candidate noisy should be"),
        ("noise_multiplier: 20", "noise_multiplier: 0.001", "Candidate noisy of"),
        ("expected_batch_size: 30", "expected_batch_size: 0", "expected_batch_size of candidate noisy (from"),
        ("n_max: 30", "n_max: 29", "more private rows than the recipe's n_max 29 allows"),
        ("features: 4", "features: 5", "does not take rows of shape (4,)"),
        ("users_data:rows", "users_lost:rows", "no module named users_lost"),
    ],
)
def test_a_bad_recipe_fails_with_one_sentence(
    services: Services, train: Callable[..., Any], old: str, new: str, sentence: str
) -> None:
    name, text = named(RECIPE.replace(old, new))
    state = train(text)
    assert state.is_failed()
    assert sentence in state.message
    assert "\n" not in state.message
    assert services.manifests.newest(name) is None


def test_a_private_record_among_the_public_ones_is_an_error(
    services: Services, train: Callable[..., Any], users_data: Splits
) -> None:
    users_data.public_train.features[3] = users_data.private.features[7]
    name, text = named()
    state = train(text)
    assert state.is_failed()
    assert "returned 1 record both as private and as public_train" in state.message
    assert services.manifests.newest(name) is None


def artifact(services: Services, key: str) -> str:
    answer = httpx.get(f"{services.connections.prefect_api_url}/artifacts/{key}/latest")
    return str(answer.raise_for_status().json()["data"])


def prefect_knows(services: Services, flow_run_id: str | None) -> str:
    """All that Prefect's server holds about a run: parameters, inputs, states and logs."""
    url = services.connections.prefect_api_url
    of_run = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
    answers = [
        httpx.get(f"{url}/flow_runs/{flow_run_id}"),
        httpx.post(f"{url}/task_runs/filter", json=of_run),
        httpx.post(f"{url}/logs/filter", json={"logs": {"flow_run_id": {"any_": [flow_run_id]}}}),
    ]
    for answer in answers:
        answer.raise_for_status()
    assert len(answers[1].json()) == 3
    return "\n".join(answer.text for answer in answers)
