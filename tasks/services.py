"""The stores and clients that a flow or a command works with, built once at its start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from infra.ledger_store import LedgerStore
from infra.object_store import ObjectStore
from infra.orchestrator import Orchestrator
from infra.policies import ManifestStore, PolicyStore
from infra.releases import ReleaseStore
from infra.settings import Connections, Settings, connections

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Services:
    """Doors to S3's documents, MLflow and Prefect. Nothing is contacted until it is used."""

    connections: Connections
    store: ObjectStore
    policies: PolicyStore
    manifests: ManifestStore
    ledger: LedgerStore
    releases: ReleaseStore
    orchestrator: Orchestrator

    @cached_property
    def mlflow(self) -> MlflowClient:
        from tasks.mlflow_server import mlflow_client

        return mlflow_client(self.connections)


def open_services(settings: Settings | None = None) -> Services:
    """Find the services.

    Raises:
        infra.settings.StackDown: the stack is not up and the environment names no other.
    """
    found = connections(settings)
    store = ObjectStore(found)
    return Services(
        connections=found,
        store=store,
        policies=PolicyStore(store),
        manifests=ManifestStore(store),
        ledger=LedgerStore(store),
        releases=ReleaseStore(store),
        orchestrator=Orchestrator(found),
    )
