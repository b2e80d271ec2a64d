"""A network tried on a few public rows: does every record have a gradient of its own, and Opacus find it?

On a copy, in training mode, at parameters a little beside the initial ones (a layer that starts at zero would hide
what lies below it), in float64 where the network allows it, so that even a faint mixture stands out from rounding:

1. A record's scores and gradient stay the same when the other record of the batch is another one. Random numbers are
   the same at the same place of a batch of the same shape, so dropout passes.
2. They stay the same after other batches were seen, and nothing but gradients was written: no memory.
3. With torch's dropout layers switched off they stay the same, and equal plain autograd's, when the record is alone;
   scores also in a batch of five.

The loss is replaced by a fixed one of the same form: the mean of what each row's scores give.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting.errors import InvalidInput
from tasks.training.fitness import keep_frozen, layer_name, names_of, same

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


_TOLERANCES = {"float64": 1e-8, "float32": 1e-4}  # of the largest gradient; far above each type's rounding
_SEED, _OTHER_SEED = 20_260_101, 20_260_102  # any two


class _WrongType(Exception):
    """The network does not compute in this floating-point type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    scores: Tensor  # (rows, ...)
    # by parameter: (rows, ...), or their norms (rows,) under ghost clipping
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def only_scores(self) -> _Result:
        return _Result(scores=self.scores)


def require_own_gradients(module: nn.Module, rows: np.ndarray, *, what: str, grad_sample_mode: str) -> None:
    """As `fitness.require_trainable`, which is to be called: it makes the checks that need no trial."""
    import torch

    three = _three_rows(rows, what)
    for name in ("float64", "float32"):
        trial = _Trial(module, three.to(getattr(torch, name)), what, grad_sample_mode, _TOLERANCES[name])
        try:
            with _quiet_and_repeatable():
                trial.run()
        except _WrongType:
            continue
        return
    raise AssertionError  # float32 never raises _WrongType


