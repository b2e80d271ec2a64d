"""What all merge operators have in common: order, weights, types, architectures, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting.errors import IncompatibleCandidates, InvalidInput
from tasks.merging import (
    MERGE_RULE,
    OPERATORS,
    checked_options,
    linear_combination,
    merge_model_files,
    merge_models,
    merge_rule,
    needs,
)
from tests.tasks.merging.merges import (
    a_model,
    file_of,
    merge,
    merge_on_disk,
    models_for,
    public,
    statistics_for,
    tensors_of,
    weights_for,
)

WITH_BASE = [operator for operator in OPERATORS if needs(operator).base]


def test_the_operators_are_those_of_the_contract() -> None:
    assert set(OPERATORS) == {
        "linear",
        "average",
        "task_arithmetic",
        "ties",
        "dare",
        "fisher",
        "regmean",
        "pcb",
        "wudi",
        "slerp",
    }
    assert {operator for operator in OPERATORS if needs(operator).base} == {
        "task_arithmetic",
        "ties",
        "dare",
        "pcb",
        "wudi",
    }
    assert (needs("fisher").statistics, needs("regmean").statistics) == ("fisher", "gram")
    assert [needs(operator).models for operator in OPERATORS if operator != "slerp"] == [None] * 9
    assert needs("slerp").models == 2


@pytest.mark.parametrize("operator", OPERATORS)
def test_both_routes_give_the_same_bytes(operator: str, tmp_path: Path) -> None:
    models, weights = models_for(operator), weights_for(operator)
    in_memory = merge(operator, models, weights)
    assert merge_on_disk(tmp_path, operator, models, weights) == in_memory
    assert merge(operator, models, weights) == in_memory
    merged = tensors_of(in_memory)
    assert merged["count"].tolist() == [7]
    assert {name: (value.shape, value.dtype) for name, value in merged.items()} == {
        name: (value.shape, value.dtype) for name, value in a_model(0).items()
    }


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_order_of_the_candidates_changes_nothing(operator: str) -> None:
    """To the byte, but for the linear ones: they add up in the order of the weights, so a sum moves by some units of
    float64 and may be rounded to the other neighbour."""
    models, weights = models_for(operator), weights_for(operator)
    expected = merge(operator, models, weights)
    for order in itertools.permutations(weights):
        again = merge(operator, models, {name: weights[name] for name in order})
        if operator in ("linear", "average"):
            for name, value in tensors_of(again).items():
                np.testing.assert_array_max_ulp(value, tensors_of(expected)[name], maxulp=1)
        else:
            assert again == expected


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) - {"dare"}))
def test_the_names_of_the_candidates_change_nothing_beyond_rounding(operator: str) -> None:
    """But for DARE, whose masks follow the names. Values are of order 1, the sums in float64."""
    models, weights = models_for(operator, np.float64), weights_for(operator)
    statistics = statistics_for(operator, "".join(models))
    base = file_of(a_model(99, np.float64))
    expected = tensors_of(merge(operator, models, weights, base=base, statistics=statistics))
    names = sorted(models)
    other = dict(zip(names, names[1:] + names[:1], strict=True))
    again = tensors_of(
        merge(
            operator,
            {other[name]: content for name, content in models.items()},
            {other[name]: weight for name, weight in weights.items()},
            base=base,
            statistics=statistics and {other[name]: content for name, content in statistics.items()},
        )
    )
    for name, value in expected.items():
        assert np.allclose(again[name], value, rtol=0, atol=1e-9), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_merging_equal_models_gives_them_back(operator: str) -> None:
    """Every operator's mean of one model is that model: all of it where nothing is trimmed or dropped."""
    weights = weights_for(operator)
    model = file_of(a_model(5))
    options: dict[str, Any] = {"density": 1.0} if operator in ("ties", "dare") else {}
    if (
        operator == "pcb"
    ):  # clips the largest values, and a parameter with the least score of all counts nothing
        return
    merged = tensors_of(merge(operator, dict.fromkeys(weights, model), weights, options=options))
    for name, value in a_model(5).items():
        assert np.allclose(merged[name], value, rtol=2e-5 if operator == "wudi" else 1e-6, atol=2e-5), name


