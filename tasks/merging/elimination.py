"""Linear algebra whose bytes are the same on every machine: sums in a fixed order, by element-wise steps alone.

BLAS and LAPACK add up in an order that depends on the processor and the number of threads, so a model merged with
them could not be merged again elsewhere to the byte. This is slower: a second or so for a thousand columns, and a
hundred times that for five thousand.
"""

from __future__ import annotations

import numpy as np

from accounting.errors import IncompatibleCandidates

BLOCK = 2**17  # elements that stay in a core's cache


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix product, shapes (rows, inner) and (inner, columns), added up in the order of `inner`."""
    total = np.zeros((left.shape[0], right.shape[1]))
    step = max(1, BLOCK // max(1, right.shape[1]))
    term = np.empty_like(total[:step])
    for start in range(0, len(total), step):
        part = total[start : start + step]
        factors = np.ascontiguousarray(left[start : start + step].T)
        for k in range(len(factors)):
            part += np.multiply(factors[k][:, None], right[k], out=term[: len(part)])
    return total


def solved(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """X with X @ matrix = right, by elimination without exchanges, which a positive definite matrix does not need.

    Args:
        matrix: symmetric and positive definite, shape (n, n); changed.
        right: shape (m, n).

    Returns:
        shape (m, n).
    """
    size = len(matrix)
    found = np.ascontiguousarray(right.T)
    scratch = np.empty_like(matrix)
    for k in range(size):
        pivot = matrix[k, k]
        if not 0 < pivot < np.inf:
            raise IncompatibleCandidates(
                "The equations of a layer cannot be solved in float64; choose a larger ridge."
            )
        factor = matrix[k + 1 :, k] / pivot
        term = scratch[: size - k - 1, : size - k - 1]
        np.multiply(factor[:, None], matrix[k, k + 1 :], out=term)
        matrix[k + 1 :, k + 1 :] -= term
        found[k + 1 :] -= factor[:, None] * found[k]
    for k in reversed(range(size)):
        found[k] /= matrix[k, k]
        found[:k] -= matrix[:k, k, None] * found[k]
    return found.T
