"""The check of a merged model on held-out public rows, and the gate.

The check is post-processing of the merged model and is free of privacy cost, provided that a failure ends
the attempt: it never triggers another draw or another choice of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.data import Rows
from tasks.models.multi_task import MULTI_TASK_NETWORK
from tasks.objective import predicted

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


SCORED_AT_ONCE = 1000  # rows, so that a convolutional network's memory stays small


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate decided, in numbers and in a sentence."""

    passed: bool
    accuracy: float  # in [0, 1], on the public-gate rows; of several tasks the lowest
    minimum: float  # in [0, 1], what was needed
    reason: str
    by_task: Mapping[str, float] = field(
        default_factory=dict
    )  # accuracy of each, where there are several tasks


def gate(
    *,
    accuracy: float,
    min_accuracy: float,
    live_accuracy: float | None,
    by_task: Mapping[str, float] | None = None,
) -> Verdict:
    """Decide whether a merged model may go live.

    Args:
        accuracy: of the merged model on the public-gate rows; where there are several tasks, the lowest of theirs.
        min_accuracy: the policy's.
        live_accuracy: of the live release on the same rows, only where that release satisfies the current
            policy; None otherwise (a stricter budget normally costs accuracy).
        by_task: accuracy of each task, where there are several.
    """
    each = ", ".join(f"{task} {share:.3f}" for task, share in (by_task or {}).items())
    what = f"The lowest accuracy of its tasks ({each})" if by_task else f"Accuracy {accuracy:.3f}"
    minimum = max(min_accuracy, live_accuracy or 0.0)
    passed = bool(accuracy >= minimum)  # NaN fails
    if passed:
        reason = f"{what} on the public-gate rows meets the minimum {minimum:.3f}."
    elif accuracy < min_accuracy or math.isnan(accuracy):
        reason = (
            f"{what} on the public-gate rows is below the policy's min_accuracy "
            f"{min_accuracy:.3f}; set a policy with a lower min_accuracy or a larger epsilon, or train a better "
            "portfolio. The attempt has ended: the same draw and weights are not tried again."
        )
    else:
        reason = (
            f"{what} on the public-gate rows is below the live release's {live_accuracy:.3f}, "
            "which satisfies this policy too, so the live release stays."
        )
    return Verdict(
        passed=passed, accuracy=accuracy, minimum=minimum, reason=reason, by_task=dict(by_task or {})
    )


def accuracy(network: NetworkRecord, model: bytes, rows: Rows) -> float:
    """Share of rows that a stored model classifies rightly, in [0, 1]; of several tasks the lowest share.

    Args:
        network: how to build the network.
        model: contents of a safetensors file with its parameters.

    Raises:
        IncompatibleCandidates: the parameters do not fit the network.
    """
    by_task = task_accuracies(network, model, rows)
    return min(by_task.values()) if by_task else share_right(_loaded(network, model), rows)


def task_accuracies(network: NetworkRecord, model: bytes, rows: Rows) -> dict[str, float]:
    """Share of each task's rows that a stored model of several tasks classifies rightly, in [0, 1], by task.

    Args:
        network: how to build the network.
        model: contents of a safetensors file with its parameters.
        rows: of all tasks (`tasks.task_groups.load_tasks`).

    Returns:
        Empty for a network that is no `multi_task_network`.

    Raises:
        IncompatibleCandidates: the parameters do not fit the network.
        InvalidInput: a task has no rows.
    """
    if network.factory != MULTI_TASK_NETWORK:
        return {}
    hits, found = right(_loaded(network, model), rows), {}
    for number, task in enumerate(sorted(network.arguments["heads"])):
        own = rows.features[:, 0] == number
        if not own.any():
            raise InvalidInput(f"There is no row of task {task}, so its accuracy is not known.")
        found[task] = int(hits[own].sum()) / int(own.sum())
    return found


def _loaded(network: NetworkRecord, model: bytes) -> nn.Module:
    from tasks.models import network_with, state_from_bytes

    return network_with(network, state_from_bytes(model))


def share_right(module: nn.Module, rows: Rows) -> float:
    """Share of rows that a network classifies rightly, in [0, 1]."""
    return int(right(module, rows).sum()) / len(rows)


def right(module: nn.Module, rows: Rows) -> np.ndarray:
    """Which rows a network classifies rightly, booleans, shape (rows,); it is left in eval mode."""
    import numpy as np
    import torch  # late: importing torch takes seconds

    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    module.eval()
    found = []
    with torch.no_grad():
        for start in range(0, len(rows), SCORED_AT_ONCE):
            part = slice(start, start + SCORED_AT_ONCE)
            classes = predicted(module(torch.tensor(rows.features[part]).to(device))).cpu().numpy()
            found.append(classes == rows.labels[part])
    return np.concatenate(found)
