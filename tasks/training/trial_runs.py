"""Copies of a network that are run for a trial: with Opacus, and one record at a time without it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accounting.errors import InvalidInput
from tasks.training.fitness import keep_frozen, layer_name, names_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SEED, OTHER_SEED = 20_260_101, 20_260_102  # any two


class AttemptFailed(Exception):
    """Not to be had in this floating-point type, or at these parameters; in others it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    scores: Tensor  # (rows, ...)
    # by parameter: (rows, ...), or their norms (rows,) under ghost clipping
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def only_scores(self) -> Result:
        return Result(scores=self.scores)

    def of_row(self, position: int) -> Result:
        """The same, of one row."""
        part = slice(position, position + 1)
        return Result(
            scores=self.scores[part],
            gradients={name: gradient[part] for name, gradient in self.gradients.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A network on trial."""

    module: nn.Module  # never run itself
    what: str  # names it at the start of a sentence
    mode: str  # grad_sample_mode
    dtype: torch.dtype
    shift: float  # how far from the initial parameters, as a share of their usual size
    last_attempt: bool

    def copy(self, *, dropout: bool = True) -> nn.Module:
        """In training mode, beside the initial parameters; the same on each call."""
        import torch

        try:
            module = copy.deepcopy(self.module).to(self.dtype)
        except Exception as error:
            raise InvalidInput(
                f"{self.what} cannot be copied ({_first_line(error)}), as for a layer whose weights are computed "
                "from others; give every layer plain parameters."
            ) from error
        numbers = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for tensor in module.parameters():
                if tensor.requires_grad:
                    size = max(float(tensor.square().mean().sqrt()), 0.1)
                    tensor += (
                        self.shift * size * torch.randn(tensor.shape, generator=numbers, dtype=tensor.dtype)
                    )
        module.train()
        keep_frozen(module)
        if not dropout:
            for layer in module.modules():
                if type(layer) in dropout_layers():
                    layer.eval()
        return module

    def wrap(self, module: nn.Module) -> Any:
        """Opacus's own wrapper, which names the layer that it fails on."""
        from opacus.grad_sample.utils import get_gsm_class

        trial, paths = self, {layer: path for path, layer in module.named_modules()}

        class Watched(get_gsm_class(self.mode)):  # type: ignore[misc]
            def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **named: Any) -> None:
                try:
                    super().capture_backprops_hook(module, *arguments, **named)
                except Exception as error:
                    raise trial._refusal(error, layer_name(paths.get(module, ""), module)) from error

        functorch = {"force_functorch": True} if self.mode == "functorch" else {}
        try:
            return Watched(module, **functorch)
        except Exception as error:
            raise self._refusal(error) from error

    def opacus(self, wrapped: Any, rows: Tensor, *, seed: int = SEED) -> Result:
        import torch

        for tensor in wrapped.parameters():
            tensor.grad = tensor.grad_sample = None
            tensor.__dict__.pop("_norm_sample", None)
        scores = self.scores(wrapped, rows, seed=seed, gradients=True)
        try:
            _combination(scores).backward()
        except Exception as error:
            raise self._refusal(error) from error
        attribute = "_norm_sample" if self.mode == "ghost" else "grad_sample"
        found = {
            name: getattr(tensor, attribute, None)
            for name, tensor in wrapped._module.named_parameters()
            if tensor.requires_grad
        }
        missing = [
            name
            for name, gradient in found.items()
            if not isinstance(gradient, torch.Tensor) or len(gradient) != len(rows)
        ]
        if missing:
            raise InvalidInput(
                f"{self.what} cannot be trained with differential privacy: Opacus finds no gradient of each record "
                f"for {names_of(missing)}; use a layer's parameters in its own forward, on one row for each record, "
                "and freeze or remove those that are not used."
            )
        return Result(
            scores=scores.detach(), gradients={name: tensor.detach() for name, tensor in found.items()}
        )

    def autograd(self, plain: nn.Module, row: Tensor) -> Result:
        """The gradient of one record alone, shape (1, ...), without Opacus."""
        import torch

        trained = {name: tensor for name, tensor in plain.named_parameters() if tensor.requires_grad}
        scores = self.scores(plain, row, gradients=True)
        try:
            gradients = torch.autograd.grad(_combination(scores), list(trained.values()))
        except RuntimeError as error:
            raise self._refusal(error) from error
        if self.mode == "ghost":
            gradients = tuple(gradient.norm().reshape(()) for gradient in gradients)
        return Result(
            scores=scores.detach(),
            gradients={name: tensor[None] for name, tensor in zip(trained, gradients, strict=True)},
        )

    def scores(self, module: nn.Module, rows: Tensor, *, seed: int = SEED, gradients: bool = False) -> Tensor:
        import torch

        torch.manual_seed(seed)
        try:
            with torch.set_grad_enabled(gradients):
                scores = module(rows.clone())
        except Exception as error:
            raise self._refusal(error) from error
        if not isinstance(scores, torch.Tensor) or scores.ndim < 1 or len(scores) != len(rows):
            raise InvalidInput(f"{self.what} must return a tensor with the scores of each row it was given.")
        if not bool(torch.isfinite(scores).all()):
            if not self.last_attempt:
                raise AttemptFailed
            raise InvalidInput(
                f"{self.what} gives scores that are NaN or infinite, at its initial parameters already."
            )
        return scores

    def outputs(self, pair: Tensor) -> list[tuple[str, Tensor]]:
        """What each innermost layer, and the network, gives for the first record of the pair."""
        plain = self.copy()
        outputs: list[tuple[str, Tensor]] = []

        def watch(path: str, layer: nn.Module) -> None:
            def remember(_layer: nn.Module, _rows: Any, output: Any) -> None:
                if hasattr(output, "detach") and output.ndim and len(output) == 2:
                    numbers = output.is_floating_point() or output.is_complex()
                    first = output.detach()[:1].clone()
                    outputs.append((layer_name(path, layer), first if numbers else first.double()))

            layer.register_forward_hook(remember)

        for path, layer in plain.named_modules():
            if not any(layer.children()) or not path:
                watch(path, layer)
        self.scores(plain, pair)
        return outputs

    def _refusal(self, error: Exception, layer: str | None = None) -> Exception:
        if isinstance(error, InvalidInput | AttemptFailed):
            return error
        if not self.last_attempt:
            return AttemptFailed()
        inplace = [path for path, part in self.module.named_modules() if getattr(part, "inplace", False)]
        advice = (
            f"make {names_of(inplace)} not in-place (inplace=False)"
            if inplace
            else "replace it by layers that Opacus supports, such as Linear, Conv2d, GroupNorm, LayerNorm and Embedding"
        )
        return InvalidInput(
            f"{self.what} cannot be trained with differential privacy: Opacus cannot compute the gradient of each "
            f"record in {layer or 'it'} ({_first_line(error)}); {advice}."
        )


def state(module: nn.Module) -> dict[str, Tensor]:
    """Everything that a forward might write to, also buffers that a state dictionary leaves out."""
    inner: Any = getattr(module, "_module", module)
    return {
        name: tensor.detach().clone() for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]
    }


def _combination(scores: Tensor) -> Tensor:
    """A loss of each row's own scores, averaged as the real losses are; its slope differs from row to row."""
    import torch

    flat = scores.reshape(len(scores), -1)
    numbers = torch.Generator().manual_seed(SEED)
    weights = torch.randn(flat.shape[1], generator=numbers, dtype=flat.dtype)
    return (flat @ weights + flat.square().sum(dim=1) / 2).mean()


def dropout_layers() -> tuple[type[torch.nn.Module], ...]:
    from torch import nn

    return (
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")
