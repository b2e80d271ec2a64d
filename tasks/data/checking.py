"""What `load_splits` demands of a loader's rows. Sentences name the part at fault, never a private value or count."""

from __future__ import annotations

from typing import Any

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.rows import Rows, Splits, blocks, record_digests

_NUMBERS = "biuf"  # numpy's kinds of numbers: bool, whole, unsigned, floating point


def require_splits(splits: Any, *, with_private: bool, where: str) -> Splits:
    """Check all of a loader's result but its rows."""
    if not isinstance(splits, Splits):
        raise InvalidInput(f"{where} must return tasks.data.Splits, but it returned {type(splits).__name__}.")
    if with_private and splits.private is None:
        raise InvalidInput(f"{where} returned no private rows although they were asked for.")
    if isinstance(splits.classes, bool) or not isinstance(splits.classes, int) or splits.classes < 2:
        raise InvalidInput(
            f"{where} returned classes {splits.classes!r}; it must be the number of classes, a whole number from 2."
        )
    if not isinstance(splits.split_rule, str) or not splits.split_rule.strip():
        raise InvalidInput(
            f"{where} returned no split_rule; it must be a sentence that says how rows were split."
        )
    return splits


def checked(rows: Any, name: str, classes: int, where: str) -> Rows:
    """The rows of one part as float32 and int64 arrays that nothing else refers to.

    Raises:
        InvalidInput: wrong dtype, shape, values or labels.
    """
    if not isinstance(rows, Rows):
        raise InvalidInput(f"{where} must return {name} as tasks.data.Rows.")
    given = _array(rows.features, f"{where} returned {name} features")
    labels = _array(rows.labels, f"{where} returned {name} labels")
    if given.ndim < 2 or labels.ndim != 1:
        raise InvalidInput(
            f"{where} returned {name} with features of {given.ndim} dimensions and labels of {labels.ndim}; "
            "their shapes must be (rows, ...) and (rows,)."
        )
    if len(given) != len(labels):  # without the numbers: how many private rows there are may be private
        raise InvalidInput(f"{where} returned {name} with another number of features than of labels.")
    if len(labels) == 0:
        raise InvalidInput(f"{where} returned no {name} rows.")
    if given[:1].size == 0:
        raise InvalidInput(f"{where} returned {name} rows without a single number in them.")
    features = _float32(given, name, where, in_place=rows.handed_over)
    if not np.issubdtype(labels.dtype, np.integer):
        raise InvalidInput(
            f"{where} returned {name} labels of type {labels.dtype}; they must be whole numbers, "
            f"0 to {classes - 1} (in NumPy: labels.astype(int))."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise InvalidInput(
            f"{where} returned {name} labels outside 0 to {classes - 1} (it says {classes} classes)."
        )
    if rows.records is not None and not (
        isinstance(rows.records, frozenset) and all(isinstance(one, bytes) for one in rows.records)
    ):
        raise InvalidInput(f"{where} returned {name} records that are not from tasks.data.record_digests.")
    return Rows(features=features, labels=labels.astype(np.int64), records=rows.records)


def _array(values: Any, what: str) -> np.ndarray:
    """As a NumPy array of numbers; torch tensors are taken too."""
    try:
        if hasattr(values, "detach"):  # a torch tensor, perhaps one that remembers gradients or lies on a GPU
            values = values.detach().cpu().numpy()
        masked = isinstance(values, np.ma.MaskedArray)
        found = np.asarray(values)
    except Exception:  # noqa: BLE001  numpy quotes values in some of its errors, so none is passed on
        raise InvalidInput(
            f"{what} as {type(values).__name__}, which NumPy cannot read as one array; return a NumPy array."
        ) from None
    if masked:
        raise InvalidInput(f"{what} as a masked array; fill in or leave out the rows with missing values.")
    if found.dtype.kind not in _NUMBERS:
        kind = "objects or texts" if found.dtype.kind in "OSUTV" else str(found.dtype)
        raise InvalidInput(f"{what} of dtype {found.dtype} ({kind}); return numbers, for example float32.")
    return found


def _float32(given: np.ndarray, name: str, where: str, *, in_place: bool) -> np.ndarray:
    kept = in_place and given.dtype == np.float32 and given.flags.c_contiguous and given.flags.writeable
    features = given if kept else np.empty(given.shape, dtype=np.float32)
    for block in blocks(given):
        part = given[block]
        if not np.isfinite(part).all():
            raise InvalidInput(f"{where} returned {name} features that are NaN or infinite.")
        with np.errstate(over="ignore"):
            np.add(part.astype(np.float32), np.float32(0), out=features[block])  # no negative zeros
        if not np.isfinite(features[block]).all():
            raise InvalidInput(
                f"{where} returned {name} features beyond the range of float32 (about 3.4e38); scale them down."
            )
    return features


def refuse_overlap(parts: dict[str, Rows], where: str) -> None:
    """A record on both sides of the split would be looked at in the open, or checked on itself.

    Rows are compared by a digest of 16 bytes: whole rows of a large data set would need its memory once more.
    """
    found = {name: record_digests(rows.features) for name, rows in parts.items()}
    for one, other in (
        ("private", "public_train"),
        ("private", "public_gate"),
        ("public_train", "public_gate"),
    ):
        shared = len(found.get(one, set()) & found[other])
        if shared:
            raise InvalidInput(
                f"{where} returned {shared} record{'s' if shared > 1 else ''} both as {one} and as {other}; "
                "split the data by a rule that puts copies of a record on one side."
            )
