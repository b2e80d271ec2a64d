"""Merging a candidate of each task: the operator makes one trunk of theirs, and every head is kept as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.merging import merge_models
from tasks.merging.parts import joined, split
from tasks.models.multi_task import TRUNK


def merge_tasks(
    operator: str,
    models: Mapping[str, bytes],
    weights: Mapping[str, float],
    *,
    options: Mapping[str, Any] | None = None,
    base: bytes | None = None,
    statistics: Mapping[str, bytes] | None = None,
) -> bytes:
    """Merge one candidate of each task into a model of all tasks.

    Args:
        operator: one of `tasks.merging.OPERATORS`; it is given the shared trunks alone.
        models: safetensors contents by candidate name, of `task_network`s, for at least those in `weights`.
        weights: by candidate name, used exactly as given, in their order.
        options: of the operator.
        base: the group's public start (initial.safetensors), where the operator needs it.
        statistics: by candidate name, of public rows, where the operator needs them; of whole task networks.

    Returns:
        The contents of a safetensors file for the group's `multi_task_network`.

    Raises:
        accounting.errors.IncompatibleCandidates: two candidates are of one task.
        accounting.errors.RemergeError: as `tasks.merging.merge_models`.
    """
    parts = {name: split(models[name], TRUNK) for name in weights}
    trunk = merge_models(
        operator,
        {name: shared for name, (shared, _) in parts.items()},
        weights,
        options=options or {},
        base=None if base is None else split(base, TRUNK)[0],
        statistics=None
        if statistics is None
        else {name: split(statistics[name], TRUNK)[0] for name in weights},
    )
    return joined([trunk, *(head for _, head in parts.values())])
