"""A tuning in MLflow: one run for it in the experiment `<portfolio>-tuning`, and a nested run for each trial.

A trial's run is written when the trial ends, so that a search that is stopped leaves what it found. None of these
runs holds a model or a trajectory, and none is ever a candidate.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from accounting.errors import RemergeError
from tasks.candidate_runs import create_run, fail_run, log_metrics, metrics_of
from tasks.mlflow_server import answers, require_up
from tasks.tuning.search import Stage
from tasks.tuning.trials import Setting, Trial
from tasks.tuning.tuning import Prepared, Tuning, document, snippet, values

if TYPE_CHECKING:
    from mlflow import MlflowClient

STAGE_TAG = "remerge.tuning_stage"
CHOSEN_TAG = "remerge.chosen"  # on a trial's run: its stage took it
TUNED_TAG = "remerge.tuned_candidate"
_PARENT_TAG = "mlflow.parentRunId"  # MLflow's own: its pages show such a run below the other


class TuningLog:
    """Writes trials and stages of one tuning as they end."""

    def __init__(self, client: MlflowClient, prepared: Prepared, experiment: str, run_id: str) -> None:
        self.run_id = run_id  # of the whole tuning
        self._client = client
        self._prepared = prepared
        self._experiment = experiment
        self._trials: dict[tuple[str, Setting], str] = {}  # run ids

    def stage_begins(self, name: str, trials: int) -> None:
        """A stage has no run of its own: its name is a tag."""

    def trial_progresses(self, share: float) -> None:
        """Only finished trials are logged."""

    def trial_ended(self, stage: str, trial: Trial) -> None:
        """Write the trial's run: its values as parameters, and its accuracy by seed."""
        bench, setting = self._prepared.bench, trial.setting
        number = 1 + sum(known == stage for known, _ in self._trials)
        parameters = {
            **{name: "none" if value is None else value for name, value in values(setting).items()},
            "expected_batch_size": bench.as_recipe(setting).expected_batch_size,
        }
        tags = {STAGE_TAG: stage, _PARENT_TAG: self.run_id, TUNED_TAG: bench.candidate.name}
        run_id = create_run(self._client, self._experiment, f"{stage} {number}", parameters, tags)
        self._trials[stage, setting] = run_id
        by_seed = [
            {"step": float(seed), "accuracy": float(share)}
            for seed, share in enumerate(trial.right.mean(axis=1))
        ]
        with answers("log a trial"):
            if trial.diverged:  # MLflow's charts have no place for NaN
                self._client.set_tag(run_id, "remerge.failure", "training diverged")
                self._client.set_terminated(run_id, "FAILED")
                return
            log_metrics(self._client, run_id, metrics_of([*by_seed, _score(trial)]))
            self._client.set_terminated(run_id, "FINISHED")

    def stage_ended(self, stage: Stage) -> None:
        """Mark the trial that was taken, and say why on the tuning's run."""
        with answers("log a stage"):
            self._client.set_tag(self._trials[stage.name, stage.chosen.setting], CHOSEN_TAG, "true")
            self._client.set_tag(
                self.run_id, f"remerge.because.{stage.name.replace(' ', '_')}", stage.because
            )

    def finish(self, tuning: Tuning, table: str) -> None:
        """Leave the result on the tuning's run and close it.

        Args:
            table: what the command prints.
        """
        files = {
            "tuning.txt": table,
            "tuning.json": json.dumps(document(tuning), indent=2, allow_nan=False) + "\n",
            "candidate.yaml": snippet(tuning),
        }
        chosen = tuning.found.chosen
        with answers("log a tuning"), tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_text(content, encoding="utf-8")
            self._client.log_artifacts(self.run_id, folder)
            log_metrics(self._client, self.run_id, metrics_of([_score(chosen)]))
            self._client.set_terminated(self.run_id, "FINISHED")


@contextmanager
def logged(client: MlflowClient, prepared: Prepared) -> Iterator[TuningLog]:
    """Open a tuning's run; what ends the block by an error marks it as failed.

    Raises:
        StackDown: MLflow does not answer.
    """
    require_up(client)
    bench = prepared.bench
    parameters = {
        "candidate": bench.candidate.name,
        "target_epsilon": prepared.epsilon,
        "delta": bench.recipe.delta,
        "neighboring_relation": bench.recipe.neighboring_relation,
        "steps": bench.candidate.steps,
        "seeds": bench.seeds,
        "fitting_rows": len(bench.fitting),
        "scoring_rows": len(bench.scoring),
        "median_gradient_norm": prepared.median_norm,
        "planned_trials": prepared.plan.trials,
        "recipe_sha256": bench.recipe.sha256(),
    }
    experiment = f"{bench.recipe.name}-tuning"
    run_id = create_run(
        client,
        experiment,
        f"{bench.candidate.name} at epsilon {prepared.epsilon:g}",
        parameters,
        {TUNED_TAG: bench.candidate.name},
    )
    try:
        yield TuningLog(client, prepared, experiment, run_id)
    except BaseException as error:
        reason = error.message if isinstance(error, RemergeError) else type(error).__name__
        with suppress(RemergeError):  # the cause matters more than the mark
            fail_run(client, run_id, reason)
        raise


def _score(trial: Trial) -> dict[str, float]:
    return {"step": 0.0, "mean_accuracy": trial.accuracy, "standard_error": trial.standard_error}
