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

from accounting.errors import RemergeError
from infra import stack_services
from infra.processes import ProcessId
from infra.settings import Settings

_SECRETS = {  # name: bytes of randomness
    "s3_access_key": 16,
    "s3_secret_key": 32,
    "data_digest_key": 32,
    "weed_jwt_signing_key": 32,
    "weed_jwt_signing_read_key": 32,
    "weed_jwt_filer_signing_key": 32,
    "weed_jwt_filer_signing_read_key": 32,
}


class CredentialsDamaged(RemergeError):
    """The stack's secrets are not all there; making new ones would lock the data out."""


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
        stack = _read_json(settings.stack_file)
        try:
            children = {name: ProcessId(**child) for name, child in stack.get("processes", {}).items()}
        except TypeError:
            children = {}
        return cls(home, stack.get("ports") or _read_json(home / "ports.json"), children)

    def write(self) -> None:
        """Make the stack known to other commands, or unknown where nothing of it is left."""
        file = self.home / "stack.json"
        if not self.children:
            file.unlink(missing_ok=True)
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
        _write_json(path, {name: secrets.token_hex(size) for name, size in _SECRETS.items()})
    found = _read_json(path)
    if missing := [name for name in _SECRETS if not found.get(name)]:
        raise CredentialsDamaged(
            f"{path} is damaged ({', '.join(missing)} missing): restore it from a backup, or start anew "
            "with another REMERGE_HOME."
        )
    return found


@contextlib.contextmanager
def exclusive(settings: Settings, progress: Callable[[str], None]) -> Iterator[State]:
    """The state, for one command at a time. The kernel drops the lock of a command that was killed."""
    home = settings.home.absolute()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / "logs").mkdir(exist_ok=True)
    with (home / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another command that starts or stops this stack ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield State.read(settings)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file in one step, readable by its owner alone."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
