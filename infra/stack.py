"""The embedded stack: S3 (SeaweedFS), MLflow, Prefect and its worker, on this machine only.

It outlives the command that starts it. All its state lies under `REMERGE_HOME`.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import httpx

from accounting.errors import RemergeError
from infra import processes, stack_services
from infra.object_store import AlreadyExists, Missing, ObjectStore
from infra.orchestrator import Orchestrator
from infra.settings import Settings, StackDown, embedded
from infra.stack_services import MLFLOW, NAMES, PREFECT, S3, WORK_POOL, WORKER
from infra.stack_state import State, credentials, exclusive

Progress = Callable[[str], None]

TITLES = {S3: "S3 (SeaweedFS)", MLFLOW: "MLflow", PREFECT: "Prefect", WORKER: "Prefect's worker"}
MLFLOW_BUCKET = "mlflow"
READY = "ready"  # an object that is read to see whether a bucket can be
START_SECONDS = 150.0
GRACE_SECONDS = 8.0
STOPPED = "The stack was stopped while this run was going; start it again."
ClientT = TypeVar("ClientT", ObjectStore, Orchestrator, httpx.Client)
_children: list[subprocess.Popen[bytes]] = []  # of this process; kept so that they are reaped when they end


class StackFailed(RemergeError):
    """A part of the stack could not be started; what this start had begun was stopped again."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One of the four children."""

    name: str
    title: str
    running: bool  # its process exists
    answering: bool  # and it does its work
    pid: int | None
    log: Path


@dataclass(frozen=True, slots=True)
class StackStatus:
    """The whole stack; `services` is empty where it is down."""

    home: Path
    services: tuple[ServiceStatus, ...] = ()
    addresses: dict[str, str] = field(default_factory=dict)  # by the names of infra.settings.Connections
    already_up: bool = False  # `start` found nothing to do

    @property
    def up(self) -> bool:
        """Whether everything answers."""
        return bool(self.services) and all(service.answering for service in self.services)


def start(settings: Settings, progress: Progress, names: tuple[str, ...] = NAMES) -> StackStatus:
    """Start what is not up already, and return when all of it works.

    Args:
        settings: whose `home` holds the stack.
        progress: told in words what was reached.
        names: of the services; a part of them is only for tests.

    Raises:
        StackFailed: names the log to read; what this call started was stopped again.
        NotInstalled, CredentialsDamaged: nothing was started.
    """
    if own := settings.own_services():
        raise StackFailed(
            "The environment names services of your own, so there is nothing to start; to use the embedded "
            f"stack, unset {', '.join(f'REMERGE_{name.upper()}' for name in own)}."
        )
    with exclusive(settings, progress) as state:
        broken = [name for name in _broken(state, settings) if name in names]
        if not broken:
            progress("The stack is up already.")
            return _look(state, settings, already_up=True)
        _end(broken, state)
        if not all(stack_services.ports_are_free(state.ports, name) for name in broken):
            _end(NAMES, state)
            broken = [name for name in NAMES if name in names]
        try:
            _begin(broken, state, settings, progress)
        except BaseException:  # a person's Ctrl-C too
            _end(broken, state)
            raise
        return _look(state, settings)


def stop(settings: Settings, progress: Progress) -> bool:
    """Stop the stack with all that it has started; its data stays. Returns whether anything ran.

    Raises:
        HomeUnusable: `home` is no folder, or cannot be written to.
    """
    home = settings.home.absolute()
    if not home.exists() and not home.is_symlink():  # nothing to lock, and stopping makes no folder
        return _stop(State(home, {}, {}), settings, progress)
    with exclusive(settings, progress) as state:
        return _stop(state, settings, progress)


def _stop(state: State, settings: Settings, progress: Progress) -> bool:
    running = [name for name in NAMES if _runs(name, state) or processes.marked(state.mark(name))]
    if running:
        progress("Stopping " + ", ".join(TITLES[name] for name in running) + " ...")
    if WORKER in running and state.ports:
        _end([WORKER], state)
        # Prefect would show what ended with its worker as running for ever. If it fails, the next start does it.
        with contextlib.suppress(RemergeError), _Probe(state, settings) as probe:
            probe.orchestrator.crash_unfinished(STOPPED)
    _end(NAMES, state)
    return bool(running)


def status(settings: Settings) -> StackStatus:
    """Look at the stack without changing anything."""
    return _look(State.read(settings), settings)


def require_worker(settings: Settings) -> None:
    """Refuse where no flow run would ever begin, before anything is stored that would wait for one.

    Raises:
        StackDown: Prefect's worker has ended.
    """
    if worker_has_ended(settings):
        raise StackDown(
            f"Prefect's worker has ended, so no flow would run (its log is {State.read(settings).log(WORKER)}): "
            "run `remerge up`, which starts it again; nothing was stored or started."
        )


def worker_has_ended(settings: Settings) -> bool:
    """Whether the embedded stack's worker is gone; of services of your own nothing is known here."""
    return not settings.own_services() and not _runs(WORKER, State.read(settings))


