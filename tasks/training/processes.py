"""Processes of this machine that do one piece of work together, speaking by torch.distributed (gloo); Linux only.

- What they work on, private rows included, lies once in a memory file without a name (memfd): all of them map it,
  it is never on a disk, and the kernel drops it with the last process, however that one ends.
- They find each other through another such file, not a port, and speak over the loopback interface.
- Each one asks the kernel to be killed with the thread that started it, so none outlives it, `kill -9` included.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from accounting.errors import InvalidInput, RemergeError
from tasks.training.group import Group

Tell = Callable[..., None]
Work = Callable[..., Any]

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from tasks.training.processes import take_part; take_part()"
)
_ALIGNED = 64  # bytes
_LAST_WORDS = 1.0  # seconds that the others have to say what they saw, once one has failed
_PR_SET_PDEATHSIG = 1


class ProcessLost(RemergeError):
    """One of the processes died, or failed in a way that it has no sentence for.

    Attributes:
        retryable: True where it was killed from outside, as for want of memory.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_lost, (self.message, self.retryable)


def _rebuild_lost(message: str, retryable: bool) -> ProcessLost:
    return ProcessLost(message, retryable=retryable)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    rank: int
    running: subprocess.Popen[bytes]
    reports: Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    rank: int
    when: float  # on the clock that all processes share; infinity for a death, of which only the end is seen
    error: RemergeError | None = None
    status: int | None = None  # with which a process ended that told nothing
    kind: str = ""  # of any other error; its words are left where they are, for they may quote private values
    where: str = ""

    @property
    def order(self) -> tuple[int, float]:
        """The cause first: a sentence, then a death, then the rest, such as a lost connection to who died."""
        return (0 if self.error else 1 if self.status is not None else 2), self.when

    def as_error(self, what: str, size: int) -> RemergeError:
        if self.error:
            return self.error
        begin = f"{what} ended because process {self.rank + 1} of {size}"
        if self.status is not None:
            how = (
                f"was killed by signal {-self.status}"
                if self.status < 0
                else f"ended with status {self.status}"
            )
            return ProcessLost(
                f"{begin} {how}; if memory was short, lower execution.processes or execution.physical_batch_size, "
                "then start again.",
                retryable=self.status < 0,
            )
        error = ProcessLost(
            f"{begin} failed with {self.kind}; set execution.processes to 1 to see whether one process fails too."
        )
        error.add_note(self.where)
        return error


def work_together(
    work: Work,
    *,
    size: int,
    arguments: Mapping[str, Any],
    heard: Mapping[str, Callable[..., None]],
    what: str,
) -> Any:
    """Call `work(group, tell, **arguments)` in each of `size` new processes; return what the first one returns.

    However this call ends, no process is left.

    Args:
        work: a function that can be imported by its name.
        arguments: what pickle takes. Arrays are not copied for each process, and read-only there.
        heard: called here, in this thread, with what the first process tells: `tell(name, *values)`. What one of
            these raises ends the work.
        what: begins the sentence of an error, such as "The training of candidate a".

    Raises:
        RemergeError: as one of the processes raised it.
        ProcessLost: one died or failed otherwise.
    """
    if not hasattr(os, "memfd_create"):
        raise InvalidInput("Several processes for one candidate need Linux; set execution.processes to 1.")
    import torch

    threads = max(1, torch.get_num_threads() // size)
    with _memory_file("remerge-work") as job, _memory_file("remerge-store") as store:
        _write(job, (work, dict(arguments)))
        started: list[_Process] = []
        try:
            for rank in range(size):
                started.append(_start(Group(size=size, rank=rank), job=job, store=store, threads=threads))
            return _listen(started, heard, what)
        finally:
            for process in started:
                process.running.kill()
            for process in started:
                process.running.wait()
                process.reports.close()


def _start(group: Group, *, job: int, store: int, threads: int) -> _Process:
    reports, told = Pipe(duplex=False)
    root = str(Path(__file__).resolve().parents[2])
    place = {
        "rank": group.rank,
        "size": group.size,
        "job": job,
        "store": store,
        "reports": told.fileno(),
        "threads": threads,
        "parent": os.getpid(),
    }
    with told:
        running = subprocess.Popen(
            [sys.executable, "-c", _START, root, json.dumps(place)],
            pass_fds=(job, store, told.fileno()),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads)},
        )
    return _Process(rank=group.rank, running=running, reports=reports)


