"""The steps of a training: every candidate from an open run to a finished one.

Shared by train_portfolio, which has one workshop, and task_merging, which has one for each task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from accounting.errors import RemergeError
from flows.train_workshop import Workshop
from infra.canonical import sha256_hex
from tasks.recipes import CandidateRecipe
from tasks.unfinished import was_interrupted

if TYPE_CHECKING:
    from tasks.training import TrainedCandidate
    from tasks.training.checkpoints import Checkpoint


class PortfolioFailed(RemergeError):
    """At least one candidate failed, so there is no new portfolio version.

    Attributes:
        own_doing: whether a candidate failed by its own doing, so that nothing of this training is used again.
    """

    own_doing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished run, and those of the checkpoints that its recipe keeps: MLflow's run id and what was trained."""

    candidates: tuple[tuple[str, TrainedCandidate], ...]


def train_all(
    workshops: Sequence[Workshop], workers: int
) -> tuple[dict[str, Trained], dict[str, tuple[str, float]]]:
    """Train every candidate of one training, and the public twins where they are asked for.

    Args:
        workers: candidates at once.

    Returns:
        What was trained, and the twins' runs and scores, by the candidates' names, which are different ones.

    Raises:
        PortfolioFailed: naming the first one that failed.
    """
    where = {one.name: workshop for workshop in workshops for one in workshop.recipe.candidates}
    with ThreadPoolTaskRunner(max_workers=workers) as runner:
        running = {
            f"Candidate {name}": runner.submit(train_and_log, {"workshop": workshop, "name": name})
            for name, workshop in where.items()
        }
        twins_running = {
            f"The public twin of {name}": runner.submit(
                train_twin_and_log, {"workshop": workshop, "name": name}
            )
            for name, workshop in where.items()
            if workshop.recipe.public_twins
        }
        finished, twins = results_of(workshops[0], running, twins_running)
    return dict(zip(where, finished, strict=True)), twins


@task(task_run_name="train {name}", cache_policy=NO_CACHE, persist_result=False)
def train_and_log(workshop: Workshop, name: str) -> Trained:
    """One candidate, from an open MLflow run to a finished one, or as an interrupted training had finished it."""
    from tasks.candidate_runs import FLOW_RUN_TAG, fail_run, start_run
    from tasks.unfinished import claim, load_finished

    client = workshop.services.mlflow
    candidate = workshop.recipe.candidate(name)
    flow_run_id = str(flow_run.get_id())
    if name in workshop.unfinished.finished:
        run_id = workshop.unfinished.finished[name]
        claim(client, run_id, {FLOW_RUN_TAG: flow_run_id, **workshop.tags})
        if (found := load_finished(client, run_id)) is not None:
            get_run_logger().info("Candidate %s was trained before.", name)
            trained, kept = found
            return Trained(candidates=((run_id, trained), *((kept[one.name], one) for one in trained.kept)))
        get_run_logger().warning("The files of candidate %s have changed, so it is trained anew.", name)
    run_id = start_run(client, workshop.recipe, candidate, flow_run_id=flow_run_id, tags=workshop.tags)
    try:
        trained_now = train(workshop, candidate, run_id, flow_run_id)
    except BaseException as error:
        interrupted = was_interrupted(error)
        if not interrupted:
            workshop.failed.append(name)
        with suppress(RemergeError):  # the cause matters more than the mark
            fail_run(client, run_id, f"{type(error).__name__}: {error}", interrupted=interrupted)
        raise
    get_run_logger().info(
        "Candidate %s is trained: %d steps.", name, trained_now.candidates[0][1].trajectory.steps
    )
    return trained_now


