"""The embedded stack for as long as a command runs, left as it was found."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from infra.settings import Settings


@contextmanager
def running_stack(settings: Settings, console: Console, *, keep: bool, command: str) -> Iterator[None]:
    """Start the stack where it is not up, and stop it again, also where the command is told to stop.

    Args:
        keep: leave it up at the end.
        command: what to run again after an interruption, such as "remerge demo".

    Raises:
        RunNotEnded: the command was told to stop while it waited for a flow run.
    """
    from infra import stack
    from infra.orchestrator import RunNotEnded

    stops = not keep and not stack.status(settings).up
    with _terminated_like_interrupted():
        try:
            with timed(console, "Starting S3 (SeaweedFS), MLflow, Prefect and its worker"):
                stack.start(settings, progress=lambda _text: None)
            yield
        except RunNotEnded as error:
            if stops:  # then the run that it speaks of does not go on
                what = command.removeprefix("remerge ")
                raise RunNotEnded(
                    f"The {what} ended before its flow run did, and stopped its stack and the run with it: run "
                    f"`{command}` again."
                ) from error
            raise
        finally:
            if stops:
                with timed(console, "Stopping the stack"):
                    stack.stop(settings, progress=lambda _text: None)


@contextmanager
def timed(console: Console, what: str) -> Iterator[None]:
    """Say what begins, and how long it took."""
    console.print(f"[bold]{what} ...[/]", highlight=False)
    began = time.monotonic()
    yield
    console.print(f"  {time.monotonic() - began:.1f} s", style="dim", highlight=False)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that what it started is stopped."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
