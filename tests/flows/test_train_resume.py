"""kill -9 of a training: the next one goes on with what it left, and counts every step once."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from flows.train_progress import Look
from tasks.services import Services, open_services
from tasks.unfinished import KEY_TAG, TRAINING_TAG, find_unfinished
from tests.flows.killed import Training

pytestmark = pytest.mark.system


@pytest.fixture
def services(stack: Any) -> Services:
    return open_services(stack.settings)


@pytest.mark.timeout(600)
def test_a_killed_training_goes_on(stack: Any, services: Services, tmp_path: Path) -> None:
    name = f"killed-{uuid.uuid4().hex[:8]}"
    training = Training.of(
        stack.settings,
        services,
        tmp_path,
        name,
        "{quick: {steps: 30}, slow: {steps: 8000, keep_checkpoints: [10, 7000]}, late: {steps: 20}}",
    )
    environment: list[bytes] = []

    def slow_is_under_way(flow_run_id: str) -> bool:
        if not environment:
            _, pid = training.flow_process()
            environment.extend(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return training.has_checkpoint("slow", flow_run_id)

    _, error = training.kill_flow(slow_is_under_way)
    assert "Error: " in error
    assert {b"GOMP_SPINCOUNT=0", b"OMP_WAIT_POLICY=PASSIVE"} <= set(environment)
    assert services.manifests.newest(name) is None
    left = training.runs()

    shown = training.train()
    told = re.search(
        rf"Resuming the training of {name} that ended at [-0-9]+ [:0-9]+ UTC: 1 of 3 candidates is done, 1 goes on "
        r"from step (\d+), 1 starts anew; `remerge train --fresh` trains all anew\.",
        shown,
    )
    assert told, shown
    manifest = services.manifests.newest(name)
    assert manifest is not None
    assert manifest.serial == 1
    assert [one.name for one in manifest.candidates] == [
        "quick",
        "slow",
        "slow-at-10",
        "slow-at-7000",
        "late",
    ]
    training.is_as_if_never_killed(manifest)
    runs = training.runs()
    records = {record.name: record.run_id for record in manifest.candidates}
    assert runs["quick"] == left["quick"] == [records["quick"]]  # not trained again
    assert runs["slow"] == [*left["slow"], records["slow"]]
    assert services.mlflow.get_run(left["slow"][0]).info.status == "KILLED"
    tags = [services.mlflow.get_run(run_id).data.tags for ids in runs.values() for run_id in ids]
    assert len({one[TRAINING_TAG] for one in tags}) == 1
    trajectories = training.trajectories(manifest)
    first, second = trajectories["slow"].segments
    assert first.steps == int(told.group(1))
    assert second.steps == 8000 - first.steps
    assert trajectories["slow-at-10"].steps == 10
    assert trajectories["slow-at-10"].segments[0].id == first.id
    assert trajectories["slow-at-7000"].steps == 7000

    look = Look(services.connections.mlflow_url, name, str(manifest.flow_run_id))
    look.again()
    look.close()
    assert {seen: one.ended_well for seen, one in look.candidates.items()} == {
        "quick": True,
        "slow": True,
        "late": True,
    }
    assert look.candidates["slow"].steps == 8000
    # A training that became a portfolio is finished: the next one starts anew.
    key = services.mlflow.get_run(records["slow"]).data.tags[KEY_TAG]
    assert find_unfinished(services, training.recipe, key) is None
