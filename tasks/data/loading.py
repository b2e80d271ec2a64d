"""Loading a data set: call its loader, check what it returns, enforce the limits that the guarantee rests on."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from infra.documents import DataRecord, PortfolioManifest, Split
from tasks.data.checking import checked, refuse_overlap, require_splits
from tasks.data.projection import shrink
from tasks.data.rows import Enforced, Rows, Splits
from tasks.import_path import call


class DataSource(Protocol):
    """Names a loader: a recipe's DataRecipe or a manifest's DataRecord."""

    @property
    def loader(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


def load_splits(
    source: DataSource,
    *,
    feature_radius: float | None,
    n_max: int,
    neighboring_relation: str,
    with_private: bool = True,
) -> Splits:
    """Load, check and project a data set.

    Args:
        feature_radius: R > 0; every row returned has an L2 norm of at most R, exactly (float64 arithmetic on
            the float32 values, rounded towards zero). None: rows of any length are left as they are.
        n_max: more private rows are refused; under add-or-remove-one there must be room for one more, so
            that the cap holds for both neighbours.

    Raises:
        InvalidInput: one sentence with the loader's name and what is wrong; never a private value.
    """
    if feature_radius is not None and not feature_radius > 0:
        raise InvalidInput(
            f"The feature radius must be above 0, or left out, but {feature_radius} was given."
        )
    where = f"The data loader {source.loader}"
    if "with_private" in source.arguments:
        raise InvalidInput(f"{where} is told with_private by whoever calls it; remove it from the arguments.")
    returned = call(source.loader, "data loader", with_private=with_private, **source.arguments)
    splits = require_splits(returned, with_private=with_private, where=where)
    del returned
    given = {"public_train": splits.public_train, "public_gate": splits.public_gate}
    if with_private and splits.private is not None:
        given["private"] = splits.private
    classes, rule = splits.classes, splits.split_rule
    del (
        splits
    )  # the loader's rows go as soon as each part is copied: two of a large part is all there ever is
    parts: dict[str, Rows] = {}
    for name in tuple(given):
        parts[name] = checked(given.pop(name), name, classes, where)
    shapes = {rows.features.shape[1:] for rows in parts.values()}
    if len(shapes) > 1:
        raise InvalidInput(f"{where} returned rows of different shapes: {sorted(shapes)}.")
    refuse_overlap(parts, where)
    if "private" in parts:
        spare = 1 if neighboring_relation == NeighboringRelation.ADD_OR_REMOVE_ONE else 0
        if len(parts["private"]) + spare > n_max:
            room = " (with room for one more record, as add_or_remove_one needs)" if spare else ""
            raise InvalidInput(
                f"{where} returned more private rows than the recipe's n_max {n_max} allows{room}; "
                "raise n_max, which is public, or restrict the data by a rule that does not look at them."
            )
    for rows in parts.values():
        if feature_radius is not None:
            shrink(rows.features, feature_radius)
        rows.features.flags.writeable = rows.labels.flags.writeable = False
    return Splits(
        private=parts.get("private"),
        public_train=parts["public_train"],
        public_gate=parts["public_gate"],
        classes=classes,
        split_rule=rule,
        enforced=Enforced(
            feature_radius=feature_radius, n_max=n_max, neighboring_relation=str(neighboring_relation)
        ),
    )


def require_public_alone(source: DataSource, splits: Splits, *, n_max: int) -> None:
    """Ask the loader for its public rows alone, as every later check of a model will.

    Args:
        splits: from `load_splits`, with private rows.

    Raises:
        InvalidInput: the loader fails without private rows, or then gives other public rows.
    """
    enforced = splits.enforced
    alone = load_splits(
        source,
        feature_radius=None if enforced is None else enforced.feature_radius,
        n_max=n_max,
        neighboring_relation="replace_one" if enforced is None else enforced.neighboring_relation,
        with_private=False,
    )
    for part in ("public_train", "public_gate"):
        if getattr(alone, part).digest() != getattr(splits, part).digest():
            raise InvalidInput(
                f"The data loader {source.loader} returned other {part} rows with with_private=False than with True: "
                "every check of a model asks for the public rows alone, so they must be the same; correct the loader."
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
        # A group's loader has projected each task's rows: here they begin with the number of their task.
        feature_radius=manifest.feature_radius if manifest.tasks is None else None,
        n_max=manifest.n_max or 2**62,
        neighboring_relation=manifest.neighboring_relation,
        with_private=False,
    )
    rows: Rows = getattr(splits, part)
    recorded: Split = getattr(manifest.data, part)
    if rows.digest() != recorded.digest:
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
        private=Split(rows=None, digest=splits.private.digest(key)),
        public_train=Split(rows=len(splits.public_train), digest=splits.public_train.digest()),
        public_gate=Split(rows=len(splits.public_gate), digest=splits.public_gate.digest()),
    )