def train(workshop: Workshop, candidate: CandidateRecipe, run_id: str, flow_run_id: str) -> Trained:
    """Train a candidate in an open run, from its checkpoint where it has one, and finish the run."""
    from tasks.candidate_runs import finish_run, log_kept
    from tasks.live_run import LiveRun
    from tasks.stored_checkpoints import discard_checkpoints
    from tasks.training import train_candidate

    recipe, client = workshop.recipe, workshop.services.mlflow
    checkpoint = starting_point(workshop, candidate.name, run_id)
    live = LiveRun(client, run_id, seen=0 if checkpoint is None else checkpoint.step)
    try:
        trained = started_from(
            workshop.start,
            train_candidate(
                candidate,
                recipe=recipe,
                splits=workshop.splits,
                initial=workshop.initial,
                run_id=run_id,
                data_digest=workshop.data.private.digest,
                on_monitor=live.monitor,
                on_checkpoint=live.keep,
                resume_from=checkpoint,
            ),
        )
        live.finish(trained.metrics)
    finally:
        live.stop()
    kept = tuple(
        (
            log_kept(
                client,
                recipe,
                one,
                initial=workshop.start,
                parent_run_id=run_id,
                flow_run_id=flow_run_id,
            ),
            one,
        )
        for one in trained.kept
    )
    finish_run(client, run_id, recipe, trained, initial=workshop.start)
    with suppress(RemergeError):  # they are of no use any more, and take room
        discard_checkpoints(client, run_id)
    return Trained(candidates=((run_id, trained), *kept))


def started_from(start: bytes, trained: TrainedCandidate) -> TrainedCandidate:
    """The candidate with the digest of the whole public start in its history, which is what is stored beside it.

    A task's network takes its own part of the start of all tasks; where there is one task it is the whole.
    """
    trajectory = replace(trained.trajectory, initialisation_digest=sha256_hex(start))
    kept = tuple(started_from(start, one) for one in trained.kept)
    return replace(trained, trajectory=trajectory, kept=kept)


def starting_point(workshop: Workshop, name: str, run_id: str) -> Checkpoint | None:
    """The checkpoint that an interrupted training left of a candidate, now in the new run, or None."""
    from tasks.unfinished import go_on, newest_checkpoint

    if name not in workshop.unfinished.checkpoints:
        return None
    client = workshop.services.mlflow
    old_run, _ = workshop.unfinished.checkpoints[name]
    checkpoint = newest_checkpoint(client, old_run, workshop.keys[name])
    if checkpoint is None:
        get_run_logger().warning("The checkpoint of candidate %s cannot be used: it is trained anew.", name)
        return None
    go_on(client, old_run, run_id, checkpoint)
    get_run_logger().info("Candidate %s goes on from step %d.", name, checkpoint.step)
    return checkpoint


@task(task_run_name="train the public twin of {name}", cache_policy=NO_CACHE, persist_result=False)
def train_twin_and_log(workshop: Workshop, name: str) -> tuple[str, tuple[str, float]]:
    """One candidate's recipe, trained on public rows, in an MLflow run of its own.

    Returns:
        The candidate's name; the MLflow run's id and the twin's score.
    """
    from tasks.candidate_runs import log_twin
    from tasks.public_twins import train_twin

    if name in workshop.unfinished.twins:
        return name, workshop.unfinished.twins[name]
    recipe = workshop.recipe
    twin = train_twin(
        recipe.candidate(name),
        recipe=recipe,
        splits=replace(workshop.splits, private=None),
        initial=workshop.initial,
    )
    run_id = log_twin(
        workshop.services.mlflow, recipe, twin, flow_run_id=flow_run.get_id(), tags=workshop.tags
    )
    get_run_logger().info("The public twin of %s is trained; its score is %.3f.", name, twin.score)
    return name, (run_id, twin.score)


def results_of(
    workshop: Workshop,
    running: Mapping[str, PrefectFuture[Trained]],
    twins_running: Mapping[str, PrefectFuture[tuple[str, tuple[str, float]]]],
) -> tuple[list[Trained], dict[str, tuple[str, float]]]:
    """Wait for every training, of candidates and of public twins, each by what it is called.

    Returns:
        The candidates in order; the twins' runs and scores by the candidates' names.

    Raises:
        PortfolioFailed: naming the first one that failed.
    """
    finished: list[Any] = []
    failures: list[str] = []
    everything: dict[str, PrefectFuture[Any]] = {**running, **twins_running}
    for what, future in everything.items():
        result: Any = future.result(raise_on_failure=False)
        if isinstance(result, RemergeError):
            failures.append(result.message.rstrip("."))
        elif isinstance(result, BaseException):
            failures.append(f"{what} failed with {type(result).__name__}: {result}".rstrip("."))
        else:
            finished.append(result)
    if failures:
        others = f" (and {len(failures) - 1} more failed)" if len(failures) > 1 else ""
        failed = PortfolioFailed(f"{failures[0]}{others}; no portfolio version was made.")
        failed.own_doing = bool(workshop.failed)
        raise failed
    return finished[: len(running)], dict(finished[len(running) :])
