"""`python -m infra.worker NAME`: deploy prefect.yaml, then run Prefect's own worker.

One process for both, started together with the server: each `prefect` command takes seconds to import, which
is spent here while the server comes up.
"""

from __future__ import annotations

import os
import sys
import time

from accounting.errors import RemergeError
from infra.orchestrator import Orchestrator
from infra.settings import StackDown
from infra.stack_services import WORK_POOL, repository_root

_PATIENCE = 180.0  # seconds that the server may take to come up; whoever started us gives up earlier


def main(name: str, api_url: str) -> None:
    """Deploy, check that everything was deployed, then work until told to stop.

    Raises:
        RemergeError, SystemExit: a step failed; what Prefect says is above in the log.
    """
    import_early()
    orchestrator = Orchestrator(api_url=api_url)
    wait_for(orchestrator)
    # Whatever an earlier worker ran is gone with it, but Prefect would show it as running for ever.
    orchestrator.crash_unfinished("The worker was stopped while this run was going; start it again.")
    orchestrator.forget_workers(WORK_POOL)
    orchestrator.create_work_pool(WORK_POOL)
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", "prefect.yaml")
    require_deployed(orchestrator)
    prefect("worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", name)


def import_early() -> None:
    """Import what the commands below will import, while the server starts."""
    import prefect.cli.deploy
    import prefect.cli.worker
    import prefect.deployments.runner
    import prefect.workers.process  # noqa: F401


def wait_for(orchestrator: Orchestrator) -> None:
    """Wait until Prefect's API answers.

    Raises:
        StackDown: it does not.
    """
    deadline = time.monotonic() + _PATIENCE
    while not orchestrator.healthy():
        if time.monotonic() > deadline:
            raise StackDown(f"Prefect at {orchestrator.api_url} did not come up within {_PATIENCE:.0f} s.")
        time.sleep(0.1)


def prefect(*arguments: str) -> None:
    """Run a `prefect` command in this process.

    Raises:
        SystemExit: it failed.
    """
    from prefect.cli import app

    sys.argv = ["prefect", *arguments]
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise


def require_deployed(orchestrator: Orchestrator) -> None:
    """Prefect only warns of a prefect.yaml that it cannot use; here that ends the start.

    Raises:
        RemergeError: naming what is missing.
    """
    import yaml

    file = repository_root() / "prefect.yaml"
    wanted = {deployment["name"] for deployment in yaml.safe_load(file.read_text())["deployments"]}
    if missing := sorted(wanted - set(orchestrator.deployments())):
        raise RemergeError(f"Prefect did not deploy {', '.join(missing)} from {file}; its reasons are above.")


if __name__ == "__main__":
    main(sys.argv[1], os.environ["PREFECT_API_URL"])
