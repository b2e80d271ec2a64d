"""Train a portfolio: independent private models from one public start, for later policies to choose from.

The portfolio version exists from the moment that its manifest is in S3, and that is written last: a run that
fails half-way leaves nothing that a policy could use. What was interrupted is gone on with by the next run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from accounting.errors import RemergeError
from accounting.words import rounded_up
from flows.train_steps import PortfolioFailed, Trained, train_all
from flows.train_workshop import Workshop, prepare, side_by_side, usable_cores
from infra.canonical import sha256_hex
from infra.documents import CandidateRecord, DataRecord, NetworkRecord, PortfolioManifest
from tasks.recipes import Recipe, find_recipe, load_recipe
from tasks.services import Services, open_services
from tasks.unfinished import OWN_DOING, close_left_over

if TYPE_CHECKING:
    from tasks.task_groups import Group
    from tasks.training import TrainedCandidate


@flow(name="train_portfolio", persist_result=False)
def train_portfolio(recipe: str = "infra/portfolios/digits.yaml", fresh: bool = False) -> State[Any]:
    """Train every candidate of a recipe and make them a portfolio version.

    Args:
        recipe: path of the recipe file.
        fresh: train all anew, even where an interrupted training could be gone on with.
    """
    try:
        manifest = build_portfolio(open_services(), load_recipe(find_recipe(recipe)), fresh=fresh)
    except PortfolioFailed as error:
        return Failed(message=error.message, name=OWN_DOING if error.own_doing else None)
    except RemergeError as error:
        return Failed(message=error.message)
    return Completed(
        message=f"Portfolio {manifest.reference} is ready with {len(manifest.candidates)} candidates."
    )


def build_portfolio(services: Services, recipe: Recipe, *, fresh: bool = False) -> PortfolioManifest:
    """The whole story; the manifest is written only when every candidate has ended well.

    Raises:
        RemergeError: one sentence; there is no new portfolio version.
    """
    workshop = prepare(services, recipe, fresh=fresh)
    workers, _ = side_by_side(recipe, usable_cores())
    finished, twins = train_all([workshop], workers)
    table = candidates_table(
        recipe,
        [trained for one in finished.values() for _, trained in one.candidates],
        {name: score for name, (_, score) in twins.items()},
    )
    manifest = publish(workshop, register_all(workshop, finished, twins))
    leave_artifact(manifest, table)
    with suppress(RemergeError):  # tidying up; the next training tries again
        close_left_over(services, recipe.name)
    return manifest


def register_all(
    workshop: Workshop, finished: Mapping[str, Trained], twins: Mapping[str, tuple[str, float]]
) -> tuple[CandidateRecord, ...]:
    """Make the finished runs versions of the registered model, in the recipe's order.

    A run's kept checkpoints come after it. They have no utility: the recipe states none for them, and public twins
    are those of whole runs.
    """
    from tasks.registry import register_candidate

    client, recipe = workshop.services.mlflow, workshop.recipe
    return tuple(
        register_candidate(client, run_id, recipe, trained, twins.get(trained.name))
        for candidate in recipe.candidates
        for run_id, trained in finished[candidate.name].candidates
    )


def publish(workshop: Workshop, records: tuple[CandidateRecord, ...]) -> PortfolioManifest:
    """Write the manifest: from here on the portfolio version exists."""
    recipe = workshop.recipe
    fields = manifest_fields(
        recipe, records, data=workshop.data, network=recipe.network, start=workshop.start
    )
    return workshop.services.manifests.append(fields)


def manifest_fields(
    planned: Recipe | Group,
    records: tuple[CandidateRecord, ...],
    *,
    data: DataRecord,
    network: NetworkRecord,
    start: bytes,
) -> dict[str, Any]:
    """Fields of the manifest of what this flow run has trained.

    Args:
        start: contents of a safetensors file: the public initial parameters.
    """
    return {
        "name": planned.name,
        "created_at": datetime.now(UTC).isoformat(),
        "lineage": planned.lineage,
        "unit": planned.unit,
        "neighboring_relation": planned.neighboring_relation,
        "recipe_digest": planned.sha256(),
        "data": data.model_dump(mode="json"),
        "network": network.model_dump(mode="json"),
        "initialisation_digest": sha256_hex(start),
        "feature_radius": planned.feature_radius,
        "n_max": planned.n_max,
        "flow_run_id": flow_run.get_id(),
        "candidates": [record.model_dump(mode="json") for record in records],
    }


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


def candidates_table(recipe: Recipe, trained: list[TrainedCandidate], scores: dict[str, float]) -> list[str]:
    """What each candidate is and what it protects, as lines of a Markdown table.

    Args:
        scores: of the public twins, by their candidates' names.

    Raises:
        AccountingError: the recipe's delta is too small to be resolved.
    """
    from accounting.joint_release import single_run

    stated = {candidate.name: candidate.utility for candidate in recipe.candidates}
    utilities = {one.name: scores.get(one.name, stated.get(one.name)) for one in trained}
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
