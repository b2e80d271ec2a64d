"""A training that was interrupted, found again: which candidates it finished, and which can be gone on with.

All runs of one training carry its id and its key: a digest of everything that it depends on. A training is gone on
with only if nobody works on it any more, its key is that of the training now asked for, and it was interrupted from
outside. Where a candidate failed by its own doing (it diverged, say), whether it failed depends on the private rows
and on its noise; trying again until it works would be a selection by private outcomes that nobody accounts for. So
such a training is never gone on with, and nothing of it is used.

A candidate that goes on gets a new run, which starts with the checkpoint and its metrics; what the old run logged
after it belongs to steps that are no part of the model, and MLflow cannot take metrics back. Two processes that go on
with the same training at once do not meet in a run, and their noise has different segment ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from accounting.errors import InvalidInput, RemergeError
from accounting.trajectory import Trajectory
from infra.canonical import canonical_json, sha256_hex, strict_json
from infra.documents import DataRecord
from infra.orchestrator import TERMINAL, FlowRun
from infra.settings import StackDown
from tasks.candidate_runs import (
    ACCURACY_TAG,
    CANDIDATE_TAG,
    FLOW_RUN_TAG,
    INTERRUPTED_TAG,
    MODEL,
    MODEL_TAG,
    SCORE_TAG,
    TRAJECTORY,
    TRAJECTORY_TAG,
    TWIN_TAG,
    download,
    kept_runs,
    log_metrics,
    metrics_of,
)
from tasks.mlflow_server import answers
from tasks.recipes import CandidateRecipe, Recipe
from tasks.services import Services
from tasks.stored_checkpoints import (
    checkpoint_steps,
    discard_checkpoints,
    put_checkpoint,
    read_checkpoint,
)
from tasks.training.processes import ProcessLost

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from tasks.training import TrainedCandidate
    from tasks.training.checkpoints import Checkpoint

TRAINING_TAG = "remerge.training"  # the flow run that began it; those that go on with it keep it
KEY_TAG = "remerge.resume_key"
RESUMED_TAG = "remerge.resumed"  # the sentence that people are told
GONE_ON_TAG = "remerge.gone_on_in"  # on a run that another one goes on with
OWN_DOING = "Failed by its own doing"  # name of the state of a flow run that is never gone on with


class Planned(Protocol):
    """What is to be trained: a recipe, or a group of tasks with all their candidates."""

    @property
    def name(self) -> str: ...
    @property
    def candidates(self) -> tuple[CandidateRecipe, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An interrupted training; runs by the names of their candidates."""

    training: str
    ended_at: datetime | None  # None: Prefect does not say
    finished: Mapping[str, str] = field(default_factory=dict)  # run
    checkpoints: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # run and step
    twins: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # run and score

    def sentence(self, planned: Planned, command: str = "remerge train") -> str:
        """What happens to the candidates, for people.

        Args:
            command: that the training was asked for with.
        """
        steps = [step for _, step in self.checkpoints.values()]
        anew = len(planned.candidates) - len(self.finished) - len(steps)
        ended = f"that ended at {self.ended_at:%Y-%m-%d %H:%M:%S} UTC" if self.ended_at else "of before"
        return (
            f"Resuming the training of {planned.name} {ended}: {len(self.finished)} of {len(planned.candidates)} "
            f"candidates {_are(len(self.finished))} done"
            + (f", {len(steps)} {_go(len(steps))} on from {_after(steps)}" if steps else "")
            + (f", {anew} {'starts' if anew == 1 else 'start'} anew" if anew else "")
            + f"; `{command} --fresh` trains all anew."
        )


def training_key(recipe: Recipe, data: DataRecord, resume_keys: Mapping[str, str]) -> str:
    """A digest of everything that a training depends on, but not of how it is carried out.

    Args:
        resume_keys: `tasks.training.checkpoints.resume_key` of each candidate, by name.
    """
    return sha256_hex(
        canonical_json(
            {
                "recipe": recipe.model_dump(mode="json", exclude={"execution"}),
                "data": data.model_dump(mode="json"),
                "candidates": dict(resume_keys),
            }
        )
    )


