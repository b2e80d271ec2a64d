"""Bad input on the real stack: one sentence that says what to do, and production stays as it was."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from infra.canonical import sha256_hex
from infra.documents import PortfolioManifest
from tasks.services import Services
from tests.system.conftest import Ended, keys_of, read, run_policy

pytestmark = pytest.mark.system

Change = Callable[..., Ended]
Remerge = Callable[..., subprocess.CompletedProcess[str]]


def pointer_of(s3: Any, region: str) -> bytes:
    return read(s3, f"regions/{region}/current.json")


def artifact_key(s3: Any, run_id: str, name: str) -> str:
    [key] = [key for key in keys_of(s3, "", "mlflow") if key.endswith(f"{run_id}/artifacts/{name}")]
    return key


@pytest.fixture
def own_portfolio(
    services: Services, portfolio: PortfolioManifest, s3: Any
) -> Callable[..., PortfolioManifest]:
    """A portfolio version of the test's own, whose candidates are copies that the test may damage."""

    def copy(
        changed: dict[str, bytes] | None = None, names: Sequence[str] = ("eps-half", "eps-1", "eps-2")
    ) -> PortfolioManifest:
        client = services.mlflow
        records = []
        for record in portfolio.candidates:
            if record.name not in names:
                continue
            files = {
                name: read(s3, artifact_key(s3, record.run_id, name), "mlflow")
                for name in ("model.safetensors", "trajectory.json")
            }
            if changed and record.name == "eps-1":
                files |= changed
            run = client.create_run(client.get_run(record.run_id).info.experiment_id, run_name=record.name)
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    (Path(folder) / name).write_bytes(content)
                client.log_artifacts(run.info.run_id, folder)
            client.set_terminated(run.info.run_id)
            version = client.create_model_version(
                "digits", f"{run.info.artifact_uri}/model.safetensors", run.info.run_id
            )
            records.append(
                {
                    **record.model_dump(),
                    "version": int(version.version),
                    "run_id": run.info.run_id,
                    "model_sha256": sha256_hex(files["model.safetensors"]),
                    "trajectory_sha256": sha256_hex(files["trajectory.json"]),
                }
            )
        known = portfolio.model_dump(mode="json", exclude={"serial"})
        return services.manifests.append({**known, "candidates": records})

    return copy


@contextmanager
def damaged(s3: Any, key: str, content: bytes | None) -> Iterator[None]:
    """Replace or remove an artifact in MLflow's bucket, and restore it."""
    before = read(s3, key, "mlflow")
    if content is None:
        s3.delete_object(Bucket="mlflow", Key=key)
    else:
        s3.put_object(Bucket="mlflow", Key=key, Body=content)
    try:
        yield
    finally:
        s3.put_object(Bucket="mlflow", Key=key, Body=before)


