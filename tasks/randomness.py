"""Random numbers that nobody can know beforehand: all of a generator's state from the operating system.

Two traps make torch's own seeding unfit for privacy:

- a fresh process starts its default CPU generator from a *constant* seed, so noise drawn from it is the
  same, publicly known noise every time;
- `Generator.manual_seed` uses only the low 32 bits of a seed on CPU, however long it is: 2^32 tries find it.

So all 624 words of the Mersenne Twister's state are drawn from the operating system.
"""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

from accounting.errors import RemergeError

if TYPE_CHECKING:
    import torch

_WORDS = 624
_OFFSET = 24  # bytes before the words in torch's CPU generator state: seed, left, seeded, next

NOISE_SOURCE = (
    "torch's Mersenne Twister (CPU), its whole 19,937-bit state drawn from the operating system's entropy "
    "for this run alone and kept nowhere; not a cryptographic generator, and Gaussian samples are 32-bit "
    "floats whose tails end near 5.8 standard deviations: not hardened against floating-point attacks"
)
COIN_SOURCE = (
    "a second Mersenne Twister, seeded in the same way and apart from the noise; each coin compares 24 "
    "random bits with the sampling probability"
)


class UnknownGenerator(RemergeError):
    """This version of torch keeps its generator's state in another form than is known here."""


def unpredictable_generator() -> torch.Generator:
    """A new CPU generator whose whole state is fresh entropy from the operating system.

    Raises:
        UnknownGenerator: torch's state has another layout, so that it cannot be filled safely.
    """
    import numpy as np
    import torch

    generator = torch.Generator()
    seed = secrets.randbits(32)
    generator.manual_seed(seed)  # leaves the generator at the start of a block of 624 words
    state = generator.get_state().numpy().copy()
    words = state[_OFFSET : _OFFSET + 8 * _WORDS].view(np.uint64)
    second = (1812433253 * (seed ^ (seed >> 30)) + 1) % 2**32  # the Mersenne Twister's own seeding rule
    if len(words) != _WORDS or int(words[0]) != seed or int(words[1]) != second:
        raise UnknownGenerator(
            f"torch {torch.__version__} keeps its random state in an unknown form, so private noise "
            "cannot be seeded safely; install the version of torch that remerge names."
        )
    words[:] = np.frombuffer(secrets.token_bytes(4 * _WORDS), dtype=np.uint32)
    generator.set_state(torch.from_numpy(state))
    return generator


def executed_probability(sampling_probability: float) -> float:
    """The probability with which a Poisson coin really falls, at least `sampling_probability`.

    Opacus tosses `torch.rand(n) < q`: a float32 that is a multiple of 2^-24 against q as a float32. The
    accountant must use what was executed: at q = 1e-8 the real rate is six times that.

    Args:
        sampling_probability: q in (0, 1], as the recipe states it.
    """
    import numpy as np

    compared = float(np.float32(sampling_probability))
    return min(1.0, max(sampling_probability, math.ceil(compared * 2**24) / 2**24))
