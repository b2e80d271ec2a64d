"""A policy that allows mixtures of merges, on the real stack: drawn once, merged, rechecked, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from accounting.certificate import Certificate
from accounting.recheck import recheck
from infra.documents import PortfolioManifest
from tasks.registry import load_all
from tasks.services import Services
from tests.system.conftest import read, read_json, run_policy

pytestmark = pytest.mark.system


def test_a_mixture_is_drawn_once_and_merged(
    change_policy: Callable[..., Any], services: Services, portfolio: PortfolioManifest, s3: Any, region: str
) -> None:
    ended = change_policy(epsilon=0.8, mechanisms=["mixture"])
    assert ended.succeeded, ended.sentence
    assert "mixture of merges" in ended.sentence
    pointer = read_json(s3, f"regions/{region}/current.json")
    release = f"releases/{pointer['release_id']}"
    certificate = read_json(s3, f"{release}/certificate.json")
    draw = read_json(s3, f"{release}/draw.json")
    components = {component["name"]: component for component in certificate["components"]}
    assert certificate["mechanism"] == certificate["bound"] == "mixture"
    assert draw["weights"] == {name: component["weight"] for name, component in components.items()}
    assert certificate["realised"]["candidate"] == draw["drawn"]
    assert certificate["realised"]["epsilon"] == components[draw["drawn"]]["epsilon"]

    loaded = load_all(services.mlflow, portfolio)
    recheck(Certificate.from_dict(certificate), {name: one.trajectory for name, one in loaded.items()})
    total = sum(
        weight * safetensors.numpy.load(loaded[name].model)["weight"].astype(np.float64)
        for name, weight in components[draw["drawn"]]["weights"].items()
    )
    expected = safetensors.numpy.save({"weight": np.asarray(total).astype(np.float32)})
    assert read(s3, f"{release}/model.safetensors") == expected

    [entry, live] = [
        e for e in services.ledger.entries(portfolio.lineage) if e.release_id == pointer["release_id"]
    ]
    assert (entry.kind, live.kind) == ("intended", "live")
    assert entry.drawn == draw["drawn"]
    assert [(outcome.weight, set(outcome.candidates)) for outcome in entry.outcomes] == [
        (component["weight"], set(component["weights"])) for component in components.values()
    ]

    # The same attempt again finds its draw.
    s3.delete_object(Bucket="production", Key=f"regions/{region}/current.json")
    s3.delete_object(Bucket="production", Key=f"{release}/manifest.json")
    assert run_policy(ended.policy).succeeded
    assert read_json(s3, f"{release}/draw.json") == draw

    # A policy without mixtures does not accept it.
    ended = change_policy(epsilon=0.8, mechanisms=["linear_combination"])
    assert ended.succeeded, ended.sentence
    now = read_json(s3, f"regions/{region}/current.json")["release_id"]
    assert now != pointer["release_id"]
