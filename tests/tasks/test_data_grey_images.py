"""The image sets in one grey shape: rows depend on their own pixels alone, and parts stay the set's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accounting.errors import InvalidInput
from tasks.data import images
from tasks.data.grey_images import grey_images
from tests.tasks.test_data_images import PHOTOS, SMALL, SMALL_CIFAR10, SMALL_MNIST, write_mnist, write_python


@pytest.fixture(autouse=True)
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MNIST", SMALL_MNIST)
    monkeypatch.setattr(images, "CIFAR10", SMALL_CIFAR10)


def photos(tmp_path: Path) -> str:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    write_python(folder)
    return str(folder)


def test_photographs_are_grey_cut_and_standardised(tmp_path: Path) -> None:
    found = grey_images(of="cifar10", folder=photos(tmp_path))
    test = PHOTOS[1].images.astype(np.float64) / 255
    weights = np.array([0.299, 0.587, 0.114])[:, None, None]
    expected = ((test * weights).sum(axis=1)[:, 2:30, 2:30] - 0.48) / 0.24
    np.testing.assert_allclose(found.public_gate.features[:, 0], expected, atol=1e-5)
    assert found.public_gate.features.dtype == np.float32
    np.testing.assert_array_equal(found.public_gate.labels, PHOTOS[1].labels)
    assert "made grey, and cut" in found.split_rule


def test_halved_images_are_means_of_four_pixels(tmp_path: Path) -> None:
    folder = str(write_mnist(tmp_path))
    whole = grey_images(of="mnist", folder=folder)
    half = grey_images(of="mnist", folder=folder, halved=True)
    assert whole.public_gate.features.shape[1:] == (1, 28, 28)
    assert half.public_gate.features.shape[1:] == (1, 14, 14)
    assert half.private is not None
    assert whole.private is not None
    np.testing.assert_allclose(
        half.private.features[:, 0, 3, 5],
        whole.private.features[:, 0, 6:8, 10:12].mean(axis=(1, 2)),
        atol=1e-6,
    )
    parts = [half.private, half.public_train, half.public_gate]
    assert sum(map(len, parts)) == sum(len(one.labels) for one in SMALL)
    rows = [row.tobytes() for part in parts for row in part.features]
    assert len(set(rows)) == len(rows)  # no row is in two parts


def test_public_rows_are_the_same_alone(tmp_path: Path) -> None:
    folder = photos(tmp_path)
    both = grey_images(of="cifar10", folder=folder, classes=[0, 1, 2, 3, 4], halved=True)
    alone = grey_images(of="cifar10", folder=folder, classes=[0, 1, 2, 3, 4], halved=True, with_private=False)
    assert alone.private is None
    assert alone.public_train.digest() == both.public_train.digest()
    assert both.classes == 5


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidInput, match="one of mnist, fashion_mnist, cifar10, but 'cats' was given"):
        grey_images(of="cats")
    with pytest.raises(InvalidInput, match=r"halved .* must be true or false, but 1 was given"):
        grey_images(of="mnist", halved=1)  # type: ignore[arg-type]
