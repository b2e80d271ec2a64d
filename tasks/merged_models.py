"""Merged models in MLflow: registered as `<portfolio>-<region>`, which alone carry the alias `production`.

A merge is never registered under its portfolio's own name, so it never comes back as a candidate.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.mlflow_server import RegistryRefused, answers, ensure_registered_model, experiment, require_up

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from infra.documents import ReleaseManifest
    from infra.releases import ReleaseStore

ALIAS = "production"
RELEASE_TAG = "remerge.release_id"
REGION_TAG = "remerge.region"


def registered_name(portfolio: str, region: str) -> str:
    return f"{portfolio}-{region}"


def register_merge(
    client: MlflowClient,
    *,
    portfolio: str,
    region: str,
    release_id: str,
    files: Mapping[str, bytes],
    parameters: Mapping[str, object],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    description: str,
) -> int:
    """Make a merged model a version of `<portfolio>-<region>`; the same release gets the same version.

    Args:
        files: artifact contents by file name; must hold model.safetensors and certificate.json.
        parameters, metrics, tags, description: what people see beside it; nothing computed from private data.

    Returns:
        The version number.

    Raises:
        RegistryRefused: the name already belongs to another portfolio or region.
        StackDown: MLflow does not answer.
    """
    from mlflow.entities import Metric, Param

    require_up(client)
    name = registered_name(portfolio, region)
    tags = {RELEASE_TAG: release_id, REGION_TAG: region, **tags}
    with answers(f"register a version of {name}"):
        versions = client.search_model_versions(f"name = '{name}'")
        existing = [
            int(version.version) for version in versions if version.tags.get(RELEASE_TAG) == release_id
        ]
        if existing:
            return min(existing)
        if any(version.tags.get(REGION_TAG) != region for version in versions):
            raise RegistryRefused(
                f"MLflow's registered model {name} belongs to another portfolio or region of a similar name: "
                "rename one of them, then set the policy again."
            )
        run = client.create_run(experiment(client, name), run_name=release_id[:12], tags=tags)
        run_id = run.info.run_id
        now = int(time.time() * 1000)
        client.log_batch(
            run_id,
            params=[Param(key, str(value)) for key, value in parameters.items()],
            metrics=[Metric(key, number, now, 0) for key, number in metrics.items()],
        )
        with tempfile.TemporaryDirectory() as folder:
            for file_name, content in files.items():
                (Path(folder) / file_name).write_bytes(content)
            client.log_artifacts(run_id, folder)
        client.set_terminated(run_id)
        ensure_registered_model(client, name)
        version = client.create_model_version(
            name,
            f"{run.info.artifact_uri}/model.safetensors",
            run_id,
            tags=tags,
            description=description,
            await_creation_for=0,
        )
        return int(version.version)


def point_alias(client: MlflowClient, name: str, version: int) -> None:
    """Let the alias `production` name this version."""
    require_up(client)
    with answers(f"set the alias {ALIAS} of {name}"):
        client.set_registered_model_alias(name, ALIAS, str(version))


def register_again(client: MlflowClient, releases: ReleaseStore, release: ReleaseManifest) -> list[str]:
    """Make the live release a version again, from its sealed files, where somebody has deleted that from MLflow.

    Returns:
        A sentence where it had to be done; nothing where a version of the release is there.
    """
    require_up(client)
    name = release.registered_model
    with answers(f"read the versions of {name}"):
        versions = client.search_model_versions(f"name = '{name}'")
    if any(version.tags.get(RELEASE_TAG) == release.release_id for version in versions):
        return []
    version = register_merge(
        client,
        portfolio=release.portfolio.partition("@")[0],
        region=release.region,
        release_id=release.release_id,
        files={
            file: releases.read_file(release.release_id, file, sha) for file, sha in release.files.items()
        },
        parameters={"policy": f"{release.region}/{release.policy_serial}", "portfolio": release.portfolio},
        metrics={"gate_accuracy": release.accuracy},
        tags={"remerge.policy_serial": str(release.policy_serial)},
        description="Registered again from the production stage, because its version was gone.",
    )
    return [f"The live release's version of {name} was gone from MLflow; it is version {version} now."]


def restore_alias(client: MlflowClient, release: ReleaseManifest) -> list[str]:
    """Let the alias name the live release's version again, wherever it points now.

    Returns:
        A sentence where it had to be changed; nothing where it was right.

    Raises:
        RegistryRefused: the version of the live release is gone from MLflow.
        StackDown: MLflow does not answer.
    """
    from mlflow.exceptions import MlflowException

    require_up(client)
    name, version = release.registered_model, release.registered_version
    with answers(f"read the versions of {name}"):
        versions = client.search_model_versions(f"name = '{name}'")
        mine = [int(v.version) for v in versions if v.tags.get(RELEASE_TAG) == release.release_id]
    if not mine:
        raise RegistryRefused(
            f"Version {version} of {name}, the live release of {release.region}, is gone from MLflow. Production is "
            "not touched by that; `remerge pull` gives the release, and MLflow's backup its version."
        )
    wanted = version if version in mine else min(mine)
    try:
        found = int(client.get_model_version_by_alias(name, ALIAS).version)
    except MlflowException:  # there is no such alias
        found = None
    if found == wanted:
        return []
    point_alias(client, name, wanted)
    before = "was missing" if found is None else f"named version {found}"
    return [f"The alias {ALIAS} of {name} {before}; it names version {wanted} again."]
