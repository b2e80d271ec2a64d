"""Networks: built from a record, started from public parameters, written as deterministic safetensors bytes.

**Bring your own.** A recipe names a factory by import path and its arguments; it returns a `torch.nn.Module`
that maps a batch of rows to one score a class or, where there are two classes, to one score: the logit of class 1
(see tasks.objective for the losses). Opacus must support its layers (no BatchNorm).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.import_path import call

if TYPE_CHECKING:
    from torch import Tensor, nn


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


def build(network: NetworkRecord) -> nn.Module:
    """Build the network that a recipe or a manifest names; its parameters are yet to be loaded.

    Raises:
        InvalidInput: the factory cannot be imported, refuses its arguments, or makes something else.
    """
    from torch import nn

    module = call(network.factory, "network factory", **network.arguments)
    if not isinstance(module, nn.Module):
        raise InvalidInput(
            f"The network factory {network.factory} must return a torch.nn.Module, but it returned "
            f"{type(module).__name__}."
        )
    return module


def initial_state(network: NetworkRecord, seed: int) -> dict[str, Tensor]:
    """Public starting parameters: the same seed gives the same ones.

    Not for concurrent use: it borrows torch's global random numbers and puts them back.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: tensor.detach().clone() for name, tensor in build(network).state_dict().items()}


def state_bytes(state: Mapping[str, Tensor]) -> bytes:
    """The contents of a safetensors file without metadata: the same tensors give the same bytes."""
    import safetensors.torch

    return safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    )


def state_from_bytes(content: bytes) -> dict[str, Tensor]:
    """Read what `state_bytes` wrote."""
    import safetensors.torch

    return safetensors.torch.load(content)
