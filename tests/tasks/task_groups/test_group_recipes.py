"""Recipes of groups: what is accepted, and what a person reads when something is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from infra.documents import NetworkRecord
from tasks.models import build
from tasks.recipes import find_recipe, load_recipe
from tasks.task_groups import Group, load_group, parse_group

READY = find_recipe("infra/portfolios/tasks-digits.yaml")
TEXT = """
name: pair
lineage: people
neighboring_relation: add_or_remove_one
records: disjoint
trunk: {factory: tasks.models:multilayer_perceptron, arguments: {features: 5, hidden: [4], classes: 3}}
width: 3
feature_radius: 1.0
n_max: 100
initialisation: {seed: 7}
delta: 1e-5
defaults: {steps: 3, max_grad_norm: 1, learning_rate: 0.5, expected_batch_size: 30, noise_multiplier: 4}
tasks:
  left:
    data: users_own:left
    classes: 3
    candidates: {left-a: {}, left-b: {noise_multiplier: 8}}
  right:
    data: {loader: users_own:right, arguments: {share: 0.5}}
    classes: 2
    defaults: {target_epsilon: 2}
    candidates: {right-a: {}, right-b: {preset: weak}}
"""


def test_the_ready_recipe_is_the_one_described() -> None:
    group = load_group(READY)
    assert (group.records, group.neighboring_relation, group.n_max) == ("disjoint", "add_or_remove_one", 1300)
    noises = {one.name.rpartition("-")[2]: one.noise_multiplier for one in group.candidates}
    assert [one.noise_multiplier for one in group.candidates] == [noises["1"], noises["4"]] * 2
    assert {(one.steps, one.sampling_probability) for one in group.candidates} == {(30, 1.0)}

    def delta(epsilon: float, mu: float) -> float:  # Balle and Wang 2018, independently of accounting/
        def normal(z: float) -> float:
            return math.erfc(-z / math.sqrt(2)) / 2

        return normal(-epsilon / mu + mu / 2) - math.exp(epsilon) * normal(-epsilon / mu - mu / 2)

    for epsilon, noise in noises.items():
        mu = math.sqrt(30) / noise
        assert delta(float(epsilon), mu) <= group.delta
        assert delta(float(epsilon) * 0.999, mu) > group.delta


def test_each_task_is_trained_by_a_recipe_of_its_own() -> None:
    group = parse_group(TEXT, "pair.yaml")
    assert list(group.tasks) == ["left", "right"]
    assert [one.name for one in group.candidates] == ["left-a", "left-b", "right-a", "right-b"]
    left, right = group.recipe_of("left"), group.recipe_of("right")
    for recipe in (left, right):
        assert (recipe.name, recipe.lineage, recipe.n_max, recipe.feature_radius) == (
            "pair",
            "people",
            100,
            1.0,
        )
        assert (recipe.neighboring_relation, recipe.delta, recipe.initialisation_seed) == (
            "add_or_remove_one",
            1e-5,
            7,
        )
    assert [one.noise_multiplier for one in left.candidates] == [4, 8]
    assert right.data.arguments == {"share": 0.5}
    weak, strong = (right.candidate(name).noise_multiplier for name in ("right-b", "right-a"))
    assert weak < strong  # the task's own target replaces the group's noise, and the candidate's preset that
    assert set(build(left.network).state_dict()) >= {"trunk.1.weight", "heads.left.weight"}
    whole = build(group.network((5,)))
    assert whole.heads.left.out_features == 3
    assert set(build(right.network).state_dict()) < set(whole.state_dict())
    assert isinstance(group.network((5,)), NetworkRecord)


def test_the_digest_covers_what_is_meant() -> None:
    group = parse_group(TEXT, "pair.yaml")
    assert (
        parse_group(TEXT.replace("noise_multiplier: 8", "noise_multiplier: 8.0"), "x").sha256()
        == group.sha256()
    )
    for old, new in (
        ("seed: 7", "seed: 8"),
        ("disjoint", "shared"),
        ("width: 3", "width: 4"),
        ("seed: 7", "pretrain: {steps: 5, learning_rate: 0.1, batch_size: 8, seed: 7}"),
        ("users_own:left", "users_own:other"),
    ):
        assert parse_group(TEXT.replace(old, new), "x").sha256() != group.sha256(), new
    assert Group.model_validate(group.model_dump()).sha256() == group.sha256()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "records: disjoint",
            "records: apart",
            "records should be 'disjoint' or 'shared', but 'apart' was given",
        ),
        ("records: disjoint\n", "", "the field records is missing"),
        ("lineage:", "linage:", "unknown field linage; check its spelling"),
        ("seed: 7", "sed: 7", "unknown field initialisation.sed"),
        ("{seed: 7}", "{}", "needs either a seed or pretrain"),
        (
            "{seed: 7}",
            "{seed: 7, pretrain: {steps: 5, learning_rate: 0.1, batch_size: 8, seed: 7}}",
            "needs either a seed or pretrain",
        ),
        (
            "{seed: 7}",
            "{pretrain: {steps: 5, learning_rate: 0.1, batch_size: 8}}",
            "pretrain.seed is missing",
        ),
        (
            "initialisation: {seed: 7}",
            "public_twins: true\ninitialisation: {pretrain: {steps: 5, learning_rate: 0.1, batch_size: 8, seed: 7}}",
            "public rows that pretrain had seen; remove one of them",
        ),
        ("width: 3", "width: 0", "width should be greater than or equal to 1"),
        ("n_max: 100", "n_max: 1.5", "n_max"),
        ("    classes: 2\n", "", "pair.yaml: task right: the field classes is missing"),
        (
            "    classes: 2\n",
            "    classes: 1\n",
            "task right: classes must be a whole number of at least 2, but 1",
        ),
        ("    classes: 2\n", "    clases: 2\n", "task right: unknown field clases"),
        ("right-a:", "left-a:", "candidate left-a is named by the tasks left and right"),
        (
            "preset: weak",
            "steps: 0",
            "task right: steps of candidate right-b should be greater than or equal to 1",
        ),
        ("preset: weak", "stepps: 1", "task right: unknown field stepps of candidate right-b"),
        ("{right-a: {}, right-b: {preset: weak}}", "{}", "task right: candidates is empty"),
        ("  left:\n", "  Left:\n", "lower-case letters, digits and hyphens"),
        ("factory: tasks.models:multilayer_perceptron, ", "", "the field trunk.factory is missing"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(old: str, new: str, sentence: str) -> None:
    assert old in TEXT
    with pytest.raises(InvalidInput) as refused:
        parse_group(TEXT.replace(old, new), "pair.yaml")
    assert sentence in refused.value.message
    assert refused.value.message.startswith("pair.yaml")
    assert "\n" not in refused.value.message


def test_a_group_has_two_tasks_and_a_portfolio_none(tmp_path: Path) -> None:
    alone = TEXT[: TEXT.index("  right:")]
    with pytest.raises(InvalidInput, match="at least two tasks"):
        parse_group(alone, "pair.yaml")
    with pytest.raises(InvalidInput, match=r"names no tasks.*`remerge train`"):
        load_group(find_recipe("infra/portfolios/digits.yaml"))
    with pytest.raises(InvalidInput, match="group of tasks: train it with `remerge merge-tasks"):
        load_recipe(READY)
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_group(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="is not a recipe"):
        parse_group("- 1", "pair.yaml")
