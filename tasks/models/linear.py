"""Regressions: one linear map of a row, which is what the proofs for shared parameters rest on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def softmax_regression(features: int, classes: int) -> nn.Module:
    """One linear layer without a bias of its own: the rows bring a constant entry instead."""
    from torch import nn  # late: importing torch takes seconds

    return nn.Linear(features, classes, bias=False)


def logistic_regression(features: int) -> nn.Module:
    """For two classes: one linear layer with one score, without a bias of its own."""
    from torch import nn

    return nn.Linear(features, 1, bias=False)


def is_regression(module: nn.Module) -> bool:
    """Whether the module is nothing but one linear map without bias, all of it trained.

    To be asked before Opacus wraps it: a hook may change what a layer computes, and Opacus adds hooks of its own.
    """
    from torch import nn

    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return (
        type(module) is nn.Linear
        and module.bias is None
        and [name for name, _ in module.named_parameters()] == ["weight"]  # not computed from others
        and module.weight.requires_grad
        and not module.weight._backward_hooks
        and "forward" not in vars(module)
        and not any(hooks)
    )
