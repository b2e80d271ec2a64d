"""Everything that is measured of a merge of tasks, as plain numbers and as metrics for MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows
from tasks.diagnostics.geometry import cosines, drift, task_vector
from tasks.diagnostics.losses import Score, sharpness
from tasks.diagnostics.paths import PathPoint, along_path, barrier

RADIUS = 0.05  # of the sharpness, L2, in the units of the parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModels:
    """One task: its own model and the merge as this task uses it, with its own head."""

    task: str
    network: NetworkRecord  # of both models
    own: bytes  # contents of a safetensors file
    merged: bytes  # the shared parameters of the merge, this task's head
    rows: Rows  # public


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDiagnosis:
    """What is measured of one task."""

    task: str
    own: Score
    merged: Score
    own_sharpness: float  # nats, see `sharpness`
    merged_sharpness: float
    drift: float  # L2 norm of the task vector over the shared parameters
    path: tuple[PathPoint, ...]  # from the own model to the merge

    @property
    def merge_gap(self) -> float:
        """Accuracy that the task loses by the merge, in [-1, 1]; below 0 where it gains."""
        return self.own.accuracy - self.merged.accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is measured of a merge."""

    tasks: tuple[TaskDiagnosis, ...]
    cosines: NDArray[np.float64]  # of task vectors, shape (tasks, tasks)
    radius: float  # of the sharpness

    def metrics(self) -> dict[str, float]:
        """By MLflow metric name."""
        found: dict[str, float] = {"sharpness_radius": self.radius}
        for one in self.tasks:
            found |= {
                f"accuracy_own_{one.task}": one.own.accuracy,
                f"accuracy_merged_{one.task}": one.merged.accuracy,
                f"merge_gap_{one.task}": one.merge_gap,
                f"sharpness_own_{one.task}": one.own_sharpness,
                f"sharpness_merged_{one.task}": one.merged_sharpness,
                f"drift_{one.task}": one.drift,
                f"path_barrier_{one.task}": barrier(one.path),
            }
        for i, one in enumerate(self.tasks):
            for j in range(i):
                found[f"cosine_{self.tasks[j].task}_{one.task}"] = float(self.cosines[j, i])
        found["merge_gap_mean"] = float(np.mean([one.merge_gap for one in self.tasks]))
        found["merge_gap_worst"] = max(one.merge_gap for one in self.tasks)
        return found


def diagnose(
    tasks: Sequence[TaskModels],
    start: Mapping[str, bytes],
    *,
    shared_prefix: str = "",
    radius: float = RADIUS,
    points: int = 11,
) -> Diagnosis:
    """Measure how a merge of tasks went.

    Args:
        tasks: at least one, with distinct names.
        start: contents of a safetensors file with the public start of each task's network, by task.
        shared_prefix: of the names of the parameters that were merged.
        radius: of the sharpness, L2, > 0.
        points: on each path, at least 2.

    Raises:
        InvalidInput: no task, one named twice, or a radius or number of points out of range.
        IncompatibleCandidates: parameters that do not fit a network or one another.
    """
    from tasks.models import network_with, state_from_bytes

    names = [one.task for one in tasks]
    if not names or len(set(names)) < len(names):
        raise InvalidInput("A diagnosis needs at least one task, each with a name of its own.")
    vectors, found = [], []
    for one in tasks:
        own, merged = state_from_bytes(one.own), state_from_bytes(one.merged)
        vector = task_vector(own, state_from_bytes(start[one.task]), shared_prefix)
        path = along_path(one.network, own, merged, one.rows, points=points)
        vectors.append(vector)
        found.append(
            TaskDiagnosis(
                task=one.task,
                own=Score(loss=path[0].loss, accuracy=path[0].accuracy),
                merged=Score(loss=path[-1].loss, accuracy=path[-1].accuracy),
                own_sharpness=sharpness(network_with(one.network, own), one.rows, radius),
                merged_sharpness=sharpness(network_with(one.network, merged), one.rows, radius),
                drift=drift(vector),
                path=path,
            )
        )
    return Diagnosis(tasks=tuple(found), cosines=cosines(vectors), radius=radius)