def find_unfinished(services: Services, planned: Planned, key: str) -> Unfinished | None:
    """The portfolio's newest training, if it is one to go on with.

    Args:
        key: `training_key` of the training now asked for.

    Raises:
        StackDown: MLflow or Prefect does not answer.
    """
    client = services.mlflow
    runs = _newest_training(client, planned.name)
    if not runs or any(run.data.tags.get(KEY_TAG) != key for run in runs):
        return None
    if any(run.info.status == "FAILED" and INTERRUPTED_TAG not in run.data.tags for run in runs):
        return None
    ends = []
    for flow_run_id in sorted({run.data.tags[FLOW_RUN_TAG] for run in runs}):
        flow_run = (
            services.orchestrator.find_flow_run(flow_run_id) or {}
        )  # forgotten by Prefect: it has ended
        if flow_run.get("state_type", "CRASHED") not in TERMINAL or flow_run.get("state_name") == OWN_DOING:
            return None
        if services.manifests.of_flow_run(planned.name, flow_run_id) is not None:
            return None
        ends += [datetime.fromisoformat(end) for end in [flow_run.get("end_time")] if end]
    found = _sorted_out(client, runs, max(ends, default=None))
    return found if found.finished or found.checkpoints or found.twins else None


def was_interrupted(error: BaseException) -> bool:
    """Whether a training was stopped from outside, whatever its data. In doubt it was not."""
    if isinstance(error, StackDown | ProcessLost):
        return error.retryable
    return not isinstance(error, Exception)


def _newest_training(client: MlflowClient, portfolio: str) -> list[Run]:
    with answers("look for an unfinished training"):
        experiment = client.get_experiment_by_name(portfolio)
        if experiment is None or experiment.lifecycle_stage == "deleted":
            return []
        where, latest = [experiment.experiment_id], ["attributes.start_time DESC"]
        newest = client.search_runs(where, f"tags.`{TRAINING_TAG}` LIKE '%'", max_results=1, order_by=latest)
        if not newest:
            return []
        training = newest[0].data.tags[TRAINING_TAG]
        return list(client.search_runs(where, f"tags.`{TRAINING_TAG}` = '{training}'", order_by=latest))


def _sorted_out(client: MlflowClient, runs: list[Run], ended_at: datetime | None) -> Unfinished:
    finished: dict[str, str] = {}
    checkpoints: dict[str, tuple[str, int]] = {}
    twins: dict[str, tuple[str, float]] = {}
    for run in reversed(runs):  # the oldest first: of two that finished, the first one counts
        tags, run_id, ended_well = run.data.tags, run.info.run_id, run.info.status == "FINISHED"
        if TWIN_TAG in tags:
            if ended_well and SCORE_TAG in tags:
                twins.setdefault(tags[TWIN_TAG], (run_id, float(tags[SCORE_TAG])))
        elif ended_well:
            finished.setdefault(tags[CANDIDATE_TAG], run_id)
        elif steps := checkpoint_steps(client, run_id):
            known = checkpoints.get(tags[CANDIDATE_TAG])
            if known is None or steps[0] > known[1]:
                checkpoints[tags[CANDIDATE_TAG]] = (run_id, steps[0])
    for name in finished:
        checkpoints.pop(name, None)
    return Unfinished(
        training=runs[0].data.tags[TRAINING_TAG],
        ended_at=ended_at,
        finished=finished,
        checkpoints=checkpoints,
        twins=twins,
    )


