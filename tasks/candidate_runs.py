"""A portfolio's runs in MLflow: opened when a training begins, ended when it ends, well or not.

Every call names its run, so threads do not disturb each other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from accounting.errors import RemergeError
from infra.canonical import canonical_json, sha256_hex
from infra.documents import NetworkRecord
from infra.settings import StackDown
from tasks.mlflow_server import NotThere, answers, experiment
from tasks.recipes import CandidateRecipe, Recipe

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from tasks.public_twins import TrainedTwin
    from tasks.training import TrainedCandidate

MODEL = "model.safetensors"
INITIAL = "initial.safetensors"  # the public parameters that the run started from, which merges may need
TRAJECTORY = "trajectory.json"
NETWORK = "network.json"
RECIPE = "recipe.json"
CANDIDATE_TAG = "remerge.candidate"
TWIN_TAG = "remerge.public_twin_of"  # on a twin's run, in place of the tag above: a twin is never a candidate
SCORE_TAG = "remerge.score"  # of a twin
FLOW_RUN_TAG = "remerge.flow_run_id"
FAILURE_TAG = "remerge.failure"  # why, in words
INTERRUPTED_TAG = (
    "remerge.interrupted"  # on a run that failed by no doing of its own, and may be gone on with
)
MODEL_TAG, TRAJECTORY_TAG = "remerge.model_sha256", "remerge.trajectory_sha256"
ACCURACY_TAG = "remerge.public_train_accuracy"  # of the model itself, which need not be that of the last step
PARENT_TAG = "mlflow.parentRunId"
_BATCH = 1000  # MLflow's limit of metrics in one log_batch


def start_run(
    client: MlflowClient,
    recipe: Recipe,
    candidate: CandidateRecipe,
    *,
    flow_run_id: str | None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Open a run with the recipe's public parameters; MLflow shows it as running.

    Args:
        tags: further ones.

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
    known = {CANDIDATE_TAG: candidate.name, FLOW_RUN_TAG: flow_run_id or "none", **(tags or {})}
    return create_run(client, recipe.name, candidate.name, parameters, known)


def log_twin(
    client: MlflowClient,
    recipe: Recipe,
    twin: TrainedTwin,
    *,
    flow_run_id: str | None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Leave a finished public twin in a run of its own, beside its candidate's; it is never registered.

    Returns:
        The run's id.
    """
    parameters = {
        **twin.recipe.model_dump(exclude={"name"}, exclude_none=True),
        "initialisation_seed": recipe.initialisation_seed,
        "recipe_sha256": recipe.sha256(),
    }
    known = {TWIN_TAG: twin.name, SCORE_TAG: repr(twin.score), FLOW_RUN_TAG: flow_run_id or "none"}
    run_id = create_run(
        client, recipe.name, f"{twin.name} (public twin)", parameters, {**known, **(tags or {})}
    )
    files = {MODEL: twin.model, NETWORK: recipe.network.content(), RECIPE: recipe.content()}
    try:
        with answers("log a run"):
            log_metrics(client, run_id, metrics_of(twin.metrics))
        _end_well(client, run_id, files)
    except RemergeError as error:
        with suppress(RemergeError):  # the cause matters more than the mark
            fail_run(client, run_id, error.message)
        raise
    return run_id


def finish_run(
    client: MlflowClient, run_id: str, recipe: Recipe, trained: TrainedCandidate, *, initial: bytes
) -> None:
    """Store the files of a finished training, whose metrics are logged, and mark its run as finished.

    Args:
        initial: contents of a safetensors file with the portfolio's public initial parameters.
    """
    files = {**candidate_files(recipe, trained), INITIAL: initial}
    with answers("log a run"):  # what is taken up again later is checked against these
        client.set_tag(run_id, MODEL_TAG, sha256_hex(files[MODEL]))
        client.set_tag(run_id, TRAJECTORY_TAG, sha256_hex(files[TRAJECTORY]))
        client.set_tag(run_id, ACCURACY_TAG, repr(trained.public_train_accuracy))
    _end_well(client, run_id, files)


