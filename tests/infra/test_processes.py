"""Processes are stopped by identity, with all their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra import processes
from infra.processes import ProcessId

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
FAMILY = (
    "import subprocess, sys, time; "
    "[subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=s)"
    " for s in (False, True)]; print('ready', flush=True); time.sleep(60)"
)


@pytest.fixture
def mark() -> str:
    return f"/tmp/test#{uuid.uuid4().hex}"


def _spawn(code: str, mark: str, folder: Path) -> tuple[subprocess.Popen[bytes], ProcessId]:
    log = folder / "log"
    child = processes.spawn(
        [sys.executable, "-c", code], environment=dict(os.environ), mark=mark, folder=folder, log=log
    )
    _wait(lambda: "ready" in log.read_text())
    found = processes.identify(child.pid)
    assert found is not None
    return child, found


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_descendants_go_too(mark: str, tmp_path: Path) -> None:
    child, leader = _spawn(FAMILY, mark, tmp_path)
    _wait(lambda: len(processes.marked(mark)) == 3)
    processes.stop([leader], [mark], grace=5)
    assert processes.marked(mark) == []
    assert child.wait(5) != 0


def test_descendants_of_a_dead_leader_go_too(mark: str, tmp_path: Path) -> None:
    child, leader = _spawn(FAMILY, mark, tmp_path)
    child.kill()
    child.wait()
    assert len(processes.marked(mark)) == 2
    processes.stop([leader], [mark], grace=5)
    assert processes.marked(mark) == []


def test_who_ignores_sigterm_is_killed(mark: str, tmp_path: Path) -> None:
    child, leader = _spawn(STUBBORN + "time.sleep(60)", mark, tmp_path)
    began = time.monotonic()
    processes.stop([leader], [mark], grace=0.5)
    assert child.wait(5) == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - began < 5


def test_another_process_with_the_same_number_is_left_alone(mark: str, tmp_path: Path) -> None:
    other, alive = _spawn(STUBBORN + "time.sleep(60)", "/tmp/test#another", tmp_path)
    try:
        processes.stop([replace(alive, start_time="earlier")], [mark], grace=0.2)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_zombie_is_not_alive(mark: str, tmp_path: Path) -> None:
    child, found = _spawn(STUBBORN + "time.sleep(60)", mark, tmp_path)
    assert processes.is_alive(found)
    child.kill()
    _wait(lambda: not processes.is_alive(found))
    assert processes.identify(child.pid) is None
    child.wait()


def test_a_child_can_be_interrupted_even_where_the_parent_cannot(mark: str, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child, _ = _spawn("import time; print('ready', flush=True); time.sleep(60)", mark, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    os.kill(child.pid, signal.SIGINT)
    assert child.wait(5) != 0


def test_ps_serves_where_there_is_no_proc(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child, _ = _spawn(FAMILY, mark, tmp_path)
    _wait(lambda: len(processes.marked(mark)) == 3)
    by_proc = processes.marked(mark)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sorted(processes.marked(mark)) == sorted(by_proc)
    leader = processes.identify(child.pid)
    assert leader is not None
    assert processes.is_alive(leader)
    processes.stop([leader], [mark], grace=5)
    assert processes.marked(mark) == []
    _wait(lambda: processes.identify(child.pid) is None)
    child.wait()
