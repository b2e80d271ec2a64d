"""DP-SGD with Opacus: one recipe entry in, one model with its trajectory as executed out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from infra.canonical import sha256_hex
from tasks.data import Splits
from tasks.models import build, is_regression, state_bytes
from tasks.randomness import COIN_SOURCE, unpredictable_generator
from tasks.recipes import CandidateRecipe, Recipe
from tasks.training.checkpoints import Checkpoint
from tasks.training.clippers import clipper
from tasks.training.descent import merging_notes
from tasks.training.fitness import FrozenPart
from tasks.training.group import ALONE, Group
from tasks.training.history import History, library_versions
from tasks.training.mode_choice import choose_mode
from tasks.training.noise import INJECTED, NoiseSource, SecureNoise, SeededNoise
from tasks.training.run import Run, TrainedCandidate
from tasks.training.scores import require_fit

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tasks.objective import Objective


def train_candidate(
    candidate: CandidateRecipe,
    *,
    recipe: Recipe,
    splits: Splits,
    initial: Mapping[str, Tensor],
    run_id: str,
    data_digest: str,
    noise: NoiseSource | None = None,
    noise_generator: torch.Generator | None = None,
    sampling_generator: torch.Generator | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    on_monitor: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    on_checkpoint: Callable[[Checkpoint], None] = lambda checkpoint: None,
    resume_from: Checkpoint | None = None,
    group: Group = ALONE,
) -> TrainedCandidate:
    """Train one candidate.

    Each step sums the clipped per-record gradients of its batch, adds Gaussian noise of standard deviation
    noise_multiplier x max_grad_norm, divides by the *public* expected_batch_size and lets the optimizer step; with
    `dp_merging` as `tasks.training.descent` says. Safe to call from several threads at once; the caller decides how
    many threads torch uses.

    Args:
        splits: from `tasks.data.load_splits`, with private rows.
        initial: the portfolio's public initial parameters.
        run_id: of this run; names its stretches of noise, together with a token of each process.
        data_digest: keyed digest of the private rows.
        noise, noise_generator, sampling_generator: for tests and public twins only; by default noise and coins are
            drawn afresh from the operating system's entropy.
        on_step: called after each step with the number of steps done, to show progress.
        on_monitor: called after every look with the steps done and the metrics by name.
        on_checkpoint: called now and then, never after the last step; what it raises ends the run.
        resume_from: where a killed run of the same key is to go on.
        group: the processes that train this candidate together.

    Raises:
        TrainingFailed: the parameters are not finite at the end.
        InvalidInput: the network does not fit the data or private training, or the checkpoint another run.
    """
    injected = noise is not None or noise_generator is not None or sampling_generator is not None
    if recipe.execution.processes > 1 and group is ALONE and not injected:
        from tasks.training.distributed import train_together

        return train_together(
            candidate,
            processes=recipe.execution.processes,
            recipe=recipe,
            splits=splits,
            initial=initial,
            run_id=run_id,
            data_digest=data_digest,
            on_step=on_step,
            on_monitor=on_monitor,
            on_checkpoint=on_checkpoint,
            resume_from=resume_from,
        )
    _silence_known_warnings()
    private, enforced = splits.private, splits.enforced
    if private is None or enforced is None:
        raise InvalidInput("Training needs private rows loaded by tasks.data.load_splits.")
    module, objective, mode, reason = _tried(candidate, recipe, splits, initial)
    frozen = FrozenPart.of(module)
    mode = group.agreed(mode)
    regression = is_regression(module)  # asked before Opacus adds its hooks
    source = noise or (SeededNoise(noise_generator) if noise_generator is not None else SecureNoise())
    device = group.device()
    module.to(device)
    history = History(
        recipe=recipe,
        candidate=candidate,
        enforced=enforced,
        objective=objective,
        regression=regression,
        data_digest=data_digest,
        initialisation_digest=sha256_hex(state_bytes(initial)),
        device=device,
        versions=library_versions(),
        notes={
            "noise_source": source.description,
            "sampling_coins": COIN_SOURCE if sampling_generator is None else INJECTED,
            "grad_sample_mode": f"{mode}: {reason}",
            **group.notes(),
            **_optimizer_notes(candidate),
            **merging_notes(candidate.dp_merging),
        },
    )
    run = Run(
        candidate=candidate,
        recipe=recipe,
        splits=splits,
        module=module,
        clipper=clipper(mode, module, candidate, objective, noise=source, processes=group.size),
        history=history,
        frozen=frozen,
        run_id=run_id,
        group=group,
    )
    if resume_from is not None:
        run.restore(resume_from)
    run.train(
        sampling_generator or unpredictable_generator(),
        on_step=on_step,
        on_monitor=on_monitor,
        on_checkpoint=on_checkpoint,
    )
    return run.finished()


def try_networks(recipe: Recipe, splits: Splits, initial: Mapping[str, Tensor]) -> None:
    """Make the trials that every candidate's training asks for, before threads train: they are remembered.

    Raises:
        InvalidInput: the network does not fit the data or private training.
    """
    _silence_known_warnings()
    for candidate in recipe.candidates:
        _tried(candidate, recipe, splits, initial)


def _tried(
    candidate: CandidateRecipe, recipe: Recipe, splits: Splits, initial: Mapping[str, Tensor]
) -> tuple[nn.Module, Objective, str, str]:
    """The network with its initial parameters, what it is trained on, and how, with the reason."""
    module = build(recipe.network)
    module.load_state_dict(initial)
    objective = require_fit(module, splits, recipe)
    mode, reason = choose_mode(
        module,
        candidate,
        recipe.execution,
        objective,
        network_digest=recipe.network.sha256() + sha256_hex(state_bytes(initial)),
        public_rows=splits.public_train.features,
        classes=splits.classes,
        what=f"The network {recipe.network.factory} of portfolio {recipe.name}",
    )
    return module, objective, mode, reason


def _optimizer_notes(candidate: CandidateRecipe) -> dict[str, str]:
    if candidate.optimizer == "sgd":
        return {}
    decay = (
        "decoupled weight decay" if candidate.optimizer == "adamw" else "weight decay added to the gradient"
    )
    return {
        "optimizer": f"torch's {candidate.optimizer} with betas 0.9 and 0.999 and eps 1e-8, {decay}; "
        "it sees noisy gradients only"
    }


def _silence_known_warnings() -> None:
    """Warnings that say nothing new: noise has a source of its own here, and rows are only ever read."""
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
