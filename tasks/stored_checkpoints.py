"""Checkpoints of candidates in training, as files of their MLflow runs: private material, inside the trust boundary.

Each is one file, `checkpoints/<step>.ckpt`, that one request writes: it is there whole or not at all. The newest
two are kept, and none once the run has ended well.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.candidate_runs import download
from tasks.mlflow_server import answers

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = "checkpoints"
KEPT = 2  # should the newest one turn out to be damaged


def put_checkpoint(client: MlflowClient, run_id: str, step: int, content: bytes) -> None:
    """Store a checkpoint, then remove those that are older than the newest two.

    Raises:
        StackDown, RegistryRefused: MLflow did not take it.
    """
    with answers("store a checkpoint"), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _file_name(step)
        path.write_bytes(content)
        client.log_artifact(run_id, str(path), FOLDER)
    for old in checkpoint_steps(client, run_id)[KEPT:]:
        _delete(client, run_id, f"{FOLDER}/{_file_name(old)}")


def checkpoint_steps(client: MlflowClient, run_id: str) -> list[int]:
    """The steps that a run's checkpoints were made after, the newest first."""
    with answers("look for checkpoints"):
        files = client.list_artifacts(run_id, FOLDER)
    return sorted((int(Path(file.path).stem) for file in files), reverse=True)


def read_checkpoint(client: MlflowClient, run_id: str, step: int) -> bytes | None:
    """Fetch a checkpoint; None where it is gone.

    Raises:
        StackDown: MLflow or its store does not hand it out.
    """
    what = f"the checkpoint of run {run_id} after step {step}"
    return download(client, run_id, f"{FOLDER}/{_file_name(step)}", what)


def discard_checkpoints(client: MlflowClient, run_id: str) -> None:
    """Remove all checkpoints of a run; nothing happens where there are none."""
    if checkpoint_steps(client, run_id):
        _delete(client, run_id, FOLDER)


def _file_name(step: int) -> str:
    return f"{step:08d}.ckpt"


def _delete(client: MlflowClient, run_id: str, path: str) -> None:
    # The client deletes whole runs only; single files are deleted by what it uploads them with.
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with answers("remove a checkpoint"):
        uri = client.get_run(run_id).info.artifact_uri
        get_artifact_repository(uri, tracking_uri=client.tracking_uri).delete_artifacts(path)
