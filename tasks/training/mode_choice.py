"""The fastest way to sums of clipped gradients, by a short trial on synthetic rows: no private row is timed."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from tasks.models import is_regression
from tasks.objective import Objective
from tasks.recipes import CandidateRecipe, Execution
from tasks.training.clippers import Clipper, clipper
from tasks.training.fitness import keep_frozen, require_trainable
from tasks.training.noise import SeededNoise

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

TRIAL_ROWS = 128  # at most
ROUNDS = 2  # timed, after one that is not
TOO_SLOW = 1.5  # a mode whose first round takes so many times the best one's is not tried again
AGREEMENT = 1e-3  # relative: how far a mode's sum of clipped gradients may be from that of Opacus's own rules
MEMORY = 2**31  # bytes that the gradients of all rows held at once may take
MOST_ROWS = 512  # held at once, unless the recipe says otherwise

_known: dict[tuple[object, ...], str] = {}
_fit: set[tuple[object, ...]] = set()
_one_at_a_time = threading.Lock()


def choose_mode(
    module: nn.Module,
    candidate: CandidateRecipe,
    execution: Execution,
    objective: Objective,
    *,
    network_digest: str,
    public_rows: np.ndarray,
    classes: int,
    what: str,
) -> tuple[str, str]:
    """The mode to train with, and in words why it is that one.

    A network that is not fit for private training in a mode (`tasks.training.fitness`), or whose sum differs there
    from that of Opacus's own rules, is not trained in it. Trials of the same network are remembered, and run one at
    a time, so that candidates trained side by side do not time each other.

    Args:
        module: with its initial parameters; it is copied, and left as it is.
        network_digest: names the network with its initial parameters, for the memory.
        public_rows: features, shape (rows, ...).
        what: names the network at the start of a sentence.

    Raises:
        InvalidInput: the network is not fit, or the mode that the recipe asks for is not one for it or its clipping.
    """
    row_shape = public_rows.shape[1:]
    wanted, apart = execution.grad_sample_mode, candidate.clipping == "per_layer"
    if wanted == "closed_form" and not (is_regression(module) and candidate.clipping == "flat"):
        raise InvalidInput(
            "grad_sample_mode closed_form is for softmax and logistic regression with flat clipping; set it to auto."
        )
    if wanted == "ghost" and apart:
        raise InvalidInput(
            "grad_sample_mode ghost cannot clip layers apart; set it to auto, or clipping to flat."
        )
    if wanted == "functorch" and apart and execution.processes > 1:
        raise InvalidInput(
            "grad_sample_mode functorch cannot clip layers apart in several processes; set it to auto, or "
            "processes to 1."
        )
    with _one_at_a_time:
        tried = "hooks" if wanted in ("auto", "closed_form") else wanted
        if (network_digest, row_shape, tried) not in _fit:
            require_trainable(module, public_rows, what=what, grad_sample_mode=tried)
            _fit.add((network_digest, row_shape, tried))
    if wanted != "auto":
        return wanted, "as the recipe says"
    if is_regression(module) and candidate.clipping == "flat":
        return "closed_form", "a regression's gradients have norms of a closed form"
    modes: tuple[str, ...] = ("hooks", "functorch") if apart else ("hooks", "ghost", "functorch")
    if apart and execution.processes > 1:
        modes = ("hooks",)
    rows = min(
        TRIAL_ROWS, max(1, round(candidate.expected_batch_size)), physical_batch_size(module, execution)
    )
    key = (network_digest, row_shape, classes, rows, modes)
    with _one_at_a_time:
        if key not in _known:
            fit = [mode for mode in modes if mode == "hooks" or _is_fit(module, public_rows, mode)]
            _known[key] = _fastest(fit, module, candidate, objective, rows, row_shape, classes)
        return _known[key], f"the fastest of {', '.join(modes)} in a trial on {rows} synthetic rows"


def _is_fit(module: nn.Module, public_rows: np.ndarray, mode: str) -> bool:
    try:
        require_trainable(module, public_rows, what="The network", grad_sample_mode=mode)
    except InvalidInput:
        return False
    return True


def physical_batch_size(module: nn.Module, execution: Execution) -> int:
    """Rows whose gradients are held at once: the recipe's number, or what fits into `MEMORY`."""
    if execution.physical_batch_size is not None:
        return execution.physical_batch_size
    entries = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return max(1, min(MOST_ROWS, MEMORY // (4 * max(1, entries))))


def _fastest(
    modes: Sequence[str],
    module: nn.Module,
    candidate: CandidateRecipe,
    objective: Objective,
    rows: int,
    row_shape: tuple[int, ...],
    classes: int,
) -> str:
    import torch

    numbers = torch.Generator().manual_seed(0)
    features = torch.rand((rows, *row_shape), generator=numbers)
    labels = torch.randint(classes, (rows,), generator=numbers)
    right: Tensor | None = None
    times: dict[str, float] = {}
    for mode in modes:
        tried = clipper(
            mode, copy.deepcopy(module), candidate, objective, noise=SeededNoise(torch.Generator())
        )
        tried.network.train()
        keep_frozen(tried.network)
        try:
            total, first = _timed(tried, features, labels)
        except (RuntimeError, NotImplementedError, ValueError):
            continue
        if right is None:
            right = total
        if not float((total - right).norm()) <= AGREEMENT * float(right.norm()):
            continue
        if times and first > TOO_SLOW * min(times.values()):
            continue
        times[mode] = min(_timed(tried, features, labels)[1] for _ in range(ROUNDS))
    if not times:
        raise InvalidInput(
            "None of Opacus's ways to per-record gradients works for this network; build it of layers that Opacus "
            "supports."
        )
    return min(times, key=lambda mode: times[mode])


def _timed(tried: Clipper, features: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """The clipped sum, flat, and the seconds that a step to it takes."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # so that dropout drops the same in every mode
        begun = time.perf_counter()
        tried.optimizer.zero_grad()
        tried.backward(features, labels)
        tried.optimizer.step()
        taken = time.perf_counter() - begun
    return torch.cat([p.summed_grad.flatten() for p in tried.optimizer.params]).clone(), taken
