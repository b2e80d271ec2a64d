"""Runs that wait for their turn and whose policy a newer one has replaced: ended without starting a process each.

Such a run would read the policies and end as superseded by itself. To start it for that costs seconds, and while a
region's policy changes many times in a minute those seconds are what everybody else waits for.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from accounting.errors import RemergeError
from infra.documents import Policy
from tasks.services import Services

POLICY_CHANGE = "policy-change"  # the deployment of the flow policy_change


def superseded_sentence(region: str, serial: int, newer: int) -> str:
    """How a run ends whose policy was replaced before it was promoted."""
    return f"Policy {serial} of {region} was superseded by policy {newer}."


def end_superseded(services: Services, now: datetime) -> int:
    """End the waiting runs of policy_change whose policy is older than the one in effect.

    It only saves time, so nothing is raised: what could not be read or ended is left to the run itself. A run that
    a worker takes at the same moment ends in the same way.

    Args:
        now: which policies are in effect is judged at this time (UTC).

    Returns:
        How many were ended.
    """
    current: dict[str, Policy | None] = {}
    ended = 0
    with suppress(RemergeError):
        for run in services.orchestrator.unended_runs(POLICY_CHANGE):
            wanted = run.get("parameters") or {}
            region, serial = wanted.get("region"), wanted.get("serial")
            if run.get("state_type") != "SCHEDULED" or not isinstance(region, str) or type(serial) is not int:
                continue
            with suppress(RemergeError):  # a damaged document of one region is not another's trouble
                if region not in current:
                    current[region] = services.policies.in_effect(region, now)
                newer = current[region]
                if newer is None or serial >= newer.serial:
                    continue
                sentence = superseded_sentence(region, serial, newer.serial)
                ended += services.orchestrator.end_waiting(str(run["id"]), sentence)
    return ended
