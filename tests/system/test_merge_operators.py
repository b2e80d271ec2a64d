"""Merge operators on the real stack: set by the command, merged, certified, promoted, verified, and merged again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accounting.certificate import Certificate
from accounting.recheck import recheck
from infra.canonical import canonical_json, sha256_hex
from infra.documents import PortfolioManifest
from tasks.data import load_public_train
from tasks.evidence import of_region
from tasks.merging import merge_models
from tasks.merging.statistics import fisher_statistics
from tasks.registry import load_all
from tasks.services import Services
from tasks.verifying import verify
from tests.system.conftest import Ended, keys_of, read, read_json, run_policy

pytestmark = pytest.mark.system

Change = Callable[..., Ended]
Remerge = Callable[..., subprocess.CompletedProcess[str]]


def live(s3: Any, region: str) -> tuple[str, Certificate]:
    release_id = read_json(s3, f"regions/{region}/current.json")["release_id"]
    return release_id, Certificate.from_dict(read_json(s3, f"releases/{release_id}/certificate.json"))


def faults(services: Services, region: str) -> set[str]:
    evidence = of_region(services, region, lambda _: None)
    return {check.what for check in verify(evidence) if check.holds is not True}


def set_command(region: str, *more: str) -> tuple[str, ...]:
    return ("policy", "set", "--region", region, "--epsilon", "2.5", "--delta", "1e-5", "--yes", *more)


def test_ties_by_the_command(
    portfolio: PortfolioManifest, services: Services, remerge: Remerge, s3: Any, region: str, tmp_path: Path
) -> None:
    merge = ("--portfolio", portfolio.reference, "--merge", "ties", "--merge-option", "density=0.4")
    ended = remerge(*set_command(region, *merge))
    assert ended.returncode == 0, ended.stderr
    words = "ties (density 0.4, normalize yes, scale 1)"
    assert f"merged by {words}." in ended.stdout
    assert f"{region} now serves a merge by {words} of " in ended.stdout

    # What was promoted is what the operator makes, with the weights of the certificate, covered by the joint release.
    release_id, certificate = live(s3, region)
    assert (certificate.mechanism, certificate.bound, certificate.merge) == ("operator", "joint", "ties")
    assert certificate.merge_options == {"density": 0.4, "scale": 1.0, "normalize": True}
    assert "share 0.4 that is largest" in certificate.merge_rule
    assert len(certificate.weights) >= 2
    loaded = load_all(services.mlflow, portfolio)
    recheck(certificate, {name: one.trajectory for name, one in loaded.items()})
    [start] = {
        read(s3, key, "mlflow")
        for record in portfolio.candidates
        for key in keys_of(s3, "", "mlflow")
        if key.endswith(f"{record.run_id}/artifacts/initial.safetensors")
    }
    assert sha256_hex(start) == portfolio.initialisation_digest
    by_hand = merge_models(
        "ties",
        {name: loaded[name].model for name in certificate.weights},
        certificate.weights,
        options={"density": 0.4},
        base=start,
    )
    assert read(s3, f"releases/{release_id}/model.safetensors") == by_hand
    entries = [e for e in services.ledger.entries(portfolio.lineage) if e.release_id == release_id]
    assert [entry.kind for entry in entries] == ["intended", "live"]
    for entry in entries:
        [outcome] = entry.outcomes
        assert (set(outcome.candidates), outcome.coefficients) == (set(certificate.weights), None)

    # People read it, and the same terms again are the same policy.
    shown = remerge("policy", "show", region)
    assert "density=0.4, normalize=True, scale=1.0" in shown.stdout
    [row] = [line for line in remerge("status").stdout.splitlines() if line.startswith(region + "  ")]
    assert "merged by ties" in row
    assert " compliant" in row
    again = remerge(*set_command(region, *merge, "--merge-option", "scale=1"))
    assert again.returncode == 0, again.stderr
    assert live(s3, region) == (release_id, certificate)
    assert services.policies.documents.last_serial(region) == 1

    # It is verified: pulled too, and whatever is changed is found.
    verified = remerge("verify", region)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "released model, merged again" in verified.stdout
    assert remerge("pull", region, "--to", str(tmp_path)).returncode == 0
    assert (tmp_path / "model.safetensors").read_bytes() == by_hand
    [record] = [record for record in portfolio.candidates if record.name == next(iter(certificate.weights))]
    (tmp_path / "model.safetensors").write_bytes(loaded[record.name].model)
    (tmp_path / "manifest.json").unlink()
    tampered = remerge("verify", str(tmp_path / "certificate.json"))
    assert tampered.returncode == 1
    assert "FAILED: released model, merged again" in tampered.stdout
    policy = f"policies/{region}/00000001.json"
    before = read(s3, policy)
    document = json.loads(before)
    for change, what in (
        ({"merge_options": {**document["merge_options"], "density": 0.5}}, "options of the merge operator"),
        ({"merge": "dare", "merge_options": {}}, "merge operator of the policy"),
    ):
        s3.put_object(Bucket="production", Key=policy, Body=canonical_json({**document, **change}))
        assert {"digest of the policy", what} <= faults(services, region)
    s3.put_object(Bucket="production", Key=policy, Body=before)
    assert faults(services, region) == set()

    # Another operator is another merge: the live release does not satisfy such a policy, and is replaced.
    ended = remerge(*set_command(region, "--portfolio", portfolio.reference, "--merge", "slerp"))
    assert ended.returncode == 0, ended.stderr
    _, other = live(s3, region)
    assert (other.merge, len(other.weights)) == ("slerp", 2)


def test_fisher_makes_its_statistics_again(
    change_policy: Change, services: Services, portfolio: PortfolioManifest, s3: Any, region: str
) -> None:
    ended = change_policy(epsilon=2.5, merge="fisher")
    assert ended.succeeded, ended.sentence
    release_id, certificate = live(s3, region)
    loaded = load_all(services.mlflow, portfolio)
    models = {name: loaded[name].model for name in certificate.weights}
    rows = load_public_train(portfolio)
    statistics = {name: fisher_statistics(portfolio.network, model, rows) for name, model in models.items()}
    model = read(s3, f"releases/{release_id}/model.safetensors")
    assert model == merge_models("fisher", models, certificate.weights, statistics=statistics)
    assert faults(services, region) == set()

    # A retry, after everything but the ledger was lost, makes the same bytes.
    for lost in ("manifest.json", "model.safetensors", "certificate.json"):
        s3.delete_object(Bucket="production", Key=f"releases/{release_id}/{lost}")
    s3.delete_object(Bucket="production", Key=f"regions/{region}/current.json")
    assert run_policy(ended.policy).succeeded
    assert live(s3, region) == (release_id, certificate)
    assert read(s3, f"releases/{release_id}/model.safetensors") == model


def test_a_budget_for_one_candidate_releases_it_alone(change_policy: Change, s3: Any, region: str) -> None:
    ended = change_policy(epsilon=0.55, merge="ties")
    assert ended.succeeded, ended.sentence
    _, certificate = live(s3, region)
    assert (certificate.mechanism, certificate.merge, len(certificate.weights)) == (
        "linear_combination",
        "linear",
        1,
    )


def test_operators_share_the_budget_of_a_region(
    change_policy: Change, services: Services, portfolio: PortfolioManifest, s3: Any, region: str
) -> None:
    assert change_policy(epsilon=2.5, merge="dare").succeeded
    ended = change_policy(epsilon=2.5, merge="dare", scope="region", merge_options={"seed": 1})
    assert ended.succeeded, ended.sentence
    _, certificate = live(s3, region)
    assert certificate.cumulative is not None
    assert certificate.cumulative.epsilon_region <= 2.5
    assert certificate.merge_options["seed"] == 1
    assert faults(services, region) == set()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--merge", "tie"), "merge: input should be 'linear', 'average'"),
        (("--merge-option", "density=0.3"), "The merge operator linear has no option density"),
        (("--merge", "ties", "--mechanism", "mixture"), "it goes without mechanisms: leave them out"),
    ],
)
def test_what_no_operator_takes_is_refused(
    portfolio: PortfolioManifest, remerge: Remerge, s3: Any, region: str, more: tuple[str, ...], sentence: str
) -> None:
    ended = remerge(*set_command(region, "--portfolio", portfolio.reference, *more))
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert keys_of(s3, f"policies/{region}/") == []
