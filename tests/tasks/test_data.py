"""Loading, checking and projecting data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from accounting.errors import InvalidInput
from infra.canonical import sha256_hex
from infra.documents import PortfolioManifest
from tasks.data import (
    Rows,
    Splits,
    data_record,
    digits,
    load_public_gate,
    load_splits,
    project,
    require_public_alone,
)
from tasks.recipes import DataRecipe

DIGITS = DataRecipe(loader="tasks.data:digits")
OWN = DataRecipe(loader="users_own:rows")
ROOT = Path(__file__).parents[2]
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


# SHA-256 of the parts' contents, as the code of released portfolios computed them: classes, then feature radius.
DIGESTS = {
    ("ten", None): (
        "f701938736a262d035df5beed9187240ad375ef15432c326c64ed3eecd3dccd8",
        "9b8a067627eca3735f3292029f258fe552b87ce401f6533815a0f882a8090fb1",
        "96b2e063ff7961ace395ea5bfb648ba692682afd536fcce3ecb021e3688e55f9",
    ),
    ("ten", 1.0): (
        "1489f9bc1789810c2ac324801cec2291bd1e22ecb3d88005187ead70b7398e59",
        "58e7744032bcddedbb195cdc14d5488f65039b13d902fddfea45c2646ee16223",
        "4524a85ddf5f815d9057bd7967a998f82ed31bc406827de1984bdd8476d1dd6f",
    ),
    ("ten", 2.0): (
        "e018bf69f58a508b7df216056dcb28c251ce14f4f31319ccdea37d2fb9c1e1a7",
        "ac6199adcf26dc251ac24fd55c4b16c492d0d7cb500b629bb944a3f4b2e62758",
        "02569124369c82db2f7917e08977cbc53d990397ff7bbdb80afe56c6146aa567",
    ),
    ("two", None): (
        "4431f5f455e621d511ef25a59f4bc0b8857b0def3ca69ae65635266527be90f8",
        "564cfd777dc009a89289d1d87ffe0602f4f42e868f762ff7f33f0af3a0934013",
        "e4a06ce0ab8811647864c095e52c3871e1b9cd8c5e627a7aa252a6bdfb73a033",
    ),
    ("two", 1.0): (
        "21f9868935510be5fc8b3f39a99e5bd4bbd5182a3dd954d6235d7af70aceef17",
        "0045294d9be693ebd18f584c15cf5b9cf0c8a3afbf4c2c1417cf0d09563e336c",
        "5110c72ac7f0ca779ab10607f6be3e058f0e3743ce66d13d3fc96f3d4b6ad4a9",
    ),
}


@pytest.mark.parametrize(("choice", "radius"), DIGESTS)
def test_the_digits_keep_the_bytes_of_released_manifests(choice: str, radius: float | None) -> None:
    arguments = {} if choice == "ten" else {"classes": [3, 8]}
    source = DataRecipe(loader="tasks.data:digits", arguments=arguments)
    splits = load_splits(source, **{**LIMITS, "feature_radius": radius})
    parts = (splits.private, splits.public_train, splits.public_gate)
    assert tuple(sha256_hex(part.content()) for part in parts) == DIGESTS[choice, radius]
    assert tuple(part.digest() for part in parts) == DIGESTS[choice, radius]
    assert splits.enforced.feature_radius == radius
    if (choice, radius) == ("ten", 1.0):
        keyed = "e7478a7ace72dc96f67ad012eade2a29b35e7fb78109838935e53f9ef7c16baa"
        assert data_record(source, splits, b"key").private.digest == keyed
        rule = "65dc242df678d4400f2a87c1f06aadbe0494f0277723d51694f6bbd304bc1bf7"
        assert sha256_hex(splits.split_rule.encode()) == rule


def test_projection_in_blocks_keeps_its_bytes() -> None:
    """1.2 million numbers, which is more than one block."""
    numbers = np.random.default_rng(5)
    images = numbers.normal(size=(5000, 3, 7, 11)) * numbers.lognormal(size=(5000, 1, 1, 1))
    before = Rows(features=images.astype(np.float32), labels=np.arange(5000))
    after = project(before, 3.0)
    assert after.digest() == "0e2ea46f77d594f72ae0118dbd39d4dbd8720c6d7eb352605204c8ffbf4356fa"
    assert sha256_hex(after.content()) == after.digest()
    assert not np.array_equal(before.features, after.features)


@pytest.mark.parametrize("radius", [0.0, -1.0, float("nan")])
def test_a_feature_radius_that_is_none_is_refused(radius: float) -> None:
    with pytest.raises(InvalidInput, match="feature radius must be above 0, or left out"):
        load_splits(DIGITS, **{**LIMITS, "feature_radius": radius})


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


def with_private(features: Any, labels: Any = (0,)) -> Splits:
    return replace(GOOD, private=Rows(features=features, labels=np.array(labels)))


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
        (replace(GOOD, classes=1), "returned classes 1; it must be the number of classes"),
        (replace(GOOD, classes="2"), "returned classes '2'"),
        (replace(GOOD, split_rule=" "), "no split_rule; it must be a sentence"),
        (
            with_private([[1, 2]], labels=[True]),
            "private labels of type bool; they must be whole numbers, 0 to 1",
        ),
        (with_private([[1, 2]], labels=[0.0]), "private labels of type float64"),
        (with_private([[1, 2]], labels=["a"]), "private labels of dtype <U1 (objects or texts)"),
        (with_private([["secret", "2"]]), "private features of dtype <U6 (objects or texts); return numbers"),
        (with_private(np.array([[1, None]], dtype=object)), "private features of dtype object"),
        (with_private([[1, 2], [3]]), "private features as list, which NumPy cannot read as one array"),
        (with_private([[1j, 2]]), "private features of dtype complex128"),
        (with_private([[1e39, 2]]), "private features beyond the range of float32"),
        (with_private(np.zeros((1, 0))), "private rows without a single number in them"),
        (with_private(np.ma.masked_equal([[1, 2]], 2)), "private features as a masked array"),
        (
            with_private(torch.zeros(1, 2, dtype=torch.bfloat16)),
            "features as Tensor, which NumPy cannot read",
        ),
        (replace(GOOD, private=np.ones((1, 2))), "must return private as tasks.data.Rows"),
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
    assert "secret" not in caught.value.message
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize(
    "features",
    [
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True),
        np.array([[1, 2], [3, 4]], dtype=np.uint8),
        np.array([[1, 2], [3, 4]], dtype=np.float64),
        np.asfortranarray(np.array([[1, 2], [3, 4]], dtype=np.float32)),
        [[1, 2], [3, 4]],
    ],
    ids=["tensor", "uint8", "float64", "columns first", "lists"],
)
def test_rows_in_other_forms_are_taken(
    users_loader: Callable[[Callable[..., Any]], None], features: Any
) -> None:
    given = replace(GOOD, private=Rows(features=features, labels=torch.tensor([0, 1])))
    users_loader(lambda *, with_private: given)
    private = load_splits(OWN, feature_radius=None, n_max=3, neighboring_relation="replace_one").private
    assert private.digest() == rows([[1, 2], [3, 4]], [0, 1]).digest()


def test_a_loaders_own_arrays_are_left_alone_unless_handed_over(
    users_loader: Callable[[Callable[..., Any]], None],
) -> None:
    limits = {"feature_radius": 0.5, "n_max": 3, "neighboring_relation": "replace_one"}
    mine = rows([[3, 4]])
    for offered, changed in ((mine, False), (replace(mine, handed_over=True), True)):
        users_loader(lambda *, with_private, offered=offered: replace(GOOD, private=offered))
        loaded = load_splits(OWN, **limits).private
        assert np.shares_memory(loaded.features, mine.features) is changed
        assert bool(mine.features.max() < 4) is changed
        assert loaded.digest() == project(rows([[3, 4]]), 0.5).digest()


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
        (DataRecipe(loader="tasks.nowhere:rows"), "no module named tasks.nowhere"),
        (DataRecipe(loader="tasks.data:letters"), "module tasks.data has no function letters"),
        (DataRecipe(loader="tasks.data:__all__"), "module tasks.data has no function __all__"),
        (DataRecipe(loader="tasks.data:digits", arguments={"size": 3}), "does not accept its arguments"),
    ],
)
def test_a_loader_that_is_not_there(source: DataRecipe, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        load_splits(source, **LIMITS)


def test_a_loader_is_told_whether_to_load_private_rows() -> None:
    with pytest.raises(InvalidInput, match="remove it from the arguments"):
        load_splits(DataRecipe(loader="tasks.data:digits", arguments={"with_private": True}), **LIMITS)


def test_public_rows_must_be_had_alone(users_loader: Callable[[Callable[..., Any]], None]) -> None:
    """As every later check of a model asks for them."""

    def rows(seed: int) -> Rows:
        features = np.random.default_rng(seed).normal(size=(9, 4)).astype(np.float32)
        return Rows(features=features, labels=np.arange(9) % 3)

    def other(*, with_private: bool) -> Splits:
        return Splits(
            private=rows(1) if with_private else None,
            public_train=rows(2),
            public_gate=rows(3 if with_private else 4),
            classes=3,
            split_rule="seeds",
        )

    def failing(*, with_private: bool) -> Splits:
        if not with_private:
            raise RuntimeError("never alone")
        return other(with_private=True)

    limits = {**LIMITS, "n_max": 9}
    for loader, sentence in (
        (other, "returned other public_gate rows with with_private=False"),
        (failing, "never"),
    ):
        users_loader(loader)
        source = DataRecipe(loader="users_own:rows")
        splits = load_splits(source, **limits)
        with pytest.raises(InvalidInput, match=sentence):
            require_public_alone(source, splits, n_max=9)


def test_a_loader_that_fails_is_quoted(users_loader: Callable[[Callable[..., Any]], None]) -> None:
    def loader(*, with_private: bool) -> Splits:
        raise FileNotFoundError("no such file: rows.csv")

    users_loader(loader)
    with pytest.raises(
        InvalidInput, match=r"users_own:rows failed with FileNotFoundError: no such file: rows\.csv"
    ):
        load_splits(OWN, **LIMITS)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import nowhere_at_all", "needs a package that is missing here (no module named nowhere_at_all)"),
        ("def load(:", "cannot be imported: SyntaxError: invalid syntax (own_broken.py, line 1)."),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero."),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3."),
        ("from tasks.data import letters", "cannot be imported: ImportError: cannot import name 'letters'"),
        ("rows = 1", "does not exist: module own_broken has no function load."),
        (
            "def load(): pass",
            "does not accept its arguments: got an unexpected keyword argument 'with_private'.",
        ),
        ("def load(*, with_private, path): pass", "does not accept its arguments: missing a required"),
        ("def load(*, with_private): raise SystemExit", "failed with SystemExit."),
    ],
)
def test_a_module_that_goes_wrong_is_told_how(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_broken", raising=False)
    with pytest.raises(InvalidInput) as caught:
        load_splits(DataRecipe(loader="own_broken:load"), **LIMITS)
    sys.modules.pop("own_broken", None)
    assert "own_broken:load" in caught.value.message
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message


LARGE = """
import re, sys, types
from pathlib import Path
import numpy as np
from tasks.data import Rows, Splits, data_record, load_splits
from tasks.recipes import DataRecipe

def rows(seed, count):
    features = np.random.default_rng(seed).random(size=(count, 785), dtype=np.float32)
    return Rows(features=features, labels=np.arange(count) % 10)

module = types.ModuleType("large")
module.rows = lambda *, with_private: Splits(
    private=rows(1, 60_000), public_train=rows(2, 5_000), public_gate=rows(3, 10_000), classes=10, split_rule="seeds"
)
sys.modules["large"] = module
source = DataRecipe(loader="large:rows")
splits = load_splits(source, feature_radius=8.0, n_max=60_000, neighboring_relation="replace_one")
print(data_record(source, splits, b"key").private.digest)
# Not getrusage's ru_maxrss, which begins at what the process that started this one had.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
"""


def test_data_as_large_as_mnist_are_loaded_in_little_more_than_twice_their_memory() -> None:
    """75,000 x 785 float32 are 225 MiB. It took 2,315 MiB once, and gave the same digest."""
    ran = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, cwd=ROOT)
    digest, peak = ran.stdout.split()
    assert digest == "1a8ed1ec731cbba58b5ee271c6f92ce2f1dec52813265cf5b99c97972dcaff3e"
    assert int(peak) < 700


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
