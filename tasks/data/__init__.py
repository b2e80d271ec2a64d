"""Data: private rows to train on, public rows to look at, checked and projected before anything uses them.

**Bring your own.** A recipe names a loader by import path; it is called as

    loader(with_private: bool, **arguments) -> Splits

- Features are rows of numbers with the bias entry already appended, labels are 0 ... classes - 1.
- A private row may depend on its own record and on public rows only (so centre by a *public* mean): otherwise
  one record moves many rows, and no guarantee holds.
- With `with_private=False` it leaves `private` out (None) and touches no private data: that is how a deployed
  release is checked, where the private rows need not even exist.
- The split is a fixed rule, recorded as a sentence, and puts copies of a record on one side.

`load_splits` then checks shapes, values and duplicates across the splits, enforces `n_max`, and projects
every row to L2 norm at most `feature_radius`, whatever the loader did: the guarantee rests on this function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from infra.canonical import canonical_json, keyed_digest, sha256_hex
from infra.documents import DataRecord, PortfolioManifest, Split
from tasks.import_path import call


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one split. Their values are never part of a repr, so that they do not end up in a log."""

    features: np.ndarray = field(repr=False)  # shape (rows, ...), float32
    labels: np.ndarray = field(repr=False)  # shape (rows,), int64

    def __len__(self) -> int:
        return len(self.labels)

    def content(self) -> bytes:
        """What a digest of these rows covers: shape, features and labels, in a fixed byte order."""
        shape = canonical_json(list(self.features.shape))
        return shape + self.features.astype("<f4").tobytes() + self.labels.astype("<i8").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforced:
    """What `load_splits` made sure of, for every data set that it lets through."""

    feature_radius: float  # R: the L2 norm of each row is at most this
    n_max: int  # the number of private rows is at most this, in both neighbours
    neighboring_relation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """A data set in three parts."""

    private: Rows | None = field(repr=False)  # None where private rows were not asked for
    public_train: Rows
    public_gate: Rows  # held out: only ever used to check a finished model
    classes: int
    split_rule: str  # the rule in words, recorded in the portfolio manifest
    enforced: Enforced | None = None  # set by load_splits only; a loader leaves it out


