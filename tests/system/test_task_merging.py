"""A group of two tasks on the real stack: trained once, merged, certified, promoted, verified, and merged again."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from accounting.certificate import Certificate
from accounting.joint_release import single_run
from infra.production import load
from tasks.data import load_public_gate, load_public_train
from tasks.merging import merge_models
from tasks.registry import load_all
from tasks.services import Services
from tasks.task_groups import rows_of_task
from tests.system.conftest import read, read_json, run_policy

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "infra/portfolios/tasks-digits.yaml").read_text()
DELTA = 1e-5
Remerge = Callable[..., CompletedProcess[str]]


def predicted(tensors: dict[str, np.ndarray], task: str, rows: np.ndarray) -> np.ndarray:
    """The released network by hand: a perceptron of one hidden layer, and the task's head."""
    hidden = np.tanh(rows @ tensors["trunk.1.weight"].T + tensors["trunk.1.bias"])
    shared = hidden @ tensors["trunk.3.weight"].T + tensors["trunk.3.bias"]
    scores = shared @ tensors[f"heads.{task}.weight"].T + tensors[f"heads.{task}.bias"]
    return np.asarray(scores.argmax(axis=1))


def test_two_tasks_reach_production_as_one_model(
    stack: Any,
    services: Services,
    remerge: Remerge,
    prefect_api: None,
    s3: Any,
    region: str,
    tmp_path: Path,
) -> None:
    name = f"tasks-{uuid.uuid4().hex[:8]}"
    recipe = tmp_path / "group.yaml"
    recipe.write_text(
        RECIPE.replace("name: tasks-digits", f"name: {name}").replace("lineage: digits", f"lineage: {name}")
    )
    asked = ("--region", region, "--epsilon", "4", "--delta", str(DELTA), "--min-accuracy", "0.5", "--yes")
    ended = remerge("merge-tasks", str(recipe), *asked)
    assert ended.returncode == 0, ended.stderr
    assert (
        f"Portfolio {name}@1 is ready with 4 candidates: low-eps-1 (low), low-eps-4 (low), high-eps-1 (high), "
        "high-eps-4 (high)."
    ) in ended.stdout
    assert f"Policy 1 of {region} was set for it." in ended.stdout

    manifest = services.manifests.read(name, 1)
    assert manifest.tasks == {
        "low-eps-1": "low",
        "low-eps-4": "low",
        "high-eps-1": "high",
        "high-eps-4": "high",
    }
    assert manifest.records == "disjoint"
    loaded = load_all(services.mlflow, manifest)
    trajectories = {one: loaded[one].trajectory for one in loaded}
    assert {one.lineage for one in trajectories.values()} == {name}
    assert {one.initialisation_digest for one in trajectories.values()} == {manifest.initialisation_digest}
    for one, trajectory in trajectories.items():
        assert trajectory.data_digest == manifest.task_data[manifest.tasks[one]].private.digest
    assert len({one.data_digest for one in trajectories.values()}) == 2

    # One candidate of each task, certified at the costlier one's own epsilon, not at their joint release's.
    pointer = read_json(s3, f"regions/{region}/current.json")
    release = f"releases/{pointer['release_id']}"
    certificate = Certificate.from_dict(read_json(s3, f"{release}/certificate.json"))
    assert certificate.bound == "parallel_tasks"
    assert dict(certificate.tasks) == {"low-eps-4": "low", "high-eps-4": "high"}
    assert certificate.records == "disjoint"
    alone = [single_run(trajectories[one]).epsilon(DELTA) for one in certificate.weights]
    assert max(alone) <= certificate.epsilon <= max(alone) * (1 + 1e-6)
    assert certificate.epsilon <= 4

    # The trunk is the mean of the two, and each head is its own candidate's, byte by byte.
    model = safetensors.numpy.load(read(s3, f"{release}/model.safetensors"))
    own = {manifest.tasks[one]: safetensors.numpy.load(loaded[one].model) for one in certificate.weights}
    for key in own["low"]:
        if key.startswith("trunk."):
            mean = (own["low"][key].astype(np.float64) + own["high"][key]) / 2
            assert np.array_equal(model[key], mean.astype(np.float32))
        else:
            assert np.array_equal(model[key], own["low"][key])
    assert np.array_equal(model["heads.high.weight"], own["high"]["heads.high.weight"])

    # A serving process: the whole release, and a task's public rows through trunk and head.
    rows = load_public_gate(manifest)
    with load(region, settings=stack.settings, poll_seconds=None) as production:
        tensors = production.release.tensors()
        shown = production.release.manifest
    shares = {}
    for task in ("low", "high"):
        of_task = rows_of_task(rows, manifest.network, task)
        shares[task] = float(np.mean(predicted(tensors, task, of_task.features) == of_task.labels))
    assert shown.accuracy == pytest.approx(min(shares.values()), abs=0.01)
    assert shown.accuracy >= 0.5
    example = subprocess.run(
        [sys.executable, "docs/examples/predict_tasks.py", region],
        env={**os.environ, "PYTHONPATH": str(ROOT), "REMERGE_HOME": str(stack.settings.home)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    printed = {line.split(":")[0]: line for line in example.stdout.splitlines()}
    assert all(f" {share:.3f} of " in printed[task] for task, share in shares.items())
    version = services.mlflow.get_model_version(shown.registered_model, str(shown.registered_version))
    metrics = services.mlflow.get_run(version.run_id).data.metrics
    for task, share in shares.items():
        assert metrics[f"gate_accuracy_{task}"] == pytest.approx(share, abs=0.01)
    services.mlflow.download_artifacts(version.run_id, "report.md", str(tmp_path))
    report = (tmp_path / "report.md").read_text()
    for task in shares:
        assert f"| accuracy of task {task} | {metrics[f'gate_accuracy_{task}']:.3f} |" in report

    # Beside them what was measured of the merge, on the public-train rows.
    public = load_public_train(manifest)
    for task in ("low", "high"):
        of_task = rows_of_task(public, manifest.network, task)
        alone_right = predicted(own[task], task, of_task.features) == of_task.labels
        merged_right = predicted(tensors, task, of_task.features) == of_task.labels
        gap = float(np.mean(alone_right) - np.mean(merged_right))
        assert metrics[f"merge_gap_{task}"] == pytest.approx(gap, abs=0.01)
        assert metrics[f"drift_{task}"] > 0
        assert metrics[f"sharpness_own_{task}"] > 0
    assert -1 <= metrics["cosine_low_high"] < 1
    assert "## How the merge went" in report
    assert f"| low | {metrics['accuracy_own_low']:.3f} | {metrics['accuracy_merged_low']:.3f} |" in report
    shown_files = {one.path for one in services.mlflow.list_artifacts(version.run_id)}
    assert {"paths.png", "cosines.png"} <= shown_files
    assert "paths.png" not in shown.files  # computed from models that are not released: not for the world

    # Another operator is a policy change: nothing is trained again.
    before = len(services.mlflow.search_model_versions(f"name = '{name}'"))
    policy = services.policies.append(
        {
            "region": region,
            "epsilon": 4,
            "delta": DELTA,
            "portfolio": manifest.reference,
            "neighboring_relation": "add_or_remove_one",
            "merge": "ties",
            "merge_options": {"density": 0.5},
            "author": "test",
        }
    )
    changed = run_policy(policy)
    assert changed.succeeded, changed.sentence
    assert len(services.mlflow.search_model_versions(f"name = '{name}'")) == before
    again = read_json(s3, f"regions/{region}/current.json")["release_id"]
    assert again != pointer["release_id"]
    by_ties = Certificate.from_dict(read_json(s3, f"releases/{again}/certificate.json"))
    assert (by_ties.merge, by_ties.bound) == ("ties", "parallel_tasks")
    start = safetensors.numpy.load(_start(services, manifest))
    released = safetensors.numpy.load(read(s3, f"releases/{again}/model.safetensors"))

    def trunk(tensors: dict[str, np.ndarray]) -> bytes:
        return safetensors.numpy.save({k: v for k, v in tensors.items() if k.startswith("trunk.")})

    expected = merge_models(
        "ties",
        {one: trunk(own[manifest.tasks[one]]) for one in by_ties.weights},
        by_ties.weights,
        options=by_ties.merge_options,
        base=trunk(start),
    )
    assert trunk(released) == trunk(safetensors.numpy.load(expected))
    assert np.array_equal(released["heads.low.weight"], own["low"]["heads.low.weight"])
    verified = remerge("verify", region)
    assert verified.returncode == 0, verified.stdout


def _start(services: Services, manifest: Any) -> bytes:
    from tasks.registry import fetch_public_start

    return fetch_public_start(services.mlflow, manifest)
