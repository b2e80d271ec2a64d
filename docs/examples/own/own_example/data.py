"""569 tumours, 30 measurements each, benign or malignant: scikit-learn's copy of the Wisconsin data."""

import hashlib

import numpy as np
from sklearn.datasets import load_breast_cancer

from tasks.data import Rows, Splits

RULE = (
    "each row by the last digit of the SHA-256 of its measurements (hexadecimal): 0 to 2 is public-train, "
    "3 to 5 public-gate, else private"
)


def load(*, with_private: bool = True) -> Splits:
    """Measurements minus their public mean, divided by their public deviation."""
    measurements, labels = load_breast_cancer(return_X_y=True)
    # The part that a row is in depends on that row alone, and copies of it go the same way.
    digits = np.array([int(hashlib.sha256(row.tobytes()).hexdigest()[-1], 16) for row in measurements])
    train, gate, private = digits <= 2, (digits >= 3) & (digits <= 5), digits >= 6
    # Public rows only: a mean over private rows would let one record move all the others.
    mean, deviation = measurements[train].mean(axis=0), measurements[train].std(axis=0)

    def part(chosen: np.ndarray) -> Rows:
        scaled = (measurements[chosen] - mean) / deviation
        return Rows(features=scaled.astype(np.float32), labels=labels[chosen].astype(np.int64))

    return Splits(
        private=part(private) if with_private else None,
        public_train=part(train),
        public_gate=part(gate),
        classes=2,
        split_rule=RULE,
    )
