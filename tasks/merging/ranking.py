"""Exact order statistics of numbers that do not fit in memory, by counting: four passes over 16 bits each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

_BITS, _BUCKETS = 16, 2**16


def ranked(passes: Callable[[], Iterable[np.ndarray]], ranks: Sequence[int]) -> np.ndarray:
    """The numbers at given places of each row's ascending order; exact, however the rows are cut into parts.

    Args:
        passes: goes through all parts once, each of shape (rows, some), float64 and finite; called four times.
        ranks: places, from 0 for the smallest.

    Returns:
        shape (rows, ranks).
    """
    found: np.ndarray = np.zeros((0, 0), np.uint64)
    left = np.zeros((0, 0), np.int64)
    for shift in (48, 32, 16, 0):
        counts = np.zeros((0, len(ranks), _BUCKETS), np.int64)
        for part in passes():
            if not counts.size:
                counts = np.zeros((len(part), len(ranks), _BUCKETS), np.int64)
            for row, values in enumerate(part):
                leading = _in_order(values) >> np.uint64(shift)
                for column in range(len(ranks)):
                    near = leading
                    if shift != 48:  # only those that share what is known of the number sought
                        near = leading[leading >> np.uint64(_BITS) == found[row, column]]
                    digits = (near & np.uint64(_BUCKETS - 1)).astype(np.int64)
                    counts[row, column] += np.bincount(digits, minlength=_BUCKETS)
        if shift == 48:
            found = np.zeros(counts.shape[:2], np.uint64)
            left = np.tile(np.array(ranks, np.int64), (len(counts), 1))
        for row, column in np.ndindex(*found.shape):
            below = np.cumsum(counts[row, column])
            digit = int(np.searchsorted(below, left[row, column], side="right"))
            left[row, column] -= below[digit - 1] if digit else 0
            found[row, column] = (int(found[row, column]) << _BITS) | digit
    return _from_order(found)


_SIGN = np.uint64(1 << 63)


def _in_order(values: np.ndarray) -> np.ndarray:
    """Whole numbers in the order of the floating-point ones: those below zero with all bits turned, others with
    the sign's."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    return np.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _from_order(keys: np.ndarray) -> np.ndarray:
    return np.where(keys >= _SIGN, keys & ~_SIGN, ~keys).view(np.float64)
