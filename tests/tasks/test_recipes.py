"""Recipes: what is accepted, and what a person reads when something is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from tasks.recipes import find_recipe, load_recipe, parse_recipe

DIGITS = find_recipe("infra/portfolios/digits.yaml")
TEXT = DIGITS.read_text()


def test_the_demo_recipe_is_the_one_described() -> None:
    recipe = load_recipe(DIGITS)
    full = [candidate for candidate in recipe.candidates if candidate.is_full_batch]
    assert len(full) == 5
    for candidate in full:
        assert (candidate.steps, candidate.max_grad_norm, candidate.learning_rate) == (160, 1.4143, 3.9)
        assert (candidate.expected_batch_size, candidate.weight_decay, candidate.momentum) == (1200, 0, 0)
    poisson = recipe.candidate("poisson-4")
    assert (poisson.expected_batch_size, poisson.sampling_probability) == (300, 0.25)
    assert (recipe.n_max, recipe.feature_radius, recipe.neighboring_relation) == (1200, 1.0, "replace_one")


def test_the_demo_epsilons_hold() -> None:
    """Exact Gaussian profile (Balle and Wang 2018), written out here independently of accounting/."""

    def delta(epsilon: float, mu: float) -> float:
        def normal(z: float) -> float:
            return math.erfc(-z / math.sqrt(2)) / 2

        return normal(-epsilon / mu + mu / 2) - math.exp(epsilon) * normal(-epsilon / mu - mu / 2)

    recipe = load_recipe(DIGITS)
    for name, epsilon in {"eps-half": 0.5, "eps-1": 1, "eps-2": 2, "eps-4": 4, "eps-8": 8}.items():
        mu = 2 * math.sqrt(160) / recipe.candidate(name).noise_multiplier
        assert delta(epsilon, mu) <= 1e-5, name
        assert delta(epsilon * 0.999, mu) > 1e-5, f"{name} has noise to spare"


def test_the_demo_poisson_epsilon_holds() -> None:
    """By dp-accounting itself, which doubles the sensitivity for replace-one on its own."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    candidate = load_recipe(DIGITS).candidate("poisson-4")
    step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=candidate.noise_multiplier,
        sensitivity=1,
        sampling_prob=candidate.sampling_probability,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    assert 3.9 < step.self_compose(candidate.steps).get_epsilon_for_delta(1e-5) < 4


