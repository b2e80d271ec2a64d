"""Stops the stacks of a test run that was killed: `guardian.py PID START_TIME ROOT HOME...`."""

import shutil
import sys
import time
from pathlib import Path

from infra import stack
from infra.processes import ProcessId, is_alive
from infra.settings import Settings


def main(pid: str, start_time: str, root: str, *homes: str) -> None:
    """Wait for the end of the run; a run that ended well has removed its folder."""
    pytest = ProcessId(int(pid), start_time)
    while is_alive(pytest):
        time.sleep(1)
        if not Path(root).exists():
            return
    for home in homes:
        if Path(home).exists():
            stack.stop(Settings(home=Path(home)), lambda message: None)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
