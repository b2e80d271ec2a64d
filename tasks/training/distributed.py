"""One large candidate trained by several processes of this machine, each with its share of the private rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accounting.errors import InvalidInput
from tasks.data import Splits
from tasks.recipes import CandidateRecipe, Recipe
from tasks.training.candidate import train_candidate
from tasks.training.checkpoints import Checkpoint
from tasks.training.group import Group
from tasks.training.processes import Tell, work_together
from tasks.training.run import TrainedCandidate

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def train_together(
    candidate: CandidateRecipe,
    *,
    processes: int,
    recipe: Recipe,
    splits: Splits,
    initial: Mapping[str, Tensor],
    run_id: str,
    data_digest: str,
    noise_generator: torch.Generator | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    on_monitor: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    on_checkpoint: Callable[[Checkpoint], None] = lambda checkpoint: None,
    resume_from: Checkpoint | None = None,
) -> TrainedCandidate:
    """Train one candidate as `train_candidate` does, with `processes` new ones; see there.

    The noise is the first process's alone, added once to the sum of all. Each process draws the coins of its own
    rows from the operating system's entropy: one generator for all would toss the same coins for different rows.
    The `on_` functions are called here, in this thread; metrics under `private/` are those of the first share.

    Args:
        processes: at least 2.
        noise_generator: for tests only, given to the first process.

    Raises:
        InvalidInput: there are fewer private rows than processes; and as `train_candidate`.
        ProcessLost: a process died, or failed in a way that it has no sentence for.
    """
    private = splits.private
    if private is None:
        raise InvalidInput("Training needs private rows loaded by tasks.data.load_splits.")
    if len(private) < processes:
        raise InvalidInput(
            f"Each of the {processes} processes that train candidate {candidate.name} needs a private row of its own; "
            "set execution.processes to 1."
        )
    result: TrainedCandidate = work_together(
        _take_share,
        size=processes,
        arguments={
            "candidate": candidate,
            "recipe": recipe,
            "splits": splits,
            "initial": dict(initial),
            "run_id": run_id,
            "data_digest": data_digest,
            "noise_state": None if noise_generator is None else noise_generator.get_state().numpy(),
            "resume_from": None if resume_from is None else resume_from.to_bytes(),
        },
        heard={
            "on_step": on_step,
            "on_monitor": on_monitor,
            "on_checkpoint": lambda content: on_checkpoint(Checkpoint.from_bytes(content)),
        },
        what=f"The training of candidate {candidate.name}",
    )
    return result


def _take_share(
    group: Group,
    tell: Tell,
    *,
    candidate: CandidateRecipe,
    noise_state: Any,
    resume_from: bytes | None,
    **arguments: Any,
) -> TrainedCandidate:
    noise_generator = None
    if noise_state is not None and group.leads:
        import torch

        noise_generator = torch.Generator()
        noise_generator.set_state(torch.tensor(noise_state))
    return train_candidate(
        candidate,
        **arguments,
        noise_generator=noise_generator,
        on_step=lambda step: tell("on_step", step),
        on_monitor=lambda step, metrics: tell("on_monitor", step, metrics),
        on_checkpoint=lambda checkpoint: tell("on_checkpoint", checkpoint.to_bytes()),
        resume_from=None if resume_from is None else Checkpoint.from_bytes(resume_from),
        group=group,
    )
