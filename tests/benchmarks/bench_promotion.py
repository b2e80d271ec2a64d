"""From the event `policy.changed` to the switched pointer, on a warm stack with the demo's portfolio.

    make bench-promotion

Not part of `make test`. Starts a stack of its own in a temporary folder, trains the demo's portfolio, changes a
region's policy several times through the real event, and reads from Prefect and S3 when what happened. Reported is the
median of each part, wall clock.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from infra import stack
from infra.events import emit_policy_changed
from infra.settings import Settings
from tasks.services import Services, open_services
from tests.conftest import pause_schedules

CHANGES = 7
REGION = "bench"
IMPORTS = "imports of MLflow and torch"
TARGET = 2.0  # seconds for our own steps, imports aside

# Prefect's task names, as flows/policy_steps.py gives them, and the row that each belongs to.
ROWS: Mapping[str, str] = {
    "read_policy": "documents",
    "read_portfolio": "documents",
    "read_past": "ledger",
    "import_libraries": IMPORTS,
    "load_candidates": "registry: pull and verify candidates",
    "consult_scores": "solve",
    "solve_weights": "solve",
    "reserve": "ledger",
    "make_draw": "draw",
    "merge_models": "merge",
    "write_ledger": "ledger",
    "check_on_public_rows": "check on public rows",
    "register": "registry: register the merge",
    "upload_release": "upload and read back",
    "switch_pointer": "pointer",
}


def instant(text: Any) -> datetime:
    return datetime.fromisoformat(str(text)).astimezone(UTC)


def change(services: Services, epsilon: float, reference: str) -> dict[str, float]:
    """Seconds by part, of one policy change."""
    policy = services.policies.append(
        {"region": REGION, "epsilon": epsilon, "delta": 1e-5, "portfolio": reference, "author": "bench"}
    )
    emitted = datetime.now(UTC)
    event_id = emit_policy_changed(services.orchestrator, policy)
    run = services.orchestrator.wait_for_event(event_id, timeout=60)
    run = services.orchestrator.wait(run["id"], timeout=300)
    if run.get("state_type") != "COMPLETED":
        raise SystemExit(f"The change failed: {run.get('state')}")
    found = services.releases.read_pointer(REGION)
    if found is None or found[0].policy_serial != policy.serial:
        raise SystemExit("The pointer was not switched.")
    switched = found[0].switched_at
    tasks = services.orchestrator.task_runs(run["id"])
    times = {task["id"]: (instant(task["start_time"]), instant(task["end_time"])) for task in tasks}
    before = [task for task in tasks if times[task["id"]][0] <= switched]
    first = min(times[task["id"]][0] for task in before)
    parts = {
        "Prefect: event to a run that a worker takes": _seconds(emitted, instant(run["start_time"])),
        "process start, imports and first contact": _seconds(instant(run["start_time"]), first),
    }
    for task in before:
        row = ROWS[str(task["name"]).rpartition("-")[0] or str(task["name"])]
        start, end = times[task["id"]]
        parts[row] = parts.get(row, 0.0) + _seconds(start, min(end, switched))
    own = sum(seconds for row, seconds in parts.items() if row in ROWS.values() and row != IMPORTS)
    inside = _seconds(first, switched) - parts.get(IMPORTS, 0.0)
    parts["between the steps: Prefect's bookkeeping, certificate"] = inside - own
    parts["our steps, all"] = own
    parts["event to pointer"] = _seconds(emitted, switched)
    return parts


def _seconds(start: datetime, end: datetime) -> float:
    return max((end - start).total_seconds(), 0.0)


def main(markdown: bool) -> None:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="remerge-bench-") as folder:
        settings = Settings(home=Path(folder) / "home")
        try:
            console.print("Starting a stack and training the demo's portfolio ...")
            stack.start(settings, lambda text: None)
            services = open_services(settings)
            pause_schedules(services.connections)
            run = services.orchestrator.create_flow_run("train-portfolio")
            services.orchestrator.wait(run["id"], timeout=600)
            manifest = services.manifests.newest("digits")
            if manifest is None:
                raise SystemExit("The portfolio was not trained.")
            results = []
            for number in range(CHANGES):
                results.append(change(services, 1.5 + 0.1 * number, manifest.reference))
                console.print(f"change {number + 1}: {results[-1]['event to pointer']:.2f} s")
                time.sleep(1)
        finally:
            stack.stop(settings, lambda text: None)
    rows = list(dict.fromkeys(row for result in results[1:] for row in result))
    ordered = [row for row in rows if row not in ("our steps, all", "event to pointer")]
    ordered += ["our steps, all", "event to pointer"]
    table = [(row, median(result.get(row, 0.0) for result in results[1:])) for row in ordered]
    if markdown:
        print("| part | seconds |\n| --- | ---: |")
        for row, value in table:
            print(f"| {row} | {value:.2f} |")
    else:
        shown = Table(title=f"One policy change, medians of {CHANGES - 1} after the first")
        shown.add_column("part")
        shown.add_column("seconds", justify="right")
        for row, value in table:
            shown.add_row(row, f"{value:.2f}")
        Console(width=110).print(shown)
    own = dict(table)["our steps, all"]
    print(f"Our steps: {own:.2f} s against a target of {TARGET:g} s: {'met' if own <= TARGET else 'MISSED'}.")


if __name__ == "__main__":
    main("--markdown" in sys.argv[1:])
