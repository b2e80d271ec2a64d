"""Opacus's optimizers with the recipe's literals, and with a noise source of our own in place of torch's generator."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from tasks.recipes import CandidateRecipe
from tasks.training.noise import NoiseSource

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer
    from torch import nn

PER_LAYER_SLACK = 1e-6  # relative: so that limits rounded to float32 still add up to at most max_grad_norm


def private_optimizer(
    module: nn.Module,
    candidate: CandidateRecipe,
    *,
    mode: str,
    noise: NoiseSource,
    processes: int = 1,
) -> DPOptimizer:
    """The optimizer of one private run.

    The noise on each step's sum has standard deviation noise_multiplier x max_grad_norm, whatever the clipping: of
    L parameters clipped apart, each is clipped to a hair below max_grad_norm / sqrt(L), so that a record's whole
    gradient stays within max_grad_norm. The divisor is the recipe's constant, never a batch's size.

    Args:
        mode: how per-record gradients are had, see `tasks.training.clippers`.
        processes: that train the run together; each divides by its share of the expected batch size, and Opacus
            then averages over the processes.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    limit: float | list[float] = candidate.max_grad_norm
    if candidate.clipping == "per_layer":
        limit = [candidate.max_grad_norm * (1 - PER_LAYER_SLACK) / len(trained) ** 0.5] * len(trained)
    kind = _noisy(candidate.clipping, mode, distributed=processes > 1)
    optimizer: DPOptimizer = kind(
        _plain_optimizer(trained, candidate),
        noise_multiplier=candidate.noise_multiplier,
        max_grad_norm=limit,
        expected_batch_size=candidate.expected_batch_size / processes,
        loss_reduction="mean",
        noise=noise,
    )
    optimizer.max_grad_norm = candidate.max_grad_norm
    return optimizer


def _plain_optimizer(trained: list[nn.Parameter], candidate: CandidateRecipe) -> Any:
    import torch

    settings = {"lr": candidate.learning_rate, "weight_decay": candidate.weight_decay}
    if candidate.optimizer == "adam":
        return torch.optim.Adam(trained, **settings)
    if candidate.optimizer == "adamw":
        return torch.optim.AdamW(trained, **settings)
    return torch.optim.SGD(trained, momentum=candidate.momentum, **settings)


@cache
def _noisy(clipping: str, mode: str, *, distributed: bool) -> Any:
    """Opacus's class for this clipping, whose noise comes from a `NoiseSource`."""
    from opacus.optimizers import get_optimizer_class

    base: Any = get_optimizer_class(
        clipping, distributed=distributed, grad_sample_mode="ghost" if mode == "closed_form" else mode
    )

    class Noisy(base):  # type: ignore[misc]
        def __init__(self, optimizer: Any, *, noise: NoiseSource, **settings: Any) -> None:
            super().__init__(optimizer, **settings)
            self.noise = noise

        def clip_and_accumulate(self) -> None:
            """Opacus's own, but a record whose gradient is not finite adds nothing, see `clippers`."""
            import torch

            before = [None if p.summed_grad is None else p.summed_grad.clone() for p in self.params]
            super().clip_and_accumulate()
            if all(bool(parameter.summed_grad.isfinite().all()) for parameter in self.params):
                return
            gradients = self.grad_samples
            finite = torch.stack([one.flatten(1).isfinite().all(dim=1) for one in gradients]).all(dim=0)
            for parameter, total, one in zip(self.params, before, gradients, strict=True):
                parameter.summed_grad = total
                parameter.grad_sample = one[finite]
            super().clip_and_accumulate()

        def add_noise(self) -> None:
            if getattr(self, "rank", 0) != 0:  # of several processes, the first one adds the noise for all
                super().add_noise()
                return
            for parameter in self.params:
                total = parameter.summed_grad
                if hasattr(total, "_processed"):
                    raise ValueError("A sum of gradients that already got its noise must be cleared first.")
                noisy = self.noise.added(total, self.noise_multiplier * self.max_grad_norm)
                parameter.grad = noisy.view_as(parameter)
                total._processed = True

    return Noisy
