"""A trained demo portfolio on the shared stack, and ways to change policies on it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from infra.documents import Policy, PortfolioManifest
from infra.settings import Connections
from tasks.services import Services, open_services
from tests.conftest import SharedStack

DELTA = 1e-5


@dataclass(frozen=True)
class Ended:
    """A policy and how its run ended, in this process."""

    policy: Policy
    succeeded: bool
    sentence: str


@pytest.fixture(scope="session")
def services(stack: SharedStack) -> Services:
    return open_services(stack.settings)


@pytest.fixture(scope="session")
def remerge(stack: SharedStack) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command as a user does, from another folder than the project's."""

    def run(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "REMERGE_HOME": str(home or stack.settings.home), "COLUMNS": "200"}
        return subprocess.run(
            [str(Path(sys.executable).parent / "remerge"), *arguments],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=240,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture(scope="session")
def portfolio(
    stack: SharedStack, services: Services, remerge: Callable[..., subprocess.CompletedProcess[str]]
) -> PortfolioManifest:
    """The demo's portfolio, trained once for the whole run, by whichever worker asks first."""
    with (stack.settings.home / "portfolio.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        trained = services.manifests.newest("digits")
        if trained is None:
            ended = remerge("train")
            assert ended.returncode == 0, ended.stderr
            trained = services.manifests.newest("digits")
    assert trained is not None
    return services.manifests.read("digits", 1)


@pytest.fixture
def region() -> str:
    """A region of the test's own, so that tests do not see each other."""
    return f"r{uuid.uuid4().hex[:10]}"


@pytest.fixture(scope="session")
def prefect_api(stack: SharedStack) -> Iterator[None]:
    """Let flows that run in this process talk to the shared Prefect server."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: stack.connections.prefect_api_url}):
        yield


@pytest.fixture
def change_policy(
    services: Services, portfolio: PortfolioManifest, prefect_api: None, region: str
) -> Callable[..., Ended]:
    """Store a policy and run the flow on it in this process: no event, no five seconds of imports."""

    def change(**fields: Any) -> Ended:
        new = fields.pop("new", False)
        stored = services.policies.append(
            {
                "region": region,
                "delta": DELTA,
                "portfolio": portfolio.reference,
                "author": "test",
                **fields,
            },
            new=new,
        )
        return run_policy(stored)

    return change


def run_policy(policy: Policy) -> Ended:
    from flows.policy_change import policy_change

    state = policy_change(policy.region, policy.serial, return_state=True)
    return Ended(policy=policy, succeeded=state.is_completed(), sentence=state.message or "")


@pytest.fixture(scope="session")
def s3(stack: SharedStack) -> Any:
    """Plain boto3, none of our code."""
    return plain_s3(stack.connections)


def plain_s3(connections: Connections) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=connections.s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id=connections.s3_access_key.get_secret_value(),
        aws_secret_access_key=connections.s3_secret_key.get_secret_value(),
        config=Config(s3={"addressing_style": "path"}),
    )


def read(s3: Any, key: str, bucket: str = "production") -> bytes:
    content: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


def read_json(s3: Any, key: str) -> Any:
    return json.loads(read(s3, key))


def keys_of(s3: Any, prefix: str, bucket: str = "production") -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [item["Key"] for page in pages for item in page.get("Contents", ())]
