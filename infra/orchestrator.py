"""The one door to Prefect for commands: plain REST, because `import prefect` alone takes a second or more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict
from urllib.parse import urlsplit

import httpx

from accounting.errors import RemergeError
from infra.settings import LOOPBACK, Connections, StackDown

RECONCILE_TAG = "remerge.reconcile"  # on runs that reconcile started
TERMINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
_PAGE = 200
_WATCH = 3.0  # seconds between looks at what a wait depends on
_BUSY = {429, 502, 503, 504}  # 503 is also what Prefect says while its SQLite database is locked
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds between tries, as Prefect's own client makes them


class OrchestratorRefused(RemergeError):
    """Prefect answered, but not with a success; its own words are quoted."""


class RunNotEnded(RemergeError):
    """A flow run has not ended (or not begun) in the time given; it may still do so."""

    retryable = True


class FlowRun(TypedDict, total=False):
    """A flow run as Prefect's API returns it; the fields used here."""

    id: str
    name: str
    deployment_id: str | None
    state_type: str | None  # SCHEDULED, PENDING, RUNNING, or one of TERMINAL
    state_name: str | None
    state: dict[str, Any] | None  # message, timestamp
    parameters: dict[str, Any]
    created_by: dict[str, Any] | None  # type AUTOMATION, id, display_value; None: by hand or by its schedule
    start_time: str | None
    end_time: str | None
    tags: list[str]


WAITS_FOR_ITS_TURN = "AwaitingConcurrencySlot"  # Prefect's name for it


def state_in_words(run: FlowRun) -> str:
    """A flow run's state, as people would say it."""
    name = str(run.get("state_name"))
    return "waiting for its turn" if name == WAITS_FOR_ITS_TURN else name.lower()


def message_of(run: FlowRun) -> str:
    """The sentence of a run's present state; empty when it has none."""
    return str((run.get("state") or {}).get("message") or "")


