"""Loaders of published image data sets: MNIST, Fashion-MNIST and CIFAR-10, private and public by a fixed rule.

A row depends on its own pixels and on constants alone: pixels / 255, minus a mean and divided by a scale for each
channel. These are the data sets' published averages, rounded to two digits; no record would change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.image_cache import cache_folder, load_part
from tasks.data.image_sets import CIFAR10, FASHION_MNIST, MNIST, PARTS, PUBLIC_PARTS, ImageSet, Pictures
from tasks.data.rows import Rows, Splits, blocks

TEN = tuple(range(10))


def mnist(
    *,
    with_private: bool = True,
    folder: str | None = None,
    flatten: bool = False,
    bias: bool = False,
    classes: Sequence[int] = TEN,
    private_rows: int | None = None,
) -> Splits:
    """Handwritten digits, 28 x 28: (pixels / 255 - 0.13) / 0.31, a row's usual length is 28.

    54,958 private, 5,042 public-train and 10,000 public-gate rows.

    Args:
        folder: a local folder in the data set's standard format; None: the cache, filled by `remerge data fetch`,
            or by this call.
        flatten: rows of 784 numbers instead of images (1, 28, 28).
        bias: append a constant entry, 4, to flattened rows.
        classes: the digits to keep, a public choice; labels are positions in this list.
        private_rows: keep only the first so many private rows (before `classes` are chosen), in the order of the
            split rule.
    """
    return _load(MNIST, "mnist", with_private, folder, flatten, bias, classes, private_rows)


def fashion_mnist(
    *,
    with_private: bool = True,
    folder: str | None = None,
    flatten: bool = False,
    bias: bool = False,
    classes: Sequence[int] = TEN,
    private_rows: int | None = None,
) -> Splits:
    """Clothing, 28 x 28: (pixels / 255 - 0.29) / 0.35; 54,998 private and 5,002 public-train rows; else as `mnist`."""
    return _load(FASHION_MNIST, "fashion_mnist", with_private, folder, flatten, bias, classes, private_rows)


def cifar10(
    *,
    with_private: bool = True,
    folder: str | None = None,
    flatten: bool = False,
    bias: bool = False,
    classes: Sequence[int] = TEN,
    private_rows: int | None = None,
) -> Splits:
    """Photographs, 3 x 32 x 32: (pixels / 255 - mean) / scale, a row's usual length is 55; else as `mnist`.

    By channel the means are 0.49, 0.48 and 0.45, the scales 0.25, 0.24 and 0.26. 44,989 private, 5,011
    public-train and 10,000 public-gate rows; flattened 3,072 numbers; the constant entry is 8.
    """
    return _load(CIFAR10, "cifar10", with_private, folder, flatten, bias, classes, private_rows)


def _load(
    one: ImageSet,
    loader: str,
    with_private: bool,
    folder: str | None,
    flatten: bool,
    bias: bool,
    classes: Sequence[int],
    private_rows: int | None,
) -> Splits:
    _require_options(loader, folder, flatten, bias, classes, private_rows)
    wanted = PARTS if with_private else PUBLIC_PARTS
    found = _from_cache(one, wanted) if folder is None else _from_folder(one, wanted, Path(folder))
    if private_rows is not None and "private" in found:
        pictures = found["private"]
        if private_rows > len(pictures.labels):
            raise InvalidInput(
                f"The argument private_rows of tasks.data:{loader} is {private_rows}, more than {one.title} has "
                f"({len(pictures.labels)})."
            )
        found["private"] = Pictures(pictures.images[:private_rows], pictures.labels[:private_rows])
    rule = one.split_rule
    if private_rows is not None:
        rule += f"; of the private rows only the first {private_rows} in this order are kept"
    if tuple(classes) != TEN:
        names = ", ".join(map(str, classes))
        rule += f"; of each part only the classes {names} are kept, labelled 0, 1, ... in this order"
    # One part after the other, so that float32 and uint8 rows of all parts are never in memory together.
    rows = {part: _rows(one, found.pop(part), flatten, bias, classes) for part in tuple(found)}
    return Splits(
        private=rows.get("private"),
        public_train=rows["public_train"],
        public_gate=rows["public_gate"],
        classes=len(classes),
        split_rule=rule,
    )


def _from_cache(one: ImageSet, wanted: Sequence[str]) -> dict[str, Pictures]:
    cache = cache_folder()
    for _ in range(2):
        parts = {part: load_part(one, part, cache) for part in wanted}
        found = {part: pictures for part, pictures in parts.items() if pictures is not None}
        if len(found) == len(parts):
            return found
        del parts, found
        from tasks.data.fetching import fetch  # late: only where something is missing

        fetch(one, cache)
    raise InvalidInput(
        f"The cached files of {one.title} in {cache / one.name} change while they are read; use another REMERGE_CACHE."
    )


def _from_folder(one: ImageSet, wanted: Sequence[str], folder: Path) -> dict[str, Pictures]:
    from infra.stack_services import repository_root

    place = folder.expanduser()
    place = place if place.is_absolute() else repository_root() / place
    if not place.is_dir():
        raise InvalidInput(f"There is no folder {place}; {one.title} needs {one.folder_format}.")
    train, test = one.read_folder(place)
    return {part: pictures for part, pictures in one.split(train, test) if part in wanted}


def _rows(one: ImageSet, pictures: Pictures, flatten: bool, bias: bool, classes: Sequence[int]) -> Rows:
    images, labels = pictures.images, pictures.labels
    if tuple(classes) != TEN:
        positions = np.full(256, -1)
        positions[list(classes)] = np.arange(len(classes))
        kept = np.isin(labels, list(classes))
        images, labels = images[kept], positions[labels[kept]]
    levels = np.arange(256) / 255
    mean, scale = np.array(one.mean)[:, np.newaxis], np.array(one.scale)[:, np.newaxis]
    table = ((levels - mean) / scale).astype(np.float32)  # by channel and level of grey
    size = int(np.prod(one.shape))
    flat = np.empty((len(labels), size + (1 if bias else 0)), dtype=np.float32)
    pixels = images.reshape(len(labels), one.shape[0], -1)
    for block in blocks(flat):
        for channel, values in enumerate(table):
            start = channel * pixels.shape[2]
            flat[block, start : start + pixels.shape[2]] = values[pixels[block, channel]]
    if bias:
        flat[:, -1] = one.bias
    features = flat if flatten else flat.reshape(len(labels), *one.shape)
    return Rows(features=features, labels=labels.astype(np.int64), handed_over=True)


def _require_options(
    loader: str, folder: object, flatten: object, bias: object, classes: object, private_rows: object
) -> None:
    """What a recipe may say; it comes from YAML, so types are not a matter of course."""

    def refuse(argument: str, given: object, wanted: str) -> InvalidInput:
        return InvalidInput(
            f"The argument {argument} of tasks.data:{loader} must be {wanted}, but {given!r} was given."
        )

    if folder is not None and not isinstance(folder, str):
        raise refuse("folder", folder, "the path of a folder")
    for argument, given in (("flatten", flatten), ("bias", bias)):
        if not isinstance(given, bool):
            raise refuse(argument, given, "true or false")
    if bias and not flatten:
        raise InvalidInput(
            f"The argument bias of tasks.data:{loader} goes with flatten: true; a network on images has biases of "
            "its own."
        )
    if (
        not isinstance(classes, list | tuple)
        or not all(type(name) is int and 0 <= name <= 9 for name in classes)
        or len(set(classes)) != len(classes)
        or len(classes) < 2
    ):
        raise refuse(
            "classes", classes, "a list of at least two different classes from 0 to 9, such as [3, 8]"
        )
    if private_rows is not None and (type(private_rows) is not int or private_rows < 1):
        raise refuse("private_rows", private_rows, "a whole number from 1")