@pytest.mark.parametrize("operator", WITH_BASE)
def test_candidates_that_never_moved_give_the_start_back(operator: str) -> None:
    weights = weights_for(operator)
    start = file_of(a_model(99))
    assert merge(operator, dict.fromkeys(weights, start), weights) == start


@pytest.mark.parametrize("operator", WITH_BASE)
def test_next_to_no_scale_gives_the_start_back(operator: str) -> None:
    models, weights = models_for(operator), weights_for(operator)
    assert merge(operator, models, weights, options={"scale": 1e-30}) == file_of(a_model(99))


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic", "dare"])
def test_sums_use_the_weights_as_they_are(operator: str) -> None:
    """The step from the start is proportional to the weights, which need not add up to 1."""
    models, weights = models_for(operator, np.float64), {"a": 1.5, "b": -0.25, "c": 0.5}
    start = file_of({name: value * 0 for name, value in a_model(99, np.float64).items()})
    one = tensors_of(merge(operator, models, weights, base=start))
    twice = tensors_of(
        merge(operator, models, {name: 2 * weight for name, weight in weights.items()}, base=start)
    )
    assert all(
        np.array_equal(twice[name], 2 * one[name]) and one[name].any()
        for name in ("layer.weight", "layer.bias")
    )


@pytest.mark.parametrize("operator", ["ties", "pcb"])
def test_means_are_divided_only_where_the_option_says_so(operator: str) -> None:
    models, weights = models_for(operator, np.float64), weights_for(operator)
    doubled = {name: 2 * weight for name, weight in weights.items()}
    start = file_of({name: value * 0 for name, value in a_model(99, np.float64).items()})

    def merged(weights: dict[str, float], normalize: bool) -> np.ndarray:
        options = {"normalize": normalize, "density": 1.0}
        return tensors_of(merge(operator, models, weights, base=start, options=options))["layer.weight"]

    assert np.array_equal(merged(doubled, True), merged(weights, True))
    assert np.array_equal(merged(doubled, False), 2 * merged(weights, False))


def test_average_and_linear_are_the_linear_combination() -> None:
    models, weights = models_for("linear"), {"c": 0.5, "a": 0.2, "b": 0.3}
    expected = linear_combination(models, weights)
    assert merge_models("average", models, weights) == expected
    assert merge_models("linear", models, weights) == expected
    assert merge_rule("linear", {}) == MERGE_RULE
    with pytest.raises(InvalidInput, match="operator average must be non-negative and add up to 1"):
        merge_models("average", models, {"a": 0.5, "b": 0.6})


@pytest.mark.parametrize("operator", OPERATORS)
def test_candidates_without_weight_are_not_opened(operator: str) -> None:
    models, weights = models_for(operator), weights_for(operator)
    statistics = statistics_for(operator, "".join(models))
    with_more = merge(operator, {**models, "z": b"no model"}, {**weights, "z": 0.0}, statistics=statistics)
    assert with_more == merge(operator, models, weights, statistics=statistics)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_are_merged_in_float64_and_rounded_once(operator: str, dtype: str) -> None:
    """The merge of narrow models is the merge of the same numbers in float64, rounded by torch."""
    import safetensors.torch

    kind = getattr(torch, dtype)
    weights = weights_for(operator)

    def narrow(seed: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.tensor(value).to(kind if value.dtype == np.float64 else torch.int64)
            for name, value in a_model(seed, np.float64).items()
        }

    def wide(seed: int) -> bytes:
        return safetensors.torch.save(
            {name: value.double() if name != "count" else value for name, value in narrow(seed).items()}
        )

    models = {name: safetensors.torch.save(narrow(ord(name))) for name in weights}
    merged = safetensors.torch.load(merge(operator, models, weights, base=safetensors.torch.save(narrow(99))))
    exact = tensors_of(merge(operator, {name: wide(ord(name)) for name in weights}, weights, base=wide(99)))
    for name, value in merged.items():
        if name == "count":
            continue
        assert value.dtype == kind
        # numpy rounds float64 to float16 and float32 once; torch's way to bfloat16 leads over float32, which for
        # these numbers lands on no tie
        expected = torch.tensor(exact[name]).to(kind) if dtype == "bfloat16" else exact[name].astype(dtype)
        assert np.array_equal(value.float().numpy(), torch.as_tensor(expected).float().numpy()), name


# What is refused

OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "another key": ({"extra": np.float32([1])}, "different architectures: tensor extra is only in one"),
    "another shape": ({"layer.bias": np.float32([1, 2])}, r"layer.bias is F32\[\d\] in one and F32\[\d\] in"),
    "another type": ({"gain": np.array(1.0, np.float16)}, r"tensor gain is F\d\d\[\] in one"),
}


@pytest.mark.parametrize("case", OTHER)
@pytest.mark.parametrize("operator", OPERATORS)
def test_other_architectures_are_refused(operator: str, case: str) -> None:
    change, message = OTHER[case]
    models, weights = models_for(operator), weights_for(operator)
    with pytest.raises(IncompatibleCandidates, match=message):
        merge(operator, {**models, "b": file_of({**a_model(1), **change})}, weights)
    if needs(operator).base:
        with pytest.raises(
            IncompatibleCandidates, match=rf"^The public start and candidate a have .*{message}"
        ):
            merge(operator, models, weights, base=file_of({**a_model(1), **change}))


@pytest.mark.parametrize("operator", OPERATORS)
def test_other_counters_are_refused_but_not_the_starts(operator: str) -> None:
    models, weights = models_for(operator), weights_for(operator)
    other = file_of({**a_model(1), "count": np.int64([8])})
    with pytest.raises(IncompatibleCandidates, match="count is not floating point and differs"):
        merge(operator, {**models, "b": other}, weights)
    start = file_of({**a_model(99), "count": np.int64([0])})
    assert merge(operator, models, weights, base=start) == merge(operator, models, weights)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("operator", OPERATORS)
def test_numbers_that_are_not_finite_are_refused(operator: str, value: float) -> None:
    models, weights = models_for(operator), weights_for(operator)
    bad = a_model(1)
    bad["layer.bias"][2] = value
    with pytest.raises(IncompatibleCandidates, match=r"candidate b holds values in tensor layer.bias"):
        merge(operator, {**models, "b": file_of(bad)}, weights)
    if needs(operator).base:
        with pytest.raises(
            IncompatibleCandidates, match=r"^The public start holds values in tensor layer.bias"
        ):
            merge(operator, models, weights, base=file_of(bad))


@pytest.mark.parametrize("operator", ["linear", *WITH_BASE])
def test_results_too_large_for_their_type_are_refused(operator: str) -> None:
    model = file_of({"w": np.float16([[60000, 1], [2, 30000]])})
    start = file_of({"w": np.float16([[0, 0], [0, 0]])})
    weights = {"a": 2.0, "b": 2.0} if operator == "linear" else {"a": 0.5, "b": 0.5}
    options: dict[str, Any] = {} if operator == "linear" else {"scale": 16.0}
    with pytest.raises(IncompatibleCandidates, match="tensor w is too large for its type F16"):
        merge_models(operator, {"a": model, "b": model}, weights, options=options, base=start)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "wrong", [{"a": float("nan"), "b": 1.0}, {"a": float("inf"), "b": 1.0}, {"a": 0.0}, {}]
)
def test_weights_that_are_no_weights_are_refused(operator: str, wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="weights must be finite numbers"):
        merge(operator, models_for(operator), wrong)


def test_weights_that_an_operator_cannot_use_are_refused() -> None:
    for operator in ("ties", "fisher", "pcb", "wudi"):
        with pytest.raises(InvalidInput, match=f"operator {operator} must not be negative"):
            merge(operator, models_for(operator), {"a": 1.5, "b": -0.5})
    for operator in ("average", "regmean", "slerp"):
        for wrong in ({"a": 1.5, "b": -0.5}, {"a": 0.5, "b": 0.6}):
            with pytest.raises(
                InvalidInput, match=f"operator {operator} must be non-negative and add up to 1"
            ):
                merge(operator, models_for(operator), wrong)
    with pytest.raises(InvalidInput, match="merges exactly 2 candidates, but 3 have"):
        merge("slerp", models_for("linear"), {"a": 0.5, "b": 0.25, "c": 0.25})


def test_what_is_missing_is_named() -> None:
    models, weights = models_for("ties"), weights_for("ties")
    with pytest.raises(InvalidInput, match="no merge operator 'tie'; choose one of linear, average"):
        merge_models("tie", models, weights)
    with pytest.raises(InvalidInput, match="ties needs the public start"):
        merge_models("ties", models, weights)
    with pytest.raises(InvalidInput, match="fisher needs statistics of candidate a from public rows"):
        merge_models("fisher", models, weights)
    with pytest.raises(InvalidInput, match="statistics of candidate c"):
        merge_models("fisher", models, weights, statistics=statistics_for("fisher", "ab"))
    for operator in ("linear", "ties"):
        with pytest.raises(InvalidInput, match="no model of candidate z"):
            merge(operator, models, {"a": 0.5, "z": 0.5})


def test_damaged_inputs_are_named(tmp_path: Path) -> None:
    models, weights = models_for("ties"), weights_for("ties")
    with pytest.raises(IncompatibleCandidates, match=r"^The public start cannot be read \(.*store it again"):
        merge("ties", models, weights, base=b"nothing")
    with pytest.raises(
        IncompatibleCandidates, match=r"^The model of candidate b cannot be read .*train it again"
    ):
        merge("ties", {**models, "b": b""}, weights)
    with pytest.raises(IncompatibleCandidates, match=r"^The statistics file of candidate a cannot be read"):
        merge("fisher", models, weights, statistics=dict.fromkeys(models, b"nothing"))
    merge_on_disk(tmp_path, "ties", models, weights)
    before = (tmp_path / "merged").read_bytes()
    with pytest.raises(IncompatibleCandidates, match=r"^The public start cannot be read"):
        merge_on_disk(tmp_path, "ties", models, weights, base=b"nothing")
    assert (tmp_path / "merged").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "base", "c", "merged"]


def test_files_that_cannot_be_opened_or_written_cost_one_sentence(tmp_path: Path) -> None:
    models, weights = models_for("ties"), weights_for("ties")
    merge_on_disk(tmp_path, "ties", models, weights)
    paths = {name: tmp_path / name for name in models}
    with pytest.raises(InvalidInput, match=r"nowhere of candidate b cannot be opened .*name another"):
        merge_model_files("linear", {**paths, "b": tmp_path / "nowhere"}, weights, tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"nowhere \(the public start\) cannot be opened"):
        merge_model_files("ties", paths, weights, tmp_path / "out", base=tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"cannot be written to .*choose another place"):
        merge_model_files("ties", paths, weights, tmp_path / "no" / "out", base=tmp_path / "base")
    with pytest.raises(IncompatibleCandidates, match="The public start cannot be read"):
        merge_model_files("ties", paths, weights, tmp_path / "out", base=tmp_path)
    assert not (tmp_path / "out").exists()


# Statistics


@pytest.mark.parametrize("operator", ["fisher", "regmean"])
def test_statistics_must_be_marked_as_public_and_fit(operator: str) -> None:
    models, weights = models_for(operator), weights_for(operator)
    good = statistics_for(operator, "abc")
    assert good is not None
    kind = needs(operator).statistics
    assert kind is not None
    inside = tensors_of(good["b"])
    other = "gram" if kind == "fisher" else "fisher"
    first = "layer.weight"
    cases = [
        (file_of(inside), "candidate b is not marked as"),
        (public(kind, inside, rows="private"), "is not marked as .* from public rows"),
        (public(other, inside), f"is not marked as {kind} statistics"),
        (public(kind, {}), "of no tensors"),
        (public(kind, {first: inside[first]}), "of other ones"),
        (
            public(kind, {**inside, first: inside[first][..., :1]}),
            f"does not fit the candidates: tensor {first}",
        ),
        (
            public(kind, {**inside, first: np.full_like(inside[first], np.nan)}),
            f"candidate b holds values in .*{first}",
        ),
        (
            public(kind, {**inside, first: -inside[first] - np.eye(*inside[first].shape)}),
            "holds (negative|no second)",
        ),
    ]
    for content, message in cases:
        with pytest.raises(IncompatibleCandidates, match=message):
            merge(operator, models, weights, statistics={**good, "b": content})
    stranger = public(kind, {"stranger": np.ones((4, 6))})
    with pytest.raises(IncompatibleCandidates, match=r"tensor stranger is .* and missing in them"):
        merge(operator, models, weights, statistics=dict.fromkeys("abc", stranger))


# Options


def test_options_are_checked_and_completed() -> None:
    assert checked_options("ties", {"density": 1}) == {"density": 1.0, "scale": 1.0, "normalize": True}
    assert type(checked_options("ties", {"density": 1})["density"]) is float
    assert checked_options("linear", {}) == {}
    assert checked_options("dare", {"seed": 3})["seed"] == 3


@pytest.mark.parametrize(
    ("operator", "options", "message"),
    [
        ("linear", {"scale": 1.0}, "linear has no option scale; it has none"),
        ("ties", {"dense": 0.5}, "ties has no option dense; it has density, scale, normalize"),
        (
            "ties",
            {"density": 0.0},
            "density of the merge operator ties must be a number above 0 and at most 1",
        ),
        ("ties", {"density": 1.5}, "must be a number above 0 and at most 1, but it is 1.5"),
        ("ties", {"density": float("nan")}, "at most 1, but it is nan"),
        ("ties", {"density": "0.5"}, "but it is '0.5'"),
        ("ties", {"density": True}, "but it is True"),
        ("ties", {"normalize": 1}, "must be true or false"),
        ("ties", {"scale": float("inf")}, "must be a number other than 0, from -1e6 to 1e6"),
        ("dare", {"scale": 0}, "must be a number other than 0"),
        ("task_arithmetic", {"scale": 1e300}, "must be a number other than 0"),
        ("ties", {"scale": 10**400}, "must be a number other than 0"),
        ("dare", {"seed": -1}, "whole number that is not negative"),
        ("dare", {"seed": 1.0}, "whole number"),
        ("fisher", {"floor": 0}, "finite number above 0"),
        ("regmean", {"shrink": 1.1}, "between 0 and 1"),
        ("wudi", {"ridge": 1e-12}, "finite number of at least 1e-10"),
        ("no such", {}, "no merge operator"),
    ],
)
def test_wrong_options_cost_one_sentence(operator: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        checked_options(operator, options)
    with pytest.raises(InvalidInput, match=message):
        merge_models(operator, {}, {"a": 1.0}, options=options)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_rule_states_every_option(operator: str) -> None:
    """Two sets of options never have one sentence."""
    options = checked_options(operator, {})
    sentences = {merge_rule(operator, options)}
    for name, value in options.items():
        changed = (
            (not value) if isinstance(value, bool) else value / 2 if isinstance(value, float) else value + 1
        )
        sentences.add(merge_rule(operator, {**options, name: changed}))
    assert len(sentences) == 1 + len(options)
    assert all("float64" in sentence and "rounded once" in sentence for sentence in sentences)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([operator for operator in OPERATORS if operator != "slerp"])
)
def test_any_models_merge_the_same_in_any_order(seed: int, operator: str) -> None:
    """As above, for random numbers of candidates, weights and sizes; many values are equal, so that thresholds and
    elections meet ties."""
    rng = np.random.default_rng(seed)
    names = [f"m{k}" for k in range(rng.integers(1, 6))]
    shape = tuple(rng.integers(1, 5, size=2))
    some = {name: {"w": rng.integers(-2, 3, size=shape).astype(np.float32)} for name in names}
    raw = rng.integers(1, 5, size=len(names)).astype(float)
    weights = dict(zip(names, (raw / raw.sum()).tolist(), strict=True))
    weights[names[-1]] = 1 - sum(weights[name] for name in names[:-1])
    statistics: dict[str, bytes] | None = None
    if operator == "fisher":
        statistics = {name: public("fisher", {"w": rng.random(shape)}) for name in names}
    if operator == "regmean":
        moments = np.eye(shape[1])
        statistics = {name: public("gram", {"w": moments * (1 + k)}) for k, name in enumerate(names)}
    models = {name: file_of(model) for name, model in some.items()}
    base = file_of({"w": rng.integers(-1, 2, size=shape).astype(np.float32)})

    def merged(order: list[str]) -> np.ndarray:
        given = {name: weights[name] for name in order}
        return tensors_of(merge_models(operator, models, given, base=base, statistics=statistics))["w"]

    one, other = merged(names), merged([names[k] for k in rng.permutation(len(names))])
    assert np.isfinite(one).all()
    if operator in ("linear", "average"):
        assert np.allclose(one, other, rtol=1e-6, atol=1e-6)
    else:
        assert one.tobytes() == other.tobytes()