def _listen(started: Sequence[_Process], heard: Mapping[str, Callable[..., None]], what: str) -> Any:
    waiting = {process.reports: process for process in started}
    result: Any = None
    failures: list[_Failure] = []
    until = float("inf")
    while waiting and time.monotonic() < until:
        for ready in wait(list(waiting), timeout=0.2 if failures else 1.0):
            process = waiting[ready]  # type: ignore[index]
            try:
                kind, value = pickle.loads(process.reports.recv_bytes())
            except EOFError:
                kind = "failed"
                value = _Failure(rank=process.rank, when=float("inf"), status=process.running.wait())
            if kind == "told" and not failures:
                name, values = value
                heard[name](*values)
            elif kind in ("done", "failed"):
                del waiting[ready]  # type: ignore[arg-type]
            if kind == "done" and process.rank == 0:
                result = value
            elif kind == "failed":
                failures.append(value)
                until = min(until, time.monotonic() + _LAST_WORDS)
    if failures:
        raise min(failures, key=lambda one: one.order).as_error(what, len(started))
    return result


def take_part() -> None:
    """What a started process does, and all that it does."""
    place = json.loads(sys.argv[2])
    _die_with(place["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt from the keyboard is the parent's to act on
    group = Group(size=place["size"], rank=place["rank"])
    with Connection(place["reports"], readable=False) as reports:

        def tell(name: str, *values: Any) -> None:
            if group.leads:
                reports.send_bytes(pickle.dumps(("told", (name, values))))

        try:
            work, arguments = _read(place["job"])
            _join(group, store=place["store"], threads=place["threads"])
            result = work(group, tell, **arguments)
            said = pickle.dumps(("done", result if group.leads else None))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
            said = pickle.dumps(("failed", _failure(error, group.rank)))
        with contextlib.suppress(BrokenPipeError):
            reports.send_bytes(said)


def _failure(error: Exception, rank: int) -> _Failure:
    when = time.monotonic()
    if isinstance(error, RemergeError):
        return _Failure(rank=rank, when=when, error=error)
    where = "".join(traceback.format_tb(error.__traceback__))
    return _Failure(rank=rank, when=when, kind=type(error).__name__, where=where)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)


def _join(group: Group, *, store: int, threads: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    torch.seed()  # a new process begins from a constant: dropout would drop the same in all of them
    meeting = dist.FileStore(f"/proc/self/fd/{store}", group.size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=group.rank, world_size=group.size)


@contextlib.contextmanager
def _memory_file(name: str) -> Iterator[int]:
    file = os.memfd_create(name)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, content: Any) -> None:
    """An import path, a pickle, and its arrays one after another; how long each is stands at the beginning."""
    arrays: list[pickle.PickleBuffer] = []
    body = pickle.dumps(content, protocol=5, buffer_callback=arrays.append)
    parts = [memoryview(body), *(array.raw() for array in arrays)]
    head = json.dumps({"path": sys.path, "lengths": [part.nbytes for part in parts]}).encode()
    with open(file, "wb", closefd=False) as written:
        written.write(len(head).to_bytes(8, "little") + head)
        for part in parts:
            written.write(bytes(-written.tell() % _ALIGNED))
            written.write(part)


def _read(file: int) -> Any:
    """What `_write` wrote; arrays lie in the file itself. The import path becomes this process's."""
    content = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
    at = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(bytes(content[8:at]))
    sys.path[:] = head["path"]
    parts = []
    for length in head["lengths"]:
        at += -at % _ALIGNED
        parts.append(content[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])
