"""The calculator end to end: what goes in as a file, what comes out as numbers, words and one-sentence errors."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from mpmath import findroot, mp, mpf

from tests.flows.shown import is_as_shown

ROOT = Path(__file__).parent.parent.parent
GOLDEN = json.loads((ROOT / "tests/accounting/golden.json").read_text())
DOCUMENT = ROOT / "docs/accounting-calculator.md"
EXAMPLES = sorted(path for kind in ("yaml", "json") for path in (ROOT / "docs/examples").glob(f"*.{kind}"))
BOUNDS = {
    "joint",
    "generic",
    "shifted",
    "stepwise",
    "random_selection_pld",
    "random_selection_rdp",
    "joint_rdp",
    "basic_composition",
    "advanced_composition",
}


@pytest.fixture(autouse=True)
def _fifty_digits() -> Iterator[None]:
    with mp.workdps(50):
        yield


@pytest.fixture
def remerge(remerge_here: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """`remerge account`: (exit status, stdout, stderr)."""
    return partial(remerge_here, "account")


@pytest.fixture
def ask(remerge: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The JSON answer to a file's fields."""

    def run(command: str, fields: dict[str, Any]) -> dict[str, Any]:
        path = tmp_path / "asked.json"
        path.write_text(json.dumps(fields))
        status, shown, error = remerge(command, path, "--json")
        assert (status, error) == (0, "")
        return json.loads(shown, parse_constant=pytest.fail)

    return run


def run_of(name: str, noise_multiplier: float, steps: int = 20, **changes: Any) -> dict[str, Any]:
    utility = {"utility": changes.pop("utility")} if "utility" in changes else {}
    segment = {
        "id": name,
        "steps": steps,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": 1,
        "learning_rate": 1,
        "expected_batch_size": 60000,
    }
    return {**utility, "segments": [segment | changes]}


def file_of(runs: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"neighboring_relation": "replace_one", "delta": 1e-5, "runs": runs, **rest}


def gaussian_epsilon(mu: Any, delta: Any) -> float:
    """Balle and Wang 2018, theorem 8, by 50 digits: independent of the product."""
    mu, delta = mpf(mu), mpf(delta)

    def excess(epsilon: Any) -> Any:
        profile = mp.ncdf(-epsilon / mu + mu / 2) - mp.exp(epsilon) * mp.ncdf(-epsilon / mu - mu / 2)
        return mp.log(profile) - mp.log(delta)

    return float(findroot(excess, (mpf("1e-3"), mu * mu / 2 + mu * 12), solver="anderson", tol=1e-30))


@pytest.mark.parametrize("row", GOLDEN["linear_combination"], ids=lambda row: str(row["lambda"]))
@pytest.mark.parametrize("factor", [1.0, 0.98])
def test_published_linear_combinations(
    row: dict[str, Any], factor: float, ask: Callable[..., dict[str, Any]]
) -> None:
    names = [f"r{i}" for i in range(len(row["lambda"]))]
    runs = {
        name: run_of(name, noise, row["steps"], update_lipschitz=factor)
        for name, noise in zip(names, row["noise_multiplier"], strict=True)
    }
    release = {"linear_combination": dict(zip(names, row["lambda"], strict=True))}
    answer = ask("bounds", file_of(runs, release=release))
    convex = row["mu_convex"] if factor == 1 else row["mu_contraction_0.98"]
    expected = {
        "joint": row["mu_joint"],
        "generic": row["mu_generic"],
        "shifted": convex,
        "stepwise": row["mu_stepwise"],
    }
    assert set(answer["bounds"]) == BOUNDS
    for name, mu in expected.items():
        assert answer["bounds"][name]["mu"] == pytest.approx(mu, abs=2e-6)
        epsilon = gaussian_epsilon(answer["bounds"][name]["mu"], "1e-5")
        assert answer["bounds"][name]["epsilon"] == pytest.approx(epsilon, rel=1e-9)
    assert answer["certified"] == {"bound": "shifted", "epsilon": answer["bounds"]["shifted"]["epsilon"]}
    assert "update_lipschitz" in " ".join(answer["assumptions"])
    assert answer["bounds"]["random_selection_pld"] is None
    assert "random selection only" in answer["reasons"]["random_selection_pld"]
    assert "Not a guarantee" in answer["warnings"]["stepwise"]


