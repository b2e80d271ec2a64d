"""Train a portfolio: independent private models from one public start, for later policies to choose from.

The portfolio version exists from the moment that its manifest is in S3, and that is written last: a run that
fails half-way leaves nothing that a policy could use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from accounting.errors import RemergeError
from accounting.words import rounded_up
from infra.documents import CandidateRecord, DataRecord, PortfolioManifest
from tasks.recipes import Recipe, find_recipe, load_recipe
from tasks.services import Services, open_services

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.data import Splits
    from tasks.public_twins import TrainedTwin
    from tasks.training import TrainedCandidate

WORKERS = 2  # candidates trained side by side, each on one core


class PortfolioFailed(RemergeError):
    """At least one candidate failed, so there is no new portfolio version."""


class Workshop:
    """What every training needs. It holds the private rows, and only threads of this process see it.

    Not a dataclass on purpose: Prefect looks into those when they are handed to a task, and not into this.
    """

    def __init__(
        self,
        services: Services,
        recipe: Recipe,
        splits: Splits,
        initial: Mapping[str, Tensor],
        data: DataRecord,
    ) -> None:
        self.services = services
        self.recipe = recipe
        self.splits = splits
        self.initial = initial
        self.data = data


@flow(
    name="train_portfolio",
    task_runner=ThreadPoolTaskRunner(max_workers=WORKERS),
    persist_result=False,
)
def train_portfolio(recipe: str = "infra/portfolios/digits.yaml") -> State[Any]:
    """Train every candidate of a recipe and make them a portfolio version.

    Args:
        recipe: path of the recipe file.
    """
    try:
        manifest = build_portfolio(open_services(), load_recipe(find_recipe(recipe)))
    except RemergeError as error:
        return Failed(message=error.message)
    return Completed(
        message=f"Portfolio {manifest.reference} is ready with {len(manifest.candidates)} candidates."
    )


def build_portfolio(services: Services, recipe: Recipe) -> PortfolioManifest:
    """The whole story; the manifest is written only when every candidate has ended well.

    Raises:
        RemergeError: one sentence; there is no new portfolio version.
    """
    workshop = prepare(services, recipe)
    names = [candidate.name for candidate in recipe.candidates]
    running = {f"Candidate {name}": train_and_log.submit(workshop, name) for name in names}
    twins_running = {
        f"The public twin of {name}": train_twin_and_log.submit(workshop, name)
        for name in names
        if recipe.public_twins
    }
    finished, twins = results_of(running, twins_running)
    table = candidates_table(recipe, [trained for _, trained in finished], [twin for _, twin in twins])
    records = register_all(workshop, finished, twins)
    manifest = publish(workshop, records)
    leave_artifact(manifest, table)
    return manifest


def prepare(services: Services, recipe: Recipe) -> Workshop:
    """Data, checked and projected, and one public initialisation for all candidates."""
    import torch

    from tasks.data import data_record, load_splits
    from tasks.mlflow_server import require_up
    from tasks.models import initial_state

    require_up(services.mlflow)
    torch.set_num_threads(1)  # the candidates run side by side; more threads would only wait for each other
    splits = load_splits(
        recipe.data,
        feature_radius=recipe.feature_radius,
        n_max=recipe.n_max,
        neighboring_relation=recipe.neighboring_relation,
    )
    key = services.connections.data_digest_key.get_secret_value().encode()
    return Workshop(
        services,
        recipe,
        splits,
        initial_state(recipe.network, recipe.initialisation_seed),
        data_record(recipe.data, splits, key),
    )


@task(task_run_name="train {name}", cache_policy=NO_CACHE, persist_result=False)
def train_and_log(workshop: Workshop, name: str) -> tuple[str, TrainedCandidate]:
    """One candidate, from an open MLflow run to a finished one.

    Returns:
        The MLflow run's id and what was trained.
    """
    from tasks.registry import fail_run, finish_run, start_run
    from tasks.training import train_candidate

    recipe, client = workshop.recipe, workshop.services.mlflow
    candidate = recipe.candidate(name)
    run_id = start_run(client, recipe, candidate, flow_run_id=flow_run.get_id())
    try:
        trained = train_candidate(
            candidate,
            recipe=recipe,
            splits=workshop.splits,
            initial=workshop.initial,
            run_id=run_id,
            data_digest=workshop.data.private.digest,
        )
        finish_run(client, run_id, recipe, trained)
    except BaseException as error:
        with suppress(RemergeError):  # the cause matters more than the mark
            fail_run(client, run_id, f"{type(error).__name__}: {error}")
        raise
    get_run_logger().info("Candidate %s is trained: %d steps.", name, trained.trajectory.steps)
    return run_id, trained


@task(task_run_name="train the public twin of {name}", cache_policy=NO_CACHE, persist_result=False)
def train_twin_and_log(workshop: Workshop, name: str) -> tuple[str, TrainedTwin]:
    """One candidate's recipe, trained on public rows, in an MLflow run of its own.

    Returns:
        The MLflow run's id and what was trained.
    """
    from tasks.public_twins import train_twin
    from tasks.registry import log_twin

    recipe = workshop.recipe
    twin = train_twin(
        recipe.candidate(name),
        recipe=recipe,
        splits=replace(workshop.splits, private=None),
        initial=workshop.initial,
    )
    run_id = log_twin(workshop.services.mlflow, recipe, twin, flow_run_id=flow_run.get_id())
    get_run_logger().info("The public twin of %s is trained; its score is %.3f.", name, twin.score)
    return run_id, twin


def results_of(
    running: Mapping[str, PrefectFuture[tuple[str, TrainedCandidate]]],
    twins_running: Mapping[str, PrefectFuture[tuple[str, TrainedTwin]]],
) -> tuple[list[tuple[str, TrainedCandidate]], list[tuple[str, TrainedTwin]]]:
    """Wait for every training, of candidates and of public twins, each by what it is called.

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
        raise PortfolioFailed(f"{failures[0]}{others}; no portfolio version was made.")
    return finished[: len(running)], finished[len(running) :]


