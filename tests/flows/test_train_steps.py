"""How the cores are shared among candidates, and what the flows' processes inherit for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.train_workshop import side_by_side
from infra import stack_services
from tasks.recipes import load_recipe

DIGITS = Path(__file__).parents[2] / "infra/portfolios/digits.yaml"  # six candidates


@pytest.mark.parametrize(
    ("cores", "parallel", "processes", "workers", "threads"),
    [
        (1, None, 1, 1, 1),
        (2, None, 1, 2, 1),
        (2, 1, 1, 1, 2),
        (8, None, 1, 6, 1),  # no more than there are candidates
        (16, None, 1, 6, 2),
        (16, 3, 1, 3, 5),
        (16, 64, 1, 6, 2),
        (2, 6, 1, 6, 1),  # as the recipe asks, with one thread each
        (8, None, 4, 2, 1),
        (16, 2, 4, 2, 2),
        (2, None, 4, 1, 1),
    ],
)
def test_cores_are_shared(
    cores: int, parallel: int | None, processes: int, workers: int, threads: int
) -> None:
    recipe = load_recipe(DIGITS)
    execution = recipe.execution.model_copy(update={"parallel_candidates": parallel, "processes": processes})
    shared = side_by_side(recipe.model_copy(update={"execution": execution}), cores)
    assert shared == (workers, threads)


def test_threads_of_flows_sleep_while_they_wait(tmp_path: Path) -> None:
    launch = stack_services.launch("worker", tmp_path, {"prefect": 1, "mlflow": 2}, {})
    fair = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    assert fair.items() <= launch.environment.items()
    # The runtime itself says what it took, before torch's first thread starts; and training asks for its threads.
    program = (
        "import threading, torch\n"
        "print(torch.__config__.parallel_info())\n"
        "torch.set_num_threads(2)\n"
        "seen = threading.Thread(target=lambda: print('in a task:', torch.get_num_threads()))\n"
        "seen.start(); seen.join()\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={**launch.environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OMP_NUM_THREADS : 1" in shown.stdout
    assert "at::get_num_threads() : 1" in shown.stdout
    assert "in a task: 2" in shown.stdout
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown.stderr
    assert "GOMP_SPINCOUNT = '0'" in shown.stderr
