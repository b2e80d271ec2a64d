"""Standardising a table's columns by public numbers alone: stated beforehand, or of the public-train rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.table_reading import Table


@dataclass(frozen=True, slots=True)
class Scaling:
    """(value - mean) / scale for each column."""

    means: np.ndarray  # shape (columns,), float64
    scales: np.ndarray  # shape (columns,), float64, > 0
    in_words: str  # appended to the split rule; empty where values are left as they are

    def apply(self, column: int, values: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = (values.astype(np.float64) - self.means[column]) / self.scales[column]
        return scaled


def scaling_of(where: str, standardise: Any, public_train: Table) -> Scaling:
    """What the argument `standardise` says; columns that it does not name are left as they are.

    Raises:
        InvalidInput: it is neither "public_train" nor a mapping from columns to a mean and a scale.
    """
    names = public_train.names
    means, scales = np.zeros(len(names)), np.ones(len(names))
    if standardise is None:
        return Scaling(means, scales, "")
    if standardise == "public_train":
        for column in range(len(names)):
            # Exactly rounded sums, so that every machine gets the same rows and digests.
            values = public_train.features[:, column].astype(np.float64)
            means[column] = math.fsum(values) / len(values)
            spread = math.sqrt(math.fsum((values - means[column]) ** 2) / len(values))
            scales[column] = spread if spread > 0 else 1.0  # a constant column says nothing about its scale
        return Scaling(
            means, scales, "; columns are standardised by mean and deviation of the public-train rows"
        )
    if not isinstance(standardise, Mapping):
        raise InvalidInput(
            f'The argument standardise of {where} must be "public_train" or a mapping from columns to '
            f"{{mean: ..., scale: ...}}, but {standardise!r} was given."
        )
    for name, constants in standardise.items():
        if name not in names:
            raise InvalidInput(
                f"The argument standardise of {where} names {name!r}, which is not among the features."
            )
        if not isinstance(constants, Mapping) or not set(constants) <= {"mean", "scale"}:
            raise InvalidInput(
                f"The argument standardise of {where} must give {name!r} a mean and a scale, nothing else."
            )
        mean, scale = constants.get("mean", 0.0), constants.get("scale", 1.0)
        numbers = all(
            isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
            for value in (mean, scale)
        )
        if not numbers or not scale > 0:
            raise InvalidInput(
                f"The argument standardise of {where} must give {name!r} a finite mean and a scale above 0."
            )
        column = names.index(name)
        means[column], scales[column] = mean, scale
    return Scaling(means, scales, "; columns are standardised by stated constants")