@pytest.mark.parametrize("row", GOLDEN["random_selection_lp"], ids=lambda row: str(row["mu"]))
def test_published_random_selection_programs(row: dict[str, Any], ask: Callable[..., dict[str, Any]]) -> None:
    names = [f"r{i}" for i in range(len(row["mu"]))]
    runs = {
        name: run_of(name, 2 / mu, 1, utility=utility)
        for name, mu, utility in zip(names, row["mu"], row["utility"], strict=True)
    }
    fields = file_of(runs, budget={"epsilon": row["epsilon"]}, mechanisms=["random_selection"])
    fields["delta"] = float(row["delta"])
    answer = ask("solve", fields)
    assert answer["mechanism"] == "random_selection"
    assert answer["bound"] == "random_selection_pld"
    for name, weight in zip(names, map(float, row["pi"]), strict=True):
        assert answer["weights"].get(name, 0.0) == pytest.approx(weight, rel=1e-8, abs=1e-12)
    assert answer["expected_utility"] == pytest.approx(float(row["expected_utility"]), rel=1e-10)
    assert answer["epsilon"] == pytest.approx(row["epsilon"], rel=1e-9)
    assert answer["epsilon"] <= row["epsilon"]
    assert answer["selection"] == "stated"
    assert "private" in answer["selection_rule"]


def test_published_random_selection_under_renyi(ask: Callable[..., dict[str, Any]]) -> None:
    rows = GOLDEN["random_selection_rdp"]
    runs = {"a": run_of("a", 2 / rows[0]["mu"][0], 1), "b": run_of("b", 2 / rows[0]["mu"][1], 1)}
    weights = dict(zip(runs, rows[0]["pi"], strict=True))
    answer = ask("bounds", file_of(runs, release={"random_selection": weights}))
    renyi = answer["bounds"]["random_selection_rdp"]["epsilon"]

    def converted(order: Any, divergence: Any) -> Any:  # Canonne, Kamath and Steinke 2020
        order = mpf(order)
        return divergence + mp.log1p(-1 / order) - (mp.log(mpf("1e-5")) + mp.log(order)) / (order - 1)

    def divergence(order: Any) -> Any:
        order = mpf(order)
        total = sum(
            mpf(w) * mp.exp((order - 1) * order * mpf(mu) ** 2 / 2)
            for w, mu in zip(rows[0]["pi"], rows[0]["mu"], strict=True)
        )
        return mp.log(total) / (order - 1)

    for row in rows:
        assert float(divergence(row["alpha"])) == pytest.approx(float(row["epsilon_alpha"]), rel=1e-12)
        assert renyi <= converted(row["alpha"], mpf(row["epsilon_alpha"])) * (1 + 1e-9)
    best = min(converted(order, divergence(order)) for order in [1 + k / 200 for k in range(200, 4000)])
    assert float(best) * (1 - 1e-4) <= renyi <= float(best) * (1 + 1e-3)
    assert answer["bounds"]["random_selection_pld"]["epsilon"] <= renyi
    assert answer["certified"]["bound"] == "random_selection_pld"


