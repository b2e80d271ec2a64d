"""A training through `remerge train` whose flow process is killed, and what must hold of it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from accounting.joint_release import single_run
from accounting.trajectory import Trajectory
from infra.documents import PortfolioManifest
from infra.orchestrator import TERMINAL
from infra.settings import Settings
from tasks.candidate_runs import CANDIDATE_TAG, FLOW_RUN_TAG, PARENT_TAG
from tasks.recipes import Recipe, load_recipe
from tasks.registry import fetch_trajectory
from tasks.services import Services
from tasks.stored_checkpoints import checkpoint_steps
from tasks.task_groups import Group
from tests.faults.harness import Field, kill, until

RECIPE = """
name: NAME
lineage: digits
data: tasks.data:digits
network: {factory: tasks.models:softmax_regression, arguments: {features: 65, classes: 10}}
feature_radius: 1.0
n_max: 1200
initialisation_seed: 3
delta: 1.0e-5
execution: {parallel_candidates: PARALLEL, monitor_every: 20, checkpoint_every: 20}
defaults: {max_grad_norm: 1.4143, learning_rate: 1, expected_batch_size: 1200, noise_multiplier: 500}
"""


@dataclass
class Training:
    """A recipe that is trained by the command, as a user does."""

    settings: Settings
    services: Services
    path: Path
    recipe: Recipe | Group
    command: str = "train"
    deployment: str = "train-portfolio"

    @classmethod
    def of(
        cls,
        settings: Settings,
        services: Services,
        folder: Path,
        name: str,
        candidates: str,
        *,
        parallel: int = 1,
    ) -> Training:
        path = folder / f"{name}.yaml"
        path.write_text(
            RECIPE.replace("NAME", name).replace("PARALLEL", str(parallel)) + f"candidates: {candidates}\n"
        )
        return cls(settings, services, path, load_recipe(path))

    def start(self, *options: str) -> subprocess.Popen[str]:
        """`remerge train` or the like, in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", self.command, str(self.path), *options],
            env={**os.environ, "REMERGE_HOME": str(self.settings.home), "COLUMNS": "300"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def flow_process(self) -> tuple[str, int]:
        """The flow run that trains the recipe now, and its process."""

        def found() -> tuple[str, int] | None:
            for run in self.services.orchestrator.runs(self.deployment, limit=20):
                if run["parameters"]["recipe"] == str(self.path) and run["state_type"] not in TERMINAL:
                    pid = Field(self.settings, self.services, None, None).flow_process(str(run["id"]))  # type: ignore[arg-type]
                    return (str(run["id"]), pid) if pid else None
            return None

        flow_run_id, pid = until(found, timeout=180)
        return flow_run_id, pid

    def kill_flow(self, when: Callable[[str], bool]) -> tuple[str, str]:
        """Begin a training and kill -9 its process once something holds of its flow run.

        Returns:
            What the command had printed, and its error.
        """
        with self.start() as command:
            flow_run_id, pid = self.flow_process()
            until(lambda: when(flow_run_id), timeout=120)
            kill([pid])
            out, error = command.communicate(timeout=120)
            assert command.returncode == 1, out
        return out, error

    def train(self, *options: str) -> str:
        """Train to the end; what was printed."""
        with self.start(*options) as command:
            out, error = command.communicate(timeout=600)
            assert command.returncode == 0, error
        return out

    def runs(self, flow_run_id: str | None = None) -> dict[str, list[str]]:
        """The ids of the candidates' runs in MLflow by name, oldest first; kept checkpoints' are left out."""
        client = self.services.mlflow
        experiment = client.get_experiment_by_name(self.recipe.name)
        found: dict[str, list[str]] = {}
        for run in client.search_runs(
            [experiment.experiment_id] if experiment else [], order_by=["attributes.start_time ASC"]
        ):
            tags = run.data.tags
            if PARENT_TAG not in tags and flow_run_id in (None, tags[FLOW_RUN_TAG]):
                found.setdefault(tags[CANDIDATE_TAG], []).append(run.info.run_id)
        return found

    def has_checkpoint(self, candidate: str, flow_run_id: str, after: int = 0) -> bool:
        """Whether a candidate has one of this flow run, of a step after that one."""
        runs = self.runs(flow_run_id).get(candidate, [])
        return any(step > after for run_id in runs for step in checkpoint_steps(self.services.mlflow, run_id))

    def trajectories(self, manifest: PortfolioManifest) -> dict[str, Trajectory]:
        client = self.services.mlflow
        return {record.name: fetch_trajectory(client, manifest, record) for record in manifest.candidates}

    def is_as_if_never_killed(self, manifest: PortfolioManifest) -> None:
        """Every step counts once, no noise is used twice, and MLflow shows each look once."""
        client = self.services.mlflow
        trajectories = self.trajectories(manifest)
        for candidate in self.recipe.candidates:
            run = trajectories[candidate.name]
            assert run.steps == candidate.steps
            first = run.segments[0]
            unkilled = replace(run, segments=(replace(first, steps=candidate.steps, parent=None),))
            # Rounded up once for each segment, so equal but for the last bits.
            assert single_run(run).epsilon(1e-5) == pytest.approx(
                single_run(unkilled).epsilon(1e-5), rel=1e-12
            )
            for before, after in zip(run.segments, run.segments[1:], strict=False):
                assert after.parent is not None
                assert (after.parent.segment, after.parent.step) == (before.id, before.steps)
        ids = [
            segment.id
            for name, run in trajectories.items()
            if "-at-" not in name  # kept checkpoints share their run's segments
            for segment in run.segments
        ]
        assert len(ids) == len(set(ids))
        for record in manifest.candidates:
            run = client.get_run(record.run_id)
            assert run.info.status == "FINISHED"
            if PARENT_TAG in run.data.tags:
                continue
            steps = self.recipe.candidate(record.name).steps
            for name in ("public_train_accuracy", "learning_rate", "private/loss"):
                seen = [metric.step for metric in client.get_metric_history(record.run_id, name)]
                assert sorted(seen) == sorted({*range(20, steps + 1, 20), steps}), (record.name, name)
        for run_id in (run_id for ids in self.runs().values() for run_id in ids):
            assert checkpoint_steps(client, run_id) == []
            assert client.get_run(run_id).info.status != "RUNNING"
