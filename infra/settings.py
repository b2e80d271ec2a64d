"""Where things are: read once, at the edge, by whoever starts a command or a flow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from accounting.errors import RemergeError

# Reached without a proxy, whatever the environment says.
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

OWN_SERVICES = (
    "s3_endpoint",
    "s3_access_key",
    "s3_secret_key",
    "mlflow_url",
    "prefect_api_url",
    "data_digest_key",
)


SECRETS = {  # of the embedded stack; name: bytes of randomness
    "s3_access_key": 16,
    "s3_secret_key": 32,
    "data_digest_key": 32,
    "weed_jwt_signing_key": 32,
    "weed_jwt_signing_read_key": 32,
    "weed_jwt_filer_signing_key": 32,
    "weed_jwt_filer_signing_read_key": 32,
}


class StackDown(RemergeError):
    """The services are not there; starting them and trying again helps."""

    retryable = True


class HomeUnusable(RemergeError):
    """The folder of the embedded stack cannot be made, read or written."""


class CredentialsDamaged(RemergeError):
    """The stack's secrets are not all there; making new ones would lock the data out."""

    @classmethod
    def of(cls, file: Path, what: str) -> CredentialsDamaged:
        return cls(
            f"{file} is damaged ({what}): restore it from a backup, or start anew with another REMERGE_HOME."
        )


class Settings(BaseSettings):
    """Everything that the environment may say. `REMERGE_HOME` holds all state of the embedded stack.

    Set all of `REMERGE_S3_ENDPOINT`, `REMERGE_S3_ACCESS_KEY`, `REMERGE_S3_SECRET_KEY`, `REMERGE_MLFLOW_URL`,
    `REMERGE_PREFECT_API_URL` and `REMERGE_DATA_DIGEST_KEY` to use services of your own instead.
    """

    model_config = SettingsConfigDict(env_prefix="REMERGE_", frozen=True, extra="ignore")

    home: Path = Path(".remerge")
    s3_endpoint: str | None = None
    s3_access_key: SecretStr | None = None
    s3_secret_key: SecretStr | None = None
    s3_region: str = "us-east-1"
    production_bucket: str = "production"
    mlflow_url: str | None = None
    prefect_api_url: str | None = None
    data_digest_key: SecretStr | None = None
    cache: Path = Path(
        "~/.cache/remerge"
    )  # fetched data sets, and features of private rows in frozen-features

    @property
    def stack_file(self) -> Path:
        """Addresses and process ids of the embedded stack while it is up."""
        return self.home.absolute() / "stack.json"

    @property
    def credentials_file(self) -> Path:
        """Secrets of the embedded stack, mode 0600, made on the first `remerge up`."""
        return self.home.absolute() / "credentials.json"

    def own_services(self) -> dict[str, str | SecretStr]:
        """What the environment says of services other than the embedded ones, by the names in OWN_SERVICES."""
        named = {name: getattr(self, name) for name in OWN_SERVICES}
        return {name: value for name, value in named.items() if value}


class S3Access(BaseModel):
    """Address and keys of the production bucket: all that a serving process needs to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    s3_endpoint: str
    s3_access_key: SecretStr
    s3_secret_key: SecretStr
    s3_region: str = "us-east-1"
    production_bucket: str = "production"


class Connections(S3Access):
    """Addresses and keys of the services, embedded or your own."""

    mlflow_url: str
    prefect_api_url: str
    prefect_ui_url: str = Field(default="")
    data_digest_key: SecretStr  # keys the digests of private rows; never leaves the trust boundary


def connections(settings: Settings | None = None) -> Connections:
    """Find the services.

    Raises:
        StackDown: neither the environment nor a running embedded stack names them.
        CredentialsDamaged: the embedded stack's secrets are not whole.
        HomeUnusable: REMERGE_HOME cannot be read.
    """
    settings = settings or Settings()
    own = settings.own_services()
    if len(own) == len(OWN_SERVICES):
        ui = str(settings.prefect_api_url).removesuffix("/api")
        return Connections.model_validate(
            {
                **own,
                "s3_region": settings.s3_region,
                "production_bucket": settings.production_bucket,
                "prefect_ui_url": ui,
            }
        )
    if own:
        missing = ", ".join(f"REMERGE_{name.upper()}" for name in OWN_SERVICES if name not in own)
        raise StackDown(f"Set {missing} too (or none of these variables, to use the embedded stack).")
    not_up = StackDown(f"The stack is not up (no {settings.stack_file}): run `remerge up` first.")
    damaged = StackDown(f"{settings.stack_file} is damaged: run `remerge down`, then `remerge up`.")
    try:
        stack = read_json(settings.stack_file)
    except ValueError:
        raise damaged from None
    if stack is None:
        raise not_up
    secrets = read_secrets(settings)
    try:
        return embedded(settings, stack["addresses"], secrets)
    except (ValueError, TypeError, KeyError):
        raise damaged from None


def s3_access(settings: Settings | None = None) -> S3Access:
    """Find the production bucket alone: a serving process need not know the other services, nor their secrets.

    Raises:
        StackDown: neither `REMERGE_S3_ENDPOINT` with its two keys nor a running embedded stack names it.
        CredentialsDamaged, HomeUnusable: as for `connections`.
    """
    settings = settings or Settings()
    own = {name: value for name, value in settings.own_services().items() if name in S3Access.model_fields}
    if len(own) < 3:
        return connections(settings)
    return S3Access.model_validate(
        {**own, "s3_region": settings.s3_region, "production_bucket": settings.production_bucket}
    )


def read_json(file: Path) -> Any:
    """The contents of a file of the embedded stack; None where there is none.

    Raises:
        HomeUnusable: the operating system does not let us read it.
        ValueError: it is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(file, error) from None


def unusable(file: Path, error: OSError) -> HomeUnusable:
    """What to say where the operating system refuses."""
    return HomeUnusable(
        f"{error.filename or file} cannot be used ({error.strerror}): let REMERGE_HOME name a folder that you can "
        "write to."
    )


def read_secrets(settings: Settings) -> dict[str, str]:
    """The secrets of the embedded stack.

    Raises:
        CredentialsDamaged: the file is not there, or not whole.
        HomeUnusable: the operating system does not let us read it.
    """
    file = settings.credentials_file
    try:
        found = read_json(file)
    except ValueError:
        raise CredentialsDamaged.of(file, "it is not JSON") from None
    if found is None:
        raise CredentialsDamaged.of(file, "it is missing")
    if not isinstance(found, dict):
        raise CredentialsDamaged.of(file, "it is not a JSON object")
    missing = [name for name in SECRETS if not (isinstance(found.get(name), str) and found[name])]
    if missing:
        raise CredentialsDamaged.of(file, f"{', '.join(missing)} missing")
    return found


def embedded(settings: Settings, addresses: dict[str, str], secrets: dict[str, str]) -> Connections:
    """The connections of the embedded stack.

    Raises:
        ValueError, KeyError, TypeError: something is missing.
    """
    return Connections.model_validate(
        {
            **addresses,
            **{name: secrets[name] for name in ("s3_access_key", "s3_secret_key", "data_digest_key")},
            "s3_region": settings.s3_region,
            "production_bucket": settings.production_bucket,
        }
    )
