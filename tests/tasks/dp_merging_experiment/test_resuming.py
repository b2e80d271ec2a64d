"""A killed experiment goes on: what is finished is never done again, and operators can be added later."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
from pathlib import Path

import pytest

from tasks.dp_merging_experiment.plan import Run, Scoring, runs
from tasks.dp_merging_experiment.results import gathered
from tasks.dp_merging_experiment.running import RUNS, Unfinished
from tasks.dp_merging_experiment.setting import NAIVE, PAIRED, Operator
from tasks.dp_merging_experiment.store import Store
from tasks.dp_merging_experiment.workers import Job, WorkerKilled, do, do_all, left_to_do
from tests.tasks.dp_merging_experiment import small

SETTING = small.setting()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Everything of the small setting, finished after one worker process was killed between two runs."""
    store = Store(tmp_path_factory.mktemp("experiment") / "results")
    finished: list[Job] = []

    def kill_one(job: Job) -> None:
        finished.append(job)
        if sum(isinstance(one, Run) for one in finished) == 3:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    with pytest.raises(WorkerKilled, match="run the same command again"):
        do_all(left_to_do(SETTING, store), store, kill_one)
    before = contents(store)
    assert sum(name.endswith(".safetensors") for name in before) >= 5  # two starts, three runs
    with pytest.raises(Unfinished, match="not finished"):
        gathered(SETTING, store)

    again = [job for stage in left_to_do(SETTING, store) for job in stage]
    for job in again:  # here, as two more processes would take longer to start than this takes
        do(job, store)
    after = contents(store)
    assert {name: after[name] for name in before} == before  # noise is fresh: a new run would differ
    assert len(after) > len(before)
    assert not {id_of(job) for job in again} & {id_of(job) for job in finished}
    return store


def id_of(job: Job) -> object:
    return tuple(run.key for run in job.runs) if isinstance(job, Scoring) else job.key


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
