"""What the processes of a test do: imported by them, by name."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from accounting.trajectory import Trajectory
from infra.canonical import sha256_hex
from tasks.data import Splits
from tasks.models import initial_state
from tasks.recipes import Recipe
from tasks.training import Checkpoint, TrainedCandidate, TrainingFailed, train_candidate
from tasks.training.group import ALONE, Group


@dataclass(frozen=True, kw_only=True)
class Case:
    recipe: Recipe
    splits: Splits
    resume_from: bytes | None = None
    coins_of_their_own: bool = False  # else those of a fixed generator, the same for each process


@dataclass(frozen=True, kw_only=True)
class Outcome:
    model: bytes
    trajectory: Trajectory
    metrics: tuple[dict[str, float], ...]
    kept: tuple[TrainedCandidate, ...]
    checkpoints: list[bytes] = field(default_factory=list)
    models_of_all: set[str] = field(default_factory=set)  # their digests


def two_layers(classes: int) -> Any:
    """Layers with frozen statistics between trained ones."""
    from torch import nn

    layers = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, classes)
    )
    layers[1].requires_grad_(False).eval()
    return layers


def train_all(group: Group = ALONE, tell: Any = None, *, cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: train_one(group, case) for name, case in cases.items()}


def train_one(group: Group, case: Case) -> Outcome:
    import torch

    saved: list[bytes] = []
    trained = train_candidate(
        case.recipe.candidate("only"),
        recipe=case.recipe,
        splits=case.splits,
        initial=initial_state(case.recipe.network, case.recipe.initialisation_seed),
        run_id="run",
        data_digest="0" * 64,
        noise_generator=torch.Generator().manual_seed(1) if group.leads else None,
        sampling_generator=None if case.coins_of_their_own else torch.Generator().manual_seed(2),
        on_checkpoint=lambda checkpoint: saved.append(checkpoint.to_bytes()),
        resume_from=None if case.resume_from is None else Checkpoint.from_bytes(case.resume_from),
        group=group,
    )
    digests = [sha256_hex(trained.model)] * group.size
    if group.size > 1:
        torch.distributed.all_gather_object(digests, sha256_hex(trained.model))
    return Outcome(
        model=trained.model,
        trajectory=trained.trajectory,
        metrics=trained.metrics,
        kept=trained.kept,
        checkpoints=saved,
        models_of_all=set(digests),
    )


def end_badly(group: Group, tell: Any, *, how: str) -> None:
    """What the second process does; the first one waits for it."""
    import torch

    tell("begun")
    if group.leads:
        torch.distributed.barrier()
    if how == "in a sentence":
        raise TrainingFailed("Candidate a diverged.")
    if how == "without a sentence":
        raise ValueError(f"row {group.size} holds {47 * 100 + 11}")
    time.sleep(600)
