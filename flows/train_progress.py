"""How far a training is, as MLflow has it, and how a terminal shows that: one bar for each candidate.

MLflow is asked over plain REST, because `import mlflow` alone takes seconds. What it does not answer is left for
the next look: nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from accounting.words import rounded_up
from infra.orchestrator import WAITS_FOR_ITS_TURN, FlowRun, state_in_words
from infra.settings import LOOPBACK
from tasks.candidate_runs import CANDIDATE_TAG, FLOW_RUN_TAG, PARENT_TAG
from tasks.recipes import Recipe
from tasks.unfinished import RESUMED_TAG


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One candidate, as its newest metrics in MLflow tell it."""

    steps: int
    ended_well: bool
    accuracy: float | None  # on public-train rows
    epsilon: float | None  # so far, at the recipe's delta

    def words(self) -> str:
        """The newest numbers, as they stand behind a bar."""
        parts = [] if self.accuracy is None else [f"accuracy {self.accuracy:.3f}"]
        if self.epsilon is not None:
            parts.append(f"epsilon {rounded_up(self.epsilon)}{'' if self.ended_well else ' so far'}")
        return ", ".join(parts)


class Look:
    """Looks at one training's runs in MLflow.

    Attributes:
        candidates: those that have begun, by name.
        resumed: the sentence that says what this training goes on with, if it goes on with one.
    """

    def __init__(self, mlflow_url: str, portfolio: str, flow_run_id: str) -> None:
        local = httpx.URL(mlflow_url).host in LOOPBACK
        self._client = httpx.Client(
            base_url=f"{mlflow_url.rstrip('/')}/api/2.0/mlflow", timeout=5, trust_env=not local
        )
        self._portfolio = portfolio
        self._flow_run_id = flow_run_id
        self.candidates: dict[str, Seen] = {}
        self.resumed: str | None = None

    def again(self) -> None:
        """Ask MLflow now; if it does not answer, what was seen last stays."""
        try:
            runs = self._runs()
        except (httpx.HTTPError, ValueError):
            return
        for run in runs:
            tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
            if CANDIDATE_TAG in tags and PARENT_TAG not in tags:
                self.candidates[tags[CANDIDATE_TAG]] = _seen(run)
                self.resumed = self.resumed or tags.get(RESUMED_TAG)

    def close(self) -> None:
        """Give back the connection."""
        self._client.close()

    def _runs(self) -> list[dict[str, Any]]:
        found = self._client.get("/experiments/get-by-name", params={"experiment_name": self._portfolio})
        if found.status_code == httpx.codes.NOT_FOUND:
            return []
        experiment = found.raise_for_status().json()["experiment"]["experiment_id"]
        where = {
            "experiment_ids": [experiment],
            "filter": f"tags.`{FLOW_RUN_TAG}` = '{self._flow_run_id}'",
            "max_results": 1000,
            "order_by": ["attributes.start_time ASC"],
        }
        answer = self._client.post("/runs/search", json=where).raise_for_status()
        return list(answer.json().get("runs", []))


def _seen(run: Mapping[str, Any]) -> Seen:
    metrics = {metric["key"]: metric for metric in run["data"].get("metrics", [])}

    def newest(name: str) -> float | None:
        return float(metrics[name]["value"]) if name in metrics else None

    return Seen(
        steps=int(metrics.get("public_train_accuracy", {}).get("step", 0)),
        ended_well=run["info"]["status"] == "FINISHED",
        accuracy=newest("public_train_accuracy"),
        epsilon=newest("epsilon_so_far"),
    )


class Bars:
    """In a terminal: the state of the flow run, and below it one bar for each candidate. Elsewhere nothing.

    Used as a context; what is printed meanwhile stands above.
    """

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._what = f"Training {len(recipe.candidates)} candidates"
        self._head = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        )
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f} of {task.total:.0f} steps"),
            TextColumn("{task.fields[words]}"),
            console=console,
        )
        self._state = self._head.add_task(f"{self._what} ...")
        self._tasks: dict[str, TaskID] = {
            candidate.name: self._bars.add_task(escape(candidate.name), total=candidate.steps, words="")
            for candidate in recipe.candidates
        }
        self._steps = {candidate.name: candidate.steps for candidate in recipe.candidates}
        self._live = Live(
            Group(self._head, self._bars), console=console, refresh_per_second=4, transient=True
        )
        self._terminal = console.is_terminal
        self._console = console
        self._said = False

    def __enter__(self) -> Bars:
        if self._terminal:
            self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._terminal:
            self._live.stop()

    def state(self, run: FlowRun) -> None:
        """Show the flow run's state; away from a terminal only that it waits, once."""
        waits = run.get("state_name") == WAITS_FOR_ITS_TURN
        words = "waiting for another training to end" if waits else state_in_words(run)
        self._head.update(self._state, description=f"{self._what}: {words} ...")
        if waits and not self._said and not self._terminal:
            self._said = True
            self._console.print(f"{self._what}: {words} ...", highlight=False)

    def show(self, candidates: Mapping[str, Seen]) -> None:
        """Move the bars to where the candidates are."""
        for name, seen in candidates.items():
            done = self._steps[name] if seen.ended_well else seen.steps
            self._bars.update(self._tasks[name], completed=done, words=seen.words())
