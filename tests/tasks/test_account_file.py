"""The calculator's input: its published schema, its defaults, and how segments become runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from accounting.joint_release import single_run
from accounting.trajectory import segment_to_dict
from tasks.account_file import AccountFile, account_schema, load_account_file, schema_path
from tasks.account_runs import Run, release_of, runs_of

FOLDER = Path(__file__).parent.parent.parent / "docs/examples"
EXAMPLES = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("*.json")])
SEGMENT: dict[str, Any] = {
    "id": "s",
    "steps": 20,
    "noise_multiplier": 16,
    "max_grad_norm": 1,
    "learning_rate": 1,
    "expected_batch_size": 60,
}


def fields_of(**runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "neighboring_relation": "replace_one",
        "delta": 1e-5,
        "runs": {name: {"segments": segments} for name, segments in runs.items()},
        "release": {"joint": list(runs)},
    }


def read(tmp_path: Path, fields: dict[str, Any]) -> AccountFile:
    path = tmp_path / "account.json"
    path.write_text(json.dumps(fields))
    return load_account_file(path)


def runs(tmp_path: Path, **runs: list[dict[str, Any]]) -> dict[str, Run]:
    return runs_of(read(tmp_path, fields_of(**runs)), "account.json")


def test_the_published_schema_is_this_version() -> None:
    assert schema_path().read_text() == account_schema(), "run `python -m tasks.account_file`"
    schema = json.loads(account_schema(), parse_constant=pytest.fail)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_satisfy_the_published_schema(path: Path) -> None:
    fields = yaml.safe_load(path.read_text().replace("1e-6,", "1.0e-6,"))
    jsonschema.validate(fields, json.loads(account_schema()))
    load_account_file(path)


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 0},
        {"delta": 1},
        {"neighboring_relation": "replace"},
        {"runs": {}},
        {"runs": {"a b": {"segments": [SEGMENT]}}},
        {"runs": {"a": {}}},
        {"runs": {"a": {"segments": [SEGMENT], "stated": {"epsilon": 1, "delta": 1e-6}}}},
        {"runs": {"a": {"segments": [SEGMENT | {"steps": 0}]}}},
        {"runs": {"a": {"segments": [SEGMENT | {"noise_multiplier": 1e31}]}}},
        {"runs": {"a": {"segments": [SEGMENT | {"update_lipschitz": "infinite"}]}}},
        {"runs": {"a": {"segments": [SEGMENT | {"learning_rate": 1e-31}]}}},
        {"release": {}},
        {"release": {"joint": ["a"], "random_selection": {"a": 1}}},
        {"release": {"linear_combination": {"a": -1}}},
        {"mechanisms": []},
        {"budget": {"epsilon": 0}},
        {"epsilon": 2},
    ],
)
def test_schema_and_reader_refuse_the_same(change: dict[str, Any], tmp_path: Path) -> None:
    fields = fields_of(a=[SEGMENT]) | change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(fields, json.loads(account_schema()))
    with pytest.raises(InvalidInput) as caught:
        read(tmp_path, fields)
    assert str(tmp_path / "account.json") in caught.value.message
    assert "\n" not in caught.value.message


def test_what_is_left_out_has_the_defaults_of_a_trajectory(tmp_path: Path) -> None:
    poisson = {**SEGMENT, "id": "p", "sampling_probability": 0.1}
    found = runs(tmp_path, full=[SEGMENT], sampled=[poisson])
    full, sampled = (run.trajectory for run in found.values())
    assert full is not None
    assert sampled is not None
    segment = full.segments[0]
    assert (segment.sampler, sampled.segments[0].sampler) == ("full_batch", "poisson")
    assert (segment.momentum, segment.weight_decay, segment.clipping) == (0, 0, "flat")
    assert (segment.schedule, segment.optimizer, segment.parent) == ("fixed", "sgd", None)
    assert (segment.ascent_radius, segment.anchor_strength) == (0, 0)
    assert segment.update_lipschitz == math.inf
    assert full.neighboring_relation is NeighboringRelation.REPLACE_ONE


@pytest.mark.parametrize("written", ['"inf"', ".inf", "inf"])
def test_infinity_is_accepted_in_yaml(written: str, tmp_path: Path) -> None:
    path = tmp_path / "account.yaml"
    text = yaml.safe_dump(fields_of(a=[{**SEGMENT, "update_lipschitz": "HERE"}]))
    path.write_text(text.replace("HERE", written))
    trajectory = runs_of(load_account_file(path), "f")["a"].trajectory
    assert trajectory is not None
    assert trajectory.segments[0].update_lipschitz == math.inf


def test_a_segment_id_used_twice_is_the_same_noise(tmp_path: Path) -> None:
    first, shorter = SEGMENT, {**SEGMENT, "steps": 8}
    branch = {**SEGMENT, "id": "branch", "noise_multiplier": 4}
    found = runs(tmp_path, a=[first], b=[shorter, branch], c=[shorter, {**branch, "steps": 3}])
    b, c = found["b"].trajectory, found["c"].trajectory
    assert b is not None
    assert c is not None
    assert b.segments[1].parent == c.segments[1].parent
    assert b.segments[1].mechanism_key() == c.segments[1].mechanism_key()
    pasted = [segment_to_dict(segment) for segment in b.segments]  # as a trajectory's JSON has them
    again = runs(tmp_path, a=[first], b=pasted)["b"].trajectory
    assert again is not None
    assert again.segments == b.segments


@pytest.mark.parametrize(
    ("segments", "sentence"),
    [
        ([SEGMENT, SEGMENT], "segment s stands at the start of run a and after step 20 of s in run a"),
        ([SEGMENT | {"sampler": "poisson"}], "does not fit sampling_probability 1.0"),
        (
            [SEGMENT, SEGMENT | {"id": "t", "parent": {"run": "a", "segment": "s", "step": 3}}],
            "parent of segment t of run a says that it follows step 3 of s",
        ),
        ([SEGMENT | {"parent": {"run": "x", "segment": "y", "step": 3}}], "it comes first"),
    ],
)
def test_segments_that_form_no_run_are_refused(
    segments: list[dict[str, Any]], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput) as caught:
        runs(tmp_path, a=segments)
    assert sentence in caught.value.message
    assert caught.value.message.startswith("account.json")


def test_one_id_after_different_steps_is_refused(tmp_path: Path) -> None:
    later = {**SEGMENT, "id": "t"}
    with pytest.raises(InvalidInput, match="after step 20 of s in run a and after step 8 of s in run b"):
        runs(tmp_path, a=[SEGMENT, later], b=[{**SEGMENT, "steps": 8}, later])


def test_a_release_drops_runs_without_weight(tmp_path: Path) -> None:
    fields = fields_of(a=[SEGMENT], b=[{**SEGMENT, "id": "t"}])
    fields["release"] = {"linear_combination": {"b": 1, "a": 0}, "fresh_noise": 0.5}
    file = read(tmp_path, fields)
    release = release_of(file, runs_of(file, "f"), "f")
    assert [run.name for run in release.runs] == ["b"]
    assert (release.kind, release.weights, release.fresh_noise) == ("linear_combination", (1.0,), 0.5)


def test_a_stated_guarantee_is_no_part_of_a_linear_combination(tmp_path: Path) -> None:
    fields = fields_of(a=[SEGMENT])
    fields["runs"]["c"] = {"stated": {"epsilon": 1, "delta": 0}}
    fields["release"] = {"linear_combination": {"a": 0.5, "c": 0.5}}
    with pytest.raises(InvalidInput, match=r"release\.linear_combination names the run c"):
        read(tmp_path, fields)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"delta": NaN}', 'write infinity as the text "inf"'),
        ('{"delta": 1, "delta": 2}', "delta is given twice"),
        ('{"delta":', "is not a valid JSON file at line 1"),
        ("[]", "must hold a mapping"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "account.json"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_account_file(path)
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message


def test_a_paired_run_is_accounted_as_one(tmp_path: Path) -> None:
    paired = {
        **SEGMENT,
        "id": "paired",
        "optimizer": "dp_sam",
        "ascent_radius": 0.05,
        "anchor_strength": 0.01,
    }
    plain, found = (run.trajectory for run in runs(tmp_path, plain=[SEGMENT], paired=[paired]).values())
    assert plain is not None
    assert found is not None
    assert (found.segments[0].ascent_radius, found.segments[0].anchor_strength) == (0.05, 0.01)
    assert single_run(found).mu == pytest.approx(math.sqrt(2) * single_run(plain).mu)  # type: ignore[operator]
