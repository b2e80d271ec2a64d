"""Child processes that outlive the command that started them, and are stopped by name, never by guess."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "REMERGE_STACK_CHILD"  # environment variable of every child, inherited by the children of the children


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from a later one that was given the same number."""

    pid: int
    start_time: str  # boot id and clock ticks on Linux, `ps`'s start time elsewhere


def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], mark: str, folder: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C here does not reach it.

    Args:
        command: an absolute path and arguments.
        environment: the whole environment.
        mark: by which `marked` finds the process and its descendants again.
        folder: its working directory.
        log: its output is appended there.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**environment, MARK: mark},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell's background job ignores SIGINT, and a child would inherit that and never stop by it.
            preexec_fn=_restore_interrupt,
        )


def _restore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def identify(pid: int) -> ProcessId | None:
    """The process that has this number now; None if there is none, or only its remains (a zombie)."""
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if fields[0] in "ZX" else ProcessId(pid, f"{boot}/{fields[19]}")
    line = _ps("-o", "state=,lstart=", "-p", str(pid)).strip()
    state, _, started = line.partition(" ")
    return None if not state or state.startswith("Z") else ProcessId(pid, started.strip())


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs."""
    return identify(process.pid) == process


def marked(mark: str) -> list[int]:
    """All processes of ours that carry this mark, without this one and those it runs in."""
    wanted = f"{MARK}={mark}"
    if sys.platform == "linux":
        candidates = (int(name) for name in os.listdir("/proc") if name.isdigit())
        found = [pid for pid in candidates if wanted.encode() in _environment(pid)]
    else:
        lines = (line.split() for line in _ps("axeww", "-o", "pid=,command=").splitlines())
        found = [int(words[0]) for words in lines if words and wanted in words]
    return [pid for pid in found if pid not in {os.getpid(), os.getppid()}]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _ps(*arguments: str) -> str:
    return subprocess.run(["ps", *arguments], capture_output=True, text=True, check=False).stdout


def stop(leaders: Iterable[ProcessId], marks: Iterable[str], *, grace: float) -> None:
    """Stop processes with all their descendants: SIGTERM first, SIGKILL after the grace time.

    Args:
        leaders: those that `spawn` started; one that is another process by now is left alone.
        marks: theirs, by which what they started is found, whatever group it is in.
        grace: seconds.
    """
    marks = list(marks)
    leaders = [leader for leader in leaders if is_alive(leader)]
    for leader in leaders:
        _signal_group(leader.pid, signal.SIGTERM)
    orphans_told = False
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        waiting = [leader for leader in leaders if is_alive(leader)]
        left = [pid for mark in marks for pid in marked(mark)]
        if not waiting and not left:
            return
        if not waiting and not orphans_told:
            for pid in left:
                _signal(pid, signal.SIGTERM)
            orphans_told = True
        time.sleep(0.05)
    for leader in leaders:
        if is_alive(leader):
            _signal_group(leader.pid, signal.SIGKILL)
    for pid in (pid for mark in marks for pid in marked(mark)):
        _signal(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(is_alive(leader) for leader in leaders) and time.monotonic() < deadline:
        time.sleep(0.05)


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        pass


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
