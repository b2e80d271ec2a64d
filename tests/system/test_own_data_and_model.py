"""Data and a network from outside the project, as docs/your-own-data-and-model.md shows: trained, merged, promoted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from infra.settings import Settings, connections
from tasks.data import load_public_gate
from tasks.services import open_services
from tests.system.conftest import plain_s3, read, read_json

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]  # a stack of its own, started and stopped

ROOT = Path(__file__).parents[2]
OWN = ROOT / "docs/examples/own"
Remerge = Callable[..., str]


@pytest.fixture
def remerge(own_stack_settings: Settings) -> Iterator[Remerge]:
    """The command as a user runs it, with PYTHONPATH set before `remerge up`."""
    found = os.pathsep.join(filter(None, [str(OWN), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": found,
        "REMERGE_HOME": str(own_stack_settings.home),
        "COLUMNS": "200",
    }

    def run(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            stdin=subprocess.DEVNULL,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    run("up")
    yield run
    run("down")


def test_own_data_and_model_reach_production(
    remerge: Remerge, own_stack_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = "docs/examples/own/recipe.yaml"
    assert "Portfolio own-example@1 is ready with 2 candidates: eps-2, eps-8." in remerge("train", recipe)
    remerge(
        "policy",
        "set",
        "--region",
        "own",
        "--epsilon",
        "8",
        "--delta",
        "1e-5",
        "--min-accuracy",
        "0.6",
        "--yes",
    )
    s3 = plain_s3(connections(own_stack_settings))
    release = read_json(s3, "regions/own/current.json")["release_id"]
    assert read_json(s3, f"releases/{release}/certificate.json")["epsilon"] <= 8

    # By hand, from the released bytes: the network is the user's, and the gate's rows are those of the user's loader.
    model = safetensors.numpy.load(read(s3, f"releases/{release}/model.safetensors"))
    assert model["0.weight"].shape == (16, 30)
    monkeypatch.syspath_prepend(OWN)
    gate = load_public_gate(open_services(own_stack_settings).manifests.read("own-example", 1))
    hidden = np.tanh(gate.features @ model["0.weight"].T + model["0.bias"])
    scores = hidden @ model["2.weight"].T + model["2.bias"]
    assert np.mean(scores.argmax(axis=1) == gate.labels) >= 0.6
