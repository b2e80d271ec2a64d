"""Merging: exact weights, one rounding, architectures that must agree, and the same bytes by both routes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st

from accounting.errors import IncompatibleCandidates, InvalidInput
from tasks.merging import PIECE, linear_combination, merge_files, sources


def file_of(**tensors: np.ndarray) -> bytes:
    return safetensors.numpy.save(tensors)


def bfloat_file(**tensors: list[int]) -> bytes:
    """A file of bfloat16 tensors, given by their bits, as the library writes it."""
    arrays = {name: np.array(bits, dtype="<u2") for name, bits in tensors.items()}
    return bytes(
        safetensors.serialize(
            {
                name: safetensors.TensorSpec(
                    dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes
                )
                for name, bits in arrays.items()
            }
        )
    )


def bfloat_bits(content: bytes) -> list[int]:
    """The bits of the one bfloat16 tensor of a file."""
    ((_, tensor),) = safetensors.deserialize(content)
    assert tensor["dtype"] == "BF16"
    return np.frombuffer(tensor["data"], dtype="<u2").tolist()


def merged_on_disk(folder: Path, models: Mapping[str, bytes], weights: Mapping[str, float]) -> bytes:
    for name, content in models.items():
        (folder / name).write_bytes(content)
    out = folder / "merged.safetensors"
    merge_files({name: folder / name for name in models}, weights, out)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*models, out.name])
    return out.read_bytes()


def test_the_sum_is_rounded_once() -> None:
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=(3, 5)).astype(np.float32) for name in "abc"}
    weights = {"a": 0.5, "b": 0.125, "c": 0.375}
    merged = safetensors.numpy.load(
        linear_combination({name: file_of(w=value) for name, value in values.items()}, weights)
    )["w"]

    def exact(row: int, column: int) -> float:
        total = sum(Fraction(weights[name]) * Fraction(float(values[name][row, column])) for name in "abc")
        return float(np.float32(float(total)))

    assert merged.dtype == np.float32
    assert merged.tolist() == [[exact(row, column) for column in range(5)] for row in range(3)]


@given(st.floats(0, 1), st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32))
def test_a_merge_lies_between_its_candidates(weight: float, left: float, right: float) -> None:
    weights = {"a": weight, "b": 1 - weight}
    models = {"a": file_of(w=np.float32([left])), "b": file_of(w=np.float32([right]))}
    merged = float(safetensors.numpy.load(linear_combination(models, weights))["w"][0])
    assert min(left, right) <= merged <= max(left, right)


def test_one_hot_returns_the_candidate_to_the_byte() -> None:
    models = {name: file_of(w=np.float32([1, 2]), n=np.int64([7])) for name in "ab"}
    assert linear_combination(models, {"a": 1.0}) == models["a"]
    assert linear_combination(models, {"a": 0.0, "b": 1.0}) == models["b"]


@pytest.mark.parametrize(
    "weights", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": float("nan"), "b": 0.5}, {"a": 0.6, "b": 0.6}]
)
def test_weights_off_the_simplex_are_refused(weights: dict[str, float]) -> None:
    models = {name: file_of(w=np.float32([1])) for name in "ab"}
    with pytest.raises(InvalidInput, match="add up to 1"):
        linear_combination(models, weights)


@pytest.mark.parametrize(
    "other",
    [
        file_of(v=np.float32([1, 2])),
        file_of(w=np.float32([1, 2]), v=np.float32([1])),
        file_of(w=np.float32([[1, 2]])),
        file_of(w=np.float64([1, 2])),
        file_of(w=np.float32([1, 2, 3])),
    ],
)
def test_different_architectures_are_refused(other: bytes) -> None:
    models = {"a": file_of(w=np.float32([1, 2])), "b": other}
    with pytest.raises(IncompatibleCandidates, match="different architectures"):
        linear_combination(models, {"a": 0.5, "b": 0.5})


def test_integers_must_agree() -> None:
    same = {name: file_of(w=np.float32([1]), n=np.int64([3])) for name in "ab"}
    assert safetensors.numpy.load(linear_combination(same, {"a": 0.5, "b": 0.5}))["n"].tolist() == [3]
    differ = {**same, "b": file_of(w=np.float32([1]), n=np.int64([4]))}
    with pytest.raises(IncompatibleCandidates, match="not floating point"):
        linear_combination(differ, {"a": 0.5, "b": 0.5})


def test_a_damaged_file_is_named() -> None:
    with pytest.raises(IncompatibleCandidates, match="candidate b cannot be read"):
        linear_combination({"a": file_of(w=np.float32([1])), "b": b"nothing"}, {"a": 0.5, "b": 0.5})


# Both routes


def _several_types(seed: int) -> dict[str, np.ndarray]:
    """More than two pieces of each type, none of a whole number of pieces, and the odd shapes."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=2 * PIECE + 7)
    return {
        "z.weight": numbers.astype(np.float32).reshape(-1, 1),
        "double": numbers,
        "half": numbers.astype(np.float16),
        "a.bias": numbers[:5].astype(np.float32),
        "scalar": np.array(numbers[0], np.float32),
        "none": np.zeros((0, 3), np.float32),
        "count": np.arange(2 * PIECE + 1),
        "mask": np.array([True, False, True]),
        "ünï": np.int8([-1]),
    }


