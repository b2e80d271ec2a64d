"""Candidates registered in MLflow and fetched from it: one version of the registered model `<portfolio>` each.

Every call names its run or version explicitly, so threads do not disturb each other, and no alias is ever
followed: the portfolio manifest names versions by number and files by digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accounting.errors import InvalidInput, RemergeError
from accounting.trajectory import Trajectory
from infra.canonical import sha256_hex, strict_json
from infra.documents import CandidateRecord, PortfolioManifest
from tasks.candidate_runs import (
    CANDIDATE_TAG,
    INITIAL,
    MODEL,
    MODEL_TAG,
    TRAJECTORY,
    TRAJECTORY_TAG,
    candidate_files,
    download,
)
from tasks.candidates import LoadedCandidate
from tasks.mlflow_server import NotThere, answers, ensure_registered_model, require_up
from tasks.recipes import Recipe

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.training import TrainedCandidate


class CandidateMissing(RemergeError):
    """A candidate that the manifest names is no longer in MLflow."""


class CandidateCorrupted(RemergeError):
    """A candidate's file is not the one that was trained: its digest differs from the manifest's."""


def register_candidate(
    client: MlflowClient,
    run_id: str,
    recipe: Recipe,
    trained: TrainedCandidate,
    twin: tuple[str, float] | None = None,
) -> CandidateRecord:
    """Make a finished run a version of the registered model that is named like the portfolio.

    Args:
        twin: the run of the public twin, and its score, which is the candidate's utility; without one, the
            utility is the one that the recipe states, if any. Kept checkpoints have none.

    Raises:
        InvalidInput: the run has not finished.
    """
    with answers("register a candidate"):
        run = client.get_run(run_id)
        if run.info.status != "FINISHED":
            raise InvalidInput(
                f"Run {run_id} of candidate {trained.name} is {run.info.status}; only finished runs are "
                "candidates."
            )
        ensure_registered_model(client, recipe.name)
        files = {name: sha256_hex(content) for name, content in candidate_files(recipe, trained).items()}
        version = client.create_model_version(
            recipe.name,
            f"{run.info.artifact_uri}/{MODEL}",
            run_id,
            tags={
                CANDIDATE_TAG: trained.name,
                MODEL_TAG: files[MODEL],
                TRAJECTORY_TAG: files[TRAJECTORY],
            },
            await_creation_for=0,
        )
    return CandidateRecord(
        name=trained.name,
        registered_model=recipe.name,
        version=int(version.version),
        run_id=run_id,
        model_sha256=files[MODEL],
        trajectory_sha256=files[TRAJECTORY],
        **_utility_fields(recipe, trained.name, twin),
    )


def _utility_fields(recipe: Recipe, name: str, twin: tuple[str, float] | None) -> dict[str, Any]:
    if twin is not None:
        run_id, score = twin
        return {"utility": score, "utility_source": "public_twin", "twin_run_id": run_id}
    stated = {candidate.name: candidate.utility for candidate in recipe.candidates}.get(name)
    if stated is not None:
        return {"utility": stated, "utility_source": "stated"}
    return {}


def fetch_candidate(
    client: MlflowClient, manifest: PortfolioManifest, record: CandidateRecord
) -> LoadedCandidate:
    """Pull a candidate and check both of its files against the manifest; errors as `fetch_files`."""
    model, trajectory = fetch_files(client, manifest, record)
    return LoadedCandidate(
        name=record.name, model=model, trajectory=Trajectory.from_dict(strict_json(trajectory))
    )


def fetch_files(
    client: MlflowClient, manifest: PortfolioManifest, record: CandidateRecord
) -> tuple[bytes, bytes]:
    """Pull a candidate's model and trajectory as they are stored, both checked against the manifest.

    Raises:
        CandidateMissing, CandidateCorrupted: naming the candidate, its portfolio and what to do.
        StackDown: MLflow or its store does not answer; trying again helps.
    """
    trajectory = _trajectory_content(client, manifest, record)
    model = _download(client, manifest, record, MODEL)
    if sha256_hex(model) != record.model_sha256:
        raise CandidateCorrupted(
            f"{MODEL} of candidate {record.name} of {manifest.reference} was replaced or corrupted after "
            "training (its SHA-256 differs from the manifest's): restore the file in MLflow run "
            f"{record.run_id}, or train the portfolio again with `remerge train`."
        )
    return model, trajectory


def load_all(client: MlflowClient, manifest: PortfolioManifest) -> dict[str, LoadedCandidate]:
    """Pull every candidate of a portfolio, in the manifest's order; errors as `fetch_candidate`."""
    return {record.name: fetch_candidate(client, manifest, record) for record in manifest.candidates}


