"""Noise that nobody can know beforehand."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import torch

from tasks.randomness import unpredictable_generator


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


def test_noise_differs_between_two_fresh_processes() -> None:
    """Also where a script seeds everything it knows of, as training scripts like to."""
    script = (
        "import json, random, numpy, torch; random.seed(1); numpy.random.seed(1); torch.manual_seed(1)\n"
        "from tasks.randomness import unpredictable_generator\n"
        "noise = torch.randn(20, generator=unpredictable_generator())\n"
        "print(json.dumps([noise.tolist(), torch.rand(3).tolist()]))"
    )
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    one, other = (json.loads(process.communicate(timeout=120)[0]) for process in running)
    assert one[1] == other[1]  # torch's own generator: the same in both
    assert sum(a == b for a, b in zip(one[0], other[0], strict=True)) <= 2
