"""Tables: CSV and Parquet files as data sets, and what is told of files that go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from accounting.errors import InvalidInput
from tasks.data import Splits, load_splits
from tasks.recipes import DataRecipe

LIMITS: dict[str, Any] = {"feature_radius": None, "n_max": 500, "neighboring_relation": "replace_one"}
Write = Callable[[pandas.DataFrame, Path], None]
WRITERS: dict[str, Write] = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "parquet": lambda frame, path: frame.to_parquet(path),
}


def people(seed: int, count: int) -> pandas.DataFrame:
    numbers = np.random.default_rng(seed)
    return pandas.DataFrame(
        {
            "age": numbers.integers(18, 90, count),
            "income": numbers.lognormal(10, 1, count),
            "member": numbers.random(count) < 0.5,
            "left": np.where(numbers.random(count) < 0.3, "yes", "no"),
        }
    )


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def arguments(kind: str, tmp_path: Path) -> dict[str, Any]:
    for seed, (part, count) in enumerate({"private": 120, "train": 40, "gate": 30}.items()):
        WRITERS[kind](people(seed, count), tmp_path / part)
    return {
        "path": str(tmp_path / "private"),
        "public_train": str(tmp_path / "train"),
        "public_gate": str(tmp_path / "gate"),
        "label": "left",
        "classes": ["no", "yes"],
    }


def load(kind: str, arguments: dict[str, Any], **changes: Any) -> Splits:
    with_private = changes.pop("with_private", True)
    source = DataRecipe(loader=f"tasks.data:{kind}", arguments={**arguments, **changes})
    return load_splits(source, **LIMITS, with_private=with_private)


def test_three_files(kind: str, arguments: dict[str, Any]) -> None:
    splits = load(kind, arguments, standardise="public_train", bias=0.5)
    train = people(1, 40)
    mean, scale = train["age"].mean(), train["age"].std(ddof=0)
    assert np.allclose(splits.private.features[:, 0], (people(0, 120)["age"] - mean) / scale, atol=1e-5)
    assert np.allclose(splits.public_train.features[:, :3].mean(axis=0), 0, atol=1e-5)
    assert np.allclose(splits.public_train.features[:, :3].std(axis=0), 1, atol=1e-5)
    assert (splits.public_gate.features[:, 3] == 0.5).all()
    assert splits.private.features.shape == (120, 4)
    assert np.array_equal(splits.private.labels, people(0, 120)["left"] == "yes")
    assert splits.classes == 2
    assert "standardised by mean and deviation of the public-train rows" in splits.split_rule
    assert "120" not in splits.split_rule


def test_the_private_file_is_not_opened_unless_asked_for(kind: str, arguments: dict[str, Any]) -> None:
    whole = load(kind, arguments)
    Path(arguments["path"]).unlink()
    public = load(kind, arguments, with_private=False)
    assert public.private is None
    assert public.public_gate.digest() == whole.public_gate.digest()
    with pytest.raises(
        InvalidInput, match=r"There is no file .*private; relative paths begin in the folder of"
    ):
        load(kind, arguments)


def test_shares_of_one_file(kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Copies of a row end on one side, and the order of rows in the file changes nothing."""
    frame = people(7, 300)
    WRITERS[kind](pandas.concat([frame, frame[:50], frame.assign(left="no")[:50]]), tmp_path / "all")
    shares = {"path": str(tmp_path / "all"), "public_train": 0.2, "public_gate": 0.1}
    splits = load(kind, arguments, **shares)
    counts = [len(part) for part in (splits.private, splits.public_train, splits.public_gate)]
    assert sum(counts) == 400
    assert np.allclose(np.array(counts) / 400, [0.7, 0.2, 0.1], atol=0.1)
    public = load(kind, arguments, **shares, with_private=False)
    assert public.public_train.digest() == splits.public_train.digest()
    WRITERS[kind](frame[::-1], tmp_path / "all")
    turned = load(kind, arguments, **shares)
    found = {row.tobytes() for row in splits.private.features}
    assert {row.tobytes() for row in turned.private.features} == found


