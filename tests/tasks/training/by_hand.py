"""DP-SGD written out by hand: one record after the other, in float64, from the recipe's literals alone.

Nothing of tasks.training or Opacus is used, only autograd for one record's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tasks.data import Rows
from tasks.models import build, initial_state
from tasks.recipes import CandidateRecipe


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(candidate: CandidateRecipe, count: int, coins: torch.Generator) -> Iterator[list[int]]:
    """The rows of each step: a coin for each row, 24 bits against the probability."""
    if candidate.sampling_probability == 1:
        while True:
            yield list(range(count))
    while True:
        torch.empty((), dtype=torch.int64).random_(generator=coins)  # torch's loader draws a seed a pass
        for _ in range(int(1 / candidate.sampling_probability)):
            heads = torch.rand(count, generator=coins) < candidate.sampling_probability
            yield heads.nonzero().flatten().tolist()


def gradients(module: nn.Module, rows: Rows, index: int) -> list[Tensor]:
    """One record's gradient by plain autograd, by parameter; the module decides the precision."""
    precision = next(module.parameters()).dtype
    scores = module(torch.tensor(rows.features[index : index + 1]).to(precision))
    label = torch.tensor(rows.labels[index : index + 1])
    if scores.shape[1] == 1:
        loss = nn.functional.binary_cross_entropy_with_logits(scores[:, 0], label.to(precision))
    else:
        loss = nn.functional.cross_entropy(scores, label)
    return list(torch.autograd.grad(loss, list(module.parameters())))


def clipped(record: Sequence[Tensor], candidate: CandidateRecipe) -> list[Tensor]:
    """Flat: the whole gradient to C; per layer: each of L parameters to C / sqrt(L)."""
    limit = candidate.max_grad_norm
    if candidate.clipping == "per_layer":
        own = limit / len(record) ** 0.5
        return [part * min(1.0, own / (float(part.norm()) + 1e-6)) for part in record]
    norm = float(torch.cat([part.flatten() for part in record]).norm())
    return [part * min(1.0, limit / (norm + 1e-6)) for part in record]


def seeded_noise(parameters: Sequence[Tensor], deviation: float, seed: int = 1) -> Iterator[list[Tensor]]:
    """The noise of each step, drawn parameter by parameter."""
    generator = seeded(seed)
    while True:
        yield [
            torch.normal(0.0, deviation, one.shape, generator=generator, dtype=torch.float32).double()
            for one in parameters
        ]


def train_by_hand(
    small: Any,
    *,
    noise: Iterator[list[Tensor]] | None = None,
    rates: Sequence[float] | None = None,
    steps: int | None = None,
    seen: Callable[[list[int]], None] = lambda chosen: None,
) -> dict[str, Tensor]:
    """The parameters after the recipe's steps, float64.

    Args:
        small: a `SmallPortfolio`.
        noise: of each step, by parameter; by default drawn from the generator with seed 1.
        rates: the learning rate of each step; by default the recipe's, constant.
        steps: to be taken; by default all.
        seen: told which rows are in each step.
    """
    candidate, rows = small.recipe.candidates[0], small.splits.private
    merging = candidate.dp_merging
    module = build(small.recipe.network)
    module.load_state_dict(initial_state(small.recipe.network, small.recipe.initialisation_seed))
    module.double().train()
    parameters = list(module.parameters())
    start = [one.detach().clone() for one in parameters]
    previous: list[Tensor] | None = None
    deviation = candidate.noise_multiplier * candidate.max_grad_norm
    noise = noise or seeded_noise(parameters, deviation)
    move = _Optimizer(candidate, parameters)
    steps = candidate.steps if steps is None else steps
    chosen_rows = batches(candidate, len(rows), seeded(2))

    def released(chosen: list[int], place: list[Tensor]) -> list[Tensor]:
        """The noisy mean gradient with the parameters moved to a place, from where they come back."""
        added, before = next(noise), [one.detach().clone() for one in parameters]
        _put(parameters, place)
        total = [torch.zeros_like(one) for one in parameters]
        for index in chosen:
            for sum_, part in zip(total, clipped(gradients(module, rows, index), candidate), strict=True):
                sum_ += part
        _put(parameters, before)
        return [(sum_ + own) / candidate.expected_batch_size for sum_, own in zip(total, added, strict=True)]

    for step in range(steps):
        chosen = next(chosen_rows)
        seen(chosen)
        here = [one.detach().clone() for one in parameters]
        if merging is not None and merging.ascent == "same_batch":
            direction = released(chosen, _climbed(here, released(chosen, here), merging.radius))
        elif merging is not None and merging.ascent == "previous_gradient" and previous is not None:
            direction = released(chosen, _climbed(here, previous, merging.radius))
        else:
            direction = released(chosen, here)
        previous = direction
        if merging is not None:
            direction = [
                one + 2 * merging.anchor * (now - then)
                for one, now, then in zip(direction, here, start, strict=True)
            ]
        move(direction, candidate.learning_rate if rates is None else rates[step])
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def _put(parameters: list[nn.Parameter], place: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, one in zip(parameters, place, strict=True):
            parameter.copy_(one)


def _climbed(here: list[Tensor], direction: list[Tensor], radius: float) -> list[Tensor]:
    """As far as the radius in the direction of a vector, which is the parameters' gradients one after the other."""
    length = sum(float((one**2).sum()) for one in direction) ** 0.5
    return [now + radius * one / length for now, one in zip(here, direction, strict=True)]


class _Optimizer:
    """SGD with momentum, Adam and AdamW, as their papers and torch's documentation write them."""

    def __init__(self, candidate: CandidateRecipe, parameters: list[nn.Parameter]) -> None:
        self.candidate, self.parameters, self.step = candidate, parameters, 0
        self.first = [torch.zeros_like(one) for one in parameters]
        self.second = [torch.zeros_like(one) for one in parameters]

    def __call__(self, direction: list[Tensor], rate: float) -> None:
        self.step += 1
        decay, kind = self.candidate.weight_decay, self.candidate.optimizer
        with torch.no_grad():
            for number, (parameter, gradient) in enumerate(zip(self.parameters, direction, strict=True)):
                first, second = self.first[number], self.second[number]
                if kind == "adamw":
                    parameter.mul_(1 - rate * decay)
                else:
                    gradient = gradient + decay * parameter
                if kind == "sgd":
                    first.mul_(self.candidate.momentum).add_(gradient)
                    parameter -= rate * first
                    continue
                first.mul_(0.9).add_(0.1 * gradient)
                second.mul_(0.999).add_(0.001 * gradient**2)
                mean = first / (1 - 0.9**self.step)
                spread = (second / (1 - 0.999**self.step)).sqrt()
                parameter -= rate * mean / (spread + 1e-8)
