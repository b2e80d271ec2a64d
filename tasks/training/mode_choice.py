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

TRIAL_ROWS = 256  # at most; the same for candidates of any batch size, so that one trial serves them all
ROUNDS = 4  # of a step in each mode in turn, after one that warms up
TOO_SLOW = 3.0  # a mode whose first round takes so many times the best one's is not tried again
AGREEMENT = (
    1e-3  # relative: how far a mode's clipped sum, and each record's norm, may be from Opacus's own rules
)
MEMORY = 2**31  # bytes that the gradients of all rows held at once may take
MOST_ROWS = 512  # held at once, unless the recipe says otherwise

_known: dict[tuple[object, ...], dict[str, float]] = {}
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

    A network that is not fit for private training in a mode (`tasks.training.fitness`), or whose sum or norms differ
    there from those of Opacus's own rules, is not trained in it. Trials of the same network are remembered and run
    one at a time. They seed torch's global generator for a moment, so where threads train networks with dropout,
    all trials are to be made before the threads start (`tasks.training.try_networks`).

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
    if wanted not in ("auto", "ghost"):
        return wanted, "as the recipe says"
    if wanted == "auto" and is_regression(module) and candidate.clipping == "flat":
        return "closed_form", "a regression's gradients have norms of a closed form"
    modes: tuple[str, ...] = ("hooks", "functorch") if apart else ("hooks", "functorch", "ghost")
    if apart and execution.processes > 1:
        modes = ("hooks",)
    rows = min(TRIAL_ROWS, physical_batch_size(module, execution))
    key = (network_digest, row_shape, classes, rows, modes)
    with _one_at_a_time:
        if key not in _known:
            fit = [mode for mode in modes if mode == "hooks" or _is_fit(module, public_rows, mode)]
            _known[key] = _seconds(fit, module, candidate, objective, rows, row_shape, classes)
        seconds = _known[key]
    if wanted == "ghost":  # scales by norms that it has apart from the gradients: never believed untried
        if "ghost" not in seconds:
            raise InvalidInput(
                "grad_sample_mode ghost fails for this network, or finds other gradient norms than Opacus's own "
                "rules; set it to auto."
            )
        return wanted, "as the recipe says"
    fastest = min(seconds, key=lambda mode: seconds[mode])
    return fastest, f"the fastest of {', '.join(modes)} in a trial on {rows} synthetic rows"


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


def _seconds(
    modes: Sequence[str],
    module: nn.Module,
    candidate: CandidateRecipe,
    objective: Objective,
    rows: int,
    row_shape: tuple[int, ...],
    classes: int,
) -> dict[str, float]:
    """How long a step takes in each mode that is right."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    features = torch.rand((rows, *row_shape), generator=numbers)
    labels = torch.randint(classes, (rows,), generator=numbers)
    beside = _beside(module)
    right: tuple[Tensor, Tensor] | None = None
    ways: dict[str, Clipper] = {}
    said = "their sums of clipped gradients differ"
    seconds: dict[str, float] = {}
    for mode in modes:
        tried = clipper(
            mode, copy.deepcopy(beside), candidate, objective, noise=SeededNoise(torch.Generator())
        )
        tried.network.train()
        keep_frozen(tried.network)
        try:
            taken = _timed(tried, features, labels)
        except (RuntimeError, ValueError, AttributeError, TypeError, LookupError) as error:
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"  # the rows are synthetic
            continue
        found = (
            torch.cat([p.summed_grad.flatten() for p in tried.optimizer.params]),
            tried.norms().detach(),
        )
        if right is None and mode != "ghost":
            right = found
        if right is not None and all(_close(*pair) for pair in zip(found, right, strict=True)):
            ways[mode], seconds[mode] = tried, taken
    worth = [mode for mode in ways if seconds[mode] <= TOO_SLOW * min(seconds.values())]
    rounds = [
        {mode: _timed(ways[mode], features, labels) for mode in worth}
        for _ in range(ROUNDS if len(worth) > 1 else 0)
    ]
    seconds |= {mode: min(one[mode] for one in rounds) for mode in worth if rounds}
    if not seconds:
        raise InvalidInput(
            f"None of Opacus's ways to per-record gradients works for this network on {rows} synthetic rows ({said}); "
            "correct it, or build it of layers that Opacus supports."
        )
    return seconds


def _beside(module: nn.Module) -> nn.Module:
    """A copy beside the initial parameters: a layer that starts at zero would hide what lies below it."""
    import torch

    copied = copy.deepcopy(module)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in copied.parameters():
            if tensor.requires_grad:
                usual = (len(tensor) / tensor.numel()) ** 0.5 if tensor.ndim > 1 and tensor.numel() else 0.1
                size = max(float(tensor.square().mean().sqrt()), usual)
                tensor += size * torch.randn(tensor.shape, generator=numbers).to(tensor) / 2
    return copied


def _close(found: Tensor, right: Tensor) -> bool:
    """The sum as a whole; norms record by record, for one wrong norm would be lost in a sum."""
    return found.shape == right.shape and bool(
        ((found - right).abs() <= AGREEMENT * right.abs().max()).all()  # NaN fails
    )


def _timed(tried: Clipper, features: Tensor, labels: Tensor) -> float:
    """The seconds that a step takes; its clipped sum and norms stay to be read."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # so that dropout drops the same in every mode
        begun = time.perf_counter()
        tried.optimizer.zero_grad()
        tried.backward(features, labels)
        tried.optimizer.step()
        return time.perf_counter() - begun