def test_both_routes_give_the_bytes_that_the_library_would_write(tmp_path: Path) -> None:
    tensors = {name: _several_types(seed) for seed, name in enumerate("abc")}
    models = {name: safetensors.numpy.save(values) for name, values in tensors.items()}
    weights = {"c": 0.3, "a": 0.6, "b": 0.1}
    expected = {}
    for key, first in tensors["c"].items():
        if np.issubdtype(first.dtype, np.floating):
            sums = 0.3 * first.astype(np.float64) + 0.6 * tensors["a"][key].astype(np.float64)
            expected[key] = np.asarray(sums + 0.1 * tensors["b"][key].astype(np.float64)).astype(first.dtype)
        else:
            expected[key] = first
    whole = safetensors.numpy.save(expected)
    assert linear_combination(models, weights) == whole
    assert merged_on_disk(tmp_path, models, weights) == whole


def test_both_routes_agree_on_bfloat16(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 0x7F80, size=(3, PIECE + 3)) | (rng.integers(0, 2, size=(3, PIECE + 3)) << 15)
    models = {name: bfloat_file(w=list(row)) for name, row in zip("abc", bits, strict=True)}
    weights = {"a": 0.25, "b": 0.5, "c": 0.25}
    assert merged_on_disk(tmp_path, models, weights) == linear_combination(models, weights)


FINITE_BFLOATS = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)


@given(st.lists(st.tuples(FINITE_BFLOATS, FINITE_BFLOATS), min_size=1), st.floats(0, 1))
@example([(0x3F80, 0x3F81)], 0.5)  # a tie of bfloat16
@example([(0x3F80, 0x3F81)], 0.5 - 2**-40)  # beside a tie, where float32 rounds onto it
@example([(0x3F81, 0x3F82)], 0.5 + 2**-40)
@example([(0x0000, 0x0001)], 0.5)  # below the smallest number
@example([(0x0001, 0x0002)], 0.5)
@example([(0x8000, 0x8000)], 0.5)
@example([(0x7F7F, 0x7F7F)], 1 / 3)  # the largest number
def test_bfloat16_is_rounded_once(pairs: list[tuple[int, int]], weight: float) -> None:
    """Against fractions: the nearest of all bfloat16 numbers to the float64 sum, and of two the even one."""
    weights = {"a": weight, "b": 1 - weight}
    left, right = zip(*pairs, strict=True)
    merged = bfloat_bits(linear_combination({"a": bfloat_file(w=left), "b": bfloat_file(w=right)}, weights))
    for found, a, b in zip(merged, left, right, strict=True):
        products = [share * _bfloat(bits) for share, bits in ((weight, a), (1 - weight, b)) if share]
        assert found == _nearest_bfloat(sum(products[1:], start=products[0]))