def _begin(names: list[str], state: State, settings: Settings, progress: Progress) -> None:
    began = time.monotonic()
    keys = credentials(settings)
    kept = [port for name in state.children for port in stack_services.PORTS[name]]
    state.ports = {
        **stack_services.choose_ports(state.ports, [name for name in NAMES if name not in state.children]),
        **{port: state.ports[port] for port in kept},
    }
    worker_name = f"remerge-{secrets.token_hex(4)}"
    started: dict[str, subprocess.Popen[bytes]] = {}
    launches = {name: stack_services.launch(name, state.home, state.ports, keys) for name in names}
    for name, launch in launches.items():
        child = processes.spawn(
            launch.command + ([worker_name] if name == WORKER else []),
            environment=launch.environment,
            mark=state.mark(name),
            folder=launch.folder,
            log=state.log(name),
        )
        started[name] = child
        _children.append(child)
        if found := processes.identify(child.pid):
            state.children[name] = found
    state.write()
    progress("Starting " + ", ".join(TITLES[name] for name in names) + " ...")

    waiting = list(names)
    with _Probe(state, settings) as probe:
        while waiting:
            for name in list(waiting):
                if started[name].poll() is not None:
                    raise StackFailed(_failure(name, f"ended with status {started[name].returncode}", state))
                if probe.answers(name, worker_name):
                    waiting.remove(name)
                    progress(f"{TITLES[name]} is up ({time.monotonic() - began:.1f} s).")
            if waiting and time.monotonic() - began > START_SECONDS:
                raise StackFailed(_failure(waiting[0], f"did not answer in {START_SECONDS:.0f} s", state))
            time.sleep(0.1)


class _Probe(contextlib.ExitStack):
    """Asks the services whether they work. Clients are made once: making one costs more than a question."""

    def __init__(self, state: State, settings: Settings) -> None:
        super().__init__()
        addresses = stack_services.addresses(state.ports)
        self.connections = embedded(settings, addresses, credentials(settings))

    @cached_property
    def _buckets(self) -> list[ObjectStore]:
        names = (self.connections.production_bucket, MLFLOW_BUCKET)
        return [self._closing(ObjectStore(self.connections, bucket=name)) for name in names]

    @cached_property
    def _mlflow(self) -> httpx.Client:
        return self._closing(httpx.Client(base_url=self.connections.mlflow_url, timeout=10, trust_env=False))

    @cached_property
    def orchestrator(self) -> Orchestrator:
        return self._closing(Orchestrator(self.connections))

    def _closing(self, client: ClientT) -> ClientT:
        self.callback(client.close)
        return client

    def answers(self, name: str, worker_name: str | None = None) -> bool:
        """Whether a service works. For S3 this includes that the buckets are there: they are made."""
        try:
            if name == S3:
                return all(_serves_objects(bucket) for bucket in self._buckets)
            if name == MLFLOW:
                return self._mlflow.get("/health").is_success
            if name == PREFECT:
                return self.orchestrator.healthy()
            online = self.orchestrator.online_workers(WORK_POOL)
            return worker_name in online if worker_name else bool(online)
        except (RemergeError, httpx.HTTPError):
            return False


def _serves_objects(bucket: ObjectStore) -> bool:
    """SeaweedFS lists buckets before its volumes are back, so only a read of an object proves it ready."""
    bucket.create_bucket()
    with contextlib.suppress(Missing):
        return bool(bucket.read(READY).content)
    with contextlib.suppress(AlreadyExists):
        bucket.create(READY, b"The store was up when this was written.")
    return bool(bucket.read(READY).content)


def _runs(name: str, state: State) -> bool:
    return name in state.children and processes.is_alive(state.children[name])


def _end(names: Iterable[str], state: State) -> None:
    """Stop services, whatever is left of them, and forget them."""
    leaders = [state.children[name] for name in names if name in state.children]
    processes.stop(leaders, [state.mark(name) for name in names], grace=GRACE_SECONDS)
    if S3 in names:
        stack_services.remove_sockets(state.ports)
    for name in names:
        state.children.pop(name, None)
    state.write()
    for child in [child for child in _children if child.poll() is not None]:
        _children.remove(child)


def _broken(state: State, settings: Settings) -> list[str]:
    """The services that do not run, or do not answer."""
    running = [name for name in NAMES if _runs(name, state)]
    if not running:
        return list(NAMES)
    with _Probe(state, settings) as probe:
        return [name for name in NAMES if not (name in running and probe.answers(name))]


def _look(state: State, settings: Settings, *, already_up: bool = False) -> StackStatus:
    if not state.children:
        return StackStatus(state.home)
    broken = _broken(state, settings)
    children = tuple(
        ServiceStatus(
            name=name,
            title=TITLES[name],
            running=(running := _runs(name, state)),
            answering=name not in broken,
            pid=state.children[name].pid if running else None,
            log=state.log(name),
        )
        for name in NAMES
    )
    return StackStatus(state.home, children, stack_services.addresses(state.ports), already_up)


def _failure(name: str, what: str, state: State) -> str:
    log = state.log(name)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = "\n".join(line for line in lines[-15:] if line.strip())
    return f"{TITLES[name]} {what}, so what was started was stopped again; read {log}, which ends:\n{tail}"