def test_yaml_and_json_say_the_same(remerge: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    runs = {
        "a": run_of("a0", 16, update_lipschitz="inf", utility=0.86),
        "b": run_of("b0", 32, update_lipschitz=1.0, utility=0.8),
    }
    fields = file_of(runs, release={"linear_combination": {"a": 0.25, "b": 0.75}}, budget={"epsilon": 2.0})
    (tmp_path / "f.json").write_text(json.dumps(fields))
    text = yaml.safe_dump(fields).replace("update_lipschitz: inf", "update_lipschitz: .inf")
    assert ".inf" in text
    (tmp_path / "f.yaml").write_text(text)
    for command in ("bounds", "solve"):
        from_json = remerge(command, tmp_path / "f.json", "--json")
        from_yaml = remerge(command, tmp_path / "f.yaml", "--json")
        assert from_json == from_yaml
        assert from_json[0] == 0


def test_a_run_without_noise_has_null_and_a_reason(ask: Callable[..., dict[str, Any]]) -> None:
    runs = {"loud": run_of("l", 16), "silent": run_of("s", 0)}
    for release in ({"linear_combination": {"loud": 0.5, "silent": 0.5}}, {"joint": ["loud", "silent"]}):
        answer = ask("bounds", file_of(runs, release=release))
        assert answer["certified"] == {"bound": None, "epsilon": None}
        assert answer["bounds"]["joint"] is None
        assert answer["reasons"]["joint"] == "No finite epsilon: a run without noise (silent)."
        assert "run without noise" in answer["reasons"]["certified"]
    unused = file_of(runs, release={"linear_combination": {"loud": 1, "silent": 0}})
    assert ask("bounds", unused)["certified"]["epsilon"] == pytest.approx(2.25814536337375)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("noise_multiplier: 16", "noise_multiplier: -1", "noise_multiplier of segment a0 of run a should be"),
        ("learning_rate: 1", "learning_rat: 1", "unknown field learning_rat of segment a0 of run a"),
        ("delta: 1e-5", "delta: 0", "delta should be greater than or equal to 1e-300, but 0 was given"),
        ("delta: 1e-5", "delta: 1.0", "delta should be less than 1"),
        ("delta: 1e-5", "", "the field delta is missing"),
        ("b: 0.75}", "c: 0.75}", "release names the run c, which is not among runs (a, b)"),
        ("b: 0.75}", "b: 0.7}", "release.linear_combination: weights must sum to 1, but they sum to 0.95"),
        ("b: 0.75}", "b: -0.75}", "release.linear_combination.b should be greater than or equal to 0"),
        ("linear_combination: {", "joint: [a], linear_combination: {", "release needs exactly one of"),
        ("release: {linear_combination: {a: 0.25, b: 0.75}}", "release: {}", "release needs exactly one of"),
        ("release: {linear_combination: {a: 0.25, b: 0.75}}", "", "the field release is missing"),
        ("b: 0.75}", "b: 0.75}, fresh_noise: -1", "release.fresh_noise should be greater"),
        ("id: b0", "id: a0", "segment a0 has noise_multiplier 16.0 in run a and 32.0 in run b"),
        ("  b: {segments", "  b: {stated: {epsilon: 1, delta: 1e-6}, segments", "and not both"),
        ("neighboring_relation: replace_one", "neighboring_relation: [", "is not a valid YAML file at line"),
        (
            "neighboring_relation: replace_one",
            "neighboring_relation: replace",
            "neighboring_relation should be",
        ),
        ("  b: {", "  a: {", "a is given twice"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    old: str, new: str, sentence: str, remerge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    text = (
        "neighboring_relation: replace_one\ndelta: 1e-5\nruns:\n"
        "  a: {segments: [{id: a0, steps: 20, noise_multiplier: 16, max_grad_norm: 1, learning_rate: 1, "
        "expected_batch_size: 60}]}\n"
        "  b: {segments: [{id: b0, steps: 20, noise_multiplier: 32, max_grad_norm: 1, learning_rate: 1, "
        "expected_batch_size: 60}]}\n"
        "release: {linear_combination: {a: 0.25, b: 0.75}}\n"
    )
    assert old in text
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace(old, new, 1))
    status, shown, error = remerge("bounds", path, "--json")
    assert (status, shown) == (1, "")
    assert error.startswith(f"Error: {path}")
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("releases", "sentence"),
    [
        ("", "the field releases is missing; list what was released"),
        ("release: {joint: [a]}", "list what was released, for example releases: [{region: eu, joint: [a]}]"),
        ("releases: []", "releases should not be empty"),
        ("releases: {region: eu, joint: [a]}", "releases should be a list, but a mapping was given"),
        ("release: {joint: [a]}\nreleases: [{region: eu, joint: [a]}]", "has both release and releases"),
        ("releases: [{joint: [a]}]", "the field region of release number 1 is missing"),
        ("releases: [{region: e u, joint: [a]}]", "region of release number 1 should be a name of letters"),
        ("releases: [{region: eu}]", "release number 1 needs exactly one of"),
        ("releases: [{region: eu, join: [a]}]", "unknown field join of release number 1; check its spelling"),
        ("releases: [7]", "release number 1 should be a mapping of its fields, but 7 was given"),
        (
            "releases: [{region: eu, joint: [a]}, {region: us, joint: [d]}]",
            "release number 2 names the run d, which is not among runs (a, b, c)",
        ),
        (
            "releases: [{region: eu, random_selection: {a: 0.5, b: 0.5}, drawn: c}]",
            "release number 1 names c as drawn, which is not among its random_selection (a, b)",
        ),
        (
            "releases: [{region: eu, random_selection: {a: 1, b: 0}, drawn: b}]",
            "release number 1 names b as drawn, whose weight is 0",
        ),
        (
            "releases: [{region: eu, linear_combination: {a: 0.5, b: 0.5}, drawn: a}]",
            "release number 1 may name drawn only beside random_selection",
        ),
        ("releases: [{region: eu, joint: [a], drawn: a}]", "may name drawn only beside random_selection"),
        (
            "releases: [{region: eu, random_selection: {a: 0.5, b: 0.4}}]",
            "random_selection of release number 1: weights must sum to 1, but they sum to 0.9",
        ),
        (
            "releases: [{region: eu, joint: [a]}, {region: eu, joint: [a, c]}]",
            "release number 2 names the run c, of which only a stated guarantee is known",
        ),
    ],
)
def test_a_wrong_list_of_releases_is_one_sentence(
    releases: str, sentence: str, remerge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    segment = "steps: 20, noise_multiplier: 16, max_grad_norm: 1, learning_rate: 1, expected_batch_size: 60"
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "neighboring_relation: replace_one\ndelta: 1e-5\nruns:\n"
        f"  a: {{segments: [{{id: a0, {segment}}}]}}\n  b: {{segments: [{{id: b0, {segment}}}]}}\n"
        f"  c: {{stated: {{epsilon: 1, delta: 1e-6}}}}\n{releases}\n"
    )
    for flags in ((), ("--json",)):
        status, shown, error = remerge("ledger", path, *flags)
        assert (status, shown) == (1, "")
        assert error.startswith(f"Error: {path}")
        assert sentence in error
        assert error.count("\n") == 1