def test_stated_constants_and_chosen_columns(kind: str, arguments: dict[str, Any]) -> None:
    splits = load(kind, arguments, features=["income", "age"], standardise={"age": {"mean": 50, "scale": 20}})
    gate = people(2, 30)
    assert np.allclose(splits.public_gate.features[:, 1], (gate["age"] - 50) / 20, atol=1e-6)
    assert np.allclose(splits.public_gate.features[:, 0], gate["income"], rtol=1e-6)
    assert splits.split_rule.endswith("columns are standardised by stated constants")


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("private", {"age": None}, r"Column 'age' of .*private has missing values; fill"),
        ("train", {"age": None}, r"Column 'age' of .*train has missing values in 1 row; fill"),
        ("gate", {"left": None}, r"Column 'left' of .*gate has missing values in 1 row;"),
        (
            "private",
            {"left": "secret"},
            r"label column 'left' of .*private holds a value that is not in `classes`",
        ),
        (
            "train",
            {"left": "maybe"},
            r"label column 'left' of .*train holds a value \('maybe'\) that is not in",
        ),
        ("private", {"income": 1e300}, r"Column 'income' of .*private holds infinite or too large numbers"),
    ],
)
def test_values_that_go_wrong(
    kind: str, arguments: dict[str, Any], tmp_path: Path, part: str, change: dict[str, Any], sentence: str
) -> None:
    seed, count = {"private": (0, 120), "train": (1, 40), "gate": (2, 30)}[part]
    frame = people(seed, count).astype({"age": float})
    for column, value in change.items():
        frame.loc[7, column] = value
    WRITERS[kind](frame, tmp_path / part)
    with pytest.raises(InvalidInput, match=sentence) as caught:
        load(kind, arguments)
    assert "secret" not in caught.value.message
    assert not (part == "private" and "1 row" in caught.value.message)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"label": "gone"}, r"train has no column 'gone'"),
        ({"features": ["age", "height"]}, r"train has no column 'height'"),
        (
            {"label": "age", "classes": 90},
            r"Column 'left' of .*train does not hold numbers only: turn categories",
        ),
        ({"features": []}, "must list different columns other than the label"),
        ({"features": ["age", "left"]}, "must list different columns other than the label"),
        ({"classes": 1}, "must list the label column's values in order"),
        ({"classes": ["no", "no"]}, "must list the label column's values in order"),
        ({"classes": [["no"], "yes"]}, "must list the label column's values in order"),
        ({"classes": ["no"]}, "must list the label column's values in order"),
        ({"public_train": 0.5, "public_gate": 0.5}, "both be paths, or both shares above 0"),
        ({"public_train": 0.5}, "both be paths, or both shares above 0"),
        ({"public_train": 1e-9, "public_gate": 1e-9}, r"leave no public_train rows"),
        ({"standardise": "private"}, 'must be "public_train" or a mapping'),
        ({"standardise": {"height": {"mean": 1}}}, "names 'height', which is not among the features"),
        ({"standardise": {"age": {"mean": 1, "scale": 0}}}, "a finite mean and a scale above 0"),
        ({"standardise": {"age": 3}}, "must give 'age' a mean and a scale, nothing else"),
        ({"bias": "much"}, "bias of .* must be a finite number"),
        ({"label": 3}, "label of .* must be a text, but 3 was given"),
        ({"separator": ";"}, "does not accept its arguments: got an unexpected keyword argument 'separator'"),
    ],
)
def test_arguments_that_make_no_sense(
    kind: str, arguments: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        load(kind, arguments, **changes)


def test_a_file_of_another_kind_is_quoted_nowhere(kind: str, arguments: dict[str, Any]) -> None:
    Path(arguments["path"]).write_bytes(b'age,income,member,left\n"secret\xff,1\n2,3,4,5,6,7,8\n')
    name = {"csv": "CSV", "parquet": "Parquet"}[kind]
    with pytest.raises(InvalidInput, match=rf"private cannot be read as a {name} file \(\w+\)\.$") as caught:
        load(kind, arguments)
    assert "secret" not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_relative_path_begins_in_the_workers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infra.stack_services import repository_root

    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text("a,b\n1,0\n")
    table = {"path": "people.csv", "label": "b", "classes": 2, "public_train": 0.1, "public_gate": 0.1}
    with pytest.raises(InvalidInput, match="There is no file") as caught:
        load("csv", table)
    assert str(repository_root() / "people.csv") in caught.value.message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,a,y\n1,2,0\n", "has two columns named 'a'"),
        ("a,b,y\n1,2,0\n1,2,0,5\n", "cannot be read as a CSV file"),
        ("a,y\n1,2,0\n3,4,1\n", "cannot be read as a CSV file"),
        ("", "is empty; its first line must name the columns"),
    ],
)
def test_a_csv_file_whose_lines_do_not_fit_its_header(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=sentence):
        load("csv", {"path": str(path), "label": "y", "classes": 2, "public_train": 0.3, "public_gate": 0.3})
