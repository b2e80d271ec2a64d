"""`remerge verify` on the real stack: releases as promoted hold, and what is changed in the stores is found."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.canonical import canonical_json
from infra.documents import PortfolioManifest
from tasks.evidence import of_region
from tasks.services import Services
from tasks.verifying import verify
from tests.system.conftest import read, read_json

pytestmark = pytest.mark.system

Command = Callable[..., subprocess.CompletedProcess[str]]


def faults(services: Services, region: str) -> set[str]:
    evidence = of_region(services, region, lambda _: None)
    return {check.what for check in verify(evidence) if check.holds is False}


@pytest.mark.parametrize(
    "policy",
    [
        {"epsilon": 0.8, "mechanisms": ["linear_combination"]},
        {"epsilon": 1.6, "mechanisms": ["random_selection"]},
        {"epsilon": 0.8, "mechanisms": ["mixture"]},
        {"epsilon": 2.0, "mechanisms": ["linear_combination"], "selection": "validation"},
        {"epsilon": 2.0, "selection": "validation_unaccounted"},
    ],
    ids=["average", "draw", "mixture", "validation", "unaccounted"],
)
def test_every_kind_of_release_holds(
    change_policy: Callable[..., Any], services: Services, region: str, policy: dict[str, Any]
) -> None:
    ended = change_policy(**policy)
    assert ended.succeeded, ended.sentence
    checks = list(verify(of_region(services, region, lambda _: None)))
    assert [check for check in checks if check.holds is not True] == []
    assert {"released model, merged again", "cumulative epsilon of the region"} <= {c.what for c in checks}


def test_what_is_changed_in_the_stores_is_found(
    change_policy: Callable[..., Any],
    services: Services,
    portfolio: PortfolioManifest,
    remerge: Command,
    s3: Any,
    region: str,
    tmp_path: Path,
) -> None:
    assert change_policy(epsilon=1.6, mechanisms=["random_selection"]).succeeded
    shown = remerge("verify", region)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.splitlines()[-1].endswith("comparisons hold.")

    # A pulled release, with what the stack knows, and without.
    assert remerge("pull", region, "--to", str(tmp_path)).returncode == 0
    shown = remerge("verify", str(tmp_path / "certificate.json"))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    document = json.loads((tmp_path / "certificate.json").read_text())
    (tmp_path / "certificate.json").write_bytes(
        canonical_json(document | {"epsilon": document["epsilon"] * 0.99})
    )
    assert remerge("verify", str(tmp_path / "certificate.json")).returncode == 1

    # Objects of the production bucket, changed and put back.
    release = f"releases/{read_json(s3, f'regions/{region}/current.json')['release_id']}"
    for name, fault in (
        ("certificate.json", "certificate.json of the release"),
        ("draw.json", "draw.json of the release"),
        ("model.safetensors", "model.safetensors of the release"),
        ("manifest.json", "release manifest that the pointer names"),
    ):
        before = read(s3, f"{release}/{name}")
        s3.put_object(Bucket="production", Key=f"{release}/{name}", Body=before[:-1] + b" ")
        assert fault in faults(services, region)
        s3.put_object(Bucket="production", Key=f"{release}/{name}", Body=before)
    policy = f"policies/{region}/00000001.json"
    before = read(s3, policy)
    changed = canonical_json(json.loads(before) | {"epsilon": 1.61})
    s3.put_object(Bucket="production", Key=policy, Body=changed)
    assert {"digest of the policy", "budget of the policy"} <= faults(services, region)
    s3.put_object(Bucket="production", Key=policy, Body=before)
    assert faults(services, region) == set()


def test_a_region_without_a_release_is_one_sentence(remerge: Command) -> None:
    shown = remerge("verify", "nowhere")
    assert shown.returncode == 1
    assert "Region 'nowhere' has no release to verify" in shown.stderr
