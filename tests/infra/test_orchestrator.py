"""Prefect through its REST API, and the event that starts a flow run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from infra.documents import Policy
from infra.events import emit_policy_changed
from infra.orchestrator import Orchestrator, OrchestratorRefused, RunNotEnded, message_of
from infra.settings import StackDown

Fields = Callable[..., dict[str, Any]]


@pytest.fixture
def policy(policy_fields: Fields) -> Policy:
    fields = policy_fields(serial=1, effective_at="2026-01-01T00:00:00Z")
    return Policy.from_fields(fields, "policy")


@pytest.fixture(scope="module")
def orchestrator(stack: Any) -> Orchestrator:
    return Orchestrator(stack.connections)


@pytest.mark.system
def test_an_event_starts_a_run_that_knows_its_automation(orchestrator: Orchestrator, policy: Policy) -> None:
    """The policy was never stored, so the run fails, with a sentence; that it ran is what counts here.

    It also ran from the repository, wherever the stack was started from.
    """
    event_id = emit_policy_changed(orchestrator, policy)
    run = orchestrator.wait_for_event(event_id)
    assert run["parameters"] == {"region": policy.region, "serial": 1, "event_id": event_id}
    assert run["created_by"]["type"] == "AUTOMATION"
    assert orchestrator.automation_name(run["created_by"]["id"]) == "policy.changed"
    seen: list[str | None] = []
    ended = orchestrator.wait(run["id"], timeout=90, progress=lambda run: seen.append(run["state_name"]))
    assert ended["state_name"] == seen[-1] == "Failed"
    assert f"There is no policy 1 of region {policy.region}" in message_of(ended)
    assert orchestrator.runs_of_event(event_id) == [orchestrator.read_flow_run(run["id"])]


@pytest.mark.system
def test_an_event_without_its_fields_starts_nothing_and_says_so(
    orchestrator: Orchestrator, name: str
) -> None:
    event = {
        "id": "3d1c1f3e-5d4f-4b57-9f0e-000000000001",
        "occurred": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "event": "policy.changed",
        "resource": {"prefect.resource.id": f"remerge.policy.{name}"},
        "payload": {"region": name},
    }
    orchestrator.emit(event)
    with pytest.raises(OrchestratorRefused, match="could not start policy-change"):
        orchestrator.wait_for_event(event["id"], timeout=20)
    assert orchestrator.runs_of_event(event["id"]) == []


@pytest.mark.system
def test_a_run_by_hand_that_is_crashed_from_outside(orchestrator: Orchestrator, name: str) -> None:
    run = orchestrator.create_flow_run("policy-change", {"region": name, "serial": 1})
    assert run["created_by"] is None
    with pytest.raises(RunNotEnded) as caught:
        orchestrator.wait(run["id"], timeout=0)
    assert caught.value.retryable
    assert orchestrator.wait(run["id"], timeout=90)["state_type"] == "FAILED"
    assert run["id"] in [found["id"] for found in orchestrator.runs("policy-change")]
    assert len(orchestrator.runs("policy-change", limit=1)) == 1


@pytest.mark.system
def test_what_prefect_refuses_is_quoted(orchestrator: Orchestrator) -> None:
    with pytest.raises(OrchestratorRefused, match="no deployment nobody"):
        orchestrator.create_flow_run("nobody")
    with pytest.raises(OrchestratorRefused, match="region"):
        orchestrator.create_flow_run("policy-change", {"serial": "one"})
    with pytest.raises(OrchestratorRefused, match="404"):
        orchestrator.read_flow_run("3d1c1f3e-5d4f-4b57-9f0e-000000000002")
    assert orchestrator.automation_name("3d1c1f3e-5d4f-4b57-9f0e-000000000002") is None


@pytest.mark.system
def test_nothing_starts_without_an_event(orchestrator: Orchestrator) -> None:
    with pytest.raises(RunNotEnded, match="No run of policy-change was started"):
        orchestrator.wait_for_event("3d1c1f3e-5d4f-4b57-9f0e-000000000003", timeout=0)


def test_prefect_is_down(policy: Policy) -> None:
    orchestrator = Orchestrator(api_url="http://127.0.0.1:9/api")
    assert not orchestrator.healthy()
    with pytest.raises(StackDown, match="is stored, but nothing was started") as caught:
        emit_policy_changed(orchestrator, policy)
    assert caught.value.retryable
    assert "same command again" in caught.value.message


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_prefect_is_busy(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    answers = [httpx.Response(status)] * 4 + [httpx.Response(200, json=[])] + [httpx.Response(status)] * 20
    orchestrator = Orchestrator(api_url="http://prefect/api")
    transport = httpx.MockTransport(lambda request: answers.pop(0))
    orchestrator._client = httpx.Client(base_url=orchestrator.api_url, transport=transport)
    assert orchestrator.deployments() == {}
    with pytest.raises(StackDown, match="not ready"):
        orchestrator.deployments()


def test_lists_are_read_to_their_end() -> None:
    runs = [{"id": str(number)} for number in range(450)]

    def answer(request: httpx.Request) -> httpx.Response:
        import json

        query = json.loads(request.content)
        return httpx.Response(200, json=runs[query["offset"] : query["offset"] + query["limit"]])

    orchestrator = Orchestrator(api_url="http://prefect/api")
    orchestrator._client = httpx.Client(base_url=orchestrator.api_url, transport=httpx.MockTransport(answer))
    assert orchestrator._pages("/flow_runs/filter", {}) == runs
    assert orchestrator.runs("policy-change", limit=210) == runs[:210]
