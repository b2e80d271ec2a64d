"""The one door to MLflow's server: a client, and its faults as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from accounting.errors import RemergeError
from infra.settings import Connections, StackDown

if TYPE_CHECKING:
    from mlflow import MlflowClient


class RegistryRefused(RemergeError):
    """MLflow answered, but not with a success; its own words are quoted."""


class NotThere(RegistryRefused):
    """MLflow does not know what was asked for."""


@contextmanager
def answers(doing: str) -> Iterator[None]:
    """Turn MLflow's and the connection's errors into sentences."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    try:
        yield
    except RequestException:
        raise StackDown(
            f"MLflow stopped answering while trying to {doing}; try again when it is up."
        ) from None
    except MlflowException as error:
        first_line = str(error).splitlines()[0]
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise NotThere(f"MLflow has not what it takes to {doing}: {first_line}") from error
        if error.error_code in {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"}:
            raise StackDown(
                f"MLflow failed while trying to {doing}; try again when it and its store are up."
            ) from error
        raise RegistryRefused(f"MLflow refused to {doing}: {first_line}") from error


def mlflow_client(connections: Connections) -> MlflowClient:
    """A client of the tracking server; nothing global is set."""
    from mlflow import MlflowClient  # late: importing mlflow takes seconds

    return MlflowClient(tracking_uri=connections.mlflow_url, registry_uri=connections.mlflow_url)


def require_up(client: MlflowClient) -> None:
    """Fail at once when MLflow is not there: its own client would try again for minutes.

    Raises:
        StackDown: with what to do.
    """
    if not healthy(client.tracking_uri):
        raise StackDown(f"MLflow does not answer at {client.tracking_uri}: run `remerge up`, then try again.")


def healthy(url: str) -> bool:
    """Whether the tracking server answers."""
    try:
        return httpx.get(f"{url.rstrip('/')}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def experiment(client: MlflowClient, name: str) -> str:
    """The id of the experiment of that name, made or restored if need be; threads may ask at once."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(
                client.create_experiment(name, tags={"mlflow.experimentKind": "custom_model_development"})
            )
        except MlflowException as error:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise error
    if found.lifecycle_stage == "deleted":  # by hand; MLflow keeps its name and its runs
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def ensure_registered_model(client: MlflowClient, name: str) -> None:
    """Make the registered model of that name, unless it exists."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
