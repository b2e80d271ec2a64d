"""Small groups of tasks on random rows, for tests."""

from __future__ import annotations

import numpy as np

from infra.documents import NetworkRecord
from tasks.data import Rows, Splits
from tasks.models.multi_task import MULTI_TASK_NETWORK

TRUNK = {
    "factory": "tasks.models:multilayer_perceptron",
    "arguments": {"features": 5, "hidden": [4], "classes": 3},
}
NETWORK = NetworkRecord(
    factory=MULTI_TASK_NETWORK,
    arguments={"trunk": TRUNK, "heads": {"left": 3, "right": 2}, "width": 3, "shape": [5]},
)


def rows(seed: int, count: int = 12, shape: tuple[int, ...] = (5,), classes: int = 3) -> Rows:
    """Normal features and labels that repeat 0, 1, ...: every class occurs."""
    numbers = np.random.default_rng(seed)
    return Rows(
        features=numbers.normal(size=(count, *shape)).astype(np.float32),
        labels=np.arange(count, dtype=np.int64) % classes,
    )


def splits(seed: int, classes: int = 3, shape: tuple[int, ...] = (5,), private: Rows | None = None) -> Splits:
    """Three parts drawn from three seeds."""
    return Splits(
        private=private or rows(10 * seed, shape=shape, classes=classes),
        public_train=rows(10 * seed + 1, shape=shape, classes=classes),
        public_gate=rows(10 * seed + 2, shape=shape, classes=classes),
        classes=classes,
        split_rule=f"drawn from seed {seed}",
    )
