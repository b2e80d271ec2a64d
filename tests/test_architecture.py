"""The packages point one way: flows -> tasks -> {accounting, infra}; infra -> accounting; accounting -> nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "accounting": {"accounting"},
    "infra": {"infra", "accounting"},
    "tasks": {"tasks", "infra", "accounting"},
    "flows": {"flows", "tasks", "infra", "accounting"},
}
HEAVY = {"torch", "prefect", "mlflow", "boto3", "botocore", "opacus"}


def imports_of(path: Path) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package: str) -> None:
    modules = list((ROOT / package).glob("**/*.py"))
    assert modules
    for path in modules:
        wrong = imports_of(path) & (set(ALLOWED) - ALLOWED[package])
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_accounting_is_pure() -> None:
    for path in (ROOT / "accounting").glob("**/*.py"):
        wrong = imports_of(path) & {
            *HEAVY,
            "os",
            "io",
            "pathlib",
            "socket",
            "subprocess",
            "httpx",
            "pydantic",
        }
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_command_starts_without_heavy_imports() -> None:
    program = f"import flows.cli, flows.commands, flows.views, sys; print({HEAVY!r} & set(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    )
    assert shown.stdout.strip() == "set()"


def test_modules_fit_in_the_head() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for package in ALLOWED
        for path in (ROOT / package).glob("**/*.py")
        if (lines := len(path.read_text().splitlines())) > 350
    }
    assert not long
