"""A candidate's noise by target epsilon or preset: what is found, what is refused, and what is really trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.calibration import PRESETS, TrainingShape, calibrated_noise
from accounting.errors import InvalidInput
from accounting.joint_release import single_run
from tasks.randomness import executed_probability
from tasks.recipes import Recipe, find_recipe, parse_recipe

TEXT = find_recipe("infra/portfolios/digits.yaml").read_text()


def with_noise(choice: str, *, of: str = "94.379", text: str = TEXT) -> Recipe:
    """The demo recipe with another choice of noise in place of a noise multiplier."""
    assert f"noise_multiplier: {of}" in text
    return parse_recipe(text.replace(f"noise_multiplier: {of}", choice, 1), "my.yaml")


def own_epsilon(recipe: Recipe, name: str, *, less: float = 1.0, releases: int = 1) -> float:
    """nats: of the run as it will be executed, with some of its noise.

    Releases of one batch are one with more of a record in it.
    """
    candidate = recipe.candidate(name)
    less /= math.sqrt(releases)
    shape = TrainingShape(
        steps=candidate.steps,
        relation=NeighboringRelation(recipe.neighboring_relation),
        sampling_probability=executed_probability(candidate.sampling_probability),
    )
    return shape.bound(candidate.noise_multiplier * less).epsilon(recipe.delta)


@pytest.mark.parametrize("target", [0.001, 1, 20, 100])
def test_a_target_is_met_and_not_undercut(target: float) -> None:
    recipe = with_noise(f"target_epsilon: {target}")
    assert own_epsilon(recipe, "eps-1") <= target < own_epsilon(recipe, "eps-1", less=0.999)
    assert [c.noise_multiplier for c in recipe.candidates[2:]] == [50.440, 27.352, 15.185, 6.85]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_target(preset: str) -> None:
    recipe = with_noise(f"preset: {preset}")
    assert recipe == with_noise(f"target_epsilon: {PRESETS[preset]}")
    assert own_epsilon(recipe, "eps-1") <= PRESETS[preset]


def test_poisson_sampling_counts_as_its_coins_fall() -> None:
    """Of q = 1e-4 the coins make 1678 / 2^24, a little more: noise that is enough for q is too little for them."""
    rare = TEXT.replace("probability: 0.25", "probability: 0.0001\n    steps: 10000")
    recipe = with_noise("target_epsilon: 0.1", of="6.85", text=rare)
    assert own_epsilon(recipe, "poisson-4") <= 0.1 < own_epsilon(recipe, "poisson-4", less=0.999)
    stated = TrainingShape(
        steps=10_000, relation=NeighboringRelation.REPLACE_ONE, sampling_probability=0.0001
    )
    enough = calibrated_noise(PrivacyBudget(epsilon=0.1, delta=1e-5), stated)
    assert enough < recipe.candidate("poisson-4").noise_multiplier


@pytest.mark.parametrize(("of", "name"), [("94.379", "eps-1"), ("6.85", "poisson-4")])
def test_two_releases_a_step_get_their_noise(of: str, name: str) -> None:
    """Each release of a pair has sqrt(2) times the noise; an ascent along what is released already costs nothing."""

    def found(how: str) -> Recipe:
        own = f"target_epsilon: 2\n    {how}" if name == "poisson-4" else f"target_epsilon: 2, {how}"
        return with_noise(own, of=of)

    plain = found("momentum: 0.0").candidate(name).noise_multiplier
    for how in ("ascent: previous_gradient, radius: 0.05", "ascent: none, anchor: 0.01"):
        assert found(f"dp_merging: {{{how}}}").candidate(name).noise_multiplier == plain
    recipe = found("dp_merging: {ascent: same_batch, radius: 0.05, anchor: 0.01}")
    assert recipe.candidate(name).noise_multiplier == pytest.approx(math.sqrt(2) * plain, rel=2e-3)
    assert own_epsilon(recipe, name, releases=2) <= 2 < own_epsilon(recipe, name, releases=2, less=0.998)


def test_dp_merging_is_in_a_digest_where_it_is_used_and_nowhere_else() -> None:
    recipe = parse_recipe(TEXT, "x")
    assert b"dp_merging" not in recipe.content()
    assert (
        parse_recipe(TEXT.replace("{noise", "{dp_merging: null, noise", 1), "x").sha256() == recipe.sha256()
    )
    digests = {recipe.sha256()}
    for how in (
        "{ascent: same_batch, radius: 0.05}",
        "{ascent: same_batch, radius: 0.06}",
        "{ascent: same_batch, radius: 0.05, anchor: 0.01}",
        "{ascent: previous_gradient, radius: 0.05}",
        "{ascent: none, anchor: 0.01}",
    ):
        merging = parse_recipe(TEXT.replace("{noise", f"{{dp_merging: {how}, noise", 1), "x")
        digests.add(merging.sha256())
        assert Recipe.from_content(merging.content(), "x") == merging
    assert len(digests) == 6


def test_the_recipe_is_the_one_with_the_multiplier_written() -> None:
    found = with_noise("target_epsilon: 1")
    noise = found.candidate("eps-1").noise_multiplier
    written = with_noise(f"noise_multiplier: {noise!r}")
    assert found == written
    assert found.sha256() == written.sha256() == with_noise("preset: strong").sha256()
    assert b"target_epsilon" not in found.content()
    assert found.sha256() != parse_recipe(TEXT, "my.yaml").sha256()


def test_recipes_of_before_keep_their_digest() -> None:
    assert parse_recipe(TEXT, "x").sha256().startswith("cc36f7bf775f7b73")


def test_a_candidates_own_choice_replaces_a_shared_one_of_any_kind() -> None:
    shared = TEXT.replace("  steps: 160", "  preset: weak\n  steps: 160", 1)
    recipe = parse_recipe(shared.replace("{noise_multiplier: 27.352}", "{}"), "my.yaml")
    assert recipe.candidate("eps-1").noise_multiplier == 94.379
    assert own_epsilon(recipe, "eps-4") <= 8 < own_epsilon(recipe, "eps-4", less=0.999)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (
            "target_epsilon: 1, noise_multiplier: 3",
            "eps-1 gives both noise_multiplier and target_epsilon; keep",
        ),
        ("target_epsilon: 1, preset: weak", "candidate eps-1 gives both target_epsilon and preset; keep one"),
        (
            "preset: weak, noise_multiplier: 3",
            "candidate eps-1 gives both noise_multiplier and preset; keep one",
        ),
        (
            "",
            "the field noise_multiplier of candidate eps-1 is missing; give it, or a target_epsilon or a preset",
        ),
        ("target_epsilon: null", "the field noise_multiplier of candidate eps-1 is missing"),
        (
            "preset: tiny",
            "preset of candidate eps-1 should be 'strong', 'medium' or 'weak', but 'tiny' was given",
        ),
        ("target_epsilon: 0", "target_epsilon of candidate eps-1 should be greater than"),
        ("target_epsilon: -1", "target_epsilon of candidate eps-1 should be greater than"),
        (
            "target_epsilon: 1.0e+7",
            "target_epsilon of candidate eps-1 should be less than or equal to 1000000",
        ),
        ("target_epsilon: .nan", "target_epsilon of candidate eps-1 should be a finite number"),
        ("target_epsilon: .inf", "target_epsilon of candidate eps-1 should be a finite number"),
        ("target_epsilon: true", "target_epsilon of candidate eps-1 should be a valid number"),
        ("target_epsilon: much", "target_epsilon of candidate eps-1 should be a valid number"),
        ("target_epsilom: 1", "unknown field target_epsilom of candidate eps-1; check its spelling"),
        ("target_epsilon: 1, steps: 0", "steps of candidate eps-1 should be greater than"),
        (
            "target_epsilon: 1, steps: 1, sampling_probability: 0.000001, expected_batch_size: 1",
            "candidate eps-1: Epsilon 1 at delta 1e-05 would allow training with practically no noise",
        ),
    ],
)
def test_a_wrong_choice_is_one_sentence_that_names_the_candidate(choice: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        with_noise(choice)
    assert caught.value.message.startswith("my.yaml: ")
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message


def test_two_shared_choices_are_refused_too() -> None:
    shared = TEXT.replace("  steps: 160", "  preset: weak\n  target_epsilon: 2\n  steps: 160", 1)
    with pytest.raises(InvalidInput, match="candidate eps-4 gives both target_epsilon and preset"):
        parse_recipe(shared.replace("{noise_multiplier: 27.352}", "{}"), "my.yaml")


def test_a_delta_that_poisson_sampling_cannot_resolve_names_the_candidate() -> None:
    tiny = TEXT.replace("delta: 1.0e-5", "delta: 1.0e-30")
    with pytest.raises(InvalidInput, match=r"my\.yaml: candidate poisson-4: delta 1e-30 is below"):
        with_noise("target_epsilon: 4", of="6.85", text=tiny)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"sampling_probability": 0.3, "expected_batch_size": 12},
        {"dp_merging": "{ascent: same_batch, radius: 0.1}"},
    ],
)
def test_what_is_trained_has_an_epsilon_of_at_most_the_target(
    sampling: dict[str, Any], small_portfolio: Callable[..., Any]
) -> None:
    """The certificate's number is computed from what the optimizer did, not from the recipe."""
    from tasks.models import initial_state
    from tasks.training import train_candidate

    small = small_portfolio(noise_multiplier="null", target_epsilon=12, **sampling)
    trained = train_candidate(
        small.recipe.candidate("only"),
        recipe=small.recipe,
        splits=small.splits,
        initial=initial_state(small.recipe.network, 7),
        run_id="run",
        data_digest="0" * 64,
    )
    assert 12 * 0.999 < single_run(trained.trajectory).epsilon(small.recipe.delta) <= 12
