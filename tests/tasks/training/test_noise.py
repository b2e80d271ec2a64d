"""The secure noise source: Gaussian, independent, never repeated, exactly as wide as said, no key to take."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tasks.training.noise import INJECTED, SECURE, SecureNoise, SeededNoise

MANY = 400_000
_BLOCK = 2**18


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    return SecureNoise().standard_normal(MANY).numpy()


class Chosen(SecureNoise):
    """The secure source, told which uniforms to use instead of its stream's."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.pair = (first, second)

    def _uniform(self, count: int) -> Tensor:
        return torch.tensor(self.pair, dtype=torch.float64).repeat_interleave(count // 2)


def test_moments(numbers: np.ndarray) -> None:
    """Each within six standard errors: a good source fails once in 10^8 runs."""
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs((numbers**power).mean() - mean) < 6 * math.sqrt(variance / MANY)


def test_distribution(numbers: np.ndarray) -> None:
    assert stats.kstest(numbers, "norm").pvalue > 1e-8
    for part in (numbers[::2], numbers[1::2], numbers[: MANY // 2], numbers[MANY // 2 :]):
        assert stats.kstest(part, "norm").pvalue > 1e-8
    far = np.abs(numbers) > 3
    assert abs(far.mean() - 0.0026998) < 6 * math.sqrt(0.0027 / MANY)


def test_numbers_are_independent_of_their_neighbours_and_of_their_partners(numbers: np.ndarray) -> None:
    """Of the two numbers of a pair, one is half of the array away; squares show a shared radius."""
    half = MANY // 2
    for values in (numbers, numbers**2, np.abs(numbers)):
        values = values - values.mean()
        values = values / values.std()
        for lag in (1, 2, 3, 4, half, half - 1, half + 1):
            assert abs((values[:-lag] * values[lag:]).mean()) < 6 / math.sqrt(MANY - lag)


def test_uniforms_fill_every_bit() -> None:
    """Each of the 53 bits is heads half of the time, and no two go together."""
    count = 40_000
    uniforms = SecureNoise()._uniform(count).numpy()
    assert ((uniforms >= 0) & (uniforms < 1)).all()
    whole = (uniforms * 2**53).astype(np.int64)
    assert (whole / 2**53 == uniforms).all()
    bits = np.array([(whole >> bit) & 1 for bit in range(53)]) * 2.0 - 1
    means = bits.mean(axis=1)
    assert np.abs(means).max() < 6.5 / math.sqrt(count)
    together = bits @ bits.T / count - np.eye(53)
    assert np.abs(together).max() < 6.5 / math.sqrt(count)


def test_tails_reach_beyond_what_torch_can_draw() -> None:
    """torch's float32 Gaussian ends near 5.8 standard deviations; this one at sqrt(2 x 53 ln 2) = 8.57."""
    furthest = Chosen(1 - 2**-53, 0.0).standard_normal(2)
    assert float(furthest[0]) == pytest.approx(math.sqrt(2 * 53 * math.log(2)), rel=1e-12)
    assert float(furthest[0]) > 8.5
    assert float(Chosen(1 - 2**-30, 0.5).standard_normal(2)[0]) < -6.4
    assert Chosen(0.0, 0.3).standard_normal(2).tolist() == [0, 0]
    assert bool(torch.isfinite(Chosen(1 - 2**-53, 1 - 2**-53).standard_normal(8)).all())


def test_a_pair_is_the_point_of_that_radius_and_angle() -> None:
    for first, second in ((0.25, 0.125), (0.9, 0.77), (1e-9, 0.5)):
        one, other = Chosen(first, second).standard_normal(2).tolist()
        radius = math.sqrt(-2 * math.log1p(-first))
        assert one == pytest.approx(radius * math.cos(2 * math.pi * second), rel=1e-6, abs=1e-12)
        assert other == pytest.approx(radius * math.sin(2 * math.pi * second), rel=1e-6, abs=1e-12)


def test_never_the_same_twice_within_between_and_across_calls() -> None:
    """53-bit numbers: among 20,000 an accidental repetition has a chance below 10^-7."""
    one, other = SecureNoise(), SecureNoise()
    drawn = torch.cat(
        [source.standard_normal(2_500) for source in (one, other, one, other) for _ in range(2)]
    )
    assert len(set(drawn.tolist())) == len(drawn) == 20_000


def test_a_block_s_end_changes_nothing() -> None:
    """Large tensors are made block by block: no number is left unset, none made twice."""
    for count in (2 * _BLOCK - 1, 2 * _BLOCK, 2 * _BLOCK + 1, 2 * _BLOCK + 3):
        made = SecureNoise().standard_normal(count)
        assert made.shape == (count,)
        assert bool(torch.isfinite(made).all())
        assert bool((made.abs() < 8.6).all())
        assert len(made.unique()) > count - 3
        middle, end = made[_BLOCK - 500 : _BLOCK + 500], made[-1000:]
        for part in (middle, end):
            assert 0.75 < float(part.std()) < 1.3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_any_number_of_entries(count: int) -> None:
    made = SecureNoise().standard_normal(count)
    assert made.shape == (count,)
    assert made.dtype == torch.float64
    assert bool((made != 0).all())


def test_the_width_is_what_was_asked_for_to_the_last_bit() -> None:
    """A total of zeros shows the noise itself: the pair's number times the deviation, rounded to float32 once."""
    for deviation in (1e-6, 0.3, 2.0, 12345.678):
        source = Chosen(0.7, 0.2)
        expected = source.standard_normal(6) * deviation
        assert torch.equal(source.added(torch.zeros(2, 3), deviation).flatten(), expected.float())


def test_the_sum_is_made_in_float64_and_rounded_once() -> None:
    """2^25 + 2 is halfway between two float32; noise of 1e-9 decides, which a rounding before would lose."""
    total = torch.full((2,), 2.0**25 + 4, dtype=torch.float32)  # float32 knows multiples of 4 here
    source = Chosen(0.7, 0.0)
    unit = float(source.standard_normal(2)[0])
    just_above, just_below = source.added(total, (2 + 1e-7) / unit), source.added(total, (2 - 1e-7) / unit)
    assert just_above.dtype == torch.float32
    assert (float(just_above[0]), float(just_below[0])) == (2.0**25 + 8, 2.0**25 + 4)
    assert float(np.float32(2 + 1e-7)) == 2  # the noise alone, rounded first, would not decide anything
    wide = source.added(total.double(), 1.0)
    assert wide.dtype == torch.float64
    assert float(wide[0]) == 2.0**25 + 4 + unit


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(torch.Generator().manual_seed(1))])
def test_the_total_is_left_alone_and_every_entry_gets_its_own(source: Any) -> None:
    total = torch.zeros(3, 1, 5, requires_grad=True)
    before = total.detach().clone()
    noisy = source.added(total.detach(), 1.0)
    assert torch.equal(total, before)
    assert noisy.shape == total.shape
    assert noisy.data_ptr() != total.data_ptr()
    assert len(noisy.unique()) == 15
    assert source.added(torch.zeros(0, 4), 1.0).shape == (0, 4)
    spread = torch.zeros(4, 6).T  # not contiguous
    assert source.added(spread, 1.0).shape == (6, 4)
    assert len(source.added(spread, 1.0).unique()) == 24


def test_nothing_else_that_is_random_reaches_it() -> None:
    """Neither torch's nor Python's nor numpy's seeds make two sources alike."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        drawn.append(SecureNoise().standard_normal(4))
    before = torch.get_rng_state()
    SecureNoise().standard_normal(4)
    assert not torch.equal(*drawn)
    assert torch.equal(before, torch.get_rng_state())


def test_there_is_no_key_to_take() -> None:
    """What is held is the running cipher alone: neither key nor counter can be read off it."""
    source = SecureNoise()
    assert set(vars(source)) == {"_stream"}
    readable = [name for name in dir(source._stream) if not name.startswith("_")]
    assert set(readable) <= {
        "authenticate_additional_data",
        "finalize",
        "reset_nonce",
        "update",
        "update_into",
    }
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(source)
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(source)


def test_what_a_source_says_of_itself() -> None:
    assert SecureNoise().description == SECURE
    assert SeededNoise(torch.Generator()).description == INJECTED
    assert "NOT PRIVATE" in INJECTED


def _draw(pipe: Any) -> None:
    pipe.send(SecureNoise().standard_normal(4).tolist())
    pipe.close()


def test_forked_processes_draw_other_noise() -> None:
    """A source made after a fork has fresh entropy; so a run, which makes its own, never shares noise."""
    context = multiprocessing.get_context("fork")
    drawn = [SecureNoise().standard_normal(4).tolist()]
    for _ in range(2):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_draw, args=(there,))
        child.start()
        assert here.poll(60)
        drawn.append(here.recv())
        child.join(60)
    assert len({number for numbers in drawn for number in numbers}) == 12
