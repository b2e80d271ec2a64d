"""Where the services are: one's own by the environment, or the embedded ones by their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra import stack
from infra.settings import (
    OWN_SERVICES,
    SECRETS,
    CredentialsDamaged,
    HomeUnusable,
    Settings,
    StackDown,
    connections,
)

OWN = {
    "s3_endpoint": "https://s3.example",
    "s3_access_key": "access",
    "s3_secret_key": "hidden",
    "mlflow_url": "https://mlflow.example",
    "prefect_api_url": "https://prefect.example/api",
    "data_digest_key": "digest",
}


WHOLE = {name: "ab" * size for name, size in SECRETS.items()}
ADDRESSES = {
    "s3_endpoint": "http://127.0.0.1:1",
    "mlflow_url": "http://127.0.0.1:2",
    "prefect_api_url": "http://127.0.0.1:3/api",
    "prefect_ui_url": "http://127.0.0.1:3",
}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("REMERGE_HOME", str(tmp_path / "home"))
    for name, value in OWN.items():
        monkeypatch.setenv(f"REMERGE_{name.upper()}", value)
    return monkeypatch


def test_services_of_your_own(own: pytest.MonkeyPatch) -> None:
    found = connections()
    assert found.s3_endpoint == OWN["s3_endpoint"]
    assert found.prefect_ui_url == "https://prefect.example"
    assert "hidden" not in repr(found)
    assert set(OWN_SERVICES) == set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_a_half_named_set_says_what_is_missing(own: pytest.MonkeyPatch, name: str) -> None:
    own.delenv(f"REMERGE_{name.upper()}")
    with pytest.raises(StackDown, match=f"Set REMERGE_{name.upper()} too"):
        connections()


def test_the_embedded_stack_is_not_started_beside_them(own: pytest.MonkeyPatch) -> None:
    with pytest.raises(stack.StackFailed, match="unset REMERGE_S3_ENDPOINT"):
        stack.start(Settings(), lambda message: None)
    assert not Settings().home.exists()


def test_no_stack(tmp_path: Path) -> None:
    with pytest.raises(StackDown, match="run `remerge up` first") as caught:
        connections(Settings(home=tmp_path))
    assert caught.value.retryable


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"addresses": {}}', '{"addresses": {"x": 1}}'])
def test_a_damaged_record(tmp_path: Path, content: str) -> None:
    settings = Settings(home=tmp_path)
    settings.stack_file.write_text(content)
    settings.credentials_file.write_text(json.dumps(WHOLE))
    with pytest.raises(StackDown, match="is damaged"):
        connections(settings)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "it is missing"),
        ("{", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        (json.dumps({**WHOLE, "s3_secret_key": ""}), "s3_secret_key missing"),
        (json.dumps({**WHOLE, "data_digest_key": 7}), "data_digest_key missing"),
    ],
)
def test_damaged_secrets_are_told_from_a_damaged_record(
    tmp_path: Path, content: str | None, what: str
) -> None:
    settings = Settings(home=tmp_path)
    settings.stack_file.write_text(json.dumps({"addresses": ADDRESSES}))
    settings.credentials_file.write_text(json.dumps(WHOLE))
    assert connections(settings).mlflow_url == ADDRESSES["mlflow_url"]
    settings.credentials_file.unlink()
    if content is not None:
        settings.credentials_file.write_text(content)
    with pytest.raises(CredentialsDamaged) as caught:
        connections(settings)
    assert caught.value.message.startswith(f"{settings.credentials_file} is damaged ({what}): restore it")


@pytest.mark.parametrize("below", ["", "below"])
def test_a_home_that_is_no_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    settings = Settings(home=tmp_path / "file" / below)
    for command in (
        lambda: stack.start(settings, lambda message: None),
        lambda: stack.stop(settings, lambda message: None),
        lambda: stack.status(settings),
        lambda: connections(settings),
    ):
        with pytest.raises(HomeUnusable, match="let REMERGE_HOME name a folder that you can write to"):
            command()
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_home_with_something_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(tmp_path / "nowhere")
    with pytest.raises(HomeUnusable, match="home cannot be used"):
        stack.stop(Settings(home=tmp_path / "home"), lambda message: None)
    (tmp_path / "stack.json").mkdir()
    with pytest.raises(HomeUnusable, match=r"stack\.json cannot be used \(Is a directory\)"):
        connections(Settings(home=tmp_path))


def test_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings(home=Path("here")).stack_file == tmp_path / "here" / "stack.json"
