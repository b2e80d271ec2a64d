"""The event `policy.changed`: a hint that a policy document is new. The document is the truth."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from infra.documents import Policy
from infra.orchestrator import Orchestrator
from infra.settings import StackDown

POLICY_CHANGED = "policy.changed"


def policy_resource(region: str) -> str:
    """The id of a region's policy as a Prefect resource; prefect.yaml matches `remerge.policy.*`."""
    return f"remerge.policy.{region}"


def emit_policy_changed(orchestrator: Orchestrator, policy: Policy, event_id: str | None = None) -> str:
    """Tell Prefect that a region has a new policy, which is stored already. Returns the event's id.

    Prefect keeps events at most once: one that nobody heard is lost, and the same command may be run again.

    Args:
        event_id: a UUID that somebody waits for; None for a new one.

    Raises:
        StackDown: Prefect cannot be reached; nothing was started.
        OrchestratorRefused: it did not take the event.
    """
    event_id = event_id or str(uuid.uuid4())
    event = {
        "id": event_id,
        "occurred": datetime.now(UTC).isoformat(),
        "event": POLICY_CHANGED,
        "resource": {
            "prefect.resource.id": policy_resource(policy.region),
            "prefect.resource.name": f"privacy policy of {policy.region}",
        },
        "payload": {"region": policy.region, "serial": policy.serial, "policy_digest": policy.sha256()},
    }
    try:
        orchestrator.emit(event)
    except StackDown as error:
        raise StackDown(
            f"Policy {policy.serial} of {policy.region} is stored, but nothing was started, because Prefect "
            f"could not be told. {error.message} Then give the same command again."
        ) from None
    return event_id
