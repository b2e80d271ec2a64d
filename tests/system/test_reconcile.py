"""Reconcile on the real stack: its schedule, a run of it in Prefect, and policies that take effect later."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.documents import PortfolioManifest
from infra.orchestrator import message_of
from tasks.coalescing import end_superseded
from tasks.reconciling import Action, reconcile_region
from tasks.services import Services
from tests.conftest import SharedStack
from tests.system.conftest import DELTA, Ended, read_json, run_policy

pytestmark = pytest.mark.system


def test_reconcile_is_deployed_with_its_schedule(stack: SharedStack, services: Services) -> None:
    deployment = services.orchestrator.deployments()["reconcile"]
    api = stack.connections.prefect_api_url
    schedules = httpx.get(f"{api}/deployments/{deployment['id']}/schedules").json()
    assert [schedule["schedule"]["cron"] for schedule in schedules] == ["*/5 * * * *"]
    # The tests' own stack pauses it; what is deployed elsewhere is what the file says.
    file = Path(__file__).parents[2] / "prefect.yaml"
    [written] = [one for one in yaml.safe_load(file.read_text())["deployments"] if one["name"] == "reconcile"]
    assert written["schedules"][0]["active"] is True


def test_a_run_of_reconcile_in_prefect_mends_the_alias(
    change_policy: Callable[..., Ended], services: Services, region: str
) -> None:
    assert change_policy(epsilon=3.0).succeeded
    found = services.mlflow.get_experiment_by_name(f"digits-{region}")
    services.mlflow.delete_experiment(found.experiment_id)  # by hand: the next promotion brings it back
    assert change_policy(epsilon=1.5).succeeded
    services.mlflow.set_registered_model_alias(f"digits-{region}", "production", "1")
    run = services.orchestrator.create_flow_run("reconcile", {"region": region})
    ended = services.orchestrator.wait(run["id"], timeout=120)
    assert ended["state_type"] == "COMPLETED"
    assert "named version 1; it names version 2 again" in str(ended["state"]["message"])  # type: ignore[index]
    assert services.mlflow.get_model_version_by_alias(f"digits-{region}", "production").version == "2"


def test_waiting_runs_of_replaced_policies_are_ended_without_a_process(
    services: Services, portfolio: PortfolioManifest, region: str
) -> None:
    fields = {"region": region, "delta": DELTA, "portfolio": portfolio.reference, "author": "test"}
    later = datetime.now(UTC) + timedelta(hours=1)
    for epsilon in (3.0, 2.5):
        services.policies.append({**fields, "epsilon": epsilon})
    # Not in effect yet, so it replaces nothing.
    services.policies.append({**fields, "epsilon": 2.0, "effective_at": later.isoformat()})
    deployment = services.orchestrator.deployments()["policy-change"]["id"]
    runs = {}
    for serial in (1, 2, 3):
        body = {
            "parameters": {"region": region, "serial": serial},
            "state": {"type": "SCHEDULED", "state_details": {"scheduled_time": later.isoformat()}},
        }
        # With its tries: Prefect answers 503 while its database is locked.
        found = services.orchestrator._call("POST", f"/deployments/{deployment}/create_flow_run", json=body)
        runs[serial] = found["id"]
    end_superseded(services, datetime.now(UTC))
    now = {serial: services.orchestrator.read_flow_run(run) for serial, run in runs.items()}
    assert {serial: run["state_type"] for serial, run in now.items()} == {
        1: "COMPLETED",
        2: "SCHEDULED",
        3: "SCHEDULED",
    }
    assert message_of(now[1]) == f"Policy 1 of {region} was superseded by policy 2."
    assert now[1]["run_count"] == 0  # type: ignore[typeddict-item]
    for serial in (2, 3):
        assert services.orchestrator.end_waiting(runs[serial], "The test is over.")
    assert not services.orchestrator.end_waiting(runs[1], "It has ended before.")
    assert message_of(services.orchestrator.read_flow_run(runs[1])) == message_of(now[1])


def test_a_policy_that_takes_effect_later(
    change_policy: Callable[..., Ended],
    services: Services,
    portfolio: PortfolioManifest,
    s3: Any,
    region: str,
) -> None:
    assert change_policy(epsilon=3.0).succeeded
    before = read_json(s3, f"regions/{region}/current.json")
    effective_at = datetime.now(UTC) + timedelta(seconds=10)
    fields = {"region": region, "delta": DELTA, "portfolio": portfolio.reference, "author": "test"}
    later = services.policies.append({**fields, "epsilon": 1.5, "effective_at": effective_at.isoformat()})

    early = run_policy(later)
    assert "takes effect at" in early.sentence
    assert datetime.now(UTC) < effective_at, "this machine was too slow for the test to show anything"
    report = reconcile_region(services, region, datetime.now(UTC))
    assert report.action is Action.MEND
    assert read_json(s3, f"regions/{region}/current.json") == before

    time.sleep(max(0.0, (effective_at - datetime.now(UTC)).total_seconds()))
    report = reconcile_region(services, region, datetime.now(UTC))
    assert report.action is Action.START
    assert report.flow_run_id is not None
    again = reconcile_region(services, region, datetime.now(UTC))
    assert again.action is Action.WAIT  # one run is enough
    ended = services.orchestrator.wait(report.flow_run_id, timeout=240)
    assert ended["state_type"] == "COMPLETED"
    after = read_json(s3, f"regions/{region}/current.json")
    assert after["policy_serial"] == later.serial
    manifest = read_json(s3, f"releases/{after['release_id']}/manifest.json")
    assert manifest["provenance"]["started_by"] == "reconcile"
    assert reconcile_region(services, region, datetime.now(UTC)).action is Action.MEND
