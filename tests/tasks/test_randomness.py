"""Noise that nobody can know beforehand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tasks.randomness import executed_probability, unpredictable_generator


def words_of(generator: torch.Generator) -> list[int]:
    return generator.get_state().numpy()[24 : 24 + 8 * 624].view(np.uint64).tolist()


def test_why_seeding_is_not_enough() -> None:
    """If one of these two facts changes, tasks.randomness may become simpler."""
    assert torch.Generator().initial_seed() == torch.Generator().initial_seed()  # constant in a fresh process
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5 + 2**32)
    assert torch.equal(torch.rand(9, generator=one), torch.rand(9, generator=other))  # 32 bits count


def test_the_whole_state_is_drawn_and_used() -> None:
    """The draws are those of a Mersenne Twister, in Python's own implementation, from all 624 words."""
    generator = unpredictable_generator()
    words = words_of(generator)
    twister = random.Random()
    twister.setstate((3, (*words, 624), None))
    drawn = torch.randint(0, 2**28 - 1, (2000,), generator=generator).tolist()
    assert drawn == [twister.getrandbits(32) % (2**28 - 1) for _ in range(2000)]
    assert len(set(words)) > 600


def test_two_generators_share_nothing() -> None:
    one, other = words_of(unpredictable_generator()), words_of(unpredictable_generator())
    assert len(set(one) & set(other)) <= 4  # of 624 words with 32 bits each: more by chance in 1e-22


@pytest.mark.parametrize(
    ("stated", "executed"),
    [(1.0, 1.0), (0.25, 0.25), (1e-8, 2**-24), (0.01, 167773 / 2**24), (1 - 1e-12, 1.0)],
)
def test_coins_fall_with_the_probability_that_is_accounted(stated: float, executed: float) -> None:
    assert executed_probability(stated) == executed
    falls = np.float32(executed) - np.float32(2**-24) if executed < 1 else np.float32(1 - 2**-24)
    assert falls < np.float32(stated) or stated == 1.0  # the largest value of torch.rand below it still falls
