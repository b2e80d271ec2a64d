"""Where the services are: one's own by the environment, or the embedded ones by their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra import stack
from infra.settings import OWN_SERVICES, Settings, StackDown, connections

OWN = {
    "s3_endpoint": "https://s3.example",
    "s3_access_key": "access",
    "s3_secret_key": "hidden",
    "mlflow_url": "https://mlflow.example",
    "prefect_api_url": "https://prefect.example/api",
    "data_digest_key": "digest",
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
    settings.credentials_file.write_text(json.dumps(OWN))
    with pytest.raises(StackDown, match="is damaged"):
        connections(settings)


def test_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings(home=Path("here")).stack_file == tmp_path / "here" / "stack.json"
