"""`remerge plan` end to end: tables, the recipe that it proposes, one document, and one-sentence errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tasks.recipes import find_recipe, parse_recipe
from tests.flows.shown import is_as_shown

ROOT = Path(__file__).parent.parent.parent
DEMO = ("--records", "1200", "--steps", "160", "--delta", "1e-5", "--budgets")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(remerge_here: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """`remerge plan`: (exit status, stdout, stderr)."""
    return partial(remerge_here, "plan")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--neighboring-relation", "add_or_remove_one", "--update-lipschitz", "1"),
        ("--sampling-probability", "0.3"),
    ],
)
def test_the_proposed_recipe_is_one_that_meets_the_plan(more: tuple[str, ...], plan: Run) -> None:
    """Pasted over the demo recipe's own lines it is accepted, and finds the same noise again."""
    status, shown, error = plan(*DEMO, "2,1", "--json", *more)
    assert (status, error) == (0, "")
    document = json.loads(shown, parse_constant=pytest.fail)
    kept = [
        line
        for line in find_recipe("infra/portfolios/digits.yaml").read_text().split("defaults:")[0].splitlines()
        if not line.startswith(("n_max", "delta", "neighboring_relation"))
    ]
    snippet = document["recipe"].replace(
        "  steps:", "  max_grad_norm: 1.4143\n  learning_rate: 3.9\n  steps:"
    )
    recipe = parse_recipe("\n".join([*kept, snippet]), "pasted.yaml")
    assert [c.name for c in recipe.candidates] == ["eps-1", "eps-2"]
    for candidate, proposed in zip(recipe.candidates, document["candidates"], strict=True):
        assert candidate.noise_multiplier == proposed["noise_multiplier"]
        assert candidate.sampling_probability == document["sampling_probability"]
        assert candidate.expected_batch_size == pytest.approx(1200 * document["sampling_probability"])
        assert proposed["epsilon"] <= proposed["target_epsilon"]
    assert recipe.neighboring_relation == document["neighboring_relation"]
    assert recipe.delta == document["delta"]
    assert recipe.n_max == (1201 if recipe.neighboring_relation == "add_or_remove_one" else 1200)


def test_the_screen_shows_what_the_document_says(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    document = json.loads(plan(*DEMO, "1,2,4", "--json")[1])
    status, shown, error = plan(*DEMO, "1,2,4")
    assert (status, error) == (0, "")
    assert document["recipe"] in shown
    for one in document["candidates"]:
        assert re.search(rf"{one['name']} .*{one['noise_multiplier']:.6g}", shown)
    for one in document["budgets"]:
        mark = r"\* " if one["foreseen"] else ""
        row = re.search(rf"^ *{mark}{one['epsilon']:g}  .*$", shown, re.MULTILINE)
        assert row is not None
        words = {"single_candidate": "one candidate"}.get(
            one["served_by"], one["served_by"].replace("_", " ")
        )
        assert words in row[0]
        percent = [float(cell) for cell in re.findall(r"([0-9.]+) %", row[0])]
        exact = [100 * one["gains"][name] for name in ("random_selection", "linear_combination")]
        assert all(0 <= true - told < 0.1 for true, told in zip(exact, percent, strict=True))
    assert "nearly invisible" in shown
    assert "close neighbours" in shown
    assert "Nothing serves a budget below 1." in shown
    assert "Warning" not in shown


def test_a_delta_not_below_one_over_n_is_warned_of(plan: Run) -> None:
    status, shown, error = plan("--records", "1200", "--steps", "160", "--delta", "1e-3", "--budgets", "1")
    assert (status, error) == (0, "")
    assert "Warning: Delta 0.001 is not below 1 / 1200" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((*DEMO, "1,two"), "--budgets must be epsilons separated by commas, for example 1,2,4, but 'two'"),
        ((*DEMO, ""), "--budgets must be epsilons separated by commas"),
        ((*DEMO, "1,-2"), "epsilon must be a finite number above 0"),
        ((*DEMO, "nan"), "epsilon must be a number"),
        ((*DEMO, ",".join(map(str, range(1, 18)))), "Name 1 to 16 different budgets, but 17 were given"),
        ((*DEMO, "1", "--delta", "1"), "delta must lie strictly between 0 and 1"),
        ((*DEMO, "1", "--steps", "0"), "--steps must lie between 1 and 100000"),
        ((*DEMO, "1", "--records", "0"), "records must be a whole number of at least 1"),
        ((*DEMO, "1", "--sampling-probability", "0"), "--sampling-probability must lie in (0, 1]"),
        ((*DEMO, "1", "--sampling-probability", "nan"), "--sampling-probability must lie in (0, 1]"),
        ((*DEMO, "1", "--neighboring-relation", "swap"), "neighboring_relation must be one of"),
        ((*DEMO, "1", "--update-lipschitz", "0"), "update_lipschitz must be above 0"),
        (
            (*DEMO, "1", "--update-lipschitz", "1", "--sampling-probability", "0.5"),
            "for full-batch training only",
        ),
        (
            (*DEMO, "1", "--steps", "1", "--sampling-probability", "1e-6"),
            "would allow training with practically no noise",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(arguments: tuple[str, ...], sentence: str, plan: Run) -> None:
    status, shown, error = plan(*arguments)
    assert (status, shown) == (1, "")
    assert error.startswith("Error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_the_documentation_shows_what_is_printed_and_no_framework_starts() -> None:
    """As in a doctest, `...` stands for anything."""
    text = (ROOT / "docs/planning.md").read_text()
    ((command, shown),) = re.findall(r"```console\n\$ remerge (.*?)\n(.*?)```", text, re.DOTALL)
    program = (
        "import sys; from flows import cli; sys.argv = ['remerge', *sys.argv[1:]]\n"
        "try: cli.main()\n"
        "except SystemExit as left: assert not left.code\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'boto3', 'botocore', 'opacus', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *command.split()],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
    )

    assert is_as_shown(shown, ran.stdout), ran.stdout
    assert ran.stderr.strip() == "[]"
