"""The accounting room is pure: it imports nothing of ours, and no framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import accounting

ALLOWED = {"accounting", "dp_accounting", "numpy", "scipy"}
FILES = sorted(Path(accounting.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_module_imports_only_numbers(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            assert top in ALLOWED or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_solving_loads_no_framework() -> None:
    names = "('torch', 'prefect', 'mlflow', 'boto3')"
    code = f"import sys, accounting.solver; print([name for name in {names} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
