"""Sums of clipped per-record gradients, had in several ways: Opacus's three, and a closed form for regressions.

All four give the same sum up to rounding, so which one runs is a matter of time and memory only:

- `hooks`: Opacus's rules for each kind of layer; holds every record's gradient in memory.
- `functorch`: the same by torch's vectorised differentiation; for layers without a rule.
- `ghost`: the norms alone, by Opacus's ghost clipping, then one more backward pass over a weighted loss.
- `closed_form`: a regression's gradient is residual times row, of norm |residual| |row|; no record's own gradient
  is ever made.

A record whose gradient, or its norm, is not a finite number adds nothing to the sum. Else that one record would make
all parameters NaN, and whether there is a model at all would tell of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tasks.objective import Objective
from tasks.recipes import CandidateRecipe
from tasks.training.noise import NoiseSource
from tasks.training.optimizers import private_optimizer
from tasks.training.sequence_norms import with_safe_rules

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer
    from torch import Tensor, nn

MODES = ("hooks", "functorch", "ghost", "closed_form")
NORM_SLACK = 1e-6  # Opacus clips by max_grad_norm / (norm + 1e-6), so shorter gradients shrink too


class Clipper(Protocol):
    """One way to have the clipped sum, with the optimizer that it feeds."""

    mode: str
    optimizer: DPOptimizer
    network: nn.Module  # what is to be put into training mode

    def backward(self, features: Tensor, labels: Tensor) -> None:
        """Leave the gradients of these rows where `optimizer.step()` finds them."""
        ...

    def losses(self) -> Tensor:
        """The last rows' losses, shape (rows,); private."""
        ...

    def norms(self) -> Tensor:
        """L2 norms of the last rows' per-record gradients before clipping, shape (rows,).

        Private, never to leave the trust boundary without noise.
        """
        ...


def clipper(
    mode: str,
    module: nn.Module,
    candidate: CandidateRecipe,
    objective: Objective,
    *,
    noise: NoiseSource,
    processes: int = 1,
) -> Clipper:
    """Make one of MODES; `closed_form` for a regression only (`tasks.models.is_regression`), asked beforehand."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.grad_sample.utils import wrap_model

    optimizer = private_optimizer(module, candidate, mode=mode, noise=noise, processes=processes)
    inner = DifferentiallyPrivateDistributedDataParallel(module) if processes > 1 else module
    if mode == "closed_form":
        return ClosedForm(inner, module.weight, optimizer, objective)
    ghost = {"max_grad_norm": candidate.max_grad_norm} if mode == "ghost" else {}
    # Not strict: that refuses every buffer, and what buffers may do is checked by tasks.training.fitness.
    network = wrap_model(inner, grad_sample_mode=mode, loss_reduction="mean", strict=False, **ghost)
    if mode == "ghost":
        network.NORM_SAMPLERS = with_safe_rules(network.NORM_SAMPLERS)  # of this network, not of the class
        return Ghost(mode, network, optimizer, objective)
    network.forbid_grad_accumulation()
    return PerRecord(mode, network, optimizer, objective)


class _Wrapped:
    """A network in one of Opacus's wrappers."""

    def __init__(self, mode: str, network: Any, optimizer: DPOptimizer, objective: Objective) -> None:
        self.mode = mode
        self.network = network
        self.optimizer = optimizer
        self.objective = objective
        self._losses: Tensor

    def losses(self) -> Tensor:
        return self._losses


class PerRecord(_Wrapped):
    """Opacus's GradSampleModule, with its own rules or by functorch."""

    def backward(self, features: Tensor, labels: Tensor) -> None:
        if not len(labels):  # many layers, and torch's vmap over convolutions, refuse a batch of no rows
            for parameter in self.optimizer.params:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
            self._losses = features.new_zeros(0)
            return
        losses = self.objective.losses(self.network(features), labels)
        losses.mean().backward()
        self._losses = losses.detach()

    def norms(self) -> Tensor:
        import torch

        norms = [gradients.flatten(1).norm(dim=1) for gradients in self.optimizer.grad_samples]
        return torch.stack(norms, dim=1).norm(dim=1)


class Ghost(_Wrapped):
    """Opacus's ghost clipping."""

    def backward(self, features: Tensor, labels: Tensor) -> None:
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        if not len(labels):  # the mean loss of no rows is not a number, nor are its gradients
            for parameter in self.optimizer.params:
                parameter.grad = parameter.new_zeros(parameter.shape)
            self._losses = features.new_zeros(0)
            return
        losses = self.objective.losses(self.network(features), labels)
        DPTensorFastGradientClipping(self.network, self.optimizer, losses, "mean").backward()
        self._losses = losses.detach()
        finite = self.norms().isfinite()
        if not finite.all():  # those records are left out; no other record's gradient changes by that
            self.optimizer.zero_grad()
            self.backward(features[finite], labels[finite])

    def norms(self) -> Tensor:
        return self.network.per_sample_gradient_norms if len(self._losses) else self._losses


class ClosedForm:
    """For one linear map W without bias: the clipped sum is (factors x residuals)' X.

    The gradient of a row's loss is the outer product of its residual r, the loss's derivative by the scores, and
    the row x itself, so its norm is |r| |x|. Opacus's optimizer adds the noise and divides, as in the other ways.
    """

    mode = "closed_form"

    def __init__(
        self, network: nn.Module, weight: nn.Parameter, optimizer: DPOptimizer, objective: Objective
    ) -> None:
        self.network = network
        self.weight = weight
        self.optimizer = optimizer
        self.objective = objective
        self._features: Tensor | None = None
        self._lengths: Tensor
        self._norms: Tensor
        self._scored: tuple[Tensor, Tensor]

    def backward(self, features: Tensor, labels: Tensor) -> None:
        import torch

        with torch.no_grad():
            if features is not self._features:  # a full batch is the same one at each step
                self._features, self._lengths = features, features.norm(dim=1)
            scores = features @ self.weight.T
            residuals = self.objective.residuals(scores, labels)
            self._norms = residuals.norm(dim=1) * self._lengths
            finite = self._norms.isfinite()
            if not finite.all():
                features, residuals = features[finite], residuals[finite]
                self._norms = self._norms[finite]
            factors = (self.optimizer.max_grad_norm / (self._norms + NORM_SLACK)).clamp(max=1.0)
            self.weight.grad = residuals.mul_(factors[:, None]).T @ features
        self._scored = (scores, labels)

    def losses(self) -> Tensor:
        return self.objective.losses(*self._scored)

    def norms(self) -> Tensor:
        return self._norms
