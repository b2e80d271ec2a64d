"""The parameters that a plan or a certificate stands for, made from its candidates: the same inputs, the same bytes.

Beside the models an operator may need the public start of their training, or statistics of each model on public
rows. The statistics are made again whenever they are needed: they are functions of models that the joint release
covers, and of public rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from accounting.plan import Mechanism
from infra.documents import NetworkRecord, PortfolioManifest
from infra.tensor_file import FLOATS, NotSafetensors, TensorPlace, read_layout, widened
from tasks import merging
from tasks.policy_merges import Claim
from tasks.registry import CandidateCorrupted, CandidateMissing, fetch_public_start
from tasks.threads import one_thread

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.data import Rows

# Relative to a tensor's largest value: what another machine's rounding may change in a merge.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What an operator merges with beside the candidates' models."""

    start: bytes | None = None  # contents of a safetensors file: the public initial parameters
    statistics: Mapping[str, bytes] | None = None  # contents of safetensors files by candidate name


def public_start(client: MlflowClient, manifest: PortfolioManifest, operator: str) -> bytes | None:
    """The public initial parameters, where an operator needs them; errors as `fetch_public_start`.

    Several tasks are also compared with where they started, for people: nothing fails for want of that.
    """
    if merging.needs(operator).base:
        return fetch_public_start(client, manifest)
    if manifest.tasks is None:
        return None
    with suppress(CandidateMissing, CandidateCorrupted):
        return fetch_public_start(client, manifest)
    return None


def public_statistics(
    manifest: PortfolioManifest, claim: Claim, models: Mapping[str, bytes]
) -> dict[str, bytes] | None:
    """Statistics of the merged candidates on the public-train rows, where the claim's operator needs them.

    Args:
        models: of at least the candidates with a weight.

    Raises:
        InvalidInput: the public rows are not those that the portfolio was trained with, or the operator cannot merge
            this network.
    """
    kind = merging.needs(claim.merge).statistics if claim.mechanism is Mechanism.OPERATOR else None
    if kind is None:
        return None
    from tasks.data import load_public_train
    from tasks.merging.statistics import fisher_statistics, gram_statistics

    make = fisher_statistics if kind == "fisher" else gram_statistics
    rows = load_public_train(manifest)
    with one_thread():
        found = {}
        for name in claim.weights:
            network, own_rows = own_network_and_rows(manifest, name, rows)
            found[name] = make(network, models[name], own_rows)
        return found


def own_network_and_rows(
    manifest: PortfolioManifest, candidate: str, rows: Rows
) -> tuple[NetworkRecord, Rows]:
    """The network of a candidate, and public rows as it takes them: of its own task, where there are several.

    Args:
        rows: of the whole portfolio.
    """
    if manifest.tasks is None:
        return manifest.network, rows
    from tasks.task_groups import rows_of_task, task_network_of

    task = manifest.tasks[candidate]
    return task_network_of(manifest.network, task), rows_of_task(rows, manifest.network, task)


def merged(
    claim: Claim, weights: Mapping[str, float], models: Mapping[str, bytes], material: Material
) -> bytes:
    """The parameters to release.

    Args:
        claim: a plan or a certificate.
        weights: of the candidates to merge, in the portfolio manifest's order: all of them, or those of the
            candidate or component that was drawn.
        models: of at least these candidates.

    Returns:
        The contents of a safetensors file.

    Raises:
        IncompatibleCandidates, InvalidInput: the operator cannot merge these models.
    """
    used = {name: models[name] for name in weights}
    if claim.mechanism is not Mechanism.OPERATOR:
        return merging.linear_combination(used, weights)
    options = dict(claim.merge_options)
    if claim.tasks:
        from tasks.task_groups import merge_tasks

        return merge_tasks(
            claim.merge, used, weights, options=options, base=material.start, statistics=material.statistics
        )
    return merging.merge_models(
        claim.merge, used, weights, options=options, base=material.start, statistics=material.statistics
    )


def rounds_alike(operator: str) -> bool:
    """Whether an operator makes the same bytes on every machine: statistics are made by torch, which may not."""
    needs = merging.needs(operator)
    return needs.statistics is None and needs.same_bytes_everywhere


def relative_difference(one: bytes, other: bytes) -> float:
    """The largest difference between two models' parameters, relative to the largest parameter of the tensor.

    Returns:
        Infinity where the files differ in anything but the values of floating-point tensors, or are not finite.
    """
    try:
        first, second = _layout(one), _layout(other)
    except NotSafetensors:
        return math.inf
    if first != second:
        return math.inf
    largest = 0.0
    for place in first.values():
        a, b = (content[place.start : place.start + place.length] for content in (one, other))
        if place.dtype not in FLOATS:
            largest = largest if a == b else math.inf
            continue
        x, y = (np.array(widened(part, place.dtype), np.float64) for part in (a, b))
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return math.inf
        scale = float(np.abs(y).max(initial=0.0))
        apart = float(np.abs(x - y).max(initial=0.0))
        largest = max(largest, apart / scale if scale > 0 else (math.inf if apart > 0 else 0.0))
    return largest


def _layout(content: bytes) -> dict[str, TensorPlace]:
    return read_layout(lambda start, length: content[start : start + length], len(content))
