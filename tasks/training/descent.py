"""How a batch moves the parameters: by plain DP-SGD, or by the steps of DP-Merging.

DP-Merging (arXiv 2608.26655) trains models that merge well, because they lie in flat regions and near their common
public start w0. A step from w climbs to `w + radius * g / ||g||`, where ||g|| is the L2 norm of all parameters'
gradients together, takes the noisy clipped gradient h there, and hands `h + 2 * anchor * (w - w0)` to the base
optimizer, at w. Where g comes from decides what the step costs (`accounting.paired_mechanism`):

- `same_batch`: a noisy clipped gradient of the same batch at w, with noise of its own: two releases;
- `previous_gradient`: the h of the step before, which is released already: the cost of a plain step. The first step
  does not climb.

Both g and h are clipped, noised and divided by Opacus's optimizer, as in plain DP-SGD. Whatever g is, w comes back bit
for bit. Where ||g|| is zero or not finite, the step does not climb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tasks.recipes import DpMerging

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer
    from torch import Tensor

Backward = Callable[["Tensor", "Tensor"], None]
RELEASED = "released_gradient"  # in the base optimizer's state, so that checkpoints have it


class Descent(Protocol):
    """Moves the parameters once a batch; a batch may come in parts, see `tasks.training.batches`."""

    def prepare(self) -> None:
        """Before the backward pass of each part."""
        ...

    def finish(self, features: Tensor, labels: Tensor) -> None:
        """After the backward pass of a part; with the last part of a batch the parameters move."""
        ...


def descent(optimizer: DPOptimizer, merging: DpMerging | None, *, backward: Backward) -> Descent:
    """The way that a candidate's recipe asks for.

    Args:
        optimizer: of parameters that stand at the public start.
        merging: None for plain DP-SGD.
        backward: leaves the gradients of rows where the optimizer finds them.
    """
    if merging is None:
        return PlainDescent(optimizer)
    kinds = {"same_batch": SameBatch, "previous_gradient": PreviousGradient, "none": AnchoredDescent}
    return kinds[merging.ascent](optimizer, merging, backward)


class PlainDescent:
    """DP-SGD: one release, where the parameters are."""

    def __init__(self, optimizer: DPOptimizer) -> None:
        self.optimizer = optimizer

    def prepare(self) -> None:
        self.optimizer.zero_grad()

    def finish(self, features: Tensor, labels: Tensor) -> None:
        self.optimizer.step()


class AnchoredDescent(PlainDescent):
    """One release, where the parameters are, and a pull towards the public start."""

    def __init__(self, optimizer: DPOptimizer, merging: DpMerging, backward: Backward) -> None:
        super().__init__(optimizer)
        self.backward = backward
        self.radius = merging.radius or 0.0
        self.anchor = merging.anchor
        self.start = [one.detach().clone() for one in optimizer.params] if merging.anchor else []
        self.place: list[Tensor] = []  # where the parameters were before they climbed
        self.has_climbed = False

    def finish(self, features: Tensor, labels: Tensor) -> None:
        if self.release():
            self.move()

    def release(self) -> bool:
        """Clip, and with a batch's last part add the noise and divide; whether it was the last."""
        if not self.optimizer.pre_step():
            return False
        if hasattr(self.optimizer, "reduce_gradients"):  # the sum over several processes
            self.optimizer.reduce_gradients()
        return True

    def climb(self, gradients: Sequence[Tensor]) -> None:
        """Go from w by the radius along gradients that were released, in float64 and rounded once."""
        import torch

        lengths = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in gradients]
        length = float(torch.linalg.vector_norm(torch.stack(lengths)))
        if not (self.radius > 0 and 0 < length < math.inf):
            return
        with torch.no_grad():
            self.place = self.place or [torch.empty_like(one) for one in self.optimizer.params]
            for place, parameter, one in zip(self.place, self.optimizer.params, gradients, strict=True):
                place.copy_(parameter)
                parameter.add_(one.double().mul_(self.radius / length).to(parameter.dtype))
        self.has_climbed = True

    def move(self) -> None:
        """Come back to w, and let the base optimizer step; afterwards `grad` is what was released."""
        import torch

        parameters = self.optimizer.params
        released = [parameter.grad for parameter in parameters]
        with torch.no_grad():
            if self.has_climbed:
                for place, parameter in zip(self.place, parameters, strict=True):
                    parameter.copy_(place)
            for start, parameter in zip(self.start, parameters, strict=False):
                parameter.grad = torch.add(parameter.grad, parameter - start, alpha=2 * self.anchor)
        self.has_climbed = False
        self.optimizer.original_optimizer.step()
        for parameter, one in zip(parameters, released, strict=True):
            parameter.grad = one


class SameBatch(AnchoredDescent):
    """Two releases from one batch, the second one at a point computed from the first.

    The Poisson coins are tossed once: the parts of a batch are kept, and go through the network again.
    """

    def __init__(self, optimizer: DPOptimizer, merging: DpMerging, backward: Backward) -> None:
        super().__init__(optimizer, merging, backward)
        self.parts: list[tuple[Tensor, Tensor]] = []

    def finish(self, features: Tensor, labels: Tensor) -> None:
        self.parts.append((features, labels))
        if not self.release():
            return
        self.climb([parameter.grad for parameter in self.optimizer.params])
        parts, self.parts = self.parts, []
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            self.prepare()
            self.backward(*part)
            self.optimizer.signal_skip_step(do_skip=left > 0)
            self.release()
        self.move()


class PreviousGradient(AnchoredDescent):
    """One release, at a point computed from the release of the step before."""

    def __init__(self, optimizer: DPOptimizer, merging: DpMerging, backward: Backward) -> None:
        super().__init__(optimizer, merging, backward)
        self.begins = True  # a batch, not a further part of one

    def prepare(self) -> None:
        if self.begins:
            self.begins = False
            previous = [self.optimizer.state.get(one, {}).get(RELEASED) for one in self.optimizer.params]
            if previous[0] is not None:
                self.climb(previous)
        super().prepare()  # sets the kept gradient to zero, in place: it has been used

    def finish(self, features: Tensor, labels: Tensor) -> None:
        if not self.release():
            return
        self.move()
        for parameter in self.optimizer.params:
            self.optimizer.state[parameter][RELEASED] = parameter.grad
        self.begins = True


def merging_notes(merging: DpMerging | None) -> dict[str, str]:
    """What the trajectory says about it in words."""
    if merging is None:
        return {}
    ways = {
        "same_batch": "each step released two noisy gradients of one batch, each with fresh noise of the noise "
        "multiplier, the second one where the first one led by the radius of ascent",
        "previous_gradient": "each step took its noisy gradient where the one of the step before led by the radius of "
        "ascent, the first step where it was",
        "none": "no ascent",
    }
    pull = "; the pull towards the public start was added after the noise" if merging.anchor else ""
    return {"dp_merging": ways[merging.ascent] + pull}
