"""What a training needs before its first step: the rows, the public start, and what an interrupted one left."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from prefect import get_run_logger
from prefect.runtime import flow_run

from infra.canonical import sha256_hex
from infra.documents import DataRecord
from tasks.noise_choice import require_noise
from tasks.recipes import CandidateRecipe, Execution, Recipe
from tasks.services import Services
from tasks.unfinished import (
    KEY_TAG,
    RESUMED_TAG,
    TRAINING_TAG,
    Planned,
    Unfinished,
    find_unfinished,
    training_key,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.data import Splits


class Workshop:
    """What every training on one data set needs. It holds the private rows, and only threads of this process see it.

    Not a dataclass on purpose: Prefect looks into those when they are handed to a task, and not into this.

    Attributes:
        initial: the public parameters that this recipe's network starts from.
        start: contents of a safetensors file with all public initial parameters, of every task where there are
            several; its SHA-256 is what trajectories and the manifest name.
    """

    def __init__(
        self,
        services: Services,
        recipe: Recipe,
        splits: Splits,
        initial: Mapping[str, Tensor],
        data: DataRecord,
        start: bytes,
    ) -> None:
        self.services = services
        self.recipe = recipe
        self.splits = splits
        self.initial = initial
        self.data = data
        self.start = start
        self.keys: dict[str, str] = {}  # `resume_key` of each candidate
        self.tags: dict[str, str] = {}  # of every run of this training
        self.unfinished = Unfinished(training="", ended_at=None)  # what there is to go on with
        self.failed: list[str] = []  # candidates that failed by their own doing


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Shared(Protocol):
    """What shares the cores: a recipe or a group of tasks."""

    @property
    def execution(self) -> Execution: ...
    @property
    def candidates(self) -> tuple[CandidateRecipe, ...]: ...


def side_by_side(recipe: Shared, cores: int) -> tuple[int, int]:
    """How the cores are shared: the number of candidates trained at once, and of torch threads for each process."""
    processes = recipe.execution.processes
    asked = recipe.execution.parallel_candidates or max(1, cores // processes)
    workers = min(asked, len(recipe.candidates))
    return workers, max(1, cores // (workers * processes))


def prepare(services: Services, recipe: Recipe, *, fresh: bool) -> Workshop:
    """Data, checked and projected, one public initialisation for all candidates, and what can be gone on with."""
    import torch

    from tasks.data import data_record, load_splits, require_public_alone
    from tasks.mlflow_server import require_up
    from tasks.models import initial_state, state_bytes

    require_up(services.mlflow)
    require_noise(recipe.name, recipe.candidates)
    _, threads = side_by_side(recipe, usable_cores())
    torch.set_num_threads(threads)
    splits = load_splits(
        recipe.data,
        feature_radius=recipe.feature_radius,
        n_max=recipe.n_max,
        neighboring_relation=recipe.neighboring_relation,
    )
    require_public_alone(recipe.data, splits, n_max=recipe.n_max)
    initial = initial_state(recipe.network, recipe.initialisation_seed)
    data = data_record(recipe.data, splits, data_key(services))
    workshop = Workshop(services, recipe, splits, initial, data, state_bytes(initial))
    try_out(workshop)
    take_up([workshop], recipe, training_key(recipe, data, workshop.keys), fresh=fresh)
    return workshop


def data_key(services: Services) -> bytes:
    """What keys the digests of private rows."""
    return services.connections.data_digest_key.get_secret_value().encode()


def try_out(workshop: Workshop) -> None:
    """See that every candidate's network can be trained, and note what each is to be resumed by.

    Raises:
        InvalidInput: the network does not fit the data or private training.
    """
    from tasks.models import state_bytes
    from tasks.training import library_versions, resume_key, try_networks

    recipe = workshop.recipe
    workshop.keys = {
        candidate.name: resume_key(
            recipe,
            candidate.name,
            data_digest=workshop.data.private.digest,
            initialisation_digest=sha256_hex(state_bytes(workshop.initial)),
            library_versions=library_versions(),
        )
        for candidate in recipe.candidates
    }
    try_networks(recipe, workshop.splits, workshop.initial)


def take_up(
    workshops: Sequence[Workshop], planned: Planned, key: str, *, fresh: bool, command: str = "remerge train"
) -> None:
    """Find an interrupted training to go on with, and say so.

    Args:
        workshops: of one training; what failed by its own doing in one of them has failed in all.
        planned: what is trained, in all of them.
        key: digest of all that the training depends on.
        command: that it was asked for with.
    """
    services = workshops[0].services
    tags = {TRAINING_TAG: str(flow_run.get_id()), KEY_TAG: key}
    found = None if fresh else find_unfinished(services, planned, key)
    if found is not None:
        sentence = found.sentence(planned, command)
        get_run_logger().info(sentence)
        tags |= {TRAINING_TAG: found.training, RESUMED_TAG: sentence}
    for workshop in workshops:
        workshop.tags = tags
        workshop.failed = workshops[0].failed
        workshop.unfinished = found or workshop.unfinished