def register_all(
    workshop: Workshop,
    finished: list[tuple[str, TrainedCandidate]],
    twins: list[tuple[str, TrainedTwin]],
) -> tuple[CandidateRecord, ...]:
    """Make the finished runs versions of the registered model, in the recipe's order."""
    from tasks.registry import register_candidate

    client = workshop.services.mlflow
    twin_of = {twin.name: (run_id, twin) for run_id, twin in twins}
    return tuple(
        register_candidate(client, run_id, workshop.recipe, trained, twin_of.get(trained.name))
        for run_id, trained in finished
    )


def publish(workshop: Workshop, records: tuple[CandidateRecord, ...]) -> PortfolioManifest:
    """Write the manifest: from here on the portfolio version exists."""
    from infra.canonical import sha256_hex
    from tasks.models import state_bytes

    recipe = workshop.recipe
    return workshop.services.manifests.append(
        {
            "name": recipe.name,
            "created_at": datetime.now(UTC).isoformat(),
            "lineage": recipe.lineage,
            "unit": recipe.unit,
            "neighboring_relation": recipe.neighboring_relation,
            "recipe_digest": recipe.sha256(),
            "data": workshop.data.model_dump(mode="json"),
            "network": recipe.network.model_dump(mode="json"),
            "initialisation_digest": sha256_hex(state_bytes(workshop.initial)),
            "feature_radius": recipe.feature_radius,
            "n_max": recipe.n_max,
            "flow_run_id": flow_run.get_id(),
            "candidates": [record.model_dump(mode="json") for record in records],
        }
    )


def leave_artifact(manifest: PortfolioManifest, table: list[str]) -> None:
    """Show people in Prefect what is on offer."""
    lines = [
        f"# Portfolio {manifest.reference}",
        "",
        f"Trained on private rows of lineage {manifest.lineage}, each {manifest.unit} protected under "
        f"{manifest.neighboring_relation}.",
        "",
        *table,
        "",
        "For the trainer's eyes: the accuracies on public-train rows are of private models that nobody has released. "
        "Choosing merge weights by them would make the choice depend on private data, unless a policy pays for that "
        "(`--selection validation`). Utilities are stated in the recipe or scores of public twins, and are free.",
    ]
    create_markdown_artifact(
        "\n".join(lines) + "\n",
        key=f"portfolio-{manifest.name}",
        description=f"The candidates of {manifest.reference}",
    )


def candidates_table(recipe: Recipe, trained: list[TrainedCandidate], twins: list[TrainedTwin]) -> list[str]:
    """What each candidate is and what it protects, as lines of a Markdown table.

    Raises:
        AccountingError: the recipe's delta is too small to be resolved.
    """
    from accounting.joint_release import single_run

    scores = {twin.name: twin.score for twin in twins}
    utilities = {one.name: scores.get(one.name, recipe.candidate(one.name).utility) for one in trained}
    told = any(utility is not None for utility in utilities.values())
    lines = [
        f"| candidate | steps | sampling | noise multiplier | epsilon (delta {recipe.delta:g}) "
        f"| public-train accuracy |{' utility |' if told else ''}",
        "|---|---:|---|---:|---:|---:|" + ("---:|" if told else ""),
    ]
    for candidate in trained:
        run = candidate.trajectory
        segment = run.segments[-1]
        sampling = "full batch" if segment.is_full_batch else f"Poisson {segment.sampling_probability:g}"
        epsilon = single_run(run).epsilon(recipe.delta)
        shown = rounded_up(epsilon) if math.isfinite(epsilon) else "not private"
        utility = utilities[candidate.name]
        lines.append(
            f"| {candidate.name} | {run.steps} | {sampling} | {segment.noise_multiplier:g} | {shown} "
            f"| {candidate.public_train_accuracy:.3f} |"
            + (f" {'' if utility is None else format(utility, '.3f')} |" if told else "")
        )
    return lines
