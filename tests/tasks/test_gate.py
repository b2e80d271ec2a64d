"""The gate is a plain function of numbers."""

from __future__ import annotations

import math

import pytest

from tasks.validation import gate


@pytest.mark.parametrize(
    ("accuracy", "min_accuracy", "live", "passed", "word"),
    [
        (0.8, 0.7, None, True, "meets"),
        (0.7, 0.7, 0.7, True, "meets"),
        (0.69, 0.7, None, False, "min_accuracy"),
        (0.75, 0.7, 0.8, False, "live release"),
        (0.6, 0.7, 0.8, False, "min_accuracy"),
        (math.nan, 0.0, None, False, "min_accuracy"),
        (0.0, 0.0, None, True, "meets"),
    ],
)
def test_gate(accuracy: float, min_accuracy: float, live: float | None, passed: bool, word: str) -> None:
    verdict = gate(accuracy=accuracy, min_accuracy=min_accuracy, live_accuracy=live)
    assert verdict.passed is passed
    assert word in verdict.reason


def test_the_gate_of_several_tasks_tells_each_ones_accuracy() -> None:
    by_task = {"left": 0.9, "right": 0.7}
    passed = gate(accuracy=0.7, min_accuracy=0.7, live_accuracy=None, by_task=by_task)
    assert (passed.passed, passed.by_task) == (True, by_task)
    assert (
        "The lowest accuracy of its tasks (left 0.900, right 0.700) on the public-gate rows meets"
        in passed.reason
    )
    failed = gate(accuracy=0.7, min_accuracy=0.8, live_accuracy=None, by_task=by_task)
    assert not failed.passed
    assert (
        "(left 0.900, right 0.700) on the public-gate rows is below the policy's min_accuracy"
        in failed.reason
    )
    assert gate(accuracy=0.7, min_accuracy=0.7, live_accuracy=None).by_task == {}