def log_kept(
    client: MlflowClient,
    recipe: Recipe,
    kept: TrainedCandidate,
    *,
    initial: bytes,
    parent_run_id: str,
    flow_run_id: str | None,
) -> str:
    """Leave a checkpoint that its recipe keeps as a candidate in a finished run of its own, below its run's.

    Args:
        initial: as for `finish_run`.

    Returns:
        The run's id: again the same one where an attempt that was interrupted had left it.
    """
    found = kept_runs(client, parent_run_id).get(kept.name)
    if found is None:
        parameters = {
            "steps": kept.trajectory.steps,
            "initialisation_seed": recipe.initialisation_seed,
            "recipe_sha256": recipe.sha256(),
        }
        tags = {CANDIDATE_TAG: kept.name, PARENT_TAG: parent_run_id, FLOW_RUN_TAG: flow_run_id or "none"}
        found = create_run(client, recipe.name, kept.name, parameters, tags)
        with answers("log a run"):
            accuracy = {"public_train_accuracy": kept.public_train_accuracy, "step": kept.trajectory.steps}
            log_metrics(client, found, metrics_of([accuracy]))
    finish_run(client, found, recipe, kept, initial=initial)
    return found


def kept_runs(client: MlflowClient, parent_run_id: str) -> dict[str, str]:
    """The runs of a run's kept checkpoints: their ids by the names of the candidates."""
    with answers("look for kept checkpoints"):
        experiment_id = client.get_run(parent_run_id).info.experiment_id
        runs = client.search_runs([experiment_id], f"tags.`{PARENT_TAG}` = '{parent_run_id}'")
    return {run.data.tags[CANDIDATE_TAG]: run.info.run_id for run in runs if CANDIDATE_TAG in run.data.tags}


def fail_run(client: MlflowClient, run_id: str, reason: str, *, interrupted: bool = False) -> None:
    """Mark a run as failed: it is never registered.

    Args:
        interrupted: it was stopped from outside, whatever its data; only then may it be gone on with.
    """
    with answers("mark a run as failed"):
        if interrupted:
            client.set_tag(run_id, INTERRUPTED_TAG, "true")
        client.set_tag(run_id, FAILURE_TAG, reason[:5000])
        client.set_terminated(run_id, "FAILED")


def create_run(
    client: MlflowClient,
    experiment_name: str,
    name: str,
    parameters: Mapping[str, object],
    tags: Mapping[str, str],
) -> str:
    """Open a run with its parameters.

    Returns:
        Its id.

    Raises:
        StackDown, RegistryRefused: MLflow did not take it.
    """
    from mlflow.entities import Param

    with answers("start a run"):
        run = client.create_run(experiment(client, experiment_name), run_name=name, tags=dict(tags))
        run_id = str(run.info.run_id)
        client.log_batch(run_id, params=[Param(key, str(value)) for key, value in parameters.items()])
    return run_id


def metrics_of(steps: Iterable[Mapping[str, float]]) -> list[Metric]:
    """MLflow's form of metrics, of now: one mapping for each step looked at, which says under "step" which it is."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    return [
        Metric(name, value, now, int(values["step"]))
        for values in steps
        for name, value in values.items()
        if name != "step"
    ]


def log_metrics(client: MlflowClient, run_id: str, metrics: list[Metric]) -> None:
    """Log metrics in as few calls as MLflow takes. The same ones again (their times too) change nothing."""
    for start in range(0, len(metrics), _BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + _BATCH])


def candidate_files(recipe: Recipe, trained: TrainedCandidate) -> dict[str, bytes]:
    """What a candidate consists of, by file name."""
    network: NetworkRecord = recipe.network
    return {
        MODEL: trained.model,
        TRAJECTORY: canonical_json(trained.trajectory.to_dict()),
        NETWORK: network.content(),
        RECIPE: recipe.content(),
    }


def download(client: MlflowClient, run_id: str, name: str, what: str) -> bytes | None:
    """Fetch a file of a run.

    Args:
        what: it is, for errors.

    Returns:
        None where the run has no such file.

    Raises:
        StackDown: MLflow or its store does not hand it out.
    """
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory() as folder:
        try:
            return Path(client.download_artifacts(run_id, name, folder)).read_bytes()
        except (MlflowException, OSError):
            pass  # MLflow gives one error for a missing file and for a store that is down: ask which it is
    listed: set[str] = set()
    with suppress(NotThere), answers(f"look for {what}"):
        listed = {entry.path for entry in client.list_artifacts(run_id, str(Path(name).parent))}
    if name in listed:
        raise StackDown(f"MLflow's store did not hand out {what}; try again when it is up.")
    return None


def _end_well(client: MlflowClient, run_id: str, files: Mapping[str, bytes]) -> None:
    with answers("log a run"):
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            client.log_artifacts(run_id, folder)
        client.set_terminated(run_id, "FINISHED")
