"""Norms of a linear layer's gradients for ghost clipping, where the layer sees a record at several places.

There the gradient is a sum of outer products, b_1 a_1' + b_2 a_2' + ..., and ghost clipping has its squared norm from
the products of all pairs. Where the places nearly cancel, float32 loses the whole of it: Opacus's own rule then gives
0 for gradients a thousand times the clipping norm, which would pass unclipped. In float64 the pairs are as exact as
the float32 gradient itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def with_safe_rules(norm_samplers: dict[Any, Any]) -> dict[Any, Any]:
    """Opacus's rules, with a safe one for linear layers; those of a user's own layers stay."""
    from torch import nn

    return {**norm_samplers, nn.Linear: linear_norms}


def linear_norms(
    layer: nn.Linear, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """The gradients' norms, shape (rows,), by parameter.

    Args:
        activations: one tensor, what the layer saw, shape (rows, ..., inputs).
        backprops: the loss's derivative by what it gave, shape (rows, ..., outputs).
    """
    import torch

    seen = activations[0].to(torch.float64).flatten(1, -2) if backprops.dim() > 2 else activations[0][:, None]
    given = backprops.to(torch.float64).flatten(1, -2) if backprops.dim() > 2 else backprops[:, None]
    norms = {}
    if layer.weight.requires_grad:
        places = seen.shape[1]
        if places == 1:
            norm = given.norm(dim=(1, 2)) * seen.norm(dim=(1, 2))
        elif places**2 <= layer.weight.numel():
            pairs = (given @ given.mT) * (seen @ seen.mT)
            norm = pairs.sum(dim=(1, 2)).clamp(min=0).sqrt()
        else:
            norm = (given.mT @ seen).norm(dim=(1, 2))
        norms[layer.weight] = norm.to(backprops.dtype)
    if layer.bias is not None and layer.bias.requires_grad:
        norms[layer.bias] = given.sum(dim=1).norm(dim=1).to(backprops.dtype)
    return norms
