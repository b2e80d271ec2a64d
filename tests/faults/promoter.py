"""A promotion in a process of its own, which dies, or does something else, at a chosen step.

The processes are forked from one that has imported everything already, so a promotion costs no seconds of imports.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "flows.policy_change",
        "mlflow",
        "tasks.certifying",
        "tasks.live_release",
        "tasks.merged_models",
        "tasks.promotion",
        "tasks.provenance",
        "tasks.registry",
        "tasks.report",
        "tasks.solving",
        "tasks.validation",
        "tests.faults.promoter",
    ]
)


@dataclass(frozen=True)
class Moment:
    """Just before or after the n-th call of a function, as it is looked up in its module or class."""

    where: str  # "module:function" or "module:Class.method"
    when: str  # "before" or "after"
    nth: int = 1

    def __str__(self) -> str:
        which = f" no. {self.nth}" if self.nth > 1 else ""
        return f"{self.when} {self.where.split(':')[1]}{which}"


Act = Callable[[], Any]


def die() -> None:
    """As `kill -9` from outside: nothing of this process runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)


def intervene(moment: Moment, act: Act) -> None:
    """Let `act` happen at that moment, once. A step that is no longer there fails, so that no fault is lost."""
    module, _, path = moment.where.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    real = getattr(owner, name)
    calls = 0

    def wrapper(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != moment.nth:
            return real(*arguments, **named)
        if moment.when == "before":
            act()
        result = real(*arguments, **named)
        if moment.when == "after":
            act()
        return result

    setattr(owner, name, wrapper)


@dataclass
class Ended:
    """How a promotion's process ended."""

    killed: bool
    completed: bool = False
    sentence: str = ""


class Promotion:
    """One run of policy_change in a process of its own, with a run of its own in the real Prefect."""

    def __init__(
        self,
        environment: Mapping[str, str],
        prefect_api_url: str,
        region: str,
        serial: int,
        moments: tuple[tuple[Moment, Act], ...] = (),
    ) -> None:
        self.answer, theirs = FORKS.Pipe(duplex=False)
        self.process: BaseProcess = FORKS.Process(
            target=_run,
            args=(theirs, dict(environment), prefect_api_url, region, serial, moments),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.ended: Ended | None = None

    def wait(self, timeout: float = 240.0) -> Ended:
        """Wait for the end, well or not; may be asked again."""
        if self.ended is None:
            self.ended = self._end(timeout)
        return self.ended

    def _end(self, timeout: float) -> Ended:
        self.process.join(timeout)
        assert not self.process.is_alive(), "the promotion neither ended nor died"
        if self.process.exitcode == -signal.SIGKILL:
            return Ended(killed=True)
        assert self.answer.poll(), f"the promotion's process ended with {self.process.exitcode}"
        completed, sentence = self.answer.recv()
        return Ended(killed=False, completed=completed, sentence=sentence)


def _run(
    answer: Connection,
    environment: dict[str, str],
    prefect_api_url: str,
    region: str,
    serial: int,
    moments: tuple[tuple[Moment, Act], ...],
) -> None:
    os.environ.update(environment)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.policy_change import policy_change

    for moment, act in moments:
        intervene(moment, act)
    with temporary_settings({PREFECT_API_URL: prefect_api_url}):
        state = policy_change(region, serial, return_state=True)
    answer.send((state.is_completed(), state.message or ""))
