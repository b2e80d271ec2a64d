"""The main job on the real stack: a policy, its event, Prefect's run, and what S3 holds afterwards."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from infra.documents import PortfolioManifest
from tasks.services import Services
from tests.conftest import SharedStack
from tests.system.conftest import keys_of, read, read_json

pytestmark = pytest.mark.system

Remerge = Callable[..., subprocess.CompletedProcess[str]]


def test_a_policy_becomes_a_model_in_production(
    stack: SharedStack,
    portfolio: PortfolioManifest,
    services: Services,
    remerge: Remerge,
    s3: Any,
    region: str,
) -> None:
    arguments = ("policy", "set", "--region", region, "--epsilon", "1.5", "--delta", "1e-5")
    arguments = (*arguments, "--portfolio", portfolio.reference)
    refused = remerge(*arguments)
    assert refused.returncode == 1
    assert "Add --yes to create it" in refused.stderr
    assert keys_of(s3, f"policies/{region}/") == []

    ended = remerge(*arguments, "--yes")
    assert ended.returncode == 0, ended.stderr
    assert f"{region} now serves a linear combination" in ended.stdout

    # From here on: plain boto3, numpy and safetensors, none of the code under test.
    pointer = read_json(s3, f"regions/{region}/current.json")
    release = f"releases/{pointer['release_id']}"
    manifest = read_json(s3, f"{release}/manifest.json")
    certificate = read_json(s3, f"{release}/certificate.json")
    model = read(s3, f"{release}/model.safetensors")
    for name, digest in manifest["files"].items():
        assert hashlib.sha256(read(s3, f"{release}/{name}")).hexdigest() == digest
    assert len(certificate["weights"]) >= 2
    assert certificate["epsilon"] <= 1.5

    trained = read_json(s3, "portfolios/digits/00000001.json")
    total: np.ndarray | float = 0.0
    for candidate in trained["candidates"]:
        weight = certificate["weights"].get(candidate["name"], 0.0)
        if weight:
            [key] = [
                key
                for key in keys_of(s3, "", "mlflow")
                if key.endswith(f"{candidate['run_id']}/artifacts/model.safetensors")
            ]
            content = read(s3, key, "mlflow")
            assert hashlib.sha256(content).hexdigest() == candidate["model_sha256"]
            total = total + weight * safetensors.numpy.load(content)["weight"].astype(np.float64)
    assert model == safetensors.numpy.save({"weight": np.asarray(total).astype(np.float32)})

    # Who did it: an automation of Prefect's that heard an event, as Prefect itself says.
    provenance = manifest["provenance"]
    assert provenance["started_by"] == "automation"
    api = stack.connections.prefect_api_url
    run = httpx.get(f"{api}/flow_runs/{provenance['flow_run_id']}").json()
    assert run["created_by"]["type"] == "AUTOMATION"
    assert run["created_by"]["id"] == provenance["automation_id"]
    automation = httpx.get(f"{api}/automations/{provenance['automation_id']}").json()
    assert automation["name"] == provenance["automation_name"] == "policy.changed"
    assert run["parameters"] == {"region": region, "serial": 1, "event_id": provenance["event_id"]}

    # What people see: the registered version with its alias and certificate, and the page in Prefect.
    client = services.mlflow
    version = client.get_model_version_by_alias(f"digits-{region}", "production")
    assert int(version.version) == manifest["registered_version"]
    assert version.tags["remerge.release_id"] == pointer["release_id"]
    assert {file.path for file in client.list_artifacts(version.run_id)} >= {
        "certificate.json",
        "model.safetensors",
    }
    artifacts = httpx.post(
        f"{api}/artifacts/filter", json={"artifacts": {"key": {"any_": [f"policy-{region}"]}}}
    ).json()
    assert "| certified epsilon |" in artifacts[0]["data"]
    assert "best single" in artifacts[0]["data"]

    # The same policy again is the same release.
    again = remerge(*arguments)
    assert again.returncode == 0, again.stderr
    assert read_json(s3, f"regions/{region}/current.json") == pointer
    assert len(keys_of(s3, f"policies/{region}/")) == 1
    kinds = [
        entry.kind
        for entry in services.ledger.entries(portfolio.lineage)
        if entry.release_id == pointer["release_id"]
    ]
    assert kinds == ["intended", "live"]


def test_everything_in_production_is_served_by_pull(
    change_policy: Callable[..., Any], remerge: Remerge, s3: Any, region: str, tmp_path: Any
) -> None:
    assert change_policy(epsilon=3.0).succeeded
    pulled = remerge("pull", region, "--to", str(tmp_path))
    assert pulled.returncode == 0, pulled.stderr
    pointer = read_json(s3, f"regions/{region}/current.json")
    keys = keys_of(s3, f"releases/{pointer['release_id']}/")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(key.rsplit("/")[-1] for key in keys)
    for key in keys:
        assert (tmp_path / key.rsplit("/")[-1]).read_bytes() == read(s3, key)


def test_random_selection_is_drawn_once_and_kept(
    change_policy: Callable[..., Any], services: Services, portfolio: PortfolioManifest, s3: Any, region: str
) -> None:
    from tests.system.conftest import run_policy

    ended = change_policy(epsilon=1.5, mechanisms=["random_selection"])
    assert ended.succeeded, ended.sentence
    pointer = read_json(s3, f"regions/{region}/current.json")
    release = f"releases/{pointer['release_id']}"
    draw = read_json(s3, f"{release}/draw.json")
    certificate = read_json(s3, f"{release}/certificate.json")
    assert draw["weights"] == certificate["weights"]
    assert len(draw["weights"]) == 2
    assert certificate["bound"] == "random_selection_pld"
    assert certificate["realised"]["candidate"] == draw["drawn"]
    [drawn] = [candidate for candidate in portfolio.candidates if candidate.name == draw["drawn"]]
    assert hashlib.sha256(read(s3, f"{release}/model.safetensors")).hexdigest() == drawn.model_sha256

    # Start the same attempt over from every point: without the pointer, then without the manifest too.
    for lost in (f"regions/{region}/current.json", f"{release}/manifest.json"):
        s3.delete_object(Bucket="production", Key=f"regions/{region}/current.json")
        s3.delete_object(Bucket="production", Key=lost)
        assert run_policy(ended.policy).succeeded
        assert read_json(s3, f"{release}/draw.json") == draw
        assert read_json(s3, f"regions/{region}/current.json")["release_id"] == pointer["release_id"]
    entries = [e for e in services.ledger.entries(portfolio.lineage) if e.release_id == pointer["release_id"]]
    assert [entry.kind for entry in entries] == ["intended", "live"]
    assert entries[0].drawn == draw["drawn"]
    assert [outcome.weight for outcome in entries[0].outcomes] == [
        certificate["weights"][o.candidates[0]] for o in entries[0].outcomes
    ]
