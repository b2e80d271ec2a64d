"""Merged models in MLflow: registered as `<portfolio>-<region>`, which alone carry the alias `production`.

A merge is never registered under its portfolio's own name, so it never comes back as a candidate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.settings import Connections

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "production"
RELEASE_TAG = "remerge.release_id"


def registered_name(portfolio: str, region: str) -> str:
    return f"{portfolio}-{region}"


def register_merge(
    client: MlflowClient,
    *,
    name: str,
    release_id: str,
    files: Mapping[str, bytes],
    parameters: Mapping[str, object],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
) -> int:
    """Make a merged model a version of the registered model `name`; the same release gets the same version.

    Args:
        files: artifact contents by file name; must hold model.safetensors and certificate.json.
        parameters, metrics, tags: what people see beside it; nothing computed from private data.

    Returns:
        The version number.
    """
    existing = [
        version
        for version in client.search_model_versions(f"name = '{name}'")
        if version.tags.get(RELEASE_TAG) == release_id
    ]
    if existing:
        return min(int(version.version) for version in existing)
    experiment_id = _experiment(client, name)
    run = client.create_run(experiment_id, run_name=release_id[:12], tags={RELEASE_TAG: release_id, **tags})
    run_id = run.info.run_id
    for key, value in parameters.items():
        client.log_param(run_id, key, value)
    for key, number in metrics.items():
        client.log_metric(run_id, key, number)
    with tempfile.TemporaryDirectory() as folder:
        for file_name, content in files.items():
            (Path(folder) / file_name).write_bytes(content)
        client.log_artifacts(run_id, folder)
    client.set_terminated(run_id)
    _ensure_registered_model(client, name)
    source = f"{client.get_run(run_id).info.artifact_uri}/model.safetensors"
    version = client.create_model_version(name, source, run_id, tags={RELEASE_TAG: release_id, **tags})
    return int(version.version)


def point_alias(client: MlflowClient, name: str, version: int) -> None:
    """Let the alias `production` name this version."""
    client.set_registered_model_alias(name, ALIAS, str(version))


def aliased_version(client: MlflowClient, name: str) -> int | None:
    """Which version the alias names; None where the model or the alias does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        return int(client.get_model_version_by_alias(name, ALIAS).version)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise


def mlflow_client(connections: Connections) -> MlflowClient:
    """A client of the tracking server; nothing global is set."""
    from mlflow import MlflowClient  # late: importing mlflow takes seconds

    return MlflowClient(tracking_uri=connections.mlflow_url, registry_uri=connections.mlflow_url)


def _experiment(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException:  # another run made it in between
        again = client.get_experiment_by_name(name)
        if again is None:
            raise
        return str(again.experiment_id)


def _ensure_registered_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
