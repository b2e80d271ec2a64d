"""A training in a process of its own, to be killed at any moment: it saves itself as it goes, and logs its noise."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opacus  # noqa: F401  (imported here so that the fork server has it, and its children start at once)
import torch
from torch import Tensor

from tasks.data import Splits, load_splits
from tasks.models import build, initial_state
from tasks.recipes import Recipe, parse_recipe
from tasks.training import Checkpoint, TrainedCandidate, train_candidate
from tasks.training.noise import SecureNoise
from tests.tasks.conftest import random_rows

HERE = "tests.tasks.training.child_run"
CANDIDATE = {
    "steps": 16,
    "noise_multiplier": 2.0,
    "max_grad_norm": 0.5,
    "learning_rate": 0.3,
    "expected_batch_size": 40,
}


def rows(*, with_private: bool) -> Splits:
    return Splits(
        private=random_rows(1, 40) if with_private else None,
        public_train=random_rows(2, 60),
        public_gate=random_rows(3, 20),
        classes=3,
        split_rule="three different seeds",
    )


@dataclass(frozen=True)
class Prepared:
    recipe: Recipe
    splits: Splits


def prepared(*, network: str = "perceptron", execution: dict[str, Any], **candidate: Any) -> Prepared:
    factory = f"tests.tasks.training.networks:{network}"
    made = {"factory": factory}
    if network == "softmax":
        made = {"factory": "tasks.models:softmax_regression", "arguments": {"features": 5, "classes": 3}}  # type: ignore[dict-item]
    fields = {
        "name": "small",
        "lineage": "small",
        "data": {"loader": f"{HERE}:rows"},
        "network": made,
        "feature_radius": 1.0,
        "n_max": 50,
        "initialisation_seed": 7,
        "delta": 1e-5,
        "execution": {"monitor_every": 1, **execution},
        "candidates": {"only": {**CANDIDATE, **candidate}},
    }
    recipe = parse_recipe(json.dumps(fields), "small.yaml")
    splits = load_splits(
        recipe.data, feature_radius=1.0, n_max=50, neighboring_relation=recipe.neighboring_relation
    )
    return Prepared(recipe, splits)


class RecordedNoise(SecureNoise):
    """The secure source itself; what it draws is appended to a log before it is used."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def standard_normal(self, count: int) -> Tensor:
        made = super().standard_normal(count)
        self.log.write("noise", made.numpy().tobytes().hex())
        return made


class Log:
    """Lines that survive a kill: each is one write to a file opened for appending."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"
        self.file = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, *words: object) -> None:
        os.write(self.file, (" ".join(map(str, words)) + "\n").encode())


def train(
    small: Prepared, folder: Path, *, resume: Checkpoint | None, pause: float = 0.0, **changes: Any
) -> TrainedCandidate:
    """One process's part of a run, which goes on from a checkpoint."""
    log = Log(folder)
    log.write("start", resume.step if resume else 0)

    try:
        return train_candidate(
            small.recipe.candidate("only"),
            **{
                "recipe": small.recipe,
                "splits": small.splits,
                "initial": initial_state(small.recipe.network, 7),
                "run_id": "run",
                "data_digest": "0" * 64,
                "noise": RecordedNoise(log),
                "resume_from": resume,
                "on_step": lambda step: time.sleep(pause),
                "on_monitor": lambda step, metrics: log.write("look", step),
                "on_checkpoint": lambda point: save(point, folder),
                **changes,
            },
        )
    finally:
        os.close(log.file)


def save(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "checkpoint.new").write_bytes(checkpoint.to_bytes())
    os.replace(folder / "checkpoint.new", folder / "checkpoint")


def saved(folder: Path) -> Checkpoint | None:
    path = folder / "checkpoint"
    return Checkpoint.from_bytes(path.read_bytes()) if path.exists() else None


def main(folder: Path, fields: dict[str, Any], pause: float) -> None:
    """What a child does; its result is in the file `done`."""
    torch.set_num_threads(1)
    trained = train(prepared(**fields), folder, resume=saved(folder), pause=pause)
    (folder / "done.new").write_bytes(pickle.dumps(trained))
    os.replace(folder / "done.new", folder / "done")


@dataclass(frozen=True)
class Story:
    """What the log tells: for each process where it started, and the noise it drew step by step."""

    starts: list[int]
    draws: list[list[bytes]]  # of each process, parameter by parameter

    @staticmethod
    def of(folder: Path) -> Story:
        starts: list[int] = []
        draws: list[list[bytes]] = []
        for line in (folder / "log").read_text().splitlines():
            kind, word = line.split()
            if kind == "start":
                starts.append(int(word))
                draws.append([])
            elif kind == "noise":
                draws[-1].append(bytes.fromhex(word))
        return Story(starts, draws)

    def surviving(self, small: Prepared) -> Iterator[list[Tensor]]:
        """The noise in the model, release by release: of each process up to where the next one started."""
        candidate, parameters = small.recipe.candidate("only"), list(build(small.recipe.network).parameters())
        deviation = candidate.noise_multiplier * candidate.max_grad_norm
        releases = 2 if candidate.is_paired else 1
        ends = [*self.starts[1:], candidate.steps]
        for start, end, draws in zip(self.starts, ends, self.draws, strict=True):
            for step in range((end - start) * releases):
                own = draws[step * len(parameters) : (step + 1) * len(parameters)]
                if not own:
                    return  # stopped early
                yield [
                    torch.frombuffer(bytearray(draw), dtype=torch.float64).reshape(parameter.shape)
                    * deviation
                    for draw, parameter in zip(own, parameters, strict=True)
                ]
