"""Loaders of one's own tables: CSV and Parquet files of numbers, one record a row, one column of labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.rows import Rows, Splits, record_digests
from tasks.data.table_reading import Columns, Reader, Table, read_csv, read_parquet
from tasks.data.table_scaling import Scaling, scaling_of


def csv(
    *,
    with_private: bool = True,
    path: str,
    label: str,
    classes: Sequence[Any] | int,
    public_train: str | float,
    public_gate: str | float,
    features: Sequence[str] | None = None,
    standardise: str | Mapping[str, Any] | None = None,
    bias: float = 0.0,
) -> Splits:
    """A CSV file (UTF-8, commas, a first line of column names); arguments as for `parquet`."""
    options = {"classes": classes, "public_train": public_train, "public_gate": public_gate}
    options |= {"features": features, "standardise": standardise, "bias": bias}
    return _load(read_csv, "csv", with_private, path, label, **options)


def parquet(
    *,
    with_private: bool = True,
    path: str,
    label: str,
    classes: Sequence[Any] | int,
    public_train: str | float,
    public_gate: str | float,
    features: Sequence[str] | None = None,
    standardise: str | Mapping[str, Any] | None = None,
    bias: float = 0.0,
) -> Splits:
    """A Parquet file.

    Args:
        path: of the file with the private rows. Relative paths begin in the folder of prefect.yaml, which is where
            the worker runs.
        label: the column of labels.
        classes: the values in that column, in order: the first becomes label 0. Or how many there are, where the
            column holds 0, 1, ... already.
        public_train, public_gate: either both paths of files of public rows; with `with_private=False` the private
            file is then not opened. Or both shares of the rows of `path`, such as 0.1 and 0.1, which are then
            *public*: each row falls where the SHA-256 of its features says.
        features: columns, in order; default: all others of the public-train file.
        standardise: "public_train" (each column minus its mean, divided by its standard deviation, both of the
            public-train rows only), or a mapping from columns to stated public constants {mean: 40, scale: 12};
            default: values as they are.
        bias: a constant entry to append, for linear models; 0, the default, is none.
    """
    options = {"classes": classes, "public_train": public_train, "public_gate": public_gate}
    options |= {"features": features, "standardise": standardise, "bias": bias}
    return _load(read_parquet, "parquet", with_private, path, label, **options)


def _load(
    read: Reader,
    loader: str,
    with_private: bool,
    path: str,
    label: str,
    *,
    classes: Any,
    public_train: Any,
    public_gate: Any,
    features: Any,
    standardise: Any,
    bias: Any,
) -> Splits:
    where = f"tasks.data:{loader}"
    values = _label_values(where, classes)
    _require_texts(where, path=path, label=label)
    _require_features(where, features, label)
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not np.isfinite(bias):
        raise InvalidInput(f"The argument bias of {where} must be a finite number, but {bias!r} was given.")
    columns = Columns(label=label, values=values, features=None if features is None else tuple(features))
    if isinstance(public_train, str) and isinstance(public_gate, str):
        train = read(_place(public_train), columns, public=True)
        columns = Columns(label=label, values=values, features=train.names)
        tables = {"public_train": train, "public_gate": read(_place(public_gate), columns, public=True)}
        if with_private:
            tables["private"] = read(_place(path), columns, public=False)
        rule = f"the rows of {path} are private, of {public_train} public-train, of {public_gate} public-gate"
    else:
        shares = _shares(where, public_train, public_gate)
        tables = _split(read(_place(path), columns, public=False), shares, with_private)
        rule = (
            f"each row of {path} by the SHA-256 of its features as float32 numbers, read as a number from 0 to 1: "
            f"below {shares[0]:g} it is public-train, from there below {shares[0] + shares[1]:g} public-gate, else "
            "private"
        )
        for part in tables:
            if len(tables[part].labels) == 0:
                raise InvalidInput(
                    f"The shares given to {where} leave no {part} rows in {path}; change the shares."
                )
    scaling = scaling_of(where, standardise, tables["public_train"])
    width = len(tables["public_train"].names)
    rows = {part: _rows(tables.pop(part), scaling, width, float(bias)) for part in tuple(tables)}
    return Splits(
        private=rows.get("private"),
        public_train=rows["public_train"],
        public_gate=rows["public_gate"],
        classes=len(values),
        split_rule=rule + scaling.in_words,
    )


def _split(table: Table, shares: tuple[float, float], with_private: bool) -> dict[str, Table]:
    """Copies of a row have the same features and thus fall into the same part."""
    positions = np.array(
        [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8]) / 2**64 for row in table.features]
    ).reshape(-1)
    train, gate = positions < shares[0], (positions >= shares[0]) & (positions < shares[0] + shares[1])
    parts = {"public_train": train, "public_gate": gate}
    if with_private:
        parts["private"] = ~(train | gate)
    return {
        part: Table(table.features[kept], table.labels[kept], table.names) for part, kept in parts.items()
    }


def _rows(table: Table, scaling: Scaling, width: int, bias: float) -> Rows:
    records = record_digests(table.features)
    features = np.empty((len(table.labels), width + (1 if bias else 0)), dtype=np.float32)
    for column in range(width):  # one column at a time: float64 of a whole table would be twice its memory
        with np.errstate(over="ignore"):  # load_splits refuses what is then infinite
            features[:, column] = scaling.apply(column, table.features[:, column])
    if bias:
        features[:, -1] = bias
    return Rows(features=features, labels=table.labels, handed_over=True, records=records)


def _place(path: str) -> Path:
    """Relative paths begin where the worker runs, so that a check by hand reads the same file as a training."""
    from infra.stack_services import repository_root

    place = Path(path).expanduser()
    return place if place.is_absolute() else repository_root() / place


def _label_values(where: str, classes: Any) -> tuple[Any, ...]:
    values: Any = classes
    if type(classes) is int:
        values = range(classes)
    if (
        not isinstance(values, list | tuple | range)
        or len(values) < 2
        or not all(isinstance(value, str | int | float) for value in values)
        or len(set(values)) < len(values)
    ):
        raise InvalidInput(
            f"The argument classes of {where} must list the label column's values in order, such as [no, yes], or be "
            f"their number from 2, but {classes!r} was given."
        )
    return tuple(values)


def _require_texts(where: str, **arguments: Any) -> None:
    for name, given in arguments.items():
        if not isinstance(given, str) or not given:
            raise InvalidInput(f"The argument {name} of {where} must be a text, but {given!r} was given.")


def _require_features(where: str, features: Any, label: str) -> None:
    if features is None:
        return
    if (
        not isinstance(features, list | tuple)
        or not features
        or not all(isinstance(name, str) for name in features)
        or len(set(features)) < len(features)
        or label in features
    ):
        raise InvalidInput(
            f"The argument features of {where} must list different columns other than the label, but {features!r} was "
            "given."
        )


def _shares(where: str, train: Any, gate: Any) -> tuple[float, float]:
    for given in (train, gate):
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1:
            break
    else:
        if train + gate < 1:
            return float(train), float(gate)
    raise InvalidInput(
        f"The arguments public_train and public_gate of {where} must both be paths, or both shares above 0 that add up "
        f"to less than 1, but {train!r} and {gate!r} were given."
    )