class DataSource(Protocol):
    """Names a loader: a recipe's DataRecipe or a manifest's DataRecord."""

    @property
    def loader(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


def load_splits(
    source: DataSource,
    *,
    feature_radius: float,
    n_max: int,
    neighboring_relation: str,
    with_private: bool = True,
) -> Splits:
    """Load, check and project a data set.

    Args:
        feature_radius: R > 0; every row returned has an L2 norm of at most R, exactly (float64 arithmetic on
            the float32 values, rounded towards zero).
        n_max: more private rows are refused; under add-or-remove-one there must be room for one more, so
            that the cap holds for both neighbours.

    Raises:
        InvalidInput: one sentence with the loader's name and what is wrong; never a private value.
    """
    where = f"The data loader {source.loader}"
    splits = call(source.loader, "data loader", with_private=with_private, **source.arguments)
    if not isinstance(splits, Splits):
        raise InvalidInput(f"{where} must return tasks.data.Splits, but it returned {type(splits).__name__}.")
    if with_private and splits.private is None:
        raise InvalidInput(f"{where} returned no private rows although they were asked for.")
    parts = {"public_train": splits.public_train, "public_gate": splits.public_gate}
    if with_private and splits.private is not None:
        parts["private"] = splits.private
    checked = {name: _checked(rows, name, splits.classes, where) for name, rows in parts.items()}
    shapes = {rows.features.shape[1:] for rows in checked.values()}
    if len(shapes) > 1:
        raise InvalidInput(f"{where} returned rows of different shapes: {sorted(shapes)}.")
    _refuse_overlap(checked, where)
    if "private" in checked:
        spare = 1 if neighboring_relation == NeighboringRelation.ADD_OR_REMOVE_ONE else 0
        if len(checked["private"]) + spare > n_max:
            room = " (with room for one more record, as add_or_remove_one needs)" if spare else ""
            raise InvalidInput(
                f"{where} returned more private rows than the recipe's n_max {n_max} allows{room}; "
                "raise n_max, which is public, or restrict the data by a rule that does not look at them."
            )
    projected = {name: project(rows, feature_radius) for name, rows in checked.items()}
    return replace(
        splits,
        private=projected.get("private"),
        public_train=projected["public_train"],
        public_gate=projected["public_gate"],
        enforced=Enforced(
            feature_radius=feature_radius, n_max=n_max, neighboring_relation=str(neighboring_relation)
        ),
    )


def load_public_gate(manifest: PortfolioManifest) -> Rows:
    """The held-out public rows that a merged model is checked on, as when the portfolio was trained.

    No private row is touched.

    Raises:
        InvalidInput: the loader is gone, or returns other rows than the manifest records.
    """
    return _public_rows(manifest, "public_gate")


def load_public_train(manifest: PortfolioManifest) -> Rows:
    """The other public rows, which no candidate was trained on and no gate uses; as `load_public_gate`."""
    return _public_rows(manifest, "public_train")


def _public_rows(manifest: PortfolioManifest, part: Literal["public_gate", "public_train"]) -> Rows:
    splits = load_splits(
        manifest.data,
        feature_radius=manifest.feature_radius or np.inf,
        n_max=manifest.n_max or 2**62,
        neighboring_relation=manifest.neighboring_relation,
        with_private=False,
    )
    rows: Rows = getattr(splits, part)
    recorded: Split = getattr(manifest.data, part)
    if sha256_hex(rows.content()) != recorded.digest:
        raise InvalidInput(
            f"The {part.replace('_', '-')} rows from {manifest.data.loader} are not those of {manifest.reference} "
            "(their digest differs): restore the data, or train the portfolio again with `remerge train`."
        )
    return rows


def data_record(source: DataSource, splits: Splits, key: bytes) -> DataRecord:
    """What the manifest says about the data, without the number of private rows: it may itself be private.

    Args:
        key: keys the private rows' digest, so that nobody without it can test a guess of the rows.
    """
    if splits.private is None:
        raise InvalidInput("A data record needs the private rows.")
    return DataRecord(
        loader=source.loader,
        arguments=dict(source.arguments),
        split_rule=splits.split_rule,
        private=Split(rows=None, digest=keyed_digest(splits.private.content(), key)),
        public_train=Split(rows=len(splits.public_train), digest=sha256_hex(splits.public_train.content())),
        public_gate=Split(rows=len(splits.public_gate), digest=sha256_hex(splits.public_gate.content())),
    )


def project(rows: Rows, radius: float) -> Rows:
    """Shrink each row that is longer than `radius` to it; shorter rows are left as they are.

    The squared norm of every float32 row returned, computed without rounding, is at most radius^2: rows are
    scaled in float64 to a hair below the radius and rounded towards zero. Entry by entry in a fixed order, so
    that every machine gets the same bytes and thus the same digests.
    """
    limit = radius * (1 - 1e-9)  # far above the rounding of a float64 sum, far below a float32 step
    flat = rows.features.reshape(len(rows), -1)
    exact = flat.astype(np.float64)
    squares = np.zeros(len(rows))
    for column in exact.T:
        squares += column * column
    norms = np.sqrt(squares)
    long = norms > limit
    scaled = exact[long] * (limit / norms[long])[:, np.newaxis]
    rounded = scaled.astype(np.float32)
    away = np.abs(rounded.astype(np.float64)) > np.abs(scaled)
    rounded[away] = np.nextafter(rounded[away], np.float32(0))
    result = flat.copy()
    result[long] = rounded
    features = result.reshape(rows.features.shape)
    features.flags.writeable = False
    return Rows(features=features, labels=rows.labels)


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
        return Rows(features=features, labels=positions[bundle.target[rows]].astype(np.int64))

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


def _checked(rows: Rows, name: str, classes: int, where: str) -> Rows:
    if not isinstance(rows, Rows):
        raise InvalidInput(f"{where} must return {name} as tasks.data.Rows.")
    features = np.ascontiguousarray(rows.features, dtype=np.float32) + np.float32(0)  # no negative zeros
    labels = np.asarray(rows.labels)
    if features.ndim < 2 or labels.ndim != 1:
        raise InvalidInput(
            f"{where} returned {name} with features of {features.ndim} dimensions and labels of {labels.ndim}; "
            "their shapes must be (rows, ...) and (rows,)."
        )
    if len(features) != len(labels):  # without the numbers: how many private rows there are may be private
        raise InvalidInput(f"{where} returned {name} with another number of features than of labels.")
    if len(labels) == 0:
        raise InvalidInput(f"{where} returned no {name} rows.")
    if not np.isfinite(features).all():
        raise InvalidInput(f"{where} returned {name} features that are NaN or infinite.")
    if not np.issubdtype(labels.dtype, np.integer):
        raise InvalidInput(
            f"{where} returned {name} labels of type {labels.dtype}; they must be whole numbers."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise InvalidInput(
            f"{where} returned {name} labels outside 0 to {classes - 1} (it says {classes} classes)."
        )
    labels = labels.astype(np.int64)
    features.flags.writeable = labels.flags.writeable = False
    return Rows(features=features, labels=labels)


def _refuse_overlap(parts: dict[str, Rows], where: str) -> None:
    """A record on both sides of the split would be looked at in the open, or checked on itself."""
    found = {name: {row.tobytes() for row in rows.features} for name, rows in parts.items()}
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
