"""The published image sets in one common shape, grey 28 x 28, so that networks of one trunk take all of them.

A row depends on its own pixels and on constants alone: CIFAR-10's photographs lose their colour by the weights of
ITU-R BT.601 and two pixels at each edge; then pixels / 255, minus a mean and divided by a scale. These are the sets'
published averages, rounded to two digits; no record would change them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.images import TEN, cifar10, fashion_mnist, mnist
from tasks.data.rows import Rows, Splits, blocks

_LOADER = "tasks.data.grey_images:grey_images"
_SETS = {"mnist": mnist, "fashion_mnist": fashion_mnist, "cifar10": cifar10}
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601
_MEAN, _SCALE = 0.48, 0.24  # of CIFAR-10's grey pixels, published, rounded
_COLOUR_MEAN, _COLOUR_SCALE = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)  # what tasks.data:cifar10 took off
_EDGE = 2  # pixels cut off each side of 32 x 32


def grey_images(
    *,
    with_private: bool = True,
    of: str,
    classes: Sequence[int] = TEN,
    private_rows: int | None = None,
    halved: bool = False,
    folder: str | None = None,
) -> Splits:
    """MNIST, Fashion-MNIST or CIFAR-10 as grey images (1, 28, 28), split as the set itself is.

    Args:
        of: "mnist", "fashion_mnist" or "cifar10".
        classes: the labels to keep, a public choice; new labels are positions in this list.
        private_rows: keep only the first so many private rows (before `classes` are chosen). Which rows are kept then
            depends on how many come before them, so the data set that a guarantee is about are the rows kept: good for
            experiments on published rows, and no rule by which to split private ones.
        halved: the mean of each 2 x 2 pixels instead: images (1, 14, 14).
        folder: a local folder in the data set's standard format; None: the cache.

    Raises:
        InvalidInput: an argument is out of range.
    """
    if of not in _SETS:
        raise InvalidInput(
            f"The argument of of {_LOADER} must be one of {', '.join(_SETS)}, but {of!r} was given."
        )
    if not isinstance(halved, bool):
        raise InvalidInput(
            f"The argument halved of {_LOADER} must be true or false, but {halved!r} was given."
        )
    found = _SETS[of](with_private=with_private, classes=classes, private_rows=private_rows, folder=folder)
    rule = found.split_rule

    def changed(rows: Rows) -> Rows:
        grey = _grey(rows) if of == "cifar10" else rows
        return _halved(grey) if halved else grey

    if of == "cifar10":
        rule += "; made grey, and cut to the inner 28 x 28 pixels"
    if halved:
        rule += "; each 2 x 2 pixels are their mean"
    return Splits(
        private=None if found.private is None else changed(found.private),
        public_train=changed(found.public_train),
        public_gate=changed(found.public_gate),
        classes=found.classes,
        split_rule=rule,
    )


def _halved(rows: Rows) -> Rows:
    """(rows, 1, 28, 28) to (rows, 1, 14, 14)."""
    small = rows.features.reshape(len(rows), 1, 14, 2, 14, 2).mean(axis=(3, 5), dtype=np.float32)
    return Rows(features=small, labels=rows.labels, handed_over=True)


def _grey(rows: Rows) -> Rows:
    """(rows, 3, 32, 32), standardised by channel, to (rows, 1, 28, 28)."""
    inner = slice(_EDGE, 32 - _EDGE)
    mean, scale, weight = (
        np.array(part, dtype=np.float32)[:, None, None] for part in (_COLOUR_MEAN, _COLOUR_SCALE, _LUMINANCE)
    )
    grey = np.empty((len(rows), 1, 32 - 2 * _EDGE, 32 - 2 * _EDGE), dtype=np.float32)
    for block in blocks(rows.features):
        pixels = rows.features[block, :, inner, inner] * scale + mean
        grey[block, 0] = ((pixels * weight).sum(axis=1) - _MEAN) / _SCALE
    return Rows(features=grey, labels=rows.labels, handed_over=True)
