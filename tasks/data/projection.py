"""Projection: no row is longer than the feature radius, which is what bounds one record's influence."""

from __future__ import annotations

import numpy as np

from tasks.data.rows import Rows, blocks


def project(rows: Rows, radius: float) -> Rows:
    """Shrink each row that is longer than `radius` to it; shorter rows are left as they are.

    The squared norm of every float32 row returned, computed without rounding, is at most radius^2: rows are
    scaled in float64 to a hair below the radius and rounded towards zero. Entry by entry in a fixed order, so
    that every machine gets the same bytes and thus the same digests.
    """
    features = rows.features.copy()
    shrink(features, radius)
    features.flags.writeable = False
    return Rows(features=features, labels=rows.labels)


def shrink(features: np.ndarray, radius: float) -> None:
    """`project`, in place: features are float32, contiguous and writeable."""
    limit = radius * (1 - 1e-9)  # far above the rounding of a float64 sum, far below a float32 step
    flat = features.reshape(len(features), -1)
    for block in blocks(flat):
        part = flat[block]
        norms = row_norms(part)
        long = norms > limit
        scaled = part[long].astype(np.float64) * (limit / norms[long])[:, np.newaxis]
        rounded = scaled.astype(np.float32)
        away = np.abs(rounded.astype(np.float64)) > np.abs(scaled)
        rounded[away] = np.nextafter(rounded[away], np.float32(0))
        part[long] = rounded + np.float32(0)  # -0 becomes 0, so that rows that are equal have equal bytes


def row_norms(features: np.ndarray) -> np.ndarray:
    """L2 norms of float32 rows, shape (rows,), float64: squares are added up entry by entry in a fixed order."""
    exact = features.reshape(len(features), -1).astype(np.float64)
    squares = np.zeros(len(features))
    for column in exact.T:
        squares += column * column
    return np.sqrt(squares)
