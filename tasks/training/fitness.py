"""Whether a network can be trained with differential privacy at all; asked before its first step.

The guarantee counts what one record can move: its own gradient, clipped. So a record may move no other record's
scores, and nothing may pass from a batch to a later one but noisy parameters. BatchNorm breaks both; it is let
through only where it is frozen, and then held in eval mode. Every other layer is tried (tasks.training.record_trial)
rather than believed.

Sharp edges: the trial sees the public rows that it is given, batches of one to five and parameters near the initial
ones; a network that insists on float32 may mix up to a ten-thousandth unseen. Code that starts to mix records later,
in larger batches or for rarer rows is not found: a network's code is trusted as the loader's is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput, RemergeError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

_REPLACEMENTS = {  # layers whose weights Opacus does not see, and what to put in their place
    "LSTM": "opacus.layers.DPLSTM",
    "GRU": "opacus.layers.DPGRU",
    "RNN": "opacus.layers.DPRNN",
    "MultiheadAttention": "opacus.layers.DPMultiheadAttention",
}


class FrozenPartChanged(RemergeError):
    """A buffer or a frozen parameter holds something else than before training: maybe private, without noise."""


def require_trainable(
    module: nn.Module, rows: np.ndarray, *, what: str, grad_sample_mode: str = "hooks"
) -> None:
    """Refuse a network whose gradients are not each record's own; the module is left as it was.

    Args:
        module: as its factory made it and with its initial parameters, before Opacus wraps it.
        rows: public rows, shape (rows, ...), at least two different ones; a few are used.
        what: names the network at the start of the sentence, such as "The network my.nets:build".
        grad_sample_mode: how Opacus will compute gradients: hooks, functorch or ghost.

    Raises:
        InvalidInput: one sentence that names every layer, or parameter, that stands in the way.
    """
    from tasks.training.record_trial import require_own_gradients

    problems = list(_problems(module))
    if problems:
        raise InvalidInput(f"{what} cannot be trained with differential privacy: {'; '.join(problems)}.")
    require_own_gradients(module, rows, what=what, grad_sample_mode=grad_sample_mode)


def keep_frozen(module: nn.Module) -> None:
    """Put every layer that keeps running statistics into eval mode: to be called after each `train()`.

    `require_trainable` let such layers through only because they are frozen. Opacus's wrapper may be given too.
    """
    for _, layer in _with_statistics(module):
        layer.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """All that training must not change: buffers, and parameters that are not trained."""

    tensors: dict[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, module: nn.Module) -> FrozenPart:
        """A copy, to be made before training; of the module itself, not of Opacus's wrapper."""
        return cls(tensors={name: tensor.detach().clone() for name, tensor in frozen_tensors(module)})

    def require_unchanged(self, module: nn.Module, what: str) -> None:
        """To be asked before anything of the trained module leaves this process.

        Raises:
            FrozenPartChanged: naming what changed; never a value.
        """
        now = dict(frozen_tensors(module))
        changed = sorted(
            name
            for name in self.tensors.keys() | now.keys()
            if name not in now or name not in self.tensors or not same(self.tensors[name], now[name])
        )
        if changed:
            raise FrozenPartChanged(
                f"{what} changed {names_of(changed)} while it trained, although only noisy gradients may change a "
                "network: its parameters were discarded; correct the layer that writes there."
            )


def frozen_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, also those that a state dictionary leaves out, and parameters that are not trained."""
    yield from module.named_buffers()
    yield from ((name, tensor) for name, tensor in module.named_parameters() if not tensor.requires_grad)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that a NaN equals itself."""
    import torch

    def content(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(content(one), content(other))


def layer_name(path: str, layer: nn.Module) -> str:
    """How a sentence names a layer: by its path in the network, and its class."""
    return (
        f"layer `{path}` ({type(layer).__name__})" if path else f"the network itself ({type(layer).__name__})"
    )


def names_of(names: list[str]) -> str:
    """The names in a sentence, the first six in full."""
    quoted = [f"`{name}`" for name in names[:6]]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(quoted) + more


def _problems(module: nn.Module) -> Iterator[str]:
    import torch
    from torch.nn.parameter import is_lazy

    trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    if not trained:
        yield "none of its parameters is trained (requires_grad is false for all)"
        return
    lazy = [name for name, tensor in module.named_parameters() if is_lazy(tensor)]
    if lazy:
        yield f"{names_of(lazy)} have no shape yet; give lazy layers their sizes, or run a row through in the factory"
        return
    odd = [name for name, tensor in trained.items() if tensor.dtype not in (torch.float32, torch.float64)]
    if odd:
        yield f"{names_of(odd)} are {trained[odd[0]].dtype}; parameters must be torch.float32 while they are trained"
    yield from _tied(module)
    statistics = dict(_with_statistics(module))
    for path, layer in statistics.items():
        yield from _unfrozen(path, layer)
    for path, layer in module.named_modules():
        own = [tensor for tensor in layer.parameters(recurse=False) if tensor.requires_grad]
        replacement = next((_REPLACEMENTS[c.__name__] for c in type(layer).__mro__ if _is_replaced(c)), None)
        if replacement and any(tensor.requires_grad for tensor in layer.parameters()):
            yield f"{layer_name(path, layer)} hides its weights from Opacus; use {replacement} in its place"
        elif own and path not in statistics:
            buffers = [name for name, _ in layer.named_buffers()]
            if buffers:
                yield (
                    f"{layer_name(path, layer)} has trained parameters beside {names_of(buffers)}, which Opacus "
                    "refuses as a buffer is not private; keep constants outside it, or as plain attributes"
                )


def _is_replaced(layer_class: type) -> bool:
    return layer_class.__module__.startswith("torch.nn.") and layer_class.__name__ in _REPLACEMENTS


def _with_statistics(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """BatchNorm of every kind, and InstanceNorm where it tracks running statistics."""
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

    for path, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _NormBase) and layer.track_running_stats):
            yield path, layer


def _unfrozen(path: str, layer: nn.Module) -> Iterator[str]:
    name = layer_name(path, layer)
    parameters = list(layer.parameters())
    if layer.running_mean is None or layer.running_var is None:
        yield f"{name} normalises by the batch, even in eval mode, and so mixes its records; use GroupNorm"
    elif any(tensor.requires_grad for tensor in parameters):
        yield (
            f"{name} keeps statistics of whole batches and so mixes their records; use GroupNorm, or freeze it "
            "(requires_grad_(False) on the layer), and it will be held in eval mode"
        )
    elif not parameters and layer.training:
        yield (
            f"{name} keeps statistics of whole batches and so mixes their records; use GroupNorm, or let the "
            "factory put it into eval mode, where it will be held"
        )


def _tied(module: nn.Module) -> Iterator[str]:
    """Two names for one memory: a record's gradient would count once where it moves two layers."""
    places = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name)
        for name, tensor in _tensors(module)
        if tensor.numel()
    )
    trained = {name for name, tensor in _tensors(module) if tensor.requires_grad}
    for (_, end, name), (start, _, other) in pairwise(places):
        if start < end and (name in trained or other in trained):
            yield f"{names_of([name, other])} share their memory; give each layer parameters of its own"


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By every name they have, but for the second names that Opacus's own LSTM, GRU and RNN give theirs."""
    from opacus.layers.dp_rnn import DPRNNBase

    aliases = [path for path, layer in module.named_modules() if isinstance(layer, DPRNNBase)]
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        if name.rpartition(".")[0] not in aliases:
            yield name, tensor


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to past the last entry, whatever the strides."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
