"""The field that faults are tried on: a real stack with a portfolio, what was seen of it, and the table of results."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra import processes
from infra.documents import Policy, PortfolioManifest
from infra.orchestrator import FlowRun, message_of
from infra.settings import Connections, Settings
from infra.stack_state import State
from tasks.reconciling import Report, reconcile_region
from tasks.services import Services
from tests.faults import invariants
from tests.faults.invariants import Memory
from tests.faults.promoter import Act, Ended, Moment, Promotion

FLOW_TIMEOUT = 300.0


@dataclass
class Row:
    """One line of the table. All counts but `times` and `settled` must be 0."""

    fault: str
    times: int = 0
    lost: int = 0
    half_promoted: int = 0
    drawn_twice: int = 0
    not_covered: int = 0
    settled: int = 0  # after one round of reconcile; must be `times`
    remark: str = ""
    wrong: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        counts = (self.times, self.lost, self.half_promoted, self.drawn_twice, self.not_covered)
        return [self.fault, *map(str, counts), f"{self.settled} of {self.times}", self.remark]


@dataclass
class Table:
    """The results of this run."""

    rows: list[Row] = field(default_factory=list)

    HEAD = (
        "Fault",
        "Times",
        "Lost",
        "Half-promoted",
        "Drawn twice",
        "Not in ledger",
        "Settled by one reconcile",
        "",
    )

    def add(self, row: Row) -> None:
        """Add what a test found, to the line of the same fault where there is one."""
        for known in self.rows:
            if known.fault == row.fault:
                for name in ("times", "lost", "half_promoted", "drawn_twice", "not_covered", "settled"):
                    setattr(known, name, getattr(known, name) + getattr(row, name))
                known.remark = row.remark or known.remark
                known.wrong += row.wrong
                return
        self.rows.append(row)

    def markdown(self) -> str:
        lines = [list(self.HEAD), ["---", *["---:"] * 6, "---"], *(row.cells() for row in self.rows)]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


@dataclass
class Field:
    """A stack with a trained portfolio, and all that was ever seen of it."""

    settings: Settings
    services: Services
    s3: Any
    portfolio: PortfolioManifest
    memory: Memory = field(default_factory=Memory)

    @property
    def connections(self) -> Connections:
        return self.services.connections

    def region(self) -> str:
        return f"f{uuid.uuid4().hex[:10]}"

    def policy(self, region: str, epsilon: float = 3.9, **fields: Any) -> Policy:
        """Store a policy whose release is drawn. No event is emitted."""
        return self.services.policies.append(
            {
                "region": region,
                "epsilon": epsilon,
                "delta": 1e-5,
                "portfolio": self.portfolio.reference,
                "mechanisms": ["random_selection"],
                "author": "faults",
                **fields,
            },
            new=True,
        )

    def promotion(
        self, policy: Policy, *moments: tuple[Moment, Act], s3_endpoint: str | None = None
    ) -> Promotion:
        """Begin a promotion in a process of its own, if need be with the store behind another address."""
        environment = {"REMERGE_HOME": str(self.settings.home), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
        if s3_endpoint is not None:
            found = self.connections
            environment |= {
                "REMERGE_S3_ENDPOINT": s3_endpoint,
                "REMERGE_S3_ACCESS_KEY": found.s3_access_key.get_secret_value(),
                "REMERGE_S3_SECRET_KEY": found.s3_secret_key.get_secret_value(),
                "REMERGE_MLFLOW_URL": found.mlflow_url,
                "REMERGE_PREFECT_API_URL": found.prefect_api_url,
                "REMERGE_DATA_DIGEST_KEY": found.data_digest_key.get_secret_value(),
            }
        return Promotion(environment, self.connections.prefect_api_url, policy.region, policy.serial, moments)

    def promote(self, policy: Policy) -> Ended:
        """A promotion that nothing happens to."""
        ended = self.promotion(policy).wait()
        assert ended.completed, ended.sentence
        self.look(policy.region)
        return ended

    def look(self, region: str, row: Row | None = None) -> list[str]:
        """What is wrong now with what must always hold; counted in the table's row."""
        row = row or Row("")
        arguments = (self.services, self.s3, self.memory, region)
        lost = invariants.nothing_is_lost(*arguments)
        half = invariants.serves_a_whole_release(*arguments)
        twice = invariants.is_drawn_once(*arguments)
        uncovered = invariants.ledger_covers_everything(*arguments)
        row.lost += len(lost)
        row.half_promoted += len(half)
        row.drawn_twice += len(twice)
        row.not_covered += len(uncovered)
        wrong = [*lost, *half, *twice, *uncovered]
        row.wrong += wrong
        return wrong

    def reconcile(self, region: str) -> tuple[Report, str]:
        """One round for one region, and the end of the run that it started; both sentences."""
        report = reconcile_region(self.services, region, datetime.now(UTC))
        if report.flow_run_id is None:
            return report, report.sentence
        ended = self.services.orchestrator.wait(report.flow_run_id, timeout=FLOW_TIMEOUT)
        return report, f"{report.sentence} It ended: {message_of(ended)}"

    def survived(self, region: str, row: Row) -> None:
        """What must hold now, holds; one reconcile settles everything; and it still holds."""
        row.times += 1
        self.look(region, row)
        report, sentence = self.reconcile(region)
        self.look(region, row)
        unsettled = invariants.is_settled(self.services, self.s3, self.memory, region)
        if unsettled or report.failed:
            row.wrong += [*unsettled, sentence]
        else:
            row.settled += 1

    # Prefect and its processes

    def emit(self, policy: Policy, event_id: str | None = None) -> str:
        """The event as `remerge policy set` emits it, without what waits for it."""
        event_id = event_id or str(uuid.uuid4())
        self.services.orchestrator.emit(
            {
                "id": event_id,
                "occurred": datetime.now(UTC).isoformat(),
                "event": "policy.changed",
                "resource": {"prefect.resource.id": f"remerge.policy.{policy.region}"},
                "payload": {"region": policy.region, "serial": policy.serial},
            }
        )
        return event_id

    def runs_of(self, region: str) -> list[FlowRun]:
        """All runs of policy_change for a region that have a deployment."""
        runs = self.services.orchestrator.runs("policy-change")
        return [run for run in runs if (run.get("parameters") or {}).get("region") == region]

    def wait_for_runs(self, region: str, count: int, timeout: float = FLOW_TIMEOUT) -> list[FlowRun]:
        """Wait until so many runs of a region have ended."""
        deadline = time.monotonic() + timeout
        while True:
            runs = self.runs_of(region)
            ended = [run for run in runs if run.get("end_time")]
            if len(ended) == len(runs) >= count:
                return runs
            assert time.monotonic() < deadline, f"{len(ended)} of {count} runs of {region} have ended"
            time.sleep(0.5)

    def flow_process(self, flow_run_id: str) -> int | None:
        """The process that the worker runs a flow in (Linux)."""
        mark = State.read(self.settings).mark("worker")
        wanted = f"PREFECT__FLOW_RUN_ID={flow_run_id}".encode()
        for pid in processes.marked(mark):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in environment:
                return pid
        return None

    def service_processes(self, name: str) -> list[int]:
        """A service's processes, the one that was started first."""
        state = State.read(self.settings)
        leader = state.children[name].pid
        return [leader, *(pid for pid in processes.marked(state.mark(name)) if pid != leader)]


class Chain:
    """A region that is served from the start, and policies for it each of which the release before violates.

    So the gate compares no two models, and every policy ends in a release of its own, with a draw of its own.
    """

    def __init__(self, field: Field) -> None:
        self.field = field
        self.region = field.region()
        self.epsilon = 3.9
        field.promote(self.policy())

    def policy(self) -> Policy:
        self.epsilon *= 0.985
        return self.field.policy(self.region, self.epsilon)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def until(true: Callable[[], Any], timeout: float = 60.0, pause: float = 0.05) -> Any:
    """Wait for something to be so, and return it."""
    deadline = time.monotonic() + timeout
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(pause)
    return found


def quiet(message: str) -> None:
    del message
