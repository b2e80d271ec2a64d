"""Candidates in and out of MLflow: one run and one version of the registered model `<portfolio>` each.

Every call names its run or version explicitly, so threads do not disturb each other, and no alias is ever
followed: the portfolio manifest names versions by number and files by digest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accounting.errors import InvalidInput, RemergeError
from accounting.trajectory import Trajectory
from infra.canonical import canonical_json, sha256_hex, strict_json
from infra.documents import CandidateRecord, NetworkRecord, PortfolioManifest
from infra.settings import StackDown
from tasks.candidates import LoadedCandidate
from tasks.mlflow_server import NotThere, answers, ensure_registered_model, experiment, require_up
from tasks.recipes import CandidateRecipe, Recipe

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.public_twins import TrainedTwin
    from tasks.training import TrainedCandidate

MODEL = "model.safetensors"
TRAJECTORY = "trajectory.json"
NETWORK = "network.json"
RECIPE = "recipe.json"
CANDIDATE_TAG = "remerge.candidate"
TWIN_TAG = "remerge.public_twin_of"  # on a twin's run, in place of the tag above: a twin is never a candidate
_BATCH = 1000  # MLflow's limit of metrics in one log_batch


class CandidateMissing(RemergeError):
    """A candidate that the manifest names is no longer in MLflow."""


class CandidateCorrupted(RemergeError):
    """A candidate's file is not the one that was trained: its digest differs from the manifest's."""


def start_run(
    client: MlflowClient, recipe: Recipe, candidate: CandidateRecipe, *, flow_run_id: str | None
) -> str:
    """Open a run with the recipe's public parameters; MLflow shows it as running.

    Returns:
        The run's id, unique to this attempt.
    """
    parameters = {
        **candidate.model_dump(exclude={"name"}, exclude_none=True),
        **recipe.model_dump(
            include={"neighboring_relation", "feature_radius", "n_max", "initialisation_seed"}
        ),
        "recipe_sha256": recipe.sha256(),
    }
    tags = {CANDIDATE_TAG: candidate.name, "remerge.flow_run_id": flow_run_id or "none"}
    return _create_run(client, recipe, candidate.name, parameters, tags)


def log_twin(client: MlflowClient, recipe: Recipe, twin: TrainedTwin, *, flow_run_id: str | None) -> str:
    """Leave a finished public twin in a run of its own, beside its candidate's; it is never registered.

    Returns:
        The run's id.
    """
    parameters = {
        **twin.recipe.model_dump(exclude={"name"}, exclude_none=True),
        "initialisation_seed": recipe.initialisation_seed,
        "recipe_sha256": recipe.sha256(),
    }
    tags = {TWIN_TAG: twin.name, "remerge.flow_run_id": flow_run_id or "none"}
    run_id = _create_run(client, recipe, f"{twin.name} (public twin)", parameters, tags)
    files = {MODEL: twin.model, NETWORK: recipe.network.content(), RECIPE: recipe.content()}
    try:
        _complete_run(client, run_id, twin.metrics, files)
    except RemergeError as error:
        with suppress(RemergeError):  # the cause matters more than the mark
            fail_run(client, run_id, error.message)
        raise
    return run_id


def finish_run(client: MlflowClient, run_id: str, recipe: Recipe, trained: TrainedCandidate) -> None:
    """Log metrics and files of a finished training, and mark its run as finished."""
    _complete_run(client, run_id, trained.metrics, _files(recipe, trained))


def _create_run(
    client: MlflowClient,
    recipe: Recipe,
    name: str,
    parameters: Mapping[str, object],
    tags: Mapping[str, str],
) -> str:
    from mlflow.entities import Param

    with answers("start a run"):
        run = client.create_run(experiment(client, recipe.name), run_name=name, tags=dict(tags))
        run_id = str(run.info.run_id)
        client.log_batch(run_id, params=[Param(key, str(value)) for key, value in parameters.items()])
    return run_id


def _complete_run(
    client: MlflowClient,
    run_id: str,
    steps: Sequence[Mapping[str, float]],
    files: Mapping[str, bytes],
) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [
        Metric(name, value, now, step)
        for step, values in enumerate(steps, start=1)
        for name, value in values.items()
    ]
    with answers("log a run"):
        for start in range(0, len(metrics), _BATCH):
            client.log_batch(run_id, metrics=metrics[start : start + _BATCH])
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            client.log_artifacts(run_id, folder)
        client.set_terminated(run_id, "FINISHED")


def fail_run(client: MlflowClient, run_id: str, reason: str) -> None:
    """Mark a run as failed: it is never registered."""
    with answers("mark a run as failed"):
        client.set_tag(run_id, "remerge.failure", reason[:5000])
        client.set_terminated(run_id, "FAILED")


def register_candidate(
    client: MlflowClient,
    run_id: str,
    recipe: Recipe,
    trained: TrainedCandidate,
    twin: tuple[str, TrainedTwin] | None = None,
) -> CandidateRecord:
    """Make a finished run a version of the registered model that is named like the portfolio.

    Args:
        twin: the run's id and the public twin whose score is the candidate's utility; without one, the utility
            is the one that the recipe states, if any.

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
        files = {name: sha256_hex(content) for name, content in _files(recipe, trained).items()}
        version = client.create_model_version(
            recipe.name,
            f"{run.info.artifact_uri}/{MODEL}",
            run_id,
            tags={
                CANDIDATE_TAG: trained.name,
                "remerge.model_sha256": files[MODEL],
                "remerge.trajectory_sha256": files[TRAJECTORY],
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
        **_utility_fields(recipe.candidate(trained.name), twin),
    )


def _utility_fields(candidate: CandidateRecipe, twin: tuple[str, TrainedTwin] | None) -> dict[str, Any]:
    if twin is not None:
        run_id, trained = twin
        return {"utility": trained.score, "utility_source": "public_twin", "twin_run_id": run_id}
    if candidate.utility is not None:
        return {"utility": candidate.utility, "utility_source": "stated"}
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


def _files(recipe: Recipe, trained: TrainedCandidate) -> dict[str, bytes]:
    network: NetworkRecord = recipe.network
    return {
        MODEL: trained.model,
        TRAJECTORY: canonical_json(trained.trajectory.to_dict()),
        NETWORK: network.content(),
        RECIPE: recipe.content(),
    }


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
    from mlflow.exceptions import MlflowException

    what = f"{name} of candidate {record.name} of {manifest.reference}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Path(client.download_artifacts(record.run_id, name, folder)).read_bytes()
        except (MlflowException, OSError):
            pass  # MLflow gives one error for a missing file and for a store that is down: ask which it is
    listed: set[str] = set()
    with suppress(NotThere), answers(f"look for {what}"):
        listed = {entry.path for entry in client.list_artifacts(record.run_id)}
    if name in listed:
        raise StackDown(f"MLflow's store did not hand out {what}; try again when it is up.")
    raise CandidateMissing(
        f"{what} is not in MLflow (run {record.run_id}): restore it from a backup, or train the portfolio "
        "again with `remerge train`."
    )