def fetch_public_start(client: MlflowClient, manifest: PortfolioManifest) -> bytes:
    """Pull the public parameters that all candidates started from, from the first run that has them.

    Returns:
        The contents of a safetensors file with the digest that the manifest states.

    Raises:
        CandidateMissing: no run has them, as in portfolios of earlier versions.
        CandidateCorrupted: the runs that have them have others.
        StackDown: MLflow or its store does not answer; trying again helps.
    """
    require_up(client)
    damaged = ""
    for record in manifest.candidates:
        what = f"{INITIAL} of candidate {record.name} of {manifest.reference}"
        content = download(client, record.run_id, INITIAL, what)
        if content is not None and sha256_hex(content) == manifest.initialisation_digest:
            return content
        if content is not None:
            damaged = damaged or f"{what} was replaced or corrupted after training"
    if damaged:
        raise CandidateCorrupted(
            f"{damaged} (its SHA-256 is not the manifest's initialisation_digest): restore the file in MLflow, or "
            "train the portfolio again with `remerge train`."
        )
    raise CandidateMissing(
        f"{manifest.reference} was trained without keeping its public start ({INITIAL} of a candidate's MLflow run), "
        "which this merge needs: train the portfolio again with `remerge train`, or set the policy with "
        "`--merge linear`."
    )


def fetch_trajectory(
    client: MlflowClient, manifest: PortfolioManifest, record: CandidateRecord
) -> Trajectory:
    """Pull a candidate's history alone, checked against the manifest; errors as `fetch_files`."""
    return Trajectory.from_dict(strict_json(_trajectory_content(client, manifest, record)))


def _trajectory_content(client: MlflowClient, manifest: PortfolioManifest, record: CandidateRecord) -> bytes:
    _require_version(client, manifest, record)
    content = _download(client, manifest, record, TRAJECTORY)
    if sha256_hex(content) != record.trajectory_sha256:
        raise CandidateCorrupted(
            f"{TRAJECTORY} of candidate {record.name} of {manifest.reference} was edited after training (its "
            "SHA-256 differs from the manifest's), so its privacy is unknown: restore the file in MLflow run "
            f"{record.run_id}, or train the portfolio again with `remerge train`."
        )
    return content


def _require_version(client: MlflowClient, manifest: PortfolioManifest, record: CandidateRecord) -> None:
    require_up(client)
    what = f"candidate {record.name} of {manifest.reference}"
    try:
        with answers(f"look up {what}"):
            version = client.get_model_version(record.registered_model, str(record.version))
    except NotThere:
        raise CandidateMissing(
            f"Version {record.version} of registered model {record.registered_model}, which is {what}, is "
            "not in MLflow: restore it from a backup, or train the portfolio again with `remerge train`."
        ) from None
    if version.run_id != record.run_id:
        raise CandidateCorrupted(
            f"Version {record.version} of registered model {record.registered_model}, which is {what}, now "
            f"comes from another run ({version.run_id}): train the portfolio again with `remerge train`."
        )


def _download(client: MlflowClient, manifest: PortfolioManifest, record: CandidateRecord, name: str) -> bytes:
    what = f"{name} of candidate {record.name} of {manifest.reference}"
    content = download(client, record.run_id, name, what)
    if content is None:
        raise CandidateMissing(
            f"{what} is not in MLflow (run {record.run_id}): restore it from a backup, or train the portfolio "
            "again with `remerge train`."
        )
    return content
