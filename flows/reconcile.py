"""Every few minutes: production is made to agree with the policy documents, whatever was lost on the way.

An event may be lost, a process killed, an alias changed by hand. One round starts what should have been started
(one run for each region, for the policy in effect; superseded ones are not run), and mends what follows a pointer.
Each round is safe at any time, also beside other rounds and beside the runs that events start: the same policy and
portfolio version always name the same release.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from accounting.errors import RemergeError
from tasks.services import open_services


@flow(name="reconcile", persist_result=False)
def reconcile(region: str | None = None) -> State[Any]:
    """Start what a lost event missed, and mend what a killed process left undone.

    Args:
        region: only this one; None: all of them.
    """
    from tasks.reconciling import reconcile_all, reconcile_region

    now = datetime.now(UTC)
    try:
        services = open_services()
        done = reconcile_all(services, now) if region is None else [reconcile_region(services, region, now)]
    except RemergeError as error:
        return Failed(message=error.message)
    for report in done:
        print(report.sentence)
    wrong = [report.sentence for report in done if report.failed]
    if wrong:
        return Failed(message=" ".join(wrong))
    changed = [report.sentence for report in done if report.changed]
    return Completed(message=" ".join(changed) or "Every region is as its policy says.")
