"""What the embedded stack remembers: stack.json while it is up, its ports, its secrets; and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra import stack_services
from infra.processes import ProcessId
from infra.settings import SECRETS, Settings, read_json, read_secrets, unusable


@dataclass(slots=True)
class State:
    """Ports and processes of the stack under one home."""

    home: Path
    ports: dict[str, int]
    children: dict[str, ProcessId]

    @classmethod
    def read(cls, settings: Settings) -> State:
        """What is on disk. A damaged file counts as none: processes are found by their mark too."""
        home = settings.home.absolute()
        stack = _mapping(settings.stack_file)
        ports = _whole_ports(stack.get("ports")) or _whole_ports(_mapping(home / "ports.json"))
        return cls(home, ports, _known_children(stack.get("processes")) if ports else {})

    def write(self) -> None:
        """Make the stack known to other commands, or unknown where nothing of it is left."""
        file = self.home / "stack.json"
        if not self.children:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise unusable(file, error) from None
            return
        children = {name: asdict(child) for name, child in self.children.items()}
        _write_json(self.home / "ports.json", self.ports)  # so that addresses stay the same after a stop
        _write_json(
            file,
            {"addresses": stack_services.addresses(self.ports), "ports": self.ports, "processes": children},
        )

    def log(self, name: str) -> Path:
        """Where a service writes."""
        return self.home / "logs" / f"{name}.log"

    def mark(self, name: str) -> str:
        """By which the processes of a service are found again, see `infra.processes`."""
        return f"{self.home}#{name}"


def credentials(settings: Settings) -> dict[str, str]:
    """The stack's secrets, made on the first start and kept.

    Raises:
        CredentialsDamaged: the file is there but not whole.
    """
    path = settings.credentials_file
    if not path.exists():
        _write_json(path, {name: secrets.token_hex(size) for name, size in SECRETS.items()})
    return read_secrets(settings)


@contextlib.contextmanager
def exclusive(settings: Settings, progress: Callable[[str], None]) -> Iterator[State]:
    """The state, for one command at a time. The kernel drops the lock of a command that was killed.

    Raises:
        HomeUnusable: the folder cannot be made or written to.
    """
    home = settings.home.absolute()
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        (home / "logs").mkdir(exist_ok=True)
        lock = (home / "lock").open("w")
    except OSError as error:
        raise unusable(home, error) from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another command that starts or stops this stack ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield State.read(settings)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _whole_ports(found: object) -> dict[str, int]:
    """Recorded ports if they are all there, none otherwise: half of them lead nowhere."""
    names = [name for ports in stack_services.PORTS.values() for name in ports]
    if not isinstance(found, dict) or not all(type(found.get(name)) is int for name in names):
        return {}
    return {name: found[name] for name in names}


def _known_children(found: object) -> dict[str, ProcessId]:
    """Recorded processes, without what is no record of one."""
    if not isinstance(found, dict):
        return {}
    return {
        name: ProcessId(child["pid"], child["start_time"])
        for name, child in found.items()
        if name in stack_services.NAMES
        and isinstance(child, dict)
        and type(child.get("pid")) is int
        and isinstance(child.get("start_time"), str)
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file in one step, readable by its owner alone."""
    partial = path.with_suffix(".partial")
    try:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise unusable(path, error) from None
