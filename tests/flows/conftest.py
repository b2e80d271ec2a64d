"""The command, run in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def remerge_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `remerge` on a terminal of 80 columns: (exit status, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["remerge", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as left:
            status = int(left.code or 0)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run
