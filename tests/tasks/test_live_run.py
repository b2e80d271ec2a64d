"""A candidate in training tells a real MLflow server, also while that does not answer well."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mlflow import MlflowClient

from infra.settings import StackDown
from tasks.live_run import LiveRun
from tasks.mlflow_server import experiment, mlflow_client
from tasks.stored_checkpoints import (
    checkpoint_steps,
    discard_checkpoints,
    put_checkpoint,
    read_checkpoint,
)
from tests.faults.proxy import PASS, Fault, Proxy, proxy_before

pytestmark = pytest.mark.system


@pytest.fixture
def client(stack: Any) -> MlflowClient:
    return mlflow_client(stack.connections)


@pytest.fixture
def run_id(client: MlflowClient) -> str:
    return str(client.create_run(experiment(client, f"live-{uuid.uuid4().hex[:8]}")).info.run_id)


@pytest.fixture
def proxy(stack: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between a client and MLflow; no client tries again by itself, so that every fault is seen."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with proxy_before(stack.connections.mlflow_url) as proxy:
        yield proxy


def until(true: Callable[[], Any], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.05)


def losing(method: str, ending: str, *, answers: int) -> Callable[[str, str, int], Fault]:
    """A rule that lets the first so many requests of a kind arrive and loses their answers."""
    left = [answers]

    def rule(seen: str, path: str, writes: int) -> Fault:
        if (seen, path.endswith(ending)) == (method, True) and left[0]:
            left[0] -= 1
            return Fault(lose_answer=True)
        return PASS

    return rule


def test_metrics_arrive_while_training_and_each_once(client: MlflowClient, run_id: str) -> None:
    live = LiveRun(client, run_id)
    live.monitor(10, {"loss": 1.5, "step": 10.0})
    until(lambda: client.get_run(run_id).data.metrics)  # nothing has ended yet
    live.monitor(20, {"loss": 1.0})
    live.monitor(20, {"loss": 9.0})  # the same step again
    live.finish([{"step": 10.0, "loss": 1.5}, {"step": 20.0, "loss": 1.0}, {"step": 30.0, "loss": 0.5}])
    history = client.get_metric_history(run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(10, 1.5), (20, 1.0), (30, 0.5)]
    assert set(client.get_run(run_id).data.metrics) == {"loss"}  # the step is no metric


def test_an_answer_that_is_lost_does_not_log_twice(client: MlflowClient, run_id: str, proxy: Proxy) -> None:
    live = LiveRun(MlflowClient(proxy.address), run_id)
    proxy.obey(losing("POST", "/runs/log-batch", answers=1))
    live.monitor(1, {"loss": 1.0, "accuracy": 0.5})
    until(lambda: proxy.faults == 1)
    live.monitor(2, {"loss": 0.5})
    live.finish([])
    assert [metric.step for metric in client.get_metric_history(run_id, "loss")] == [1, 2]
    assert [metric.step for metric in client.get_metric_history(run_id, "accuracy")] == [1]


def test_training_bears_an_outage_and_only_its_end_needs_mlflow(
    client: MlflowClient, run_id: str, proxy: Proxy
) -> None:
    proxy.obey(lambda method, path, writes: Fault(refuse=503))
    live = LiveRun(MlflowClient(proxy.address), run_id)
    live.monitor(1, {"loss": 1.0})
    until(lambda: proxy.faults >= 1)
    live.monitor(2, {"loss": 0.5})
    proxy.obey(lambda method, path, writes: PASS)
    until(lambda: client.get_run(run_id).data.metrics)  # tried again without being asked to
    proxy.obey(lambda method, path, writes: Fault(refuse=503))
    with pytest.raises(StackDown, match="while trying to log a run"):
        live.finish([{"step": 3.0, "loss": 0.2}])
    assert [metric.step for metric in client.get_metric_history(run_id, "loss")] == [1, 2]


def test_the_newest_two_checkpoints_are_kept(client: MlflowClient, run_id: str) -> None:
    assert checkpoint_steps(client, run_id) == []
    for step in (9, 10, 100):
        put_checkpoint(client, run_id, step, f"after {step}".encode())
    assert checkpoint_steps(client, run_id) == [100, 10]
    assert read_checkpoint(client, run_id, 10) == b"after 10"
    assert read_checkpoint(client, run_id, 9) is None
    client.log_text(run_id, "stays", "model.safetensors")
    discard_checkpoints(client, run_id)
    discard_checkpoints(client, run_id)
    assert checkpoint_steps(client, run_id) == []
    assert "model.safetensors" in {file.path for file in client.list_artifacts(run_id)}
