"""`remerge verify` of files, without a stack, as an auditor runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks.certified import KINDS, evidence_of


@pytest.fixture
def pulled(tmp_path: Path) -> Path:
    """A pulled release of a mixture, and a folder of its trajectories."""
    _, evidence = evidence_of(KINDS["mixture"])
    assert evidence.release is not None
    assert evidence.draw is not None
    assert evidence.model is not None
    files = {
        "certificate.json": evidence.certificate,
        "manifest.json": evidence.release.content(),
        "draw.json": evidence.draw.content(),
        "model.safetensors": evidence.model,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "runs").mkdir()
    for name, content in evidence.trajectories.items():
        (tmp_path / "runs" / f"{name}.json").write_bytes(content)
    return tmp_path


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "remerge"), "verify", *arguments],
        env={**os.environ, "REMERGE_HOME": str(folder / "no-stack"), "COLUMNS": "100"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_a_pulled_release_and_its_trajectories(pulled: Path) -> None:
    for target in ("certificate.json", "."):
        ended = verify(pulled, target, "--trajectories", "runs")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["compared", "stated", "found", "result"]
    assert sum(line.endswith("ok") or line.rstrip().endswith("ok") for line in lines) > 100
    assert "Not compared: policy: The policy's document is not at hand." in lines
    assert lines[-1].startswith("All ")
    assert " comparisons that could be made hold. Not compared: policy, " in lines[-1]


def test_a_changed_file_fails_by_name(pulled: Path) -> None:
    run = pulled / "runs" / "c1.json"
    run.write_bytes(run.read_bytes().replace(b'"noise_multiplier":18.0', b'"noise_multiplier":18.1'))
    ended = verify(pulled, "certificate.json", "--trajectories", "runs")
    assert ended.returncode == 1
    assert "FAILED: digest of the trajectory of c1: " in ended.stdout
    assert "FAILED: epsilon: The document states " in ended.stdout
    assert ended.stdout.rstrip().endswith("do not rely on this release.")


def test_without_trajectories_or_stack_it_fails(pulled: Path) -> None:
    ended = verify(pulled, "certificate.json")
    assert ended.returncode == 1
    assert (
        "It is not at hand: if the stack is down start it, or name a folder by --trajectories."
        in ended.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("eu",), "The stack is not up"),
        (("missing.json",), "There is no certificate at missing.json"),
        (("certificate.json", "--trajectories", "nowhere"), "nowhere is not a folder"),
        (("eu", "--trajectories", "runs"), "--trajectories goes with a certificate's file"),
    ],
)
def test_what_cannot_be_verified_is_one_sentence(
    pulled: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    ended = verify(pulled, *arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: ")
    assert sentence in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