@pytest.mark.parametrize(
    ("name", "how", "sentence"),
    [
        ("model.safetensors", "flip", "replaced or corrupted"),
        ("model.safetensors", "truncate", "replaced or corrupted"),
        ("model.safetensors", "remove", "is not in MLflow"),
        ("trajectory.json", "edit", "was edited"),
        ("trajectory.json", "remove", "is not in MLflow"),
    ],
)
def test_a_damaged_candidate_stops_the_change_and_nothing_else(
    change_policy: Change,
    own_portfolio: Callable[..., PortfolioManifest],
    s3: Any,
    region: str,
    name: str,
    how: str,
    sentence: str,
) -> None:
    assert change_policy(epsilon=4.5).succeeded
    live = pointer_of(s3, region)
    copied = own_portfolio()
    key = artifact_key(s3, copied.candidates[1].run_id, name)
    content = read(s3, key, "mlflow")
    damage = {
        "flip": bytes([*content[:-1], content[-1] ^ 1]),
        "truncate": content[: len(content) // 2],
        "edit": content.replace(b'"steps":160', b'"steps":159'),
        "remove": None,
    }[how]
    assert damage != content
    with damaged(s3, key, damage):
        ended = change_policy(epsilon=1.5, portfolio=copied.reference)
        assert not ended.succeeded
        assert sentence in ended.sentence
        assert copied.candidates[1].name in ended.sentence
        assert copied.reference in ended.sentence
        assert pointer_of(s3, region) == live
    mended = run_policy(ended.policy)  # the same policy, after the cause is mended
    assert mended.succeeded, mended.sentence
    assert pointer_of(s3, region) != live


def test_a_trajectory_of_another_lineage_or_relation_is_refused(
    change_policy: Change,
    own_portfolio: Callable[..., PortfolioManifest],
    portfolio: PortfolioManifest,
    s3: Any,
    region: str,
) -> None:
    key = artifact_key(s3, portfolio.candidates[1].run_id, "trajectory.json")
    content = read(s3, key, "mlflow")
    for field, before, after in (
        ("lineage", b'"lineage":"digits"', b'"lineage":"others"'),
        (
            "neighboring_relation",
            b'"neighboring_relation":"replace_one"',
            b'"neighboring_relation":"add_or_remove_one"',
        ),
    ):
        assert before in content
        copied = own_portfolio({"trajectory.json": content.replace(before, after)})
        ended = change_policy(epsilon=1.5, portfolio=copied.reference)
        assert not ended.succeeded
        assert f"a trajectory of another {field}" in ended.sentence
    assert keys_of(s3, f"regions/{region}/current.json") == []


def test_different_architectures_are_refused(
    change_policy: Change, own_portfolio: Callable[..., PortfolioManifest]
) -> None:
    wide = safetensors.numpy.save({"weight": np.zeros((10, 66), np.float32)})
    copied = own_portfolio({"model.safetensors": wide})
    ended = change_policy(epsilon=1.5, portfolio=copied.reference)
    assert not ended.succeeded
    assert "different architectures" in ended.sentence


def test_a_portfolio_without_its_public_start_is_merged_only_by_what_needs_none(
    own_portfolio: Callable[..., PortfolioManifest],
    change_policy: Change,
    remerge: Remerge,
    s3: Any,
    region: str,
) -> None:
    """As trained by a version that did not keep it."""
    before = own_portfolio()
    ended = remerge(
        *("policy", "set", "--region", region, "--epsilon", "2.5", "--delta", "1e-5", "--yes"),
        *("--portfolio", before.reference, "--merge", "ties"),
    )
    assert ended.returncode == 1
    assert "train the portfolio again with `remerge train`" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert keys_of(s3, f"policies/{region}/") == []
    flow = change_policy(epsilon=2.5, portfolio=before.reference, merge="ties")
    assert not flow.succeeded
    assert "train the portfolio again with `remerge train`" in flow.sentence
    assert keys_of(s3, f"regions/{region}/current.json") == []
    assert change_policy(epsilon=2.5, portfolio=before.reference, merge="average").succeeded


def test_a_policy_of_another_relation_is_refused(change_policy: Change) -> None:
    ended = change_policy(epsilon=1.5, neighboring_relation="add_or_remove_one")
    assert not ended.succeeded
    assert "--neighboring-relation replace_one" in ended.sentence


def test_an_infeasible_budget_makes_the_region_non_compliant(
    change_policy: Change, remerge: Remerge, s3: Any, region: str, tmp_path: Path
) -> None:
    assert change_policy(epsilon=3.0).succeeded
    live = pointer_of(s3, region)
    ended = change_policy(epsilon=0.1)
    assert not ended.succeeded
    assert "the smallest epsilon on offer is 0.5" in ended.sentence
    assert "noise_multiplier" in ended.sentence
    assert pointer_of(s3, region) == live

    status = remerge("status")
    assert status.returncode == 2
    assert "non-compliant" in status.stdout
    pulled = remerge("pull", region, "--to", str(tmp_path / "refused"))
    assert pulled.returncode == 1
    assert "non-compliant" in pulled.stderr
    assert not (tmp_path / "refused").exists()

    assert not change_policy(epsilon=0.1, grace_seconds=3600).succeeded
    graced = remerge("pull", region, "--to", str(tmp_path / "graced"))
    assert graced.returncode == 0
    assert "grace period" in graced.stdout
    assert (tmp_path / "graced" / "model.safetensors").exists()


def test_a_failed_check_ends_the_attempt_for_good(
    change_policy: Change, services: Services, portfolio: PortfolioManifest, s3: Any, region: str
) -> None:
    ended = change_policy(epsilon=1.5, min_accuracy=0.999)
    assert not ended.succeeded
    assert "below the policy's min_accuracy 0.999" in ended.sentence
    again = run_policy(ended.policy)
    assert not again.succeeded
    assert "never tried again" in again.sentence
    assert keys_of(s3, f"regions/{region}/current.json") == []
    kinds = [entry.kind for entry in services.ledger.entries(portfolio.lineage) if entry.region == region]
    assert kinds == ["intended", "failed_check"]
    assert change_policy(epsilon=1.5).succeeded  # other terms: a new policy, a new release


def test_an_older_policy_never_replaces_a_newer_one(change_policy: Change, s3: Any, region: str) -> None:
    first = change_policy(epsilon=3.0)
    assert change_policy(epsilon=1.5).succeeded
    live = pointer_of(s3, region)
    late = run_policy(first.policy)
    assert late.succeeded
    assert "superseded by policy 2" in late.sentence
    assert pointer_of(s3, region) == live


def test_a_worse_model_does_not_replace_a_compliant_one(
    change_policy: Change,
    own_portfolio: Callable[..., PortfolioManifest],
    s3: Any,
    region: str,
    remerge: Remerge,
    tmp_path: Path,
) -> None:
    assert change_policy(epsilon=3.0).succeeded
    live = pointer_of(s3, region)
    noisiest = own_portfolio(names=["eps-half"])  # about .5 accurate, where the live release has about .85
    ended = change_policy(epsilon=3.5, portfolio=noisiest.reference)
    assert not ended.succeeded
    assert "the live release stays" in ended.sentence
    assert pointer_of(s3, region) == live
    assert remerge("pull", region, "--to", str(tmp_path)).returncode == 0  # it satisfies the new policy
    # A stricter budget normally costs accuracy: the live release violates it, so it is no bar.
    assert change_policy(epsilon=0.7, portfolio=noisiest.reference).succeeded


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--epsilon", "0", "--delta", "1e-5"], "epsilon"),
        (["--epsilon", "-1", "--delta", "1e-5"], "epsilon"),
        (["--epsilon", "nan", "--delta", "1e-5"], "epsilon"),
        (["--epsilon", "inf", "--delta", "1e-5"], "epsilon"),
        (["--epsilon", "two", "--delta", "1e-5"], "epsilon"),
        (["--delta", "1e-5"], "epsilon"),
        (["--epsilon", "1"], "delta"),
        (["--epsilon", "1", "--delta", "0"], "delta"),
        (["--epsilon", "1", "--delta", "-0.1"], "delta"),
        (["--epsilon", "1", "--delta", "1"], "delta"),
        (["--epsilon", "1", "--delta", "nan"], "delta"),
        (["--epsilon", "1", "--delta", "small"], "delta"),
        (
            ["--epsilon", "1", "--delta", "1e-5", "--portfolio", "nothing@latest"],
            "There is no portfolio nothing",
        ),
        (["--epsilon", "1", "--delta", "1e-5", "--portfolio", "digits"], "portfolio"),
        (["--epsilon", "1", "--delta", "1e-5", "--portfolio", "digits@999"], "digits@999"),
        (["--epsilon", "1", "--delta", "1e-5", "--mechanism", "magic"], "mechanisms"),
        (["--epsilon", "1", "--delta", "1e-5", "--min-accuracy", "2"], "min_accuracy"),
        (["--epsilon", "1", "--delta", "1e-5", "--neighboring-relation", "both"], "neighboring_relation"),
    ],
)
def test_a_bad_policy_is_never_stored(
    portfolio: PortfolioManifest, remerge: Remerge, s3: Any, region: str, arguments: list[str], sentence: str
) -> None:
    ended = remerge("policy", "set", "--region", region, "--yes", *arguments)
    assert ended.returncode in {1, 2}
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
    assert keys_of(s3, f"policies/{region}/") == []


