"""The public start of a group: one set of parameters, trunk and heads, that every candidate starts from.

It is random, from a seed, or pre-trained: ordinary training without privacy, on the tasks' public-train rows and
nothing else. Whoever has the recipe and the public rows can make it again, on the same kind of machine bit by bit.
A candidate takes the trunk and its own task's head of it (`start_of`).

Pre-training has seen the public-train rows: what candidates score on them is then better than on new rows. The
public-gate rows stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows
from tasks.models.multi_task import HEADS, TRUNK
from tasks.task_groups.recipes import Pretrain, Start
from tasks.threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor


def public_start(
    start: Start,
    network: NetworkRecord,
    public_train: Rows,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Tensor]:
    """The parameters of the whole group's network that all candidates start from.

    Args:
        start: what the recipe says.
        network: the group's `multi_task_network`.
        public_train: the public-train rows of all tasks, flat (`joined_splits`).
        on_step: called after each step of pre-training with the number of steps done.
    """
    from tasks.models import initial_state

    state = initial_state(network, start.any_seed)
    if start.pretrain is None:
        return state
    return _pretrained(start.pretrain, network, state, public_train, on_step)


def start_of(task: str, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a group's public start one task's candidates take: the trunk and the task's own head."""
    own = (TRUNK, f"{HEADS}{task}.")
    return {name: tensor for name, tensor in start.items() if name.startswith(own)}


def _pretrained(
    pretrain: Pretrain,
    network: NetworkRecord,
    state: Mapping[str, Tensor],
    rows: Rows,
    on_step: Callable[[int], None],
) -> dict[str, Tensor]:
    """Adam on the mean cross-entropy of batches drawn by the seed, every row as likely as any other.

    With one thread: how many add numbers up changes how sums are rounded, and a resumed training needs the same start.
    """
    import torch

    from tasks.models import build
    from tasks.objective import CROSS_ENTROPY

    features, labels = torch.tensor(rows.features), torch.tensor(rows.labels)
    order = torch.Generator().manual_seed(pretrain.seed)
    size = min(pretrain.batch_size, len(rows))
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(pretrain.seed)  # of dropout, if the trunk has any
        module = build(network)
        module.load_state_dict(state)
        optimizer = torch.optim.Adam(module.parameters(), lr=pretrain.learning_rate)
        module.train()
        for step in range(1, pretrain.steps + 1):
            batch = torch.randperm(len(rows), generator=order)[:size]
            optimizer.zero_grad()
            try:
                loss = CROSS_ENTROPY.losses(module(features[batch]), labels[batch]).mean()
            except Exception as error:  # noqa: BLE001 - whatever a user's trunk raises, on public rows
                raise InvalidInput(
                    f"The trunk {network.arguments['trunk']['factory']} failed on public rows with "
                    f"{type(error).__name__}: {error}; correct it, or its arguments and width in the recipe."
                ) from None
            loss.backward()
            optimizer.step()
            on_step(step)
    trained = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in trained.values()):
        raise InvalidInput(
            "The pre-training of the public start diverged: its parameters are not finite; lower "
            "pretrain.learning_rate."
        )
    return trained
