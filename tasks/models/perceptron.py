"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from tasks.models.sizes import activation as activation_layer
from tasks.models.sizes import require_counts

if TYPE_CHECKING:
    from torch import nn

_FACTORY = "tasks.models:multilayer_perceptron"


def multilayer_perceptron(
    features: int, classes: int, hidden: Sequence[int] = (128,), activation: str = "tanh"
) -> nn.Module:
    """Linear layers with an activation between them; rows of any shape are flattened first.

    Args:
        features: numbers in a row: channels x height x width for an image.
        classes: scores it gives; 1 for the logit of the second of two classes.
        hidden: units of each hidden layer, at least one layer. Without any, take softmax_regression, about which
            more can be proven.
        activation: tanh, relu or elu. Under clipping and noise, bounded activations such as tanh usually do better.

    Raises:
        InvalidInput: an argument is out of range.
    """
    from torch import nn  # late: importing torch takes seconds

    require_counts(_FACTORY, features=features, classes=classes)
    if not isinstance(hidden, list | tuple) or not hidden:
        raise InvalidInput(
            f"The argument hidden of {_FACTORY} must list the units of each hidden layer, such as [128, 64], but "
            f"{hidden!r} was given; without hidden layers, name tasks.models:softmax_regression."
        )
    for units in hidden:
        require_counts(_FACTORY, hidden=units)
    layers: list[nn.Module] = [nn.Flatten()]
    width = features
    for units in hidden:
        layers += [nn.Linear(width, units), activation_layer(_FACTORY, activation)]
        width = units
    layers.append(nn.Linear(width, classes))
    return nn.Sequential(*layers)
