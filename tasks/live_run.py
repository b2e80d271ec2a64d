"""What a candidate in training tells MLflow: metrics while it trains, and checkpoints to go on from.

A thread of its own does the talking, so that training never waits for MLflow. What MLflow does not take is tried
again until it does; only at the end must everything have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from accounting.errors import RemergeError
from tasks.candidate_runs import log_metrics, metrics_of
from tasks.mlflow_server import answers
from tasks.stored_checkpoints import put_checkpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from tasks.training.checkpoints import Checkpoint

_EVERY = 1.0  # seconds between two calls for one candidate
_LONGEST = 30.0  # seconds between two tries while MLflow does not answer


class LiveRun:
    """An open MLflow run, written to from the outside of the training loop.

    A metric is made MLflow's own, its time included, when it is handed in: so a second try of a call that had
    arrived after all adds nothing.

    Args:
        seen: metrics up to this step are in MLflow already.
    """

    def __init__(self, client: MlflowClient, run_id: str, *, seen: int = 0) -> None:
        self._client = client
        self._run_id = run_id
        self._seen = seen
        self._metrics: list[Metric] = []
        self._checkpoint: tuple[int, bytes] | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"mlflow {run_id}", daemon=True)
        self._thread.start()

    def monitor(self, step: int, values: Mapping[str, float]) -> None:
        """Hand in the metrics of a step; those of a step that was seen before are left out."""
        with self._changed:
            self._take([{**values, "step": step}])
            self._changed.notify()

    def keep(self, checkpoint: Checkpoint) -> None:
        """Hand in a checkpoint. One that waits still is replaced: only the newest matters."""
        content = checkpoint.to_bytes()
        with self._changed:
            self._checkpoint = (checkpoint.step, content)
            self._changed.notify()

    def finish(self, metrics: Iterable[Mapping[str, float]]) -> None:
        """Log what has not arrived yet.

        Args:
            metrics: all of the run, one mapping for each step looked at.

        Raises:
            StackDown, RegistryRefused: MLflow did not take it.
        """
        self.stop()
        with self._changed:
            self._take(metrics)
            rest, self._metrics = self._metrics, []
        with answers("log a run"):
            log_metrics(self._client, self._run_id, rest)

    def stop(self) -> None:
        """Talk to MLflow no more. What it has not taken is dropped, except by `finish`."""
        with self._changed:
            self._ending = True
            self._checkpoint = None
            self._changed.notify()
        self._thread.join()

    def _take(self, metrics: Iterable[Mapping[str, float]]) -> None:
        new = [values for values in metrics if values["step"] > self._seen]
        self._metrics += metrics_of(new)
        self._seen = max((int(values["step"]) for values in new), default=self._seen)

    def _work(self) -> None:
        pause = _EVERY
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._metrics or self._checkpoint)
                if self._ending:
                    return
            try:
                self._send()
                pause = _EVERY
            except RemergeError:  # MLflow does not answer, or not well
                pause = min(2 * pause, _LONGEST)
            with self._changed:
                self._changed.wait_for(lambda: self._ending, timeout=pause)

    def _send(self) -> None:
        with self._changed:
            metrics, checkpoint = list(self._metrics), self._checkpoint
        if metrics:
            with answers("log a run"):
                log_metrics(self._client, self._run_id, metrics)
            with self._changed:
                del self._metrics[: len(metrics)]
        if checkpoint:
            put_checkpoint(self._client, self._run_id, *checkpoint)
            with self._changed:
                if self._checkpoint is checkpoint:
                    self._checkpoint = None