class _Trial:
    def __init__(
        self, module: nn.Module, rows: Tensor, what: str, grad_sample_mode: str, tolerance: float
    ) -> None:
        self.original, self.rows, self.what = module, rows, what
        self.mode, self.tolerance = grad_sample_mode, tolerance

    def run(self) -> None:
        first, second, third = self.rows
        pair, swapped = _stack(first, second), _stack(first, third)
        self._require_no_mixing_layer(pair, swapped)
        result = self._opacus(self._wrap(self._copy()), pair)
        wrapped = self._wrap(self._copy())  # which has not seen the pair
        before = _state(wrapped)
        other = self._opacus(wrapped, swapped)
        self._require_nothing_written(before, wrapped)
        self._require_same(
            _rows_of(result, 0, 1), _rows_of(other, 0, 1), "depend on the other records of the batch"
        )
        del other  # of a large network, gradients of each record are most of the memory
        self._require_same(result, self._opacus(wrapped, pair), "depend on the batches that were seen before")
        if any(type(layer) in _dropout_layers() for layer in wrapped.modules()):
            result = self._opacus(self._wrap(self._copy(dropout=False)), pair)
        self._require_independent_of_count(result, pair)

    def _require_independent_of_count(self, result: _Result, pair: Tensor) -> None:
        """`result` is that of the pair without dropout; here each record is alone, or one of five."""
        plain = self._copy(dropout=False)
        self._require_same(
            result.only_scores(),
            _Result(scores=self._scores(plain, pair, seed=_OTHER_SEED)),
            "are drawn at random outside torch's dropout layers, so that nobody can tell whether records mix",
            advice="use torch.nn.Dropout layers",
        )
        by_count = "depend on how many records the batch has"
        five = self._scores(plain, self.rows[[0, 1, 2, 0, 1]])
        self._require_same(result.only_scores(), _Result(scores=five[:2]), by_count)
        for position in range(2):
            alone = self._autograd(plain, pair[position : position + 1])
            own = _rows_of(result, position, position + 1)
            self._require_same(own.only_scores(), alone.only_scores(), by_count)
            self._require_same(
                own,
                alone,
                f"are computed wrongly by Opacus (grad_sample_mode {self.mode}), or {by_count}",
                advice="use a layer's parameters in its own forward only, or another grad_sample_mode",
            )

    def _copy(self, *, dropout: bool = True) -> nn.Module:
        """In training mode, beside the initial parameters; the same on each call."""
        import torch

        try:
            module = copy.deepcopy(self.original).to(self.rows.dtype)
        except Exception as error:
            raise InvalidInput(
                f"{self.what} cannot be copied ({_first_line(error)}), as for a layer whose weights are computed "
                "from others; give every layer plain parameters."
            ) from error
        numbers = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for tensor in module.parameters():
                if tensor.requires_grad:
                    size = max(float(tensor.square().mean().sqrt()), 0.1)
                    tensor += 0.1 * size * torch.randn(tensor.shape, generator=numbers, dtype=tensor.dtype)
        module.train()
        keep_frozen(module)
        if not dropout:
            for layer in module.modules():
                if type(layer) in _dropout_layers():
                    layer.eval()
        return module

    def _wrap(self, module: nn.Module) -> Any:
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

    def _opacus(self, wrapped: Any, rows: Tensor, *, seed: int = _SEED) -> _Result:
        import torch

        for tensor in wrapped.parameters():
            tensor.grad = tensor.grad_sample = None
            tensor.__dict__.pop("_norm_sample", None)
        scores = self._scores(wrapped, rows, seed=seed, gradients=True)
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
        return _Result(
            scores=scores.detach(), gradients={name: tensor.detach() for name, tensor in found.items()}
        )

    def _autograd(self, plain: nn.Module, row: Tensor) -> _Result:
        """The gradient of one record alone, shape (1, ...), without Opacus."""
        import torch

        trained = {name: tensor for name, tensor in plain.named_parameters() if tensor.requires_grad}
        scores = self._scores(plain, row, gradients=True)
        try:
            gradients = torch.autograd.grad(_combination(scores), list(trained.values()))
        except RuntimeError as error:
            raise self._refusal(error) from error
        if self.mode == "ghost":
            gradients = tuple(gradient.norm().reshape(()) for gradient in gradients)
        return _Result(
            scores=scores.detach(),
            gradients={name: tensor[None] for name, tensor in zip(trained, gradients, strict=True)},
        )

    def _scores(
        self, module: nn.Module, rows: Tensor, *, seed: int = _SEED, gradients: bool = False
    ) -> Tensor:
        import torch

        torch.manual_seed(seed)
        try:
            with torch.set_grad_enabled(gradients):
                scores = module(rows.clone())
        except Exception as error:
            raise self._refusal(error) from error
        if not isinstance(scores, torch.Tensor) or scores.ndim < 1 or len(scores) != len(rows):
            raise InvalidInput(f"{self.what} must return a tensor with the scores of each row it was given.")
        return scores

    def _require_no_mixing_layer(self, pair: Tensor, swapped: Tensor) -> None:
        """Layer by layer, so that the sentence can name the first one that mixes."""
        before, after = self._outputs(pair), self._outputs(swapped)
        for (layer, one), (_, other) in zip(before, after, strict=False):
            if not self._close(one, other, scale=_scale(one, other)):
                raise InvalidInput(
                    f"{self.what} cannot be trained with differential privacy: what {layer} gives for a record "
                    "depends on the other records of the batch, so one record would move others' gradients; "
                    "normalise each record by itself (GroupNorm, LayerNorm)."
                )

    def _outputs(self, pair: Tensor) -> list[tuple[str, Tensor]]:
        """What each innermost layer, and the network, gives for the first record of the pair."""
        plain = self._copy()
        outputs: list[tuple[str, Tensor]] = []

        def watch(path: str, layer: nn.Module) -> None:
            def remember(_layer: nn.Module, _rows: Any, output: Any) -> None:
                if hasattr(output, "detach") and output.ndim and len(output) == 2:
                    outputs.append((layer_name(path, layer), output.detach()[:1].clone()))

            layer.register_forward_hook(remember)

        for path, layer in plain.named_modules():
            if not any(layer.children()) or not path:
                watch(path, layer)
        self._scores(plain, pair)
        return outputs

    def _require_nothing_written(self, before: dict[str, Tensor], wrapped: Any) -> None:
        written = [name for name, tensor in _state(wrapped).items() if not same(tensor, before[name])]
        if written:
            raise InvalidInput(
                f"{self.what} cannot be trained with differential privacy: its forward writes to "
                f"{names_of(written)}, which would carry private rows into the model without noise; remove what "
                "it keeps from batch to batch, or freeze it."
            )

    def _require_same(self, one: _Result, other: _Result, how: str, *, advice: str | None = None) -> None:
        scale = max(
            [_scale(one.gradients[name], other.gradients[name]) for name in one.gradients], default=0.0
        )
        wrong = [
            name
            for name, gradient in one.gradients.items()
            if not self._close(
                gradient,
                other.gradients[name],
                scale=_scale(gradient, other.gradients[name]) + 1e-2 * scale,
            )
        ]
        parts = [f"the gradients of {names_of(wrong)}"] if wrong else []
        if not self._close(one.scores, other.scores, scale=_scale(one.scores, other.scores)):
            parts.insert(0, "its scores")
        if parts:
            raise InvalidInput(
                f"{self.what} cannot be trained with differential privacy: {' and '.join(parts)} {how}; "
                f"{advice or 'what it computes for a record may depend on that record alone'}."
            )

    def _close(self, one: Tensor, other: Tensor, *, scale: float) -> bool:
        return one.shape == other.shape and bool(
            ((one - other).abs() <= self.tolerance * scale).all()  # NaN fails
        )

    def _refusal(self, error: Exception, layer: str | None = None) -> Exception:
        import torch

        if isinstance(error, InvalidInput | _WrongType):
            return error
        if self.rows.dtype == torch.float64:
            return _WrongType()
        inplace = [path for path, part in self.original.named_modules() if getattr(part, "inplace", False)]
        advice = (
            f"make {names_of(inplace)} not in-place (inplace=False)"
            if inplace
            else "replace it by layers that Opacus supports, such as Linear, Conv2d, GroupNorm, LayerNorm and Embedding"
        )
        return InvalidInput(
            f"{self.what} cannot be trained with differential privacy: Opacus cannot compute the gradient of each "
            f"record in {layer or 'it'} ({_first_line(error)}); {advice}."
        )


