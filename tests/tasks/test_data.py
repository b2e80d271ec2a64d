"""Loading, checking and projecting data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from accounting.errors import InvalidInput
from infra.canonical import sha256_hex
from infra.documents import PortfolioManifest
from tasks.data import Rows, Splits, data_record, digits, load_public_gate, load_splits, project
from tasks.recipes import DataRecipe

DIGITS = DataRecipe(loader="tasks.data:digits")
OWN = DataRecipe(loader="users_own:rows")
LIMITS: dict[str, Any] = {"feature_radius": 1.0, "n_max": 1200, "neighboring_relation": "replace_one"}


def squared_norms(features: np.ndarray) -> list[Fraction]:
    """Without rounding."""
    return [
        sum((Fraction(float(x)) ** 2 for x in row), Fraction(0))
        for row in features.reshape(len(features), -1)
    ]


@given(
    features=arrays(
        np.float32,
        st.tuples(st.integers(1, 6), st.integers(1, 9)),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    radius=st.floats(1e-3, 1e3),
)
def test_projection_is_exact_and_leaves_short_rows_alone(features: np.ndarray, radius: float) -> None:
    rows = Rows(features=features, labels=np.zeros(len(features), dtype=np.int64))
    projected = project(rows, radius).features
    assert projected.dtype == np.float32
    assert all(norm <= Fraction(radius) ** 2 for norm in squared_norms(projected))
    for before, after in zip(features, projected, strict=True):
        length = np.linalg.norm(before.astype(np.float64))
        if length < radius * (1 - 1e-8):
            assert np.array_equal(before, after)
        else:
            expected = before.astype(np.float64) * (radius / length)
            assert np.allclose(after, expected, rtol=3e-7, atol=1e-30)


def test_the_digits_are_split_checked_and_projected() -> None:
    splits = load_splits(DIGITS, **LIMITS)
    assert splits.private is not None
    assert [len(part) for part in (splits.private, splits.public_train, splits.public_gate)] == [
        1200,
        300,
        297,
    ]
    for part in (splits.private, splits.public_train, splits.public_gate):
        assert part.features.shape[1] == 65
        assert all(norm <= 1 for norm in squared_norms(part.features))
        assert part.features[:, -1].min() > 0.05  # the bias entry
        assert not part.features.flags.writeable
    everything = np.vstack(
        [digits().private.features, digits().public_train.features, digits().public_gate.features]
    )
    assert len(np.unique(everything, axis=0)) == 1797


def test_the_digits_split_is_the_same_everywhere() -> None:
    """On every machine: a portfolio trained on one is checked on another."""
    record = data_record(DIGITS, load_splits(DIGITS, **LIMITS), b"key")
    assert record.public_train.digest == "58e7744032bcddedbb195cdc14d5488f65039b13d902fddfea45c2646ee16223"
    assert record.public_gate.digest == "4524a85ddf5f815d9057bd7967a998f82ed31bc406827de1984bdd8476d1dd6f"


def test_some_digits_alone_are_the_same_rows_with_new_labels() -> None:
    """Which rows are private does not depend on the choice; only the public mean that they are centred by does."""
    ten, two = digits(), digits(classes=[8, 3])
    assert two.classes == 2
    assert "of each part only the digits 8, 3 are kept, labelled 0, 1, ... in this order" in two.split_rule
    assert "digits 8, 3" not in ten.split_rule
    for name in ("private", "public_train", "public_gate"):
        all_rows, kept_rows = getattr(ten, name), getattr(two, name)
        chosen = np.isin(all_rows.labels, (3, 8))
        assert 40 < len(kept_rows) == chosen.sum()
        assert np.array_equal(kept_rows.labels, np.where(all_rows.labels[chosen] == 8, 0, 1))
        shift = kept_rows.features - all_rows.features[chosen]
        assert np.allclose(shift, shift[0], atol=1e-6)
    assert np.allclose(two.public_train.features[:, :-1].mean(axis=0), 0, atol=1e-6)


@pytest.mark.parametrize(
    "classes", [[3], [], [3, 3], [3, 10], [-1, 3], "38", 3, [3.0, 8.0], [True, False], None]
)
def test_digits_that_cannot_be_told_apart_are_refused(classes: Any) -> None:
    source = DataRecipe(loader="tasks.data:digits", arguments={"classes": classes})
    with pytest.raises(InvalidInput, match="must list at least two different digits"):
        load_splits(source, **LIMITS)


def test_rows_do_not_print_their_values() -> None:
    splits = load_splits(DIGITS, **LIMITS)
    assert repr(splits.private) == "Rows()"
    assert "private=" not in repr(splits)


def test_private_rows_are_not_touched_unless_asked_for() -> None:
    splits = load_splits(DIGITS, **LIMITS, with_private=False)
    assert splits.private is None
    with pytest.raises(InvalidInput, match="needs the private rows"):
        data_record(DIGITS, splits, b"key")


def test_digests_are_keyed_for_private_rows_only() -> None:
    splits = load_splits(DIGITS, **LIMITS)
    record, other = data_record(DIGITS, splits, b"key"), data_record(DIGITS, splits, b"other key")
    assert record.private.digest != other.private.digest
    assert record.private.digest != sha256_hex(splits.private.content())
    assert record.private.rows is None
    assert record.public_gate == other.public_gate
    assert record.public_gate.digest == sha256_hex(splits.public_gate.content())
    assert (record.public_train.rows, record.public_gate.rows) == (300, 297)


def rows(values: list[list[float]], labels: list[int] | None = None) -> Rows:
    return Rows(
        features=np.array(values, dtype=np.float32),
        labels=np.array(labels or [0] * len(values), dtype=np.int64),
    )


GOOD = Splits(
    private=rows([[1, 2], [3, 4]]),
    public_train=rows([[5, 6]], [1]),
    public_gate=rows([[7, 8]], [1]),
    classes=2,
    split_rule="by hand",
)


@pytest.mark.parametrize(
    ("splits", "sentence"),
    [
        (replace(GOOD, public_gate=rows([[3, 4]])), "returned 1 record both as private and as public_gate"),
        (replace(GOOD, public_train=rows([[3, 4], [1, 2]])), "2 records both as private and as public_train"),
        (replace(GOOD, public_train=rows([[7, 8]])), "1 record both as public_train and as public_gate"),
        (replace(GOOD, private=rows([[0.0, 1]]), public_gate=rows([[-0.0, 1]])), "1 record both as private"),
        (replace(GOOD, private=rows([[float("nan"), 1]])), "private features that are NaN or infinite"),
        (
            replace(GOOD, public_gate=rows([[float("inf"), 1]])),
            "public_gate features that are NaN or infinite",
        ),
        (replace(GOOD, private=rows([[1, 2]], [2])), "private labels outside 0 to 1"),
        (replace(GOOD, private=rows([[1, 2]], [-1])), "private labels outside 0 to 1"),
        (replace(GOOD, private=rows([[1, 2]], [0, 1])), "another number of features than of labels"),
        (
            replace(GOOD, private=Rows(features=np.ones(2), labels=np.zeros(2, int))),
            "must be (rows, ...) and",
        ),
        (replace(GOOD, private=rows([[1, 2, 3]])), "rows of different shapes"),
        (replace(GOOD, private=Rows(features=np.zeros((0, 2)), labels=np.zeros(0, int))), "no private rows"),
        (replace(GOOD, private=None), "returned no private rows although they were asked for"),
        (
            replace(GOOD, private=rows([[i, 2] for i in range(9)])),
            "more private rows than the recipe's n_max 3",
        ),
        ("rows", "must return tasks.data.Splits, but it returned str"),
    ],
)
def test_a_loader_that_goes_wrong_is_told_how(
    users_loader: Callable[[Callable[..., Any]], None], splits: Any, sentence: str
) -> None:
    users_loader(lambda *, with_private: splits)
    with pytest.raises(InvalidInput) as caught:
        load_splits(OWN, feature_radius=1.0, n_max=3, neighboring_relation="replace_one")
    assert "users_own:rows" in caught.value.message
    assert sentence in caught.value.message


def test_n_max_holds_for_both_neighbours(users_loader: Callable[[Callable[..., Any]], None]) -> None:
    users_loader(lambda *, with_private: GOOD)
    load_splits(OWN, feature_radius=1.0, n_max=2, neighboring_relation="replace_one")
    with pytest.raises(InvalidInput, match="with room for one more record"):
        load_splits(OWN, feature_radius=1.0, n_max=2, neighboring_relation="add_or_remove_one")
    load_splits(OWN, feature_radius=1.0, n_max=3, neighboring_relation="add_or_remove_one")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (DataRecipe(loader="tasks.data"), "must be an import path such as"),
        (DataRecipe(loader="nowhere_at_all:rows"), "no module named nowhere_at_all"),
        (DataRecipe(loader="tasks.data:letters"), "module tasks.data has no function letters"),
        (DataRecipe(loader="tasks.data:digits", arguments={"size": 3}), "does not accept its arguments"),
    ],
)
def test_a_loader_that_is_not_there(source: DataRecipe, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        load_splits(source, **LIMITS)


def test_a_loader_that_fails_is_quoted(users_loader: Callable[[Callable[..., Any]], None]) -> None:
    def loader(*, with_private: bool) -> Splits:
        raise FileNotFoundError("no such file: rows.csv")

    users_loader(loader)
    with pytest.raises(
        InvalidInput, match=r"users_own:rows failed with FileNotFoundError: no such file: rows\.csv"
    ):
        load_splits(OWN, **LIMITS)


def test_the_gate_rows_are_those_of_the_manifest() -> None:
    splits = load_splits(DIGITS, **LIMITS)
    fields = {
        "name": "digits",
        "serial": 1,
        "created_at": "2026-01-01T00:00:00Z",
        "lineage": "digits",
        "unit": "record",
        "neighboring_relation": "replace_one",
        "recipe_digest": "0" * 64,
        "data": data_record(DIGITS, splits, b"key").model_dump(mode="json"),
        "network": {"factory": "tasks.models:softmax_regression", "arguments": {}},
        "initialisation_digest": "0" * 64,
        "feature_radius": 1.0,
        "n_max": 1200,
        "flow_run_id": None,
        "candidates": [
            {
                "name": "a",
                "registered_model": "digits",
                "version": 1,
                "run_id": "r",
                "model_sha256": "0" * 64,
                "trajectory_sha256": "0" * 64,
            }
        ],
    }
    manifest = PortfolioManifest.from_fields(fields, "manifest")
    rows = load_public_gate(manifest)
    features, labels = rows.features, rows.labels
    assert np.array_equal(features, splits.public_gate.features)
    assert np.array_equal(labels, splits.public_gate.labels)
    with pytest.raises(InvalidInput, match="are not those of digits@1"):
        load_public_gate(PortfolioManifest.from_fields({**fields, "feature_radius": 0.5}, "manifest"))