def _bfloat(bits: int) -> float:
    """The number behind sixteen bits: sign, eight of exponent, seven of fraction."""
    sign, exponent, fraction = bits >> 15, bits >> 7 & 0xFF, bits & 0x7F
    size = (fraction + (128 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 134)
    return -size if sign else size


def _nearest_bfloat(value: float) -> int:
    sign = 0x8000 if np.signbit(value) else 0
    low, high = 0, 0x7F80  # the bits of numbers >= 0 are in the numbers' order
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _bfloat(middle) <= abs(value) else (low, middle)
    below = Fraction(abs(value)) - Fraction(_bfloat(low))
    above = Fraction(_bfloat(high)) - Fraction(abs(value))
    return sign | (low if below < above or (below == above and low % 2 == 0) else high)


@given(st.permutations("abcd"), st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4))
def test_the_order_of_the_candidates_moves_a_sum_by_less_than_float32_shows(
    order: list[str], values: list[float]
) -> None:
    """Permuting candidates with their weights moves the float64 sum by a few of its units, so the rounded sum by at
    most one unit of float32."""
    weights = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
    models = {name: file_of(w=np.float32([value])) for name, value in zip("abcd", values, strict=True)}
    one = safetensors.numpy.load(linear_combination(models, weights))["w"]
    other = safetensors.numpy.load(linear_combination(models, {name: weights[name] for name in order}))["w"]
    allowed = np.spacing(np.float32(max(map(abs, values)))) * 2**-20
    assert abs(float(one[0]) - float(other[0])) <= max(float(np.spacing(abs(one[0]))), float(allowed))


def test_one_hot_returns_the_candidate_to_the_byte_by_both_routes(tmp_path: Path) -> None:
    everything = np.arange(2**16, dtype="<u2").view(np.float16)
    numbers = everything[np.isfinite(everything)]  # all of float16's, -0.0 and the smallest among them
    models = {
        "a": file_of(w=numbers, v=-numbers.astype(np.float32), n=np.int64([7])),
        "b": file_of(w=numbers[::-1].copy(), v=numbers.astype(np.float32), n=np.int64([8])),
    }
    for name in "ab":
        weights = {"a": 0.0, "b": 0.0, name: 1.0}
        assert linear_combination(models, weights) == models[name]
        assert merged_on_disk(tmp_path, models, weights) == models[name]
    bits = [bits for bits in range(2**16) if bits & 0x7F80 != 0x7F80]
    assert linear_combination({"a": bfloat_file(w=bits)}, {"a": 1.0}) == bfloat_file(w=bits)


def test_weights_are_used_as_they_are_and_never_normalised(tmp_path: Path) -> None:
    """These weights add up to 1 + 5e-13, which float64 parameters show; normalised they would give 1 exactly."""
    models = {name: file_of(w=np.float64([1.0])) for name in "ab"}
    weights = {"a": 0.5, "b": 0.5 + 5e-13}
    for content in (linear_combination(models, weights), merged_on_disk(tmp_path, models, weights)):
        assert safetensors.numpy.load(content)["w"][0] == 0.5 + (0.5 + 5e-13) > 1


# What is refused, by both routes, and then leaves nothing behind

