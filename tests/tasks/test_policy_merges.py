"""Which merge a policy asks for: its options, what a release must be to satisfy it, and the words for both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from accounting.certificate import MERGE_RULES
from accounting.errors import InvalidInput
from accounting.plan import Mechanism
from infra.documents import Merge, Option, Policy, PortfolioManifest
from tasks.merging import MERGE_RULE, OPERATORS, checked_options, needs
from tasks.policy_merges import (
    allows,
    how_made,
    merge_in_words,
    merge_rule,
    options_of,
    parsed_options,
    require_mergeable,
    with_checked_options,
)


@dataclass(frozen=True)
class Made:
    """What a certificate says of how a model was made."""

    mechanism: Mechanism
    weights: dict[str, float]
    merge: str = "linear"
    merge_options: dict[str, Option] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)


TWO = {"a": 0.5, "b": 0.5}


def policy_of(**fields: Any) -> Policy:
    good = {
        "region": "eu",
        "serial": 1,
        "epsilon": 2,
        "delta": 1e-5,
        "portfolio": "digits@1",
        "effective_at": "2026-01-01T00:00:00Z",
        "author": "test",
    }
    return Policy.from_fields({**good, **fields}, "policy")


def test_policies_name_the_operators_that_there_are() -> None:
    assert set(get_args(Merge)) == set(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_options_are_filled_in_when_a_policy_is_set(operator: str) -> None:
    """Another default in a later version must not change what a stored policy says."""
    fields = with_checked_options({"merge": operator, "epsilon": 2})
    assert fields["merge_options"] == checked_options(operator, {})
    stored = policy_of(merge=operator, merge_options=fields["merge_options"])
    assert options_of(stored) == fields["merge_options"]
    assert options_of(policy_of(merge=operator)) == fields["merge_options"]
    assert with_checked_options(fields) == fields


def test_options_of_another_operator_are_refused() -> None:
    for fields in ({"merge": "average", "merge_options": {"scale": 1.0}}, {"merge_options": {"scale": 1.0}}):
        with pytest.raises(InvalidInput, match="has no option scale; it has none"):
            with_checked_options(fields)
    with pytest.raises(InvalidInput, match="has no option densty; it has"):
        with_checked_options({"merge": "ties", "merge_options": {"densty": 0.3}})
    for bad in (0.0, 1.5, -1, "half", True):
        with pytest.raises(InvalidInput, match="Option density of the merge operator ties must be"):
            with_checked_options({"merge": "ties", "merge_options": {"density": bad}})
    unknown = {"merge": "tie", "merge_options": {"density": 0.3}}
    assert with_checked_options(unknown) == unknown  # the policy's own check names the operators


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        ([], {}),
        (["density=0.3"], {"density": 0.3}),
        (["density=1", "scale = 2e-1 "], {"density": 1, "scale": 0.2}),
        (["rescale=true", "flip=false"], {"rescale": True, "flip": False}),
        (["sign=total", "list=[1]", "nothing=null"], {"sign": "total", "list": "[1]", "nothing": "null"}),
        (["density=NaN"], {"density": "NaN"}),
        (["name=a=b"], {"name": "a=b"}),
    ],
)
def test_options_are_read_as_they_are_given(texts: list[str], options: dict[str, Any]) -> None:
    found = parsed_options(texts)
    assert found == options
    assert [type(value) for value in found.values()] == [type(value) for value in options.values()]


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["density"], "is given as NAME=VALUE"),
        (["=0.3"], "is given as NAME=VALUE"),
        (["density="], "is given as NAME=VALUE"),
        ([""], "is given as NAME=VALUE"),
        (["density=0.3", "density=0.4"], "density was given twice"),
    ],
)
def test_options_given_otherwise_are_refused(texts: list[str], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        parsed_options(texts)
    assert "\n" not in caught.value.message


def test_a_release_must_be_merged_as_the_policy_says() -> None:
    options = checked_options("ties", {})
    ties = Made(Mechanism.OPERATOR, TWO, "ties", options)
    alone = Made(Mechanism.LINEAR_COMBINATION, {"a": 1.0})
    averaged = Made(Mechanism.LINEAR_COMBINATION, TWO)
    drawn = Made(Mechanism.RANDOM_SELECTION, TWO)
    policy = policy_of(merge="ties")
    assert allows(policy, ties)
    assert allows(policy, alone)  # no two candidates fitted the budget
    assert not allows(policy, averaged)
    assert not allows(policy, drawn)
    assert not allows(policy_of(merge="ties", merge_options={"density": 0.9}), ties)
    assert not allows(policy_of(merge="dare"), ties)
    assert not allows(policy_of(), ties)
    assert allows(policy_of(), averaged)
    assert allows(policy_of(), drawn)
    assert not allows(policy_of(mechanisms=["linear_combination"]), drawn)
    # A portfolio of several tasks is merged by an operator, linear too.
    tasks = Made(Mechanism.OPERATOR, TWO, tasks={"a": "left", "b": "right"})
    assert allows(policy_of(), tasks)
    assert not allows(policy, tasks)


def test_a_certificate_says_in_words_how_a_model_was_made() -> None:
    assert merge_rule(Made(Mechanism.LINEAR_COMBINATION, TWO)) == MERGE_RULE
    assert merge_rule(Made(Mechanism.MIXTURE, TWO)).endswith(MERGE_RULE)
    random = Mechanism.RANDOM_SELECTION
    assert merge_rule(Made(random, TWO)) == MERGE_RULES[random]
    rules = [
        merge_rule(Made(Mechanism.OPERATOR, TWO, "ties", checked_options("ties", {"density": density})))
        for density in (0.3, 0.4)
    ]
    assert rules[0] != rules[1]
    of_tasks = merge_rule(Made(Mechanism.OPERATOR, TWO, tasks={"a": "left", "b": "right"}))
    assert "each task keeps its own head" in of_tasks
    assert of_tasks.endswith(MERGE_RULE)
    with pytest.raises(InvalidInput, match="has no option density"):
        merge_rule(Made(Mechanism.OPERATOR, TWO, "average", {"density": 0.3}))


def test_merges_in_words() -> None:
    assert merge_in_words("average", {}) == "average"
    words = merge_in_words("ties", {"scale": 1.0, "density": 0.3, "flag": True, "sign": "total"})
    assert words == "ties (density 0.3, flag yes, scale 1, sign total)"
    assert how_made(Made(Mechanism.RANDOM_SELECTION, TWO)) == "random_selection"
    assert how_made(Made(Mechanism.OPERATOR, TWO, "ties", {"density": 0.3})) == "ties (density 0.3)"


def manifest_of(tasks: dict[str, str] | None) -> PortfolioManifest:
    names = list(tasks or {"a": "", "b": ""})
    split = {"rows": 10, "digest": "1" * 64}
    data = {
        "loader": "module:function",
        "split_rule": "a rule",
        "private": {**split, "rows": None},
        "public_train": split,
        "public_gate": split,
    }
    group: dict[str, Any] = {}
    if tasks is not None:
        group = {
            "tasks": tasks,
            "records": "disjoint",
            "task_data": {
                task: {**data, "private": {"rows": None, "digest": f"{number}" * 64}}
                for number, task in enumerate(sorted(set(tasks.values())))
            },
        }
    return PortfolioManifest.from_fields(
        {
            "name": "digits",
            "serial": 1,
            "created_at": "2026-01-01T00:00:00Z",
            "lineage": "digits",
            "unit": "record",
            "neighboring_relation": "replace_one",
            "recipe_digest": "2" * 64,
            "data": data,
            "network": {"factory": "module:function"},
            "initialisation_digest": "e" * 64,
            "feature_radius": 1.0,
            "n_max": 100,
            "flow_run_id": None,
            "candidates": [
                {
                    "name": name,
                    "registered_model": "digits",
                    "version": 1,
                    "run_id": name,
                    "model_sha256": "3" * 64,
                    "trajectory_sha256": "4" * 64,
                }
                for name in names
            ],
            **group,
        },
        "manifest",
    )


def test_an_operator_for_two_does_not_merge_three_tasks() -> None:
    three = manifest_of({"a": "left", "b": "right", "c": "middle"})
    two = manifest_of({"a": "left", "b": "right", "c": "right"})
    assert needs("slerp").models == 2
    with pytest.raises(InvalidInput, match="merges exactly 2 models, but digits@1 has 3 tasks"):
        require_mergeable(policy_of(merge="slerp"), three)
    require_mergeable(policy_of(merge="slerp"), two)
    require_mergeable(policy_of(merge="ties"), three)
    require_mergeable(policy_of(merge="slerp"), manifest_of(None))
    with pytest.raises(InvalidInput, match="leave out `--mechanism`"):
        require_mergeable(policy_of(mechanisms=["random_selection"]), two)
    require_mergeable(policy_of(mechanisms=["random_selection"]), manifest_of(None))
    with pytest.raises(InvalidInput, match="has no option density"):
        require_mergeable(policy_of(merge="average", merge_options={"density": 0.3}), two)
