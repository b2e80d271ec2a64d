"""Merges of one model of each task by every operator, scored on each task's rows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tasks.data import Rows
from tasks.dp_merging_experiment.plan import Run, Scoring
from tasks.dp_merging_experiment.rows import task_network, task_rows
from tasks.dp_merging_experiment.running import RUNS, STARTS, Unfinished
from tasks.dp_merging_experiment.setting import Family, Operator
from tasks.dp_merging_experiment.store import Store

MERGES = "merges"
STATISTICS_ROWS = 200  # public rows of each task, for the operators that need statistics


def unfinished(scoring: Scoring, store: Store) -> list[Operator]:
    """The operators whose merge has not been scored yet."""
    return [one for one in scoring.family.operators if store.result(MERGES, scoring.key(one)) is None]


def make_scoring(scoring: Scoring, store: Store) -> None:
    """Merge the trunks by every operator that is not done, keep each task's own head, and score every task.

    Raises:
        Unfinished: a model is not in the store.
    """
    from tasks.merging import needs

    left = unfinished(scoring, store)
    if not left:
        return
    family = scoring.family
    runs = {run.task.name: run for run in scoring.runs}
    models = {name: _model(run, store) for name, run in runs.items()}
    start = store.model(STARTS, scoring.runs[0].start.key)
    if start is None:
        raise Unfinished("A public start is missing in the cache folder; run the command again.")
    rows = {
        task.name: task_rows(family, task, test_rows=scoring.test_rows, with_private=False)
        for task in family.tasks
    }
    statistics: dict[str, dict[str, bytes]] = {}
    cosine = mean_cosine(models, start)
    for operator in left:
        kind = needs(operator.name).statistics
        if kind is not None and kind not in statistics:
            statistics[kind] = {
                name: _statistics(kind, family, name, model, rows[name].looked_at)
                for name, model in models.items()
            }
        result = merged_scores(
            family,
            operator,
            models,
            start=start,
            statistics=None if kind is None else statistics[kind],
            rows={name: one.test for name, one in rows.items()},
            looked_at={name: one.looked_at for name, one in rows.items()},
        )
        result["cosine"] = cosine
        setting = {"runs": [run.key for run in runs.values()], "operator": operator.name}
        store.keep(MERGES, scoring.key(operator), setting, result)


def merged_scores(
    family: Family,
    operator: Operator,
    models: dict[str, bytes],
    *,
    start: bytes,
    statistics: dict[str, bytes] | None,
    rows: dict[str, Rows],
    looked_at: dict[str, Rows],
) -> dict[str, Any]:
    """One merge on each task's rows: `test` accuracy and `looked_at` accuracy by task, in [0, 1]."""
    from tasks.models import state_bytes, state_from_bytes
    from tasks.task_groups.merging import merge_tasks
    from tasks.task_groups.starts import start_of
    from tasks.validation import accuracy

    sizes = {task.name: float(task.nominal_rows) if operator.by_size else 1.0 for task in family.tasks}
    weights = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    began = time.perf_counter()
    merged = state_from_bytes(
        merge_tasks(
            operator.name,
            models,
            weights,
            options=operator.options,
            base=start,
            statistics=statistics,
        )
    )
    seconds = time.perf_counter() - began
    own = {task.name: state_bytes(start_of(task.name, merged)) for task in family.tasks}
    return {
        "seconds": seconds,
        "test": {
            task.name: accuracy(task_network(family, task), own[task.name], rows[task.name])
            for task in family.tasks
        },
        "looked_at": {
            task.name: accuracy(task_network(family, task), own[task.name], looked_at[task.name])
            for task in family.tasks
        },
    }


def mean_cosine(models: dict[str, bytes], start: bytes) -> float:
    """Mean over pairs of tasks of the cosine between their trunks' task vectors."""
    from tasks.diagnostics import cosines, task_vector
    from tasks.models import state_from_bytes
    from tasks.task_groups.starts import start_of

    public = state_from_bytes(start)
    found = cosines(
        [
            task_vector(state_from_bytes(model), start_of(name, public), "trunk.")
            for name, model in models.items()
        ]
    )
    return float(found[np.triu_indices(len(models), k=1)].mean())


def _statistics(kind: str, family: Family, task: str, model: bytes, rows: Rows) -> bytes:
    from tasks.merging.statistics import fisher_statistics, gram_statistics

    few = Rows(features=rows.features[:STATISTICS_ROWS], labels=rows.labels[:STATISTICS_ROWS])
    make = {"fisher": fisher_statistics, "gram": gram_statistics}[kind]
    return make(task_network(family, family.task(task)), model, few)


def _model(run: Run, store: Store) -> bytes:
    content = store.model(RUNS, run.key)
    if content is None:
        raise Unfinished("A trained model is missing in the cache folder; run the command again.")
    return content
