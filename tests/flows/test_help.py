"""`--help` of every command can be read on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
import typer.main
from typer.testing import CliRunner

from flows.cli import app


def commands(
    found: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, found
    for name, below in getattr(found, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_all_commands_are_found() -> None:
    assert {("up",), ("policy", "set"), ("account", "solve")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_name_and_no_sentence_is_cut(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [*path, "--help"], terminal_width=80)
    assert shown.exit_code == 0
    words = shown.output.split()
    for parameter in COMMANDS[path].params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            if name.startswith("--"):
                assert name in words
    assert "…" not in shown.output
    assert not any(line.endswith("...") for line in shown.output.splitlines()[1:])
    assert all(len(line) <= 80 for line in shown.output.splitlines())