def test_each_command_names_the_one_that_reads_the_other_field(
    remerge: Callable[..., tuple[int, str, str]],
) -> None:
    for command, example, hint in [
        ("bounds", "many-releases.yaml", "`remerge account ledger` reads releases"),
        ("ledger", "two-runs.yaml", "`remerge account bounds` reads release"),
    ]:
        status, shown, error = remerge(command, ROOT / "docs/examples" / example)
        assert (status, shown) == (1, "")
        assert hint in error


def test_one_release_in_the_ledger_costs_what_bounds_says(ask: Callable[..., dict[str, Any]]) -> None:
    full, sampled = run_of("a", 16), run_of("p", 1.0, 50, sampling_probability=0.01)
    kept = run_of("c", 16, update_lipschitz=1.0)
    other = run_of("d", 32, update_lipschitz=1.0)
    runs = {"a": full, "p": sampled, "c": kept, "d": other}
    for release, bound in [
        ({"joint": ["a", "p"]}, "joint"),
        ({"joint": ["a", "c"]}, "joint"),
        ({"random_selection": {"a": 0.25, "p": 0.75}}, "random_selection_pld"),
        ({"linear_combination": {"c": 0.25, "d": 0.75}}, "shifted"),
        ({"linear_combination": {"c": 0.25, "d": 0.75}, "fresh_noise": 1e-4}, "shifted"),
        ({"linear_combination": {"a": 0.5, "d": 0.5}}, "generic"),
    ]:
        single = ask("bounds", file_of(runs, release=release))
        told = ask("ledger", file_of(runs, releases=[{"region": "eu", **release}]))
        assert single["certified"]["bound"] == bound
        assert told["epsilon"] == pytest.approx(single["certified"]["epsilon"], rel=1e-9)
        assert told["by_region"] == {"eu": told["epsilon"]}
        assert told["releases"] == [{"region": "eu", "epsilon": told["epsilon"], **release}]


def test_cumulative_figures_on_the_screen(remerge: Callable[..., tuple[int, str, str]]) -> None:
    example = ROOT / "docs/examples/many-releases.yaml"
    exact = json.loads(remerge("ledger", example, "--json")[1], parse_constant=pytest.fail)
    status, shown, error = remerge("ledger", example)
    assert (status, error) == (0, "")
    number = float(re.search(r"have epsilon ([0-9.]+) at delta", shown)[1])  # type: ignore[index]
    assert exact["epsilon"] <= number <= exact["epsilon"] * (1 + 1e-3)
    assert exact["epsilon"] == pytest.approx(gaussian_epsilon(exact["mu"], "1e-5"), rel=1e-9)
    rows = {row[0]: row[1:] for line in shown.splitlines() if len(row := re.findall(r"[^│]+", line)) == 4}
    figures = {name.strip(): float(cells[1]) for name, cells in rows.items() if cells[1].strip()[0].isdigit()}
    expected = {**exact["by_region"], "all regions (colluding)": exact["epsilon"]}
    for name, value in expected.items():
        assert value <= figures[name] <= value * (1 + 1e-3)
    for texts in (exact["assumptions"], *exact["further_assumptions"].values()):
        assert all(text in shown for text in texts)


