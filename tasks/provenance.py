"""Who started this run: an automation that heard an event, reconcile, or a hand."""

from __future__ import annotations

from infra.documents import Provenance
from infra.orchestrator import RECONCILE_TAG, Orchestrator


def provenance_of(orchestrator: Orchestrator, flow_run_id: str | None, event_id: str | None) -> Provenance:
    """Ask Prefect who created a flow run; what the run was told about itself is not trusted.

    Args:
        flow_run_id: None where the flow function was called without a server-side run.
        event_id: as the automation passed it; kept only for a run that an automation really created.
    """
    if flow_run_id is None:
        return Provenance(started_by="hand")
    run = orchestrator.read_flow_run(flow_run_id)
    creator = run.get("created_by") or {}
    if creator.get("type") != "AUTOMATION":
        started_by = "reconcile" if RECONCILE_TAG in (run.get("tags") or ()) else "hand"
        return Provenance(started_by=started_by, flow_run_id=flow_run_id, flow_run_name=run.get("name"))
    automation_id = str(creator.get("id"))
    return Provenance(
        started_by="automation",
        automation_id=automation_id,
        automation_name=orchestrator.automation_name(automation_id) or creator.get("display_value"),
        event_id=event_id,
        flow_run_id=flow_run_id,
        flow_run_name=run.get("name"),
    )
