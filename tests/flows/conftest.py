"""Commands and flows, run in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def run_here(stack: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Run a flow with the text of a recipe, against the stack's Prefect server; returns its final state."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    def run(flow: Any, text: str, **options: Any) -> Any:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return flow(recipe=str(path), return_state=True, **options)

    settings = {PREFECT_API_URL: stack.connections.prefect_api_url, PREFECT_HOME: tmp_path / "prefect"}
    with temporary_settings(settings):
        yield run