def _three_rows(rows: np.ndarray, what: str) -> Tensor:
    """Three different rows; where there are too few, one with its entries moved round stands in."""
    import torch

    found: list[np.ndarray] = []
    for row in [*rows[:100], *(np.roll(row.ravel(), 1).reshape(row.shape) for row in rows[:2])]:
        if not any(np.array_equal(row, earlier) for earlier in found):
            found.append(row)
        if len(found) == 3:
            return torch.tensor(np.stack(found))
    raise InvalidInput(
        f"{what} cannot be tried before training: the public rows are all the same; bring different ones."
    )


def _stack(*rows: Tensor) -> Tensor:
    import torch

    return torch.stack(rows)


def _combination(scores: Tensor) -> Tensor:
    """A loss of each row's own scores, averaged as the real losses are; its slope differs from row to row."""
    import torch

    flat = scores.reshape(len(scores), -1)
    numbers = torch.Generator().manual_seed(_SEED)
    weights = torch.randn(flat.shape[1], generator=numbers, dtype=flat.dtype)
    return (flat @ weights + flat.square().sum(dim=1) / 2).mean()


def _rows_of(result: _Result, start: int, end: int) -> _Result:
    return _Result(
        scores=result.scores[start:end],
        gradients={name: gradient[start:end] for name, gradient in result.gradients.items()},
    )


def _scale(one: Tensor, other: Tensor) -> float:
    return max([float(part.abs().max()) for part in (one, other) if part.numel()], default=0.0)


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Everything that a forward might write to, also buffers that a state dictionary leaves out."""
    inner: Any = getattr(module, "_module", module)
    return {
        name: tensor.detach().clone() for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]
    }


def _dropout_layers() -> tuple[type[torch.nn.Module], ...]:
    from torch import nn

    return (
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    )


@contextmanager
def _quiet_and_repeatable() -> Iterator[None]:
    """torch's global random numbers are put back afterwards; hooks of no consequence do not warn."""
    import torch

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")
