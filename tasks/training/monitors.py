"""What people see of a run while it trains. Everything under `private/` is computed from private rows without noise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.data import Rows
from tasks.training.clippers import NORM_SLACK, Clipper
from tasks.validation import share_right

if TYPE_CHECKING:
    from torch import Tensor, nn

# Prefix of metrics computed from private data without noise: for the trainer's eyes only.
PRIVATE = "private/"
LOOKS = 50  # a run, unless the recipe says otherwise
LOOK_ROWS = 1000  # public-train rows that a look scores, so that looking stays cheap
RARELY = 20  # the epsilon so far is computed anew once training took so many times as long as computing it


class Monitor:
    """Looks at a run every few steps; in between it costs nothing.

    Args:
        every: steps between two looks; the last step is always looked at.
        steps: of the whole run.
        epsilon_after: the epsilon of the run's first so many steps, nats; None where its noise hides nothing.
        full_batch: then a batch's size, the number of private rows, is not told.
    """

    def __init__(
        self,
        *,
        every: int | None,
        steps: int,
        done: int,
        public_train: Rows,
        epsilon_after: Callable[[int], float] | None,
        full_batch: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = every or max(1, steps // LOOKS)
        self.steps = steps
        self.rows = Rows(features=public_train.features[:LOOK_ROWS], labels=public_train.labels[:LOOK_ROWS])
        self.epsilon_after = epsilon_after
        self.full_batch = full_batch
        self.clock = clock
        self._norms: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._looked = (done, clock())
        self._rows_seen = 0
        self._epsilon_due = clock()

    def due(self, step: int) -> bool:
        """Whether the step with this number, from 1, is looked at."""
        return step % self.every == 0 or step == self.steps

    def see(self, clipper: Clipper, rows: int, *, look: bool) -> None:
        """Take in a part of a batch, after the backward pass and before the optimizer's step."""
        self._rows_seen += rows
        if look and rows:
            # Without those that are not finite, which add nothing to the step either.
            self._norms.append(_finite(clipper.norms()))
            self._losses.append(_finite(clipper.losses()))

    def look(self, step: int, clipper: Clipper, module: nn.Module, *, last: bool) -> dict[str, float]:
        """The metrics of a step that has just been taken, by name; `step` is one of them.

        Args:
            last: no step follows, so nothing is left out to save time.
        """
        import torch

        optimizer = clipper.optimizer
        now = self.clock()
        before, then = self._looked
        seconds = max(now - then, 1e-9)
        metrics = {
            "step": float(step),
            "public_train_accuracy": share_right(module, self.rows),
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
            "steps_per_second": (step - before) / seconds,
        }
        if self.epsilon_after and (last or now >= self._epsilon_due):
            metrics["epsilon_so_far"] = self.epsilon_after(step)
            computed = self.clock()
            self._epsilon_due = computed + RARELY * (computed - now)
        if not self.full_batch:  # of a full batch it would be the number of private rows
            metrics[f"{PRIVATE}batch_size"] = float(sum(len(norms) for norms in self._norms))
            metrics[f"{PRIVATE}records_per_second"] = self._rows_seen / seconds
        if sum(map(len, self._norms)) and sum(
            map(len, self._losses)
        ):  # an empty Poisson batch has no loss and no gradients, but its noise was added
            norms, losses = torch.cat(self._norms), torch.cat(self._losses)
            limit = float(optimizer.max_grad_norm)
            metrics[f"{PRIVATE}loss"] = float(losses.mean())
            metrics[f"{PRIVATE}gradient_norm_mean"] = float(norms.mean())
            metrics[f"{PRIVATE}gradient_norm_max"] = float(norms.max())
            metrics[f"{PRIVATE}clipping_rate"] = float((norms + NORM_SLACK > limit).float().mean())
        metrics.update(_noise(clipper))
        self._norms, self._losses, self._rows_seen = [], [], 0
        self._looked = (step, self.clock())
        return metrics


def _finite(values: Tensor) -> Tensor:
    return values[values.isfinite()]


def _noise(clipper: Clipper) -> dict[str, float]:
    """L2 norms of the last update before the learning rate: the whole of it, and its noise alone.

    Of several processes, the first one knows its own sum only, so the noise alone is not told.
    """
    import torch

    optimizer = clipper.optimizer
    divisor = float(optimizer.expected_batch_size * optimizer.accumulated_iterations)
    noisy = torch.cat([p.grad.flatten() for p in optimizer.params])
    if getattr(optimizer, "world_size", 1) > 1:
        return {f"{PRIVATE}noisy_gradient_norm": float(noisy.norm())}
    clean = torch.cat([p.summed_grad.flatten() for p in optimizer.params]) / divisor
    return {
        f"{PRIVATE}noisy_gradient_norm": float(noisy.norm()),
        f"{PRIVATE}noise_norm": float((noisy - clean).norm()),
    }