def test_unknown_regions_and_odd_names_are_refused(portfolio: PortfolioManifest, remerge: Remerge) -> None:
    for region in ("nowhere", "../x", "EU", ""):
        pulled = remerge("pull", region, "--to", "/nowhere")
        assert pulled.returncode == 1
        assert "Traceback" not in pulled.stderr
        assert "Error:" in pulled.stderr
    ended = remerge("policy", "set", "--region", "EU", "--epsilon", "1", "--delta", "1e-5", "--yes")
    assert ended.returncode == 1
    assert "region" in ended.stderr


def test_a_delta_above_one_record_is_warned_about(
    portfolio: PortfolioManifest, remerge: Remerge, region: str
) -> None:
    ended = remerge(
        "policy",
        "set",
        "--region",
        region,
        "--epsilon",
        "3",
        "--delta",
        "0.01",
        "--portfolio",
        "digits@1",
        "--yes",
        "--no-wait",
    )
    assert ended.returncode == 0, ended.stderr
    assert "Warning" in ended.stdout


def test_without_a_stack_every_command_says_what_to_do(remerge: Remerge, tmp_path: Path) -> None:
    for arguments in (
        ["status"],
        ["train"],
        ["policy", "set", "--region", "eu", "--epsilon", "1", "--delta", "1e-5", "--yes"],
        ["pull", "eu", "--to", str(tmp_path / "out")],
    ):
        ended = remerge(*arguments, home=tmp_path / "home")
        assert ended.returncode == 1
        assert "remerge up" in ended.stderr
        assert "Traceback" not in ended.stderr
    ended = remerge("down", home=tmp_path / "home")
    assert ended.returncode == 0
