"""Two worker processes with one torch thread each do what a setting's plan asks for and the store does not have."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from accounting.errors import RemergeError
from tasks.dp_merging_experiment.plan import Run, Scoring, Start, runs, scorings, starts
from tasks.dp_merging_experiment.running import RUNS, STARTS
from tasks.dp_merging_experiment.scoring import unfinished
from tasks.dp_merging_experiment.setting import Setting
from tasks.dp_merging_experiment.store import Store

PROCESSES = 2
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_AHEAD = 4  # jobs handed over before they are needed: few, so that an interrupted experiment stops soon

Job = Start | Run | Scoring


class WorkerKilled(RemergeError):
    """A worker process ended without a word; what it had finished is kept."""


def left_to_do(setting: Setting, store: Store) -> list[list[Job]]:
    """The jobs that are not done, in stages: each needs what the ones before made."""
    return [
        [one for one in starts(setting) if store.result(STARTS, one.key) is None],
        [one for one in runs(setting) if store.result(RUNS, one.key) is None],
        [one for one in scorings(setting) if unfinished(one, store)],
    ]


def do_all(
    stages: Sequence[Sequence[Job]], store: Store, on_done: Callable[[Job], None] = lambda job: None
) -> None:
    """Do the jobs, stage after stage.

    Raises:
        WorkerKilled: a worker process was killed; running the experiment again goes on.
        RemergeError: what a job raised; the other finished ones are kept.
    """
    if not any(stages):
        return
    with _one_thread_each():
        pool = ProcessPoolExecutor(
            PROCESSES, mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
        )
        try:
            for stage in stages:
                for job in _done(pool, stage, store):
                    on_done(job)
        except BrokenProcessPool:
            raise WorkerKilled(
                "A worker process of the experiment was killed; run the same command again, what is finished is kept."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _done(pool: ProcessPoolExecutor, jobs: Iterable[Job], store: Store) -> Iterator[Job]:
    waiting: dict[Future[None], Job] = {}
    for job in jobs:
        waiting[pool.submit(do, job, store)] = job
        if len(waiting) >= PROCESSES + _AHEAD:
            yield from _finished(waiting)
    while waiting:
        yield from _finished(waiting)


def _finished(waiting: dict[Future[None], Job]) -> Iterator[Job]:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        job = waiting.pop(future)
        future.result()
        yield job


def do(job: Job, store: Store) -> None:
    """One job, in whichever process."""
    from tasks.dp_merging_experiment.running import make_run, make_start
    from tasks.dp_merging_experiment.scoring import make_scoring

    if isinstance(job, Start):
        make_start(job, store)
    elif isinstance(job, Run):
        make_run(job, store)
    else:
        make_scoring(job, store)


def _begin(parent: int) -> None:
    """One torch thread; and an end where the parent was killed, for nobody else tells a waiting worker."""
    import torch

    torch.set_num_threads(1)

    def end_with_the_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """For processes started meanwhile: libraries read these when they are loaded."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
