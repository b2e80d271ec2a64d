"""The operators that mergekit has, against numbers that mergekit 0.1.5 computed.

mergekit.json says how they were made. It is not installed with remerge: it brings transformers and its own versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.merging import merge_models
from tests.tasks.merging.merges import file_of, tensors_of

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "mergekit.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['operator']}-{case['options']}")
def test_values_are_those_of_mergekit(case: dict[str, Any]) -> None:
    models = {name: file_of({"w": np.array(rows)}) for name, rows in GOLDEN["models"].items()}
    base = file_of({"w": np.array(GOLDEN["base"])})
    merged = merge_models(case["operator"], models, case["weights"], options=case["options"], base=base)
    allowed = 1e-7 if case["operator"] == "dare" else 1e-14  # mergekit rounds to float32 under its masks
    assert np.allclose(tensors_of(merged)["w"], case["merged"], rtol=0, atol=allowed)
    assert not np.allclose(case["merged"], GOLDEN["base"], atol=0.01)


def test_all_operators_of_mergekit_are_there() -> None:
    assert {case["operator"] for case in GOLDEN["cases"]} == {
        "linear",
        "task_arithmetic",
        "ties",
        "dare",
        "slerp",
    }