def claim(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    """Make a finished run one of the flow run that takes it as it is."""
    with answers("take up a finished run"):
        for name, value in tags.items():
            client.set_tag(run_id, name, value)


def load_finished(client: MlflowClient, run_id: str) -> tuple[TrainedCandidate, dict[str, str]] | None:
    """A candidate that an interrupted training had finished, with the runs of its kept checkpoints by name.

    Returns:
        None where its files are no longer what they were when it finished; it is trained anew then.
    """
    trained = _load(client, run_id)
    children = kept_runs(client, run_id)
    kept = [_load(client, child) for child in children.values()]
    if trained is None or None in kept:
        return None
    return replace(trained, kept=tuple(kept)), children


def newest_checkpoint(client: MlflowClient, run_id: str, key: str) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole and of the right key, or None."""
    from tasks.training.checkpoints import Checkpoint

    for step in checkpoint_steps(client, run_id):
        content = read_checkpoint(client, run_id, step)
        with suppress(InvalidInput):
            found = Checkpoint.from_bytes(content) if content is not None else None
            if found is not None and (found.key, found.step) == (key, step):
                return found
    return None


def go_on(client: MlflowClient, old_run: str, new_run: str, checkpoint: Checkpoint) -> None:
    """Copy what a new run starts from, then close the old one. Killed in between, the next one finds either."""
    with answers("go on with a run"):
        log_metrics(client, new_run, metrics_of(checkpoint.metrics))
    put_checkpoint(client, new_run, checkpoint.step, checkpoint.to_bytes())
    with suppress(RemergeError), answers("close a run"):  # it is of no use any more, whatever it looks like
        client.set_tag(old_run, GONE_ON_TAG, new_run)
        client.set_terminated(old_run, "KILLED")
        discard_checkpoints(client, old_run)


def close_left_over(services: Services, portfolio: str) -> None:
    """After a portfolio version was written: what earlier attempts left open is closed, and its checkpoints removed.

    Only the newest training is ever gone on with, and that has just ended.
    """
    client = services.mlflow
    with answers("look for what was left over"):
        experiment = client.get_experiment_by_name(portfolio)
        if experiment is None:
            return
        open_ones = f"tags.`{TRAINING_TAG}` LIKE '%' AND attributes.status != 'FINISHED'"
        left = client.search_runs([experiment.experiment_id], open_ones)
    ended: dict[str, bool] = {}
    for run in left:
        flow_run_id, run_id = run.data.tags[FLOW_RUN_TAG], run.info.run_id
        if GONE_ON_TAG in run.data.tags:
            continue
        if flow_run_id not in ended:
            ended[flow_run_id] = _has_ended(services.orchestrator.find_flow_run(flow_run_id))
        if ended[flow_run_id]:
            discard_checkpoints(client, run_id)
            with answers("close a run"):
                client.set_tag(run_id, GONE_ON_TAG, "none")
                client.set_terminated(run_id, "KILLED" if run.info.status == "RUNNING" else run.info.status)


def _has_ended(flow_run: FlowRun | None) -> bool:
    """By Prefect's word; of a run that it has forgotten too."""
    return flow_run is None or flow_run.get("state_type") in TERMINAL


def _load(client: MlflowClient, run_id: str) -> TrainedCandidate | None:
    from tasks.training import TrainedCandidate

    with answers("look up a finished run"):
        run = client.get_run(run_id)
    model = download(client, run_id, MODEL, f"the model of run {run_id}")
    trajectory = download(client, run_id, TRAJECTORY, f"the trajectory of run {run_id}")
    if model is None or trajectory is None:
        return None
    tags = run.data.tags
    if (sha256_hex(model), sha256_hex(trajectory)) != (tags.get(MODEL_TAG), tags.get(TRAJECTORY_TAG)):
        return None
    return TrainedCandidate(
        name=tags[CANDIDATE_TAG],
        model=model,
        trajectory=Trajectory.from_dict(strict_json(trajectory)),
        metrics=(),
        public_train_accuracy=float(tags[ACCURACY_TAG]),
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _go(count: int) -> str:
    return "goes" if count == 1 else "go"


def _after(steps: list[int]) -> str:
    numbers = [str(step) for step in steps]
    listed = " and ".join([", ".join(numbers[:-1]), numbers[-1]]) if len(numbers) > 1 else numbers[0]
    return f"step{'s' if len(numbers) > 1 else ''} {listed}"