def test_what_cannot_be_read_or_written_or_solved_is_one_sentence(
    remerge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    good = EXAMPLES[-1]
    no_budget = tmp_path / "no-budget.json"
    no_budget.write_text(json.dumps(file_of({"a": run_of("a", 16)}, release={"joint": ["a"]})))
    tight = tmp_path / "tight.json"
    tight.write_text(json.dumps(file_of({"a": run_of("a", 16)}, budget={"epsilon": 0.1})))
    for arguments, sentence in [
        (("bounds", tmp_path / "none.yaml"), "none.yaml cannot be read: No such file"),
        (("bounds", tmp_path), "cannot be read: Is a directory"),
        (("solve", no_budget), "the field budget is missing"),
        (
            ("solve", tight),
            "the smallest epsilon on offer is 2.259, so train a candidate with noise_multiplier",
        ),
        (("bounds", good, "--plot", tmp_path / "plot.gif"), "must end in .png, .svg, .pdf"),
        (("bounds", good, "--plot", tmp_path / "none" / "plot.png"), "there is no folder"),
    ]:
        status, shown, error = remerge(*arguments)
        assert (status, shown) == (1, "")
        assert error.startswith("Error: ")
        assert sentence in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["bounds", "solve"])
def test_plots_are_written(
    command: str, remerge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    out = tmp_path / "plot.png"
    more = ("--frontier",) if command == "solve" else ()
    status, shown, error = remerge(command, ROOT / "docs/examples/two-runs.yaml", "--plot", out, *more)
    assert (status, error) == (0, "")
    assert f"wrote {out}" in shown
    assert out.read_bytes().startswith(b"\x89PNG")


def test_numbers_on_the_screen_are_rounded_up(
    remerge: Callable[..., tuple[int, str, str]],
) -> None:
    example = ROOT / "docs/examples/two-runs.yaml"
    exact = json.loads(remerge("bounds", example, "--json")[1])["certified"]["epsilon"]
    shown = remerge("bounds", example)[1]
    number = float(re.search(r"has epsilon ([0-9.]+) at delta", shown)[1])  # type: ignore[index]
    assert exact <= number <= exact * (1 + 1e-3)
    assert "not a guarantee" in shown
    assert "This holds if" in shown


def test_it_starts_no_framework() -> None:
    program = (
        "import sys; from flows import cli; sys.argv = ['remerge', 'account', sys.argv[1], sys.argv[2], '--json']\n"
        "try: cli.main()\n"
        "except SystemExit as left: assert not left.code\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'boto3', 'botocore', 'opacus', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    for command, name in [("bounds", "two-runs"), ("solve", "two-runs"), ("ledger", "many-releases")]:
        shown = subprocess.run(
            [sys.executable, "-c", program, command, str(ROOT / f"docs/examples/{name}.yaml")],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert shown.stderr.strip() == "[]"
        assert math.isfinite(json.loads(shown.stdout)["delta"])


def console_blocks() -> list[tuple[str, str]]:
    """(command line, output shown) of each example in the documentation."""
    blocks = re.findall(r"```console\n\$ (.*?)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    return blocks


@pytest.mark.parametrize(("command", "shown"), console_blocks(), ids=lambda text: text.splitlines()[0][:60])
def test_the_documentation_shows_what_is_printed(command: str, shown: str) -> None:
    """As in a doctest, `...` stands for anything."""
    program, *arguments = command.split()
    assert program == "remerge"
    ran = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
    )

    assert is_as_shown(shown, ran.stdout), ran.stdout


def test_every_example_is_in_the_documentation() -> None:
    text = DOCUMENT.read_text()
    assert EXAMPLES
    for path in EXAMPLES:
        assert f"examples/{path.name}" in text
