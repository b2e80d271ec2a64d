"""How a merge of several tasks went, on public rows: for people who look at its run in MLflow.

The figures are computed from the tasks' own models, which are not released. What covers a merge of tasks covers
them too: parallel composition or the joint release, of all candidates that were merged. So they cost nothing, and
still they stay in MLflow, inside the trust boundary. The rows are the public-train rows: the gate's stay held out.
"""

from __future__ import annotations

from collections.abc import Mapping

from accounting.errors import InvalidInput
from infra.documents import PortfolioManifest
from tasks.data import load_public_train
from tasks.diagnostics import Diagnosis, TaskModels, diagnose
from tasks.models import state_bytes, state_from_bytes
from tasks.models.multi_task import TRUNK
from tasks.release_merging import own_network_and_rows
from tasks.task_groups.starts import start_of


def diagnose_merge(
    manifest: PortfolioManifest, models: Mapping[str, bytes], merged: bytes, start: bytes
) -> Diagnosis:
    """Measure a merge of one candidate of each task.

    Args:
        manifest: of a portfolio of several tasks.
        models: contents of safetensors files, by the names of the candidates that were merged.
        merged: what came of it, of the group's network.
        start: the group's public start.

    Raises:
        InvalidInput: the portfolio is not of several tasks, or its public rows are not those that it was trained with.
    """
    tasks = manifest.tasks
    if tasks is None:
        raise InvalidInput(
            f"{manifest.reference} is not a portfolio of several tasks: there is no merge gap."
        )
    rows = load_public_train(manifest)
    whole, public = state_from_bytes(merged), state_from_bytes(start)
    found, starts = [], {}
    for name, model in models.items():
        network, own_rows = own_network_and_rows(manifest, name, rows)
        starts[tasks[name]] = state_bytes(start_of(tasks[name], public))
        found.append(
            TaskModels(
                task=tasks[name],
                network=network,
                own=model,
                merged=state_bytes(start_of(tasks[name], whole)),
                rows=own_rows,
            )
        )
    return diagnose(found, starts, shared_prefix=TRUNK)