FINE = file_of(w=np.float32([1, 2]), n=np.int64([7]))
UNFIT = {
    "another key": (file_of(v=np.float32([1, 2]), n=np.int64([7])), "different architectures: tensor v"),
    "one more": (file_of(w=np.float32([1, 2]), n=np.int64([7]), x=np.int8([1])), "tensor x is only in one"),
    "another shape": (
        file_of(w=np.float32([[1, 2]]), n=np.int64([7])),
        r"F32\[2\] in one and F32\[1, 2\] in the",
    ),
    "another type": (file_of(w=np.float16([1, 2]), n=np.int64([7])), r"F32\[2\] in one and F16\[2\] in the"),
    "another integer": (
        file_of(w=np.float32([1, 2]), n=np.int64([8])),
        "n is not floating point and differs",
    ),
    "truncated": (FINE[:-1], "candidate b cannot be read"),
    "too long": (FINE + b"\0", "candidate b cannot be read"),
    "half a header": (FINE[:40], "candidate b cannot be read"),
    "empty": (b"", "candidate b cannot be read"),
    "no header": (b"\xff" * 100, "candidate b cannot be read"),
    "a header that is no JSON": (FINE.replace(b"{", b"(", 1), "candidate b cannot be read"),
    "overlapping tensors": (FINE.replace(b"[8,16]", b"[0,8] "), "candidate b cannot be read"),
    "a shape beyond its bytes": (FINE.replace(b'"shape":[2]', b'"shape":[3]'), "as many bytes as its shape"),
    "a type without a name": (FINE.replace(b'"F32"', b'"F33"'), "the type F33, which is not supported"),
    "not a number": (
        file_of(w=np.float32([np.nan, 2]), n=np.int64([7])),
        "candidate b holds values in tensor w",
    ),
    "infinite": (
        file_of(w=np.float32([1, -np.inf]), n=np.int64([7])),
        "candidate b holds values in tensor w",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_models_are_refused_by_both_routes(case: str, tmp_path: Path) -> None:
    content, message = UNFIT[case]
    assert content != FINE
    models, weights = {"a": FINE, "b": content}, {"a": 0.5, "b": 0.5}
    with pytest.raises(IncompatibleCandidates, match=message):
        linear_combination(models, weights)
    with pytest.raises(IncompatibleCandidates, match=message):
        merged_on_disk(tmp_path, models, weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_float8_is_refused_for_it_is_not_an_integer() -> None:
    header = b'{"w":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8)
    model = len(header).to_bytes(8, "little") + header + b"\x38" * 8
    with pytest.raises(IncompatibleCandidates, match="type F8_E4M3, which is not supported"):
        linear_combination({"a": model}, {"a": 1.0})


def test_a_model_without_weight_is_not_even_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(FINE)
    merge_files({"a": tmp_path / "a", "b": tmp_path / "nowhere"}, {"a": 1.0, "b": 0.0}, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == FINE


def test_files_that_cannot_be_opened_or_written_cost_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(FINE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidInput, match="candidate b cannot be opened"):
        merge_files({"a": tmp_path / "a", "b": tmp_path / "b"}, {"a": 0.5, "b": 0.5}, tmp_path / "out")
    with pytest.raises(IncompatibleCandidates, match="candidate a cannot be read"):
        merge_files({"a": tmp_path / "folder"}, {"a": 1.0}, tmp_path / "out")
    for out in (tmp_path / "none" / "out", tmp_path / "folder"):
        with pytest.raises(InvalidInput, match="cannot be written"):
            merge_files({"a": tmp_path / "a"}, {"a": 1.0}, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


def test_a_merge_may_take_the_place_of_one_of_its_candidates(tmp_path: Path) -> None:
    models = {"a": file_of(w=np.float32([1, 2])), "b": file_of(w=np.float32([3, 6]))}
    for name, content in models.items():
        (tmp_path / name).write_bytes(content)
    merge_files({name: tmp_path / name for name in models}, {"a": 0.5, "b": 0.5}, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == file_of(w=np.float32([2, 4]))
    assert (tmp_path / "b").read_bytes() == models["b"]


def test_a_file_that_shrinks_under_the_merge_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {name: file_of(w=np.ones(40 * PIECE, np.float32)) for name in "ab"}
    for name, content in models.items():
        (tmp_path / name).write_bytes(content)
    once = threading.Event()
    write = sources.write_all

    def shrink_then_write(*arguments: object) -> None:
        if not once.is_set():
            once.set()
            os.truncate(tmp_path / "b", 1000)
        write(*arguments)

    monkeypatch.setattr(sources, "write_all", shrink_then_write)
    with pytest.raises(IncompatibleCandidates, match=r"candidate b cannot be read .*cut short"):
        merge_files({name: tmp_path / name for name in models}, {"a": 0.5, "b": 0.5}, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


MEMORY_OF_A_MERGE = """
import re, sys
from pathlib import Path
from tasks.merging import linear_combination, merge_files

def anonymous(field):  # MB; a process's peak of anonymous memory is not kept by the kernel, so sample in a thread
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024

import threading
paths = {path.name: path for path in sorted(Path(sys.argv[1]).iterdir())}
weights = {name: 1 / len(paths) for name in paths}
before, peak, done = anonymous("RssAnon"), 0.0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous("RssAnon"))

watcher = threading.Thread(target=watch)
watcher.start()
if sys.argv[2] == "files":
    merge_files(paths, weights, Path(sys.argv[3]))
else:
    linear_combination({name: path.read_bytes() for name, path in paths.items()}, weights)
done.set()
watcher.join()
print(peak - before, "torch" in sys.modules)
"""


def test_a_merge_of_files_holds_little_of_them(tmp_path: Path) -> None:
    """Eight models of 40 MB. A loader of everything holds 320 MB, which the same measurement shows; the other route
    holds less than one of them."""
    models = tmp_path / "models"
    models.mkdir()
    for k in range(8):
        (models / f"m{k}").write_bytes(file_of(w=np.full(10_000_000, k, np.float32)))

    def grown(route: str) -> float:
        command = [sys.executable, "-c", MEMORY_OF_A_MERGE, str(models), route, str(tmp_path / "out")]
        megabytes, torch = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert torch == "False"
        return float(megabytes)

    assert grown("memory") > 300
    assert grown("files") < 40
    merged = safetensors.numpy.load_file(tmp_path / "out")["w"]
    assert set(merged.tolist()) == {3.5}
