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

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting.errors import InvalidInput
from tasks.training.fitness import names_of, same
from tasks.training.trial_runs import OTHER_SEED, AttemptFailed, Result, Subject, dropout_layers, state

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOLERANCES = {"float64": 1e-8, "float32": 1e-4}  # of the largest gradient; far above each type's rounding
_SHIFTS = (0.1, 0.0)  # none where a network stands no other parameters than its initial ones


def require_own_gradients(module: nn.Module, rows: np.ndarray, *, what: str, grad_sample_mode: str) -> None:
    """As `fitness.require_trainable`, which is to be called: it makes the checks that need no trial."""
    import torch

    three = _three_rows(rows, what)
    attempts = list(product(_SHIFTS, _TOLERANCES))
    for shift, name in attempts:
        dtype = getattr(torch, name)
        subject = Subject(
            module=module,
            what=what,
            mode=grad_sample_mode,
            dtype=dtype,
            shift=shift,
            last_attempt=(shift, name) == attempts[-1],
        )
        try:
            with _quiet_and_repeatable():
                _Trial(subject, three.to(dtype), _TOLERANCES[name]).run()
        except AttemptFailed:
            continue
        return
    raise AssertionError  # the last attempt either passes or is refused


class _Trial:
    def __init__(self, subject: Subject, rows: Tensor, tolerance: float) -> None:
        self.subject, self.rows, self.tolerance = subject, rows, tolerance

    def run(self) -> None:
        pair, swapped = self.rows[:2], self.rows[[0, 2]]
        self._require_no_mixing_layer(pair, swapped)
        result = self.subject.opacus(self.subject.wrap(self.subject.copy()), pair)
        wrapped = self.subject.wrap(self.subject.copy())  # which has not seen the pair
        before = state(wrapped)
        other = self.subject.opacus(wrapped, swapped)
        self._require_nothing_written(before, wrapped)
        self._require_same(result.of_row(0), other.of_row(0), "depend on the other records of the batch")
        del other  # of a large network, gradients of each record are most of the memory
        self._require_same(
            result, self.subject.opacus(wrapped, pair), "depend on the batches that were seen before"
        )
        if any(type(layer) in dropout_layers() for layer in wrapped.modules()):
            result = self.subject.opacus(self.subject.wrap(self.subject.copy(dropout=False)), pair)
        self._require_independent_of_count(result, pair)

    def _require_independent_of_count(self, result: Result, pair: Tensor) -> None:
        """`result` is that of the pair without dropout; here each record is alone, or one of five."""
        plain = self.subject.copy(dropout=False)
        self._require_same(
            result.only_scores(),
            Result(scores=self.subject.scores(plain, pair, seed=OTHER_SEED)),
            "are drawn at random outside torch's dropout layers, so that nobody can tell whether records mix",
            advice="use torch.nn.Dropout layers",
        )
        by_count = "depend on how many records the batch has"
        five = self.subject.scores(plain, self.rows[[0, 1, 2, 0, 1]])
        self._require_same(result.only_scores(), Result(scores=five[:2]), by_count)
        for position in range(2):
            alone = self.subject.autograd(plain, pair[position : position + 1])
            own = result.of_row(position)
            self._require_same(own.only_scores(), alone.only_scores(), by_count)
            self._require_same(
                own,
                alone,
                f"are computed wrongly by Opacus (grad_sample_mode {self.subject.mode}), or {by_count}",
                advice="use a layer's parameters in its own forward only, or another grad_sample_mode",
            )

    def _require_no_mixing_layer(self, pair: Tensor, swapped: Tensor) -> None:
        """Layer by layer, so that the sentence can name the first one that mixes."""
        before, after = self.subject.outputs(pair), self.subject.outputs(swapped)
        for (layer, one), (_, other) in zip(before, after, strict=False):
            if not self._close(one, other, scale=_scale(one, other)):
                raise InvalidInput(
                    f"{self.subject.what} cannot be trained with differential privacy: what {layer} gives for a record "
                    "depends on the other records of the batch, so one record would move others' gradients; "
                    "normalise each record by itself (GroupNorm, LayerNorm)."
                )

    def _require_nothing_written(self, before: dict[str, Tensor], wrapped: Any) -> None:
        written = [name for name, tensor in state(wrapped).items() if not same(tensor, before[name])]
        if written:
            raise InvalidInput(
                f"{self.subject.what} cannot be trained with differential privacy: its forward writes to "
                f"{names_of(written)}, which would carry private rows into the model without noise; remove what "
                "it keeps from batch to batch, or freeze it."
            )

    def _require_same(self, one: Result, other: Result, how: str, *, advice: str | None = None) -> None:
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
                f"{self.subject.what} cannot be trained with differential privacy: {' and '.join(parts)} {how}; "
                f"{advice or 'what it computes for a record may depend on that record alone'}."
            )

    def _close(self, one: Tensor, other: Tensor, *, scale: float) -> bool:
        """Entry by entry; equal infinities are close, NaN never is."""
        return one.shape == other.shape and bool(
            ((one == other) | ((one - other).abs() <= self.tolerance * scale)).all()
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


def _scale(one: Tensor, other: Tensor) -> float:
    """The largest finite entry: an infinite one would let everything pass as close."""
    import torch

    return max(
        float(torch.where(torch.isfinite(part), part, 0).abs().max()) if part.numel() else 0.0
        for part in (one, other)
    )


@contextmanager
def _quiet_and_repeatable() -> Iterator[None]:
    """torch's global random numbers are put back afterwards; hooks of no consequence do not warn."""
    import torch

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield
