"""The calculator's cumulative figures: the theory's examples, laws, and a reason for every null."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import jsonschema
import pytest
from mpmath import mp, mpf, quad
from pydantic import ValidationError

from tasks.account_errors import sentence
from tasks.account_file import AccountFile, account_schema
from tasks.account_ledger import CHOSEN_APART, LedgerAccount, ledger_of
from tasks.account_ledger_report import ledger_document, ledger_sentences, told_in_words
from tasks.account_runs import runs_of

HALF = {"a": 0.5, "b": 0.5}


def run_of(segment: str, noise_multiplier: float, steps: int = 1, **changes: Any) -> dict[str, Any]:
    """Full batch; under replace_one its mu is 2 * sqrt(steps) / noise_multiplier."""
    fields = {
        "id": segment,
        "steps": steps,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": 1,
        "learning_rate": 1,
        "expected_batch_size": 60,
    }
    return {"segments": [fields | changes]}


def account(runs: dict[str, Any], releases: list[dict[str, Any]], **changes: Any) -> LedgerAccount:
    fields = {"neighboring_relation": "replace_one", "delta": 1e-5, "runs": runs, "releases": releases}
    file = AccountFile.model_validate_json(json.dumps(fields | changes))
    jsonschema.validate(fields | changes, json.loads(account_schema()))
    return ledger_of(file, runs_of(file, "f"), "f")


def answer(runs: dict[str, Any], releases: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """As printed: strict JSON."""
    document = ledger_document(account(runs, releases, **changes))
    return json.loads(json.dumps(document, allow_nan=False))


def gaussian_delta(mu: Any, epsilon: Any) -> Any:
    """The hockey-stick divergence of N(mu, 1) from N(0, 1), by 50-digit integration."""
    with mp.workdps(50):
        mu, epsilon = mpf(mu), mpf(epsilon)
        start = epsilon / mu + mu / 2
        both = lambda x: mp.npdf(x, mu) - mp.exp(epsilon) * mp.npdf(x)  # noqa: E731
        return quad(both, [start, start + 4, start + 12, start + 40])


TWO = {"a": run_of("a0", 2.5), "b": run_of("b0", 2.5)}  # mu 0.8 each


def test_asking_for_the_other_one_after_a_draw() -> None:
    """0.175 at epsilon 1; the formula that weights a past draw says 0.119."""
    first, other = {"region": "eu", "random_selection": HALF}, {"region": "us", "joint": ["b"]}
    with mp.workdps(50):
        truth = gaussian_delta(mp.sqrt(2) * mpf("0.8"), 1)
        weighted = (truth + gaussian_delta("0.8", 1)) / 2
    assert float(truth) == pytest.approx(0.175, abs=5e-4)
    assert float(weighted) == pytest.approx(0.119, abs=5e-4)
    drawn = [first | {"drawn": "a"}, other]
    known = answer(TWO, drawn, delta=float(truth))
    assert 1 - 1e-12 <= known["epsilon"] <= 1 + 1e-9
    assert answer(TWO, drawn, delta=float(weighted))["epsilon"] > 1.2
    assert known["mu"] == pytest.approx(0.8 * math.sqrt(2), rel=1e-12)
    assert "count as what was drawn" in " ".join(known["assumptions"])
    to_come = answer(TWO, [first, other], delta=float(weighted))
    assert 1 - 1e-12 <= to_come["epsilon"] <= 1 + 1e-9
    assert to_come["mu"] is None
    assert "a draw is still to come" in to_come["reasons"]["mu"]
    assert "draws still to come were all fixed before" in " ".join(to_come["assumptions"])
    assert (known["draws_to_come"], to_come["draws_to_come"]) == (0, 1)


def test_the_run_that_was_drawn_counts_alone() -> None:
    runs = {"a": run_of("a0", 2.0), "b": run_of("b0", 8.0)}
    selection = {"region": "eu", "random_selection": HALF}
    drawn = {name: answer(runs, [selection | {"drawn": name}]) for name in runs}
    for name, mu in {"a": 1.0, "b": 0.25}.items():
        assert drawn[name]["mu"] == pytest.approx(mu, rel=1e-12)
        assert float(gaussian_delta(mu, drawn[name]["epsilon"])) == pytest.approx(1e-5, rel=1e-9)
    to_come = answer(runs, [selection])["epsilon"]
    assert drawn["b"]["epsilon"] < to_come < drawn["a"]["epsilon"]
    mixed = sum(gaussian_delta(mu, to_come) for mu in (1.0, 0.25)) / 2
    assert float(mixed) == pytest.approx(1e-5, rel=1e-9)


def test_two_nearly_equal_averages_tell_both_models() -> None:
    runs = {
        name: run_of(name, noise, 100, update_lipschitz=0.9) for name, noise in (("a", 32.0), ("b", 64.0))
    }
    averages = [
        {"region": region, "linear_combination": {"a": share, "b": 1 - share}}
        for region, share in (("eu", 0.25), ("us", 0.2501))
    ]
    both = answer(runs, averages)
    assert both["mu"] == pytest.approx(math.hypot(2 * 10 / 32, 2 * 10 / 64), rel=1e-12)  # the joint release
    assert float(gaussian_delta(both["mu"], both["epsilon"])) == pytest.approx(1e-5, rel=1e-9)
    alone = [release["epsilon"] for release in both["releases"]]
    assert both["epsilon"] > 2 * sum(alone)  # so certificates do not add up
    assert both["by_region"] == {"eu": alone[0], "us": alone[1]}
    twice = answer(runs, [averages[0], averages[0] | {"region": "us"}])
    assert twice["epsilon"] == alone[0]  # the same model again tells nothing new
    assert "update_lipschitz" in " ".join(both["further_assumptions"]["by_region.eu"])
    assert "update_lipschitz" not in " ".join(both["assumptions"])
    assert "releases.1" in both["further_assumptions"]
    assert "another merge of them" in " ".join(twice["assumptions"])


def test_a_part_of_the_releases_must_not_have_been_chosen_by_the_others() -> None:
    """us gets a or b by what eu's model looks like: whoever sees us alone learns about eu's model."""
    sees_eu = [{"region": "eu", "joint": ["a"]}, {"region": "us", "joint": ["b"]}]
    told = answer(TWO, sees_eu)
    for name in ("by_region.eu", "by_region.us", "releases.0", "releases.1"):
        assert told["further_assumptions"][name] == [CHOSEN_APART]
    assert CHOSEN_APART not in told["assumptions"]
    one = answer(TWO, sees_eu[:1])
    assert one["further_assumptions"] == {}
    one_region = answer(TWO, [release | {"region": "eu"} for release in sees_eu])
    assert set(one_region["further_assumptions"]) == {"releases.0", "releases.1"}


def test_order_of_the_releases_and_spelling_of_zero_weights_change_nothing() -> None:
    runs = {name: run_of(name, noise, 30) for name, noise in (("a", 20.0), ("b", 30.0), ("c", 40.0))}
    releases = [
        {"region": "eu", "random_selection": HALF, "drawn": "a"},
        {"region": "us", "linear_combination": {"b": 0.5, "c": 0.5}},
        {"region": "eu", "random_selection": {"b": 0.25, "c": 0.75}},
        {"region": "jp", "joint": ["c"]},
    ]
    told = answer(runs, releases)
    assert list(told["by_region"]) == ["eu", "jp", "us"]
    for order in itertools.permutations(range(4)):
        again = answer(runs, [releases[k] for k in order])
        assert again["epsilon"] == pytest.approx(told["epsilon"], rel=1e-12)
        assert again["by_region"] == pytest.approx(told["by_region"], rel=1e-12)
        assert [again["releases"][order.index(k)] for k in range(4)] == told["releases"]
    padded = [
        *releases[:1],
        {"region": "us", "linear_combination": {"a": 0, "b": 0.5, "c": 0.5}},
        *releases[2:],
    ]
    assert answer(runs, padded) == told
    assert all(value <= told["epsilon"] for value in told["by_region"].values())


def test_shared_steps_count_once_and_longer_checkpoints_whole() -> None:
    """Two checkpoints of one run tell as much as the later one, whichever was released first."""
    runs = {"early": run_of("main", 30.0, 10), "late": run_of("main", 30.0, 90)}
    late = 2 * math.sqrt(90) / 30
    for names in (("early", "late"), ("late", "early")):
        releases = [{"region": name, "joint": [name]} for name in names]
        assert answer(runs, releases)["mu"] == pytest.approx(late, rel=1e-12)
    selection = answer(runs, [{"region": "eu", "random_selection": {"early": 0.5, "late": 0.5}}])
    mixed = sum(gaussian_delta(mu, selection["epsilon"]) for mu in (late, 2 * math.sqrt(10) / 30)) / 2
    assert float(mixed) == pytest.approx(1e-5, rel=1e-9)


def test_a_run_without_noise_has_null_and_a_reason_where_it_counts() -> None:
    runs = {"silent": run_of("s", 0.0), "a": run_of("a", 20.0), "b": run_of("b", 20.0)}
    releases = [
        {"region": "eu", "joint": ["silent"]},
        {"region": "us", "joint": ["a"]},
        {"region": "us", "random_selection": {"silent": 0.5, "b": 0.5}, "drawn": "b"},
    ]
    told = answer(runs, releases)
    expected = "No finite epsilon: a run without noise (silent)."
    assert (told["epsilon"], told["mu"], told["source"], told["assumptions"]) == (None, None, None, [])
    for name in ("epsilon", "mu", "by_region.eu", "releases.0"):
        assert told["reasons"][name] == expected
    assert set(told["reasons"]) == {"epsilon", "mu", "by_region.eu", "releases.0"}
    assert told["by_region"]["eu"] is None
    assert told["by_region"]["us"] > told["releases"][2]["epsilon"] > 0
    words = " ".join(ledger_sentences(account(runs, releases)))
    assert f"No guarantee[/] for all releases together: {expected}" in words
    assert f"No epsilon for region eu alone. {expected}" in words


def test_what_cannot_be_computed_is_null_with_a_reason() -> None:
    runs = {f"r{i}": run_of(f"s{i}", 20.0 + i) for i in range(26)}
    selections = [
        {"region": f"g{i}", "random_selection": {f"r{2 * i}": 0.5, f"r{2 * i + 1}": 0.5}} for i in range(13)
    ]
    told = answer(runs, selections)
    assert told["epsilon"] is None
    assert "state what was drawn" in told["reasons"]["epsilon"]
    assert all(value > 0 for value in told["by_region"].values())
    sampled = {"p": run_of("p", 1.0, 100, sampling_probability=0.01)}
    told = answer(sampled, [{"region": "eu", "joint": ["p"]}], delta=1e-200)
    assert told["epsilon"] is told["by_region"]["eu"] is None
    assert "delta 1e-200 is below" in told["reasons"]["by_region.eu"]


def test_releases_in_words() -> None:
    releases = [
        {"region": "eu", "random_selection": HALF},
        {"region": "eu", "random_selection": HALF, "drawn": "b"},
        {"region": "eu", "random_selection": {"a": 1, "b": 0}},
        {"region": "eu", "linear_combination": HALF, "fresh_noise": 0.5},
    ]
    assert [told_in_words(told) for told in account(TWO, releases).releases] == [
        "random selection of 0.5 a + 0.5 b, draw still to come",
        "random selection of 0.5 a + 0.5 b, b was drawn",
        "random selection of a alone",
        "linear combination of 0.5 a + 0.5 b, with fresh noise of standard deviation 0.5",
    ]


@pytest.mark.parametrize(
    "releases",
    [
        [],
        [{"joint": ["a"]}],
        [{"region": "e u", "joint": ["a"]}],
        [{"region": "eu"}],
        [{"region": "eu", "joint": ["a"], "linear_combination": HALF}],
        [{"region": "eu", "linear_combination": HALF, "drawn": "a"}],
        [{"region": "eu", "random_selection": HALF, "drawn": 1}],
        [{"region": "eu", "joint": ["a"], "extra": 1}],
    ],
)
def test_schema_and_reader_refuse_the_same_releases(releases: list[dict[str, Any]]) -> None:
    fields = {"neighboring_relation": "replace_one", "delta": 1e-5, "runs": TWO, "releases": releases}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(fields, json.loads(account_schema()))
    with pytest.raises(ValidationError) as caught:
        AccountFile.model_validate_json(json.dumps(fields))
    assert "release" in sentence("f", caught.value, fields)


def test_release_and_releases_are_not_both_allowed_by_the_schema() -> None:
    fields = {
        "neighboring_relation": "replace_one",
        "delta": 1e-5,
        "runs": TWO,
        "release": {"joint": ["a"]},
        "releases": [{"region": "eu", "joint": ["a"]}],
    }
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(fields, json.loads(account_schema()))
    with pytest.raises(ValidationError, match="has both release and releases"):
        AccountFile.model_validate_json(json.dumps(fields))
