"""What Fisher-weighted averaging and RegMean need to know of each candidate, from public rows alone.

The model is post-processed and the rows are public, so a merge by these statistics stays post-processing of the joint
release. The files are marked as made from public rows; **give no private rows to these functions**.

Computed in float64, whatever the model's type, so that sums in another order on another machine show in the merged
model almost never. For bytes that must be made again, keep the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from accounting.errors import IncompatibleCandidates, InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows
from tasks.merging.marks import KIND, MODEL_SHA256, PUBLIC, ROWS, ROWS_SHA256, marked

if TYPE_CHECKING:
    from torch import Tensor, nn

GRADIENTS_AT_ONCE = 2**21  # numbers, 16 MB; more are slower, for they leave the caches
PATCHES_AT_ONCE = 32  # rows, for a convolution sees each of them in many patches


def fisher_statistics(network: NetworkRecord, model: bytes, rows: Rows) -> bytes:
    """The diagonal Fisher information of a model on public rows.

    F_p = mean over rows x of sum over classes y of p(y | x) * (d log p(y | x) / d theta_p)^2: the expectation over
    the model's own answers, as in Matena and Raffel 2022; the rows' labels are not read.

    Args:
        model: contents of a safetensors file.
        rows: public ones.

    Returns:
        A safetensors file, float64, with the shape of each parameter that is trained.

    Raises:
        InvalidInput: there is no row, or the network cannot be differentiated row by row.
        IncompatibleCandidates: the parameters do not fit the network, or a result is not finite.
    """
    import torch
    from torch.func import functional_call, grad, vmap

    module = _loaded(network, model, rows)
    trained = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    numbers = sum(value.numel() for value in trained.values())

    def log_probability(parameters: dict[str, Tensor], row: Tensor, answer: int) -> Tensor:
        return _log_probabilities(functional_call(module, parameters, (row[None],)))[0, answer]

    total = {name: torch.zeros_like(value) for name, value in trained.items()}
    try:
        for part in _parts(rows, max(1, min(256, GRADIENTS_AT_ONCE // max(1, numbers)))):
            with torch.no_grad():
                probabilities = _log_probabilities(module(part)).exp()
            for answer in range(probabilities.shape[1]):
                share = probabilities[:, answer]
                gradients = vmap(grad(log_probability), in_dims=(None, 0, None))(trained, part, answer)
                for name, gradient in gradients.items():
                    total[name] += torch.einsum("r,r...->...", share, gradient.square())
    except RuntimeError as error:
        raise InvalidInput(
            f"The network {network.factory} cannot be differentiated row by row, as Fisher information needs "
            f"({str(error).splitlines()[0].strip()}); choose another merge operator."
        ) from None
    return _file("fisher", model, rows, {name: value / len(rows) for name, value in total.items()})


def gram_statistics(network: NetworkRecord, model: bytes, rows: Rows) -> bytes:
    """The second moments of what each linear layer of a model sees on public rows.

    For each `torch.nn.Linear` that is trained, G = mean of x x' over its inputs x (of all rows, and of all places where
    a row has several); for each `torch.nn.Conv2d` without groups and padded with zeros, the same over the patches.
    Other
    layers are left out: RegMean takes the mean of their weights.

    Args:
        model: contents of a safetensors file.
        rows: public ones.

    Returns:
        A safetensors file, float64: under the name of the layer's weight, shape (inputs, inputs), symmetric.

    Raises:
        InvalidInput: there is no row, or the network has no such layer.
        IncompatibleCandidates: the parameters do not fit the network, or a result is not finite.
    """
    import torch

    module = _loaded(network, model, rows)
    total: dict[str, Tensor] = {}
    count: dict[str, int] = {}

    def counted(weight: str, inputs_of: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def hook(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
            seen = inputs_of(arguments[0])
            total[weight] = total.get(weight, 0) + seen.T @ seen
            count[weight] = count.get(weight, 0) + len(seen)

        return hook

    for name, layer in module.named_modules():
        inputs_of = _inputs_of(layer)
        if inputs_of is not None and layer.weight.requires_grad:
            layer.register_forward_pre_hook(counted(f"{name}.weight" if name else "weight", inputs_of))
    with torch.no_grad():
        for part in _parts(rows, PATCHES_AT_ONCE):
            module(part)
    if not total:
        raise InvalidInput(
            f"The network {network.factory} has no linear layer whose inputs could be looked at; choose another "
            "merge operator than regmean."
        )
    return _file(
        "gram", model, rows, {name: (value + value.T) / (2 * count[name]) for name, value in total.items()}
    )


def _inputs_of(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How a layer's inputs become rows of a matrix, each weighed by the layer's flattened weight; None: not linear."""
    from torch import nn
    from torch.nn.functional import unfold

    if isinstance(layer, nn.Linear):
        return lambda values: values.reshape(-1, values.shape[-1])
    if not isinstance(layer, nn.Conv2d) or layer.groups != 1 or layer.padding_mode != "zeros":
        return None
    padding = (0, 0) if layer.padding == "valid" else layer.padding
    if isinstance(padding, str):
        return None

    def patches(values: Tensor) -> Tensor:
        seen = unfold(values, layer.kernel_size, layer.dilation, padding, layer.stride)
        return seen.transpose(1, 2).reshape(-1, seen.shape[1])

    return patches


def _loaded(network: NetworkRecord, model: bytes, rows: Rows) -> nn.Module:
    from tasks.models import network_with, state_from_bytes

    if not len(rows):
        raise InvalidInput("Statistics need public rows, but there are none; give some.")
    return network_with(network, state_from_bytes(model)).double()


def _parts(rows: Rows, at_once: int) -> Iterator[Tensor]:
    import torch

    for start in range(0, len(rows), at_once):
        yield torch.tensor(rows.features[start : start + at_once], dtype=torch.float64)


def _log_probabilities(scores: Tensor) -> Tensor:
    """Of each class, shape (rows, classes); one score is the logit of class 1 (see tasks.objective)."""
    import torch
    from torch.nn.functional import logsigmoid

    if scores.shape[1] == 1:
        return torch.cat([logsigmoid(-scores), logsigmoid(scores)], dim=1)
    return torch.log_softmax(scores, dim=1)


def _file(kind: str, model: bytes, rows: Rows, statistics: dict[str, Tensor]) -> bytes:
    import safetensors.numpy
    import torch

    for name, value in statistics.items():
        if not torch.isfinite(value).all():
            raise IncompatibleCandidates(
                f"The {kind} statistics of tensor {name} are not finite: the model's training diverged; train it "
                "again with a smaller learning rate."
            )
    return marked(
        safetensors.numpy.save({name: value.contiguous().numpy() for name, value in statistics.items()}),
        {
            KIND: kind,
            ROWS: PUBLIC,
            ROWS_SHA256: rows.digest(),
            MODEL_SHA256: hashlib.sha256(model).hexdigest(),
        },
    )