class Orchestrator:
    """Every method may raise:

    StackDown: Prefect's API cannot be reached, or is not ready; trying again later helps.
    OrchestratorRefused: it answered with an error, quoted.
    """

    def __init__(self, connections: Connections | None = None, *, api_url: str = "") -> None:
        self.api_url = (connections.prefect_api_url if connections else api_url).rstrip("/")
        local = urlsplit(self.api_url).hostname in LOOPBACK
        self._client = httpx.Client(base_url=self.api_url, timeout=10, trust_env=not local)

    def close(self) -> None:
        """Give back the connections; nothing can be asked afterwards."""
        self._client.close()

    def healthy(self) -> bool:
        """Whether the API answers."""
        try:
            return bool(self._call("GET", "/health"))
        except RemergeError:
            return False

    # Events and automations

    def emit(self, event: Mapping[str, Any]) -> None:
        """Hand one event to Prefect, which keeps it in memory until it is handled."""
        self._call("POST", "/events", json=[event])

    def automation_name(self, automation_id: str) -> str | None:
        """The name of an automation; None if there is none (any more)."""
        found = self._call("GET", f"/automations/{automation_id}", missing_is_none=True)
        return str(found["name"]) if found else None

    def refusals_of_event(self, event_id: str) -> list[str]:
        """Why automations that heard an event could not start a run (for example a field that is missing)."""
        cause = {"id": [f"prefect.event.{event_id}"], "role": ["triggering-event"]}
        where = {"event": {"name": ["prefect.automation.action.failed"]}, "related": cause}
        found = self._call("POST", "/events/filter", json={"filter": where, "limit": 10})
        return [str(event["payload"].get("reason", "")) for event in found["events"]]

    # Deployments and flow runs

    def deployments(self) -> dict[str, dict[str, Any]]:
        """All deployments by name, as Prefect's API returns them."""
        return {found["name"]: found for found in self._pages("/deployments/filter", {})}

    def create_flow_run(
        self, deployment: str, parameters: Mapping[str, Any] | None = None, *, tags: Sequence[str] = ()
    ) -> FlowRun:
        """Start a run of a deployment by hand.

        Args:
            deployment: its name, for example "train-portfolio".
            parameters: over the deployment's own.
        """
        found = self._pages("/deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
        if not found:
            raise OrchestratorRefused(
                f"Prefect at {self.api_url} has no deployment {deployment}: `remerge up`."
            )
        body = {
            "parameters": {**found[0]["parameters"], **(parameters or {})},
            "state": {"type": "SCHEDULED"},
            "tags": list(tags),
        }
        return self._call("POST", f"/deployments/{found[0]['id']}/create_flow_run", json=body)  # type: ignore[no-any-return]

    def read_flow_run(self, flow_run_id: str) -> FlowRun:
        """The run as it is now."""
        return self._call("GET", f"/flow_runs/{flow_run_id}")  # type: ignore[no-any-return]

    def find_flow_run(self, flow_run_id: str) -> FlowRun | None:
        """The run as it is now; None where Prefect knows none of that id (any more)."""
        return self._call("GET", f"/flow_runs/{flow_run_id}", missing_is_none=True)  # type: ignore[no-any-return]

    def runs(self, deployment: str, *, limit: int = _PAGE) -> list[FlowRun]:
        """The newest runs of a deployment, newest first."""
        where = {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_DESC"}
        return self._pages("/flow_runs/filter", where, limit=limit)

    def runs_of_event(self, event_id: str, *, deployment: str = "policy-change") -> list[FlowRun]:
        """The runs that were started with this event's id among their parameters."""
        return [
            run for run in self.runs(deployment) if (run.get("parameters") or {}).get("event_id") == event_id
        ]

    def task_runs(self, flow_run_id: str) -> list[dict[str, Any]]:
        """The steps of a run as Prefect saw them, with their names and times, earliest first."""
        where = {"flow_runs": {"id": {"any_": [flow_run_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return self._pages("/task_runs/filter", where)

    def unended_runs(self, deployment: str) -> list[FlowRun]:
        """The runs of a deployment that are scheduled, pending or running, newest first."""
        where = {
            "deployments": {"name": {"any_": [deployment]}},
            "flow_runs": {"state": {"type": {"not_any_": sorted(TERMINAL)}}},
            "sort": "EXPECTED_START_TIME_DESC",
        }
        return self._pages("/flow_runs/filter", where)

    def wait_for_event(
        self,
        event_id: str,
        *,
        timeout: float = 30.0,
        deployment: str = "policy-change",
        interval: float = 0.25,
    ) -> FlowRun:
        """Wait until an automation has started a run for an event.

        Args:
            timeout: seconds.

        Raises:
            OrchestratorRefused: an automation heard the event and could not start its run; says why.
            RunNotEnded: nothing was started in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            if found := self.runs_of_event(event_id, deployment=deployment):
                return found[-1]
            if reasons := self.refusals_of_event(event_id):
                raise OrchestratorRefused(f"Prefect could not start {deployment}: {reasons[0]}")
            if time.monotonic() > deadline:
                raise RunNotEnded(
                    f"No run of {deployment} was started within {timeout:.0f} s of the event: see whether "
                    "`remerge status` shows the worker, and whether the automation in Prefect is enabled."
                )
            time.sleep(interval)

    def wait(
        self,
        flow_run_id: str,
        *,
        timeout: float,
        progress: Callable[[FlowRun], None] | None = None,
        watch: Callable[[FlowRun], None] | None = None,
        interval: float = 0.25,
        watch_every: float = _WATCH,
    ) -> FlowRun:
        """Wait until a run has ended, well or not.

        Args:
            timeout: seconds.
            progress: called with the run whenever its state has another name than before.
            watch: called with it every `watch_every` seconds; what it raises ends the waiting.

        Raises:
            RunNotEnded: it has not ended in time.
        """
        deadline = time.monotonic() + timeout
        watched = time.monotonic()
        seen: str | None = None
        while True:
            run = self.read_flow_run(flow_run_id)
            state = run.get("state_name")
            if progress and state != seen:
                progress(run)
            seen = state
            if run.get("state_type") in TERMINAL:
                return run
            if watch and time.monotonic() > watched + watch_every:
                watch(run)
                watched = time.monotonic()
            if time.monotonic() > deadline:
                raise RunNotEnded(
                    f"The flow run {run.get('name')} is still {state} after {timeout:.0f} s; "
                    "look at it in Prefect's pages, or wait on."
                )
            time.sleep(interval)

    def end_waiting(self, flow_run_id: str, sentence: str) -> bool:
        """End a run well that has not been started, saying why; whether Prefect did so."""
        if self.read_flow_run(flow_run_id).get("state_type") != "SCHEDULED":
            return False
        state = {"type": "COMPLETED", "message": sentence}
        answer = self._call("POST", f"/flow_runs/{flow_run_id}/set_state", json={"state": state})
        return bool(answer["status"] == "ACCEPT")

    def crash_unfinished(self, reason: str) -> list[FlowRun]:
        """Mark as crashed what Prefect takes for running, and return it; only for when nothing can be."""
        going = {"flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}}
        runs: list[FlowRun] = self._pages("/flow_runs/filter", going)
        for run in runs:
            state = {"type": "CRASHED", "message": reason}
            self._call("POST", f"/flow_runs/{run['id']}/set_state", json={"state": state, "force": True})
        return runs

    # Work pools and workers

    def create_work_pool(self, name: str) -> None:
        """Make a work pool whose runs are processes, unless it is there."""
        if self._call("GET", f"/work_pools/{name}", missing_is_none=True) is None:
            self._call("POST", "/work_pools/", json={"name": name, "type": "process"})

    def online_workers(self, work_pool: str) -> list[str]:
        """The names of the workers of a pool that have lately been heard of."""
        return [worker["name"] for worker in self._workers(work_pool) if worker.get("status") == "ONLINE"]

    def forget_workers(self, work_pool: str) -> None:
        """Remove a pool's list of workers; those that live come back by themselves."""
        for worker in self._workers(work_pool):
            self._call("DELETE", f"/work_pools/{work_pool}/workers/{worker['name']}", missing_is_none=True)

    def _workers(self, work_pool: str) -> list[dict[str, Any]]:
        return (
            self._call("POST", f"/work_pools/{work_pool}/workers/filter", json={}, missing_is_none=True) or []
        )

    def _pages(self, path: str, where: Mapping[str, Any], *, limit: int | None = None) -> list[Any]:
        found: list[Any] = []
        while True:
            room = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = self._call("POST", path, json={**where, "offset": len(found), "limit": room})
            found += page
            if len(page) < room or len(found) == limit:
                return found

    def _call(self, method: str, path: str, *, json: Any = None, missing_is_none: bool = False) -> Any:
        for pause in (*_PAUSES, None):
            try:
                response = self._client.request(method, path, json=json)
            except httpx.HTTPError as error:
                raise StackDown(
                    f"Prefect at {self.api_url} cannot be reached ({type(error).__name__}): run `remerge up`, "
                    "or check REMERGE_PREFECT_API_URL."
                ) from None
            if pause is None or response.status_code not in _BUSY:
                break
            time.sleep(pause)
        if response.status_code == 404 and missing_is_none:
            return None
        if response.status_code in _BUSY:
            raise StackDown(f"Prefect at {self.api_url} is not ready ({response.status_code}); try again.")
        if response.is_error:
            raise OrchestratorRefused(
                f"Prefect refused {method} {path} ({response.status_code}): {response.text[:300]}"
            )
        return response.json() if response.content else None
