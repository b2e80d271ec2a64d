"""A killed experiment goes on: what is finished is never done again, and operators can be added later."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.dp_merging_experiment.plan import Run, runs, starts
from tasks.dp_merging_experiment.results import gathered
from tasks.dp_merging_experiment.running import RUNS, Unfinished
from tasks.dp_merging_experiment.setting import NAIVE, PAIRED, Operator
from tasks.dp_merging_experiment.store import Store
from tasks.dp_merging_experiment.workers import WorkerKilled, do, do_all, left_to_do
from tests.tasks.dp_merging_experiment import small

SETTING = small.setting()


PROGRAM = """
import sys
from pathlib import Path
from tasks.dp_merging_experiment.store import Store
from tasks.dp_merging_experiment.workers import do_all, left_to_do
from tests.tasks.dp_merging_experiment import small

if __name__ == "__main__":
    store = Store(Path(sys.argv[1]))
    do_all(left_to_do(small.setting(), store), store, lambda job: print(type(job).__name__, flush=True))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Everything of the small setting, finished after a first experiment was killed between two runs."""
    folder = tmp_path_factory.mktemp("experiment")
    store, program = Store(folder / "results"), folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    experiment = subprocess.Popen(
        [sys.executable, str(program), str(store.folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert experiment.stdout is not None
    finished = [experiment.stdout.readline().strip() for _ in range(5)]
    workers = children_of(experiment.pid)
    experiment.kill()
    experiment.wait()
    assert finished == ["Start", "Start", "Run", "Run", "Run"]
    assert workers
    end = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < end, "workers outlive the experiment that started them"
        time.sleep(0.1)

    before = contents(store)
    with pytest.raises(Unfinished, match="not finished"):
        gathered(SETTING, store)
    again = [job for stage in left_to_do(SETTING, store) for job in stage]
    for job in again:  # here, as two more processes would take longer to start than this takes
        do(job, store)
    after = contents(store)
    assert {name: after[name] for name in before} == before  # noise is fresh: a new run would differ
    assert len(after) > len(before)
    assert sum(isinstance(job, Run) for job in again) <= 8 - 3
    return store


def children_of(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()
    return [int(child) for child in listed]


def test_a_killed_worker_is_said_in_a_sentence(tmp_path: Path) -> None:
    deadly = small.family(tasks=(replace(small.task("low", [0, 1]), loader=f"{small.__name__}:deadly"),))
    [job, *_] = starts(small.setting(families=(deadly,)))
    with pytest.raises(WorkerKilled, match="run the same command again"):
        do_all([[job]], Store(tmp_path))


def contents(store: Store) -> dict[str, bytes]:
    files = [path for path in store.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(store.folder)): path.read_bytes() for path in files}


def test_a_killed_experiment_ends_with_every_result(store: Store) -> None:
    assert left_to_do(SETTING, store) == [[], [], []]
    results = gathered(SETTING, store)
    assert len(results.groups) == 2 * 2
    for (_, method, epsilon, _), group in results.groups.items():
        assert set(group.own) == {"low", "high"}
        assert set(group.merged) == {"average", "regmean"}
        for one in group.own.values():
            assert 0.9 * epsilon < one.epsilon <= epsilon
            assert one.drift > 0
            assert one.noise_multiplier > 0
        assert method in (NAIVE, PAIRED)
    noise = {
        method: results.groups["digits", method, 2.0, 1].own["low"].noise_multiplier
        for method in (NAIVE, PAIRED)
    }
    assert noise[PAIRED] > 1.4 * noise[NAIVE]


def test_an_operator_is_added_without_training_again(store: Store) -> None:
    more = small.family(
        operators=(*small.family().operators, Operator(name="slerp"), Operator(name="linear", by_size=True))
    )
    setting = small.setting(families=(more,), seeds=(1,))
    first, second, third = left_to_do(setting, store)
    assert not first
    assert not second
    assert len(third) == 2
    for job in third:
        do(job, store)
    merged = gathered(setting, store).groups["digits", NAIVE, 2.0, 1].merged
    assert set(merged) == {"average", "regmean", "slerp", "linear"}
    assert merged["linear"] == merged["average"]  # both tasks are of one size


def test_damaged_results_and_models_are_done_again(store: Store, tmp_path: Path) -> None:
    [first, second, *_] = runs(SETTING)
    damaged = Store(tmp_path / "results")
    for run in (first, second):
        model = store.model(RUNS, run.key)
        result = store.result(RUNS, run.key)
        assert model is not None
        assert result is not None
        damaged.keep(RUNS, run.key, run.depends_on(), result, model)
        assert damaged.result(RUNS, run.key) == result
    (damaged.folder / RUNS / f"{first.key}.safetensors").write_bytes(b"something else")
    (damaged.folder / RUNS / f"{second.key}.json").write_text("{")
    assert damaged.result(RUNS, first.key) is None
    assert damaged.result(RUNS, second.key) is None
    assert damaged.model(RUNS, first.key) is None


def test_models_are_for_their_owner_alone(store: Store) -> None:
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o600 for path in store.folder.rglob("*") if path.is_file()
    )