def test_the_digest_covers_what_is_meant_and_not_how_it_is_written() -> None:
    recipe = load_recipe(DIGITS)
    assert parse_recipe(TEXT + "\n# a comment\n", "x").sha256() == recipe.sha256()
    assert parse_recipe(TEXT.replace("1.0e-5", "1e-5"), "x").sha256() == recipe.sha256()
    assert parse_recipe(TEXT.replace("steps: 160", "steps: 161"), "x").sha256() != recipe.sha256()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "expected_batch_size: 300",
            "expected_batch_size: 0",
            "expected_batch_size of candidate poisson-4 should",
        ),
        (
            "expected_batch_size: 1200",
            "expected_batch_size: 0",
            "expected_batch_size of candidate eps-half (from d",
        ),
        (
            "multiplier: 94.379",
            "multiplier: -1",
            "noise_multiplier of candidate eps-1 should be greater than 0",
        ),
        (
            "multiplier: 94.379",
            "multiplier: .nan",
            "noise_multiplier of candidate eps-1 should be a finite number",
        ),
        (
            "multiplier: 94.379",
            "multiplier: .inf",
            "noise_multiplier of candidate eps-1 should be a finite number",
        ),
        (
            "multiplier: 94.379",
            "multiplier: much",
            "noise_multiplier of candidate eps-1 should be a valid number",
        ),
        ("noise_multiplier: 94.379", "", "the field noise_multiplier of candidate eps-1 is missing"),
        (
            "probability: 0.25",
            "probability: 0",
            "sampling_probability of candidate poisson-4 should be greater",
        ),
        (
            "probability: 0.25",
            "probability: 1.01",
            "sampling_probability of candidate poisson-4 should be less",
        ),
        ("steps: 160", "steps: 16000000", "steps of candidate eps-half (from defaults) should be less than"),
        ("steps: 160", "steps: 0", "steps of candidate eps-half (from defaults) should be greater than"),
        ("steps: 160", "steps: 1.5", "steps of candidate eps-half (from defaults) should be a valid integer"),
        ("steps: 160", "stepz: 160", "unknown field stepz of candidate eps-half (from defaults)"),
        (
            "clipping: flat",
            "clipping: layers",
            "clipping of candidate eps-half (from defaults) should be 'flat'",
        ),
        ("  eps-1:", "  eps-2:", "eps-2 is given twice"),
        ("  eps-1:", "  Eps_1:", "name of candidate Eps_1 should be lower-case letters"),
        ("n_max: 1200", "n_maks: 1200", "unknown field n_maks"),
        ("n_max: 1200", "n_max: true", "n_max should be a valid integer, but True was given"),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, utility: .inf",
            "utility of candidate eps-1 should be a finite",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, utility: .nan",
            "utility of candidate eps-1 should be a finite",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, utility: good",
            "utility of candidate eps-1 should be a valid",
        ),
        ("unit: record", "public_twins: 1", "public_twins should be a valid boolean, but 1 was given"),
        ("delta: 1.0e-5", "delta: 1.0", "delta should be less than 1, but 1.0 was given"),
        ("feature_radius: 1.0", "feature_radius: -1", "feature_radius should be greater than 0"),
        (
            "relation: replace_one",
            "relation: swap",
            "neighboring_relation should be 'replace_one', 'add_or_remove",
        ),
        ("classes: 10", "classes: .nan", "network.arguments may hold texts, finite numbers"),
        ("{features: 65, classes: 10}", "{features: [}", "is not a valid YAML file at line"),
        (
            "steps: 160",
            "steps: 160\n  warmup_steps: 160",
            "eps-half: warmup_steps must be below steps, which is 160",
        ),
        (
            "steps: 160",
            "steps: 160\n  keep_checkpoints: [10, 160]",
            "eps-half: keep_checkpoints must be rising numbers of steps from 1 to 159",
        ),
        (
            "steps: 160",
            "steps: 160\n  keep_checkpoints: [10]\n  early_stopping: {every: 5, patience: 1}",
            "eps-half: keep_checkpoints and early_stopping exclude each other",
        ),
        (
            "steps: 160",
            "steps: 160\n  early_stopping: {every: 200, patience: 1}",
            "eps-half: early_stopping looks every 200 steps, but there are 160",
        ),
        (
            "steps: 160",
            "steps: 160\n  optimizer: adam\n  momentum: 0.9",
            "eps-half: momentum belongs to sgd",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, dp_merging: {ascent: same_batch}",
            "dp_merging of candidate eps-1 needs a radius with the ascent same_batch, such as 0.05",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, dp_merging: {ascent: none, radius: 0.1, anchor: 1.0}",
            "dp_merging of candidate eps-1 has no use for a radius with the ascent none",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, dp_merging: {ascent: none}",
            "dp_merging of candidate eps-1 changes nothing with the ascent none and no anchor",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, dp_merging: {ascent: next_batch, radius: 0.1}",
            "dp_merging.ascent of candidate eps-1 should be 'same_batch', 'previous_gradient' or 'none', but",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, dp_merging: {ascent: same_batch, radius: -0.1}",
            "dp_merging.radius of candidate eps-1 should be greater than or equal to 0, but -0.1 was given",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, dp_merging: {ascent: same_batch, radius: .nan}",
            "dp_merging.radius of candidate eps-1 should be a finite number",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, dp_merging: {ascent: same_batch, radius: 0.1, anchr: 1.0}",
            "unknown field dp_merging.anchr of candidate eps-1; check its spelling",
        ),
        (
            "steps: 160",
            "steps: 160\n  dp_merging: {ascent: none, anchor: .inf}",
            "dp_merging.anchor of candidate eps-half (from defaults) should be a finite number",
        ),
        (
            "multiplier: 94.379",
            "multiplier: 94.379, keep_checkpoints: 10",
            "keep_checkpoints of candidate eps-1",
        ),
        (
            "learning_rate: 3.9",
            "learning_rate: 1.0e+39",
            "learning_rate of candidate eps-half (from defaults)",
        ),
    ],
)
def test_a_fault_is_named_with_file_field_and_candidate(old: str, new: str, sentence: str) -> None:
    assert old in TEXT
    with pytest.raises(InvalidInput) as caught:
        parse_recipe(TEXT.replace(old, new, 1), "my.yaml")
    assert caught.value.message.startswith("my.yaml")
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "- 1", "name: x", "candidates: [a]\n", "candidates: {a: 3}\n"])
def test_what_is_not_a_recipe_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"my\.yaml"):
        parse_recipe(text, "my.yaml")


def test_utilities_are_stated_or_measured_but_not_both() -> None:
    text = TEXT.replace("eps-1: {", "eps-1: {utility: -3, ")
    recipe = parse_recipe(text, "my.yaml")
    assert [candidate.utility for candidate in recipe.candidates][:3] == [None, -3, None]
    assert parse_recipe("public_twins: true\n" + _without_twins(TEXT), "my.yaml").public_twins
    with pytest.raises(InvalidInput, match=r"my\.yaml: .*eps-1 states a utility although public_twins"):
        parse_recipe("public_twins: true\n" + _without_twins(text), "my.yaml")


def _without_twins(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith("public_twins"))


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="There is no recipe file"):
        find_recipe(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_recipe(tmp_path)


def test_a_relative_path_is_also_looked_for_beside_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("infra/portfolios/digits.yaml") == DIGITS
    (tmp_path / "own.yaml").write_text(TEXT)
    assert load_recipe(find_recipe("own.yaml")).name == "digits"


def test_a_kept_checkpoint_needs_a_name_that_fits() -> None:
    long = "a" * 62
    text = TEXT.replace("  eps-1:", f"  {long}:", 1).replace("94.379", "94.379, keep_checkpoints: [10]", 1)
    with pytest.raises(
        InvalidInput, match=f"candidate {long}: keep_checkpoints makes a candidate named {long}-at-10"
    ):
        parse_recipe(text, "my.yaml")


def test_no_candidates_is_said_plainly() -> None:
    with pytest.raises(InvalidInput, match=r"my\.yaml: candidates is empty; give at least one\."):
        parse_recipe("name: x\ncandidates: {}\n", "my.yaml")
