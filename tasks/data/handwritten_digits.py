"""The data set built into scikit-learn: small, and at hand on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.rows import Rows, Splits, record_digests


def digits(*, with_private: bool = True, classes: Sequence[int] = tuple(range(10))) -> Splits:
    """Handwritten digits, 8 x 8 pixels, from scikit-learn: pixels / 16 minus the public mean, and a bias.

    The bias entry, 0.3, is small beside a row's usual length of 2: projection leaves the pixels their room.

    Args:
        classes: the digits to keep, a public choice, at least two; labels are positions in this list. Whether a
            row is kept depends on that row alone, and the public mean is that of the rows kept.
    """
    from sklearn.datasets import load_digits  # late: importing scikit-learn takes a second

    _require_digits(classes)
    bundle = load_digits()
    order = np.array(
        sorted(range(len(bundle.target)), key=lambda row: hashlib.sha256(f"digits:{row}".encode()).digest())
    )

    def kept(start: int, end: int) -> np.ndarray:
        rows = order[start:end]
        return rows[np.isin(bundle.target[rows], classes)]

    public_mean = (bundle.data[kept(1200, 1500)] / 16).mean(axis=0)
    positions = np.array([list(classes).index(digit) if digit in classes else -1 for digit in range(10)])

    def part(start: int, end: int) -> Rows:
        rows = kept(start, end)
        centred = bundle.data[rows] / 16 - public_mean
        features = np.hstack([centred, np.full((len(rows), 1), 0.3)]).astype(np.float32)
        return Rows(
            features=features,
            labels=positions[bundle.target[rows]].astype(np.int64),
            records=record_digests(bundle.data[rows]),
        )

    rule = (
        'scikit-learn\'s digits ordered by the SHA-256 of "digits:<row number>"; the first 1,200 are '
        "private, the next 300 public-train, the last 297 public-gate; no record occurs twice in the data"
    )
    if tuple(classes) != tuple(range(10)):
        names = ", ".join(map(str, classes))
        rule += f"; of each part only the digits {names} are kept, labelled 0, 1, ... in this order"
    return Splits(
        private=part(0, 1200) if with_private else None,
        public_train=part(1200, 1500),
        public_gate=part(1500, 1797),
        classes=len(classes),
        split_rule=rule,
    )


def _require_digits(classes: Sequence[int]) -> None:
    digits_named = isinstance(classes, list | tuple) and all(
        type(digit) is int and 0 <= digit <= 9 for digit in classes
    )
    if not digits_named or len(set(classes)) != len(classes) or len(classes) < 2:
        raise InvalidInput(
            f"The argument classes of tasks.data:digits must list at least two different digits from 0 to 9, such as "
            f"[3, 8], but {classes!r} was given."
        )
