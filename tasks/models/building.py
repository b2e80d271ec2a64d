"""From a record to a network, from a seed to its public start, from parameters to deterministic bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from accounting.errors import IncompatibleCandidates, InvalidInput
from infra.documents import NetworkRecord
from tasks.import_path import call

if TYPE_CHECKING:
    from torch import Tensor, nn


def build(network: NetworkRecord) -> nn.Module:
    """Build the network that a recipe or a manifest names; its parameters are yet to be loaded.

    Raises:
        InvalidInput: the factory cannot be imported, refuses its arguments, or makes something else.
    """
    from torch import nn  # late: importing torch takes seconds

    module = call(network.factory, "network factory", **network.arguments)
    if not isinstance(module, nn.Module):
        raise InvalidInput(
            f"The network factory {network.factory} must return a torch.nn.Module, but it returned "
            f"{type(module).__name__}."
        )
    return module


def network_with(network: NetworkRecord, state: Mapping[str, Tensor]) -> nn.Module:
    """Build a network and give it these parameters, in eval mode.

    Raises:
        IncompatibleCandidates: the parameters do not fit.
    """
    module = build(network)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise IncompatibleCandidates(
            f"The parameters do not fit the network {network.factory}: {str(error).splitlines()[-1].strip()}"
        ) from None
    return module.eval()


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
