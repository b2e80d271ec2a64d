"""Reading a table: the columns that are wanted, as numbers; of a private file no value and no count is told."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from accounting.errors import InvalidInput

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What is wanted of a table."""

    label: str
    values: tuple[Any, ...]  # of the label column; the position is the label
    features: tuple[str, ...] | None  # None: all others


@dataclass(frozen=True, slots=True)
class Table:
    """Features (rows, columns) float32, labels (rows,) int64."""

    features: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)
    names: tuple[str, ...]


class Reader(Protocol):
    def __call__(self, path: Path, columns: Columns, *, public: bool) -> Table: ...


def read_csv(path: Path, columns: Columns, *, public: bool) -> Table:
    """Read a CSV file; see `_table`."""
    import pandas

    def names() -> list[str]:
        with path.open(
            encoding="utf-8-sig", newline=""
        ) as file:  # pandas would rename a name that comes twice
            lines = csv.reader(file)
            header, first = next(lines, []), next(lines, [])
        if len(first) > len(header):  # pandas would take the fields too many, in front, for names of rows
            raise ValueError("more fields than the header has")
        return [name or f"Unnamed: {position}" for position, name in enumerate(header)]

    def read(wanted: list[str]) -> pandas.DataFrame:
        # All columns: where only some are asked for, pandas does not mind lines of too many fields.
        return pandas.read_csv(path, encoding="utf-8", low_memory=False)[wanted]

    return _table(path, "CSV", names, read, columns, public=public)


def read_parquet(path: Path, columns: Columns, *, public: bool) -> Table:
    """Read a Parquet file; see `_table`."""
    from pyarrow import parquet

    def names() -> list[str]:
        return [name for name in parquet.read_schema(path).names if not name.startswith("__index_level_")]

    def read(wanted: list[str]) -> pandas.DataFrame:
        # What pandas calls an index is a column like any other here.
        return parquet.read_table(path, columns=wanted).to_pandas(ignore_metadata=True)

    return _table(path, "Parquet", names, read, columns, public=public)


def _table(
    path: Path,
    kind: str,
    names: Callable[[], list[str]],
    read: Callable[[list[str]], pandas.DataFrame],
    columns: Columns,
    *,
    public: bool,
) -> Table:
    """Numbers from a file.

    Args:
        public: whether errors may tell values and counts.

    Raises:
        InvalidInput: one sentence with the file, and the column at fault.
    """
    if not path.is_file():
        raise InvalidInput(f"There is no file {path}; relative paths begin in the folder of prefect.yaml.")
    unreadable = f"{path} cannot be read as a {kind} file"
    there = _quietly(names, unreadable)
    if not there:
        raise InvalidInput(f"{path} is empty; its first line must name the columns.")
    twice = next((name for position, name in enumerate(there) if name in there[:position]), None)
    if twice is not None:
        raise InvalidInput(f"{path} has two columns named {twice!r}; give each a name of its own.")
    wanted = list(columns.features or [name for name in there if name != columns.label])
    for name in (*wanted, columns.label):
        if name not in there:
            raise InvalidInput(f"{path} has no column {name!r}; correct the loader's arguments or the file.")
    if not wanted:
        raise InvalidInput(f"{path} has no column beside the label {columns.label!r}.")
    frame = _quietly(lambda: read([*wanted, columns.label]), unreadable)
    if not public and len(frame) == 0:
        raise InvalidInput(f"{path} holds no rows.")
    features = np.empty((len(frame), len(wanted)), dtype=np.float32)
    for position, name in enumerate(wanted):
        with np.errstate(over="ignore"):
            features[:, position] = _numbers(frame[name], name, path, public=public)
        if not np.isfinite(features[:, position]).all():
            raise InvalidInput(f"Column {name!r} of {path} holds infinite or too large numbers for float32.")
    return Table(features, _labels(frame[columns.label], columns, path, public=public), tuple(wanted))


def _numbers(column: pandas.Series[Any], name: str, path: Path, *, public: bool) -> np.ndarray:
    from pandas.api import types

    # A column without a single value is read as texts or as numbers, whichever; what is wrong is that they are missing.
    _refuse_missing(column, name, path, public=public)
    if not types.is_numeric_dtype(column.dtype) or types.is_complex_dtype(column.dtype):
        raise InvalidInput(
            f"Column {name!r} of {path} does not hold numbers only: turn categories into columns of 0 and 1 beforehand "
            "(one-hot), or leave the column out by listing `features`."
        )
    return np.asarray(column.to_numpy(dtype=np.float64))


def _labels(column: pandas.Series[Any], columns: Columns, path: Path, *, public: bool) -> np.ndarray:
    _refuse_missing(column, columns.label, path, public=public)
    positions = {value: position for position, value in enumerate(columns.values)}
    found = [positions.get(value, -1) for value in column.tolist()]
    labels = np.array(found, dtype=np.int64)
    if len(labels) and labels.min() < 0:
        value = f" ({column.tolist()[int(np.argmin(labels))]!r})" if public else ""
        raise InvalidInput(
            f"The label column {columns.label!r} of {path} holds a value{value} that is not in `classes`; list all "
            "values in order, as they are written there (numbers without quotes)."
        )
    return labels


def _refuse_missing(column: pandas.Series[Any], name: str, path: Path, *, public: bool) -> None:
    missing = int(column.isna().sum())
    if missing:
        count = f" in {missing} row{'s' if missing > 1 else ''}" if public else ""
        raise InvalidInput(
            f"Column {name!r} of {path} has missing values{count}; fill them in by a rule that looks at one row at a "
            "time, or leave those rows out."
        )


def _quietly(step: Callable[[], Any], unreadable: str) -> Any:
    """Parsers quote values and line numbers in their errors: only the kind of error is passed on."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001
        raise InvalidInput(f"{unreadable} ({type(error).__name__}).") from None
