"""YAML that a person wrote: numbers as they look, nothing read as another number than it seems."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from tasks.plain_yaml import parse_yaml, read_mapping


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100", 100),
        ("-7", -7),
        ("+3", 3),
        ("0", 0),
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1E6", 1e6),
        ("-.5", -0.5),
        (".5e1", 5.0),
        ("2.", 2.0),
        ("0.25", 0.25),
        ("true", True),
        ("False", False),
    ],
)
def test_numbers_and_booleans(text: str, value: object) -> None:
    found = parse_yaml(f"field: {text}", "a file")["field"]
    assert found == value
    assert type(found) is type(value)


def test_infinity_has_the_name_that_yaml_gives_it() -> None:
    assert parse_yaml("field: .inf", "a file")["field"] == math.inf
    assert parse_yaml("field: -.inf", "a file")["field"] == -math.inf


@pytest.mark.parametrize(
    "text",
    ["0100", "0x10", "0b1", "0o17", "1:40", "1_000", "00.5", "1e", ".", "yes", "no", "on", "off", "1:40.5"],
)
def test_what_may_be_read_in_two_ways_is_a_text(text: str) -> None:
    """YAML 1.1 reads 0100 as 64, 1:40 as 100 and no as false: too few steps, and an epsilon too small."""
    assert parse_yaml(f"field: {text}", "a file")["field"] == text


def test_a_field_that_wants_a_number_refuses_such_a_text(tmp_path: Path) -> None:
    from tasks.account_file import load_account_file

    file = tmp_path / "runs.yaml"
    file.write_text(
        "neighboring_relation: replace_one\ndelta: 1e-5\nruns:\n  a: {segments: [{id: a0, steps: 0100, "
        "noise_multiplier: 16, max_grad_norm: 1, learning_rate: 1, expected_batch_size: 10, "
        "sampling_probability: 1}]}\nrelease: {joint: [a]}\n"
    )
    with pytest.raises(InvalidInput, match=r"steps.*'0100'"):
        load_account_file(file)
    assert read_mapping(file)["delta"] == 1e-5
