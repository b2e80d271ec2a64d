"""The shared stack as a field of faults, one of its own for services that are killed, and the table at the end."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from flows.commands import train_portfolio
from infra import stack as embedded
from infra.documents import PortfolioManifest
from infra.settings import Settings, connections
from tasks.services import Services, open_services
from tests.conftest import SharedStack, pause_schedules
from tests.faults.harness import Chain, Field, Row, Table, quiet
from tests.system.conftest import plain_s3, portfolio, remerge, services  # noqa: F401

_TABLE = pytest.StashKey[Table]()
_BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-table", type=Path, help="the file whose last section gets the table, if all is well"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLE] = Table()
    config.stash[_BEGUN] = time.monotonic()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    table = config.stash[_TABLE]
    if not table.rows:
        return
    terminalreporter.section("faults survived")
    terminalreporter.write_line(table.markdown())
    for line in (line for row in table.rows for line in row.wrong):
        terminalreporter.write_line(f"WRONG: {line}")
    file: Path | None = config.getoption("--keep-table", default=None)
    if file is not None and exitstatus == pytest.ExitCode.OK:
        minutes = (time.monotonic() - config.stash[_BEGUN]) / 60
        before, heading, _ = file.read_text().partition("## Results\n")
        when = f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores ({platform.machine()}), {minutes:.0f} minutes"
        file.write_text(f"{before}{heading}\n{when}.\n\n{table.markdown()}\n")


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """The test's line in the table; the test names it. Anything wrong in it fails the test."""
    row = Row("")
    yield row
    if row.times:
        request.config.stash[_TABLE].add(row)
        told = request.config.pluginmanager.get_plugin("terminalreporter")
        if told is not None:  # pytest-xdist's workers have none
            told.write_line(" | ".join(row.cells()))
    assert row.wrong == []
    assert row.settled == row.times > 0


@pytest.fixture(scope="session")
def shared(stack: SharedStack, services: Services, portfolio: PortfolioManifest) -> Field:  # noqa: F811
    """The stack that all tests of the run share; nothing on it may be stopped."""
    return Field(stack.settings, services, plain_s3(stack.connections), portfolio)


@pytest.fixture(scope="module")
def chain(shared: Field) -> Chain:
    """A region with a live release and ever stricter policies, on the shared stack."""
    return Chain(shared)


@pytest.fixture(scope="module")
def own(own_stack_settings: Settings) -> Iterator[Field]:
    """A stack of its own, whose services may be killed; every test leaves it up."""
    embedded.start(own_stack_settings, quiet)
    found = connections(own_stack_settings)
    pause_schedules(found)
    trained = train_portfolio(own_stack_settings, Path("infra/portfolios/digits.yaml"), Console(quiet=True))
    yield Field(own_stack_settings, open_services(own_stack_settings), plain_s3(found), trained)
    embedded.stop(own_stack_settings, quiet)
