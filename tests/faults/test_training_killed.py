"""kill -9 of a training's process, several times in one training, at random times: it ends as if never killed."""

from __future__ import annotations

import random
import time
import uuid
from pathlib import Path

import pytest

from infra.settings import Settings
from tests.faults.harness import Field, kill
from tests.flows.killed import Training

pytestmark = [pytest.mark.system, pytest.mark.faults]

KILLS = 6
SEED = 20261130
CANDIDATES = "{first: {steps: 9000, keep_checkpoints: [4000]}, second: {steps: 6000}, third: {steps: 12000}}"


@pytest.mark.timeout(1800)
def test_kills_at_random_times_of_a_training_change_nothing(own: Field, tmp_path: Path) -> None:
    clock = random.Random(SEED)
    settings: Settings = own.settings
    name = f"storm-{uuid.uuid4().hex[:8]}"
    training = Training.of(settings, own.services, tmp_path, name, CANDIDATES, parallel=2)
    resumed = 0
    for _ in range(KILLS):
        with training.start() as command:
            _, pid = training.flow_process()
            time.sleep(clock.uniform(0, 25))  # from its imports to the second half of its steps
            kill([pid])
            out, _ = command.communicate(timeout=120)
            if command.returncode == 0:  # it had ended before
                break
            resumed += "Resuming the training of" in out
    manifest = own.services.manifests.newest(name)
    if manifest is None:
        resumed += "Resuming the training of" in training.train()
        manifest = own.services.manifests.newest(name)
    assert manifest is not None
    assert manifest.serial == 1
    assert resumed > 0
    training.is_as_if_never_killed(manifest)
    left = {name: list(ids) for name, ids in training.runs().items()}
    assert "Resuming" not in training.train()  # that training is finished, so the next one is a new one
    newest = own.services.manifests.newest(name)
    assert newest is not None
    assert newest.serial == 2
    assert not {record.run_id for record in newest.candidates} & {run for ids in left.values() for run in ids}
