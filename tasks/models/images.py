"""Networks for images, of shape (channels, height, width): a small CNN and a ResNet-18 with GroupNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from tasks.models.sizes import activation as activation_layer
from tasks.models.sizes import require_counts

if TYPE_CHECKING:
    from torch import nn

_CNN = "tasks.models:small_cnn"
_RESNET = "tasks.models:resnet18"
_RESNET_WIDTHS = (64, 128, 256, 512)


def small_cnn(channels: int, size: int, classes: int, activation: str = "tanh") -> nn.Module:
    """Two convolutions and two linear layers, usual for differentially private training on MNIST: 26,010
    parameters for 1 x 28 x 28 and ten classes.

    Args:
        channels: 1 for grey images, 3 for colour.
        size: height and width of the images in pixels, at least 14.
        classes: scores it gives; 1 for the logit of the second of two classes.
        activation: tanh, relu or elu; bounded tanh usually does better under clipping and noise (Papernot et
            al., arXiv 2007.14191).

    Raises:
        InvalidInput: an argument is out of range.
    """
    from torch import nn  # late: importing torch takes seconds

    require_counts(_CNN, channels=channels, size=size, classes=classes)
    after_first = ((size + 2 * 3 - 8) // 2 + 1) - 1  # convolution 8/2 with padding 3, pool 2/1
    side = ((after_first - 4) // 2 + 1) - 1  # convolution 4/2, pool 2/1
    if after_first < 4 or side < 1:
        raise InvalidInput(
            f"The argument size of {_CNN} must be at least 14 pixels, but {size} was given; for smaller images "
            "name tasks.models:multilayer_perceptron."
        )
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        activation_layer(_CNN, activation),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation_layer(_CNN, activation),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * side * side, 32),
        activation_layer(_CNN, activation),
        nn.Linear(32, classes),
    )


def resnet18(channels: int, classes: int, groups: int = 32, small_images: bool = True) -> nn.Module:
    """ResNet-18 (He et al., arXiv 1512.03385) with GroupNorm where the original has BatchNorm, which would mix
    the records of a batch: 11.2 million parameters.

    Args:
        channels: 1 for grey images, 3 for colour; any height and width.
        classes: scores it gives; 1 for the logit of the second of two classes.
        groups: of each GroupNorm; it must divide 64.
        small_images: start with a 3 x 3 convolution and no max-pooling, as is usual for images of 32 x 32;
            otherwise with a 7 x 7 convolution of stride 2 and max-pooling, as for ImageNet.

    Raises:
        InvalidInput: an argument is out of range.
    """
    from torch import nn

    from tasks.models.residual import ResidualBlock

    require_counts(_RESNET, channels=channels, classes=classes, groups=groups)
    if _RESNET_WIDTHS[0] % groups:
        raise InvalidInput(
            f"The argument groups of {_RESNET} must divide 64, the channels of its first block: one of 1, 2, 4, 8, "
            f"16, 32 and 64, but {groups} was given."
        )
    if type(small_images) is not bool:
        raise InvalidInput(
            f"The argument small_images of {_RESNET} must be true or false, but {small_images!r} was given."
        )
    width = _RESNET_WIDTHS[0]
    layers: list[nn.Module] = (
        [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        if small_images
        else [nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)]
    )
    layers += [nn.GroupNorm(groups, width), nn.ReLU()]
    if not small_images:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    for index, wider in enumerate(_RESNET_WIDTHS):
        layers.append(ResidualBlock(width, wider, stride=1 if index == 0 else 2, groups=groups))
        layers.append(ResidualBlock(wider, wider, stride=1, groups=groups))
        width = wider
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)
