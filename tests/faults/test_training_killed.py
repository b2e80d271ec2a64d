"""kill -9 of a training's process, several times in one training, at random times: it ends as if never killed."""

from __future__ import annotations

import random
import time
import uuid
from pathlib import Path

import pytest

from tasks.services import Services
from tests.conftest import SharedStack
from tests.faults.harness import kill, until
from tests.flows.killed import Training

pytestmark = [pytest.mark.system, pytest.mark.faults]

KILLS = 6
SEED = 20261130
CANDIDATES = "{first: {steps: 6000, keep_checkpoints: [2000]}, second: {steps: 3000}, third: {steps: 6000}}"


@pytest.mark.timeout(1800)
def test_kills_at_random_times_of_a_training_change_nothing(
    stack: SharedStack, services: Services, tmp_path: Path
) -> None:
    clock = random.Random(SEED)
    name = f"storm-{uuid.uuid4().hex[:8]}"
    training = Training.of(stack.settings, services, tmp_path, name, CANDIDATES, parallel=2)
    resumed = 0
    for _ in range(KILLS):
        with training.start() as command:
            flow_run_id, pid = training.flow_process()
            until(lambda now=flow_run_id: training.runs(now), timeout=300)
            time.sleep(clock.uniform(0, 4))
            kill([pid])
            out, _ = command.communicate(timeout=300)
        resumed += "Resuming the training of" in out
        if command.returncode == 0:  # it had ended before
            break
    else:
        resumed += "Resuming the training of" in training.train()
    manifest = services.manifests.newest(name)
    assert manifest is not None
    assert manifest.serial == 1
    assert resumed > 0
    training.is_as_if_never_killed(manifest)
    used = {record.run_id for record in manifest.candidates}
    assert "Resuming" not in training.train()  # that training is finished, so the next one is a new one
    newest = services.manifests.newest(name)
    assert newest is not None
    assert newest.serial == 2
    assert not used & {record.run_id for record in newest.candidates}
