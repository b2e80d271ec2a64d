"""Checks that every factory makes of its arguments, and the activations they may name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accounting.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn

ACTIVATIONS = ("tanh", "relu", "elu")


def require_counts(factory: str, **counts: object) -> None:
    """Every value must be a whole number of at least 1.

    Raises:
        InvalidInput: naming the argument.
    """
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise InvalidInput(
                f"The argument {name} of {factory} must be a whole number of at least 1, but {value!r} was given."
            )


def activation(factory: str, name: str) -> nn.Module:
    """A new activation layer; never one that writes over its input, which per-record gradients still need.

    Raises:
        InvalidInput: there is none of this name.
    """
    from torch import nn  # late: importing torch takes seconds

    if name not in ACTIVATIONS:
        raise InvalidInput(
            f"The argument activation of {factory} must be one of {', '.join(ACTIVATIONS)}, but {name!r} was given."
        )
    return {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}[name]()
