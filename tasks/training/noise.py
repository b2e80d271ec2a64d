"""Gaussian noise for the sums of gradients: from a cryptographic generator, or, for public twins and tests, a seed."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SECURE = (
    "AES-256 in counter mode, keyed by the operating system's entropy for this process and run alone and kept "
    "nowhere; 53 random bits a uniform, Box-Muller in float64 (tails end near 8.5 standard deviations), added to the "
    "sum in float64 and rounded once to the parameters' precision: no proof against attacks on floating-point "
    "rounding or on timing"
)
INJECTED = "INJECTED FOR A TEST: NOT PRIVATE"
_BLOCK = 2**18  # pairs of numbers made at once: 16 MiB of working memory


class NoiseSource(Protocol):
    """Where a run's noise comes from."""

    description: str  # goes into the trajectory's notes

    def added(self, total: Tensor, deviation: float) -> Tensor:
        """`total` plus fresh noise of this standard deviation in every entry; `total` itself is left alone."""
        ...


@dataclass(slots=True)
class SeededNoise:
    """torch's Gaussian from a given generator: for public twins, whose noise hides nothing, and for tests."""

    generator: torch.Generator
    description: str = INJECTED

    def added(self, total: Tensor, deviation: float) -> Tensor:
        import torch

        noise = torch.normal(0.0, deviation, total.shape, generator=self.generator, dtype=total.dtype)
        return total + noise.to(total.device)


class SecureNoise:
    """Gaussian noise that nobody can predict or make again: the key is drawn here and never leaves this object."""

    description = SECURE

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key, start = secrets.token_bytes(32), secrets.token_bytes(16)
        self._stream: Any = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor()

    def added(self, total: Tensor, deviation: float) -> Tensor:
        import torch

        noise = self.standard_normal(total.numel()).reshape(total.shape).mul_(deviation)
        return (total.detach().to("cpu", torch.float64) + noise).to(total.device, total.dtype)

    def standard_normal(self, count: int) -> Tensor:
        """Independent standard normal numbers, float64, shape (count,)."""
        import torch

        made = torch.empty(count + count % 2, dtype=torch.float64).reshape(2, -1)  # numbers are made in pairs
        for start in range(0, made.shape[1], _BLOCK):
            block = made[:, start : start + _BLOCK]
            first, second = self._uniform(2 * block.shape[1]).reshape(2, -1)
            radius = first.neg_().add_(1).log_().mul_(-2).sqrt_()  # 1 - first lies in (0, 1]
            angle = second.mul_(2 * math.pi)
            torch.mul(radius, angle.cos(), out=block[0])
            torch.mul(radius, angle.sin(), out=block[1])
        return made.reshape(-1)[:count]

    def _uniform(self, count: int) -> Tensor:
        """Independent multiples of 2**-53 in [0, 1), float64, shape (count,)."""
        import torch

        stream = bytearray(self._stream.update(bytes(8 * count)))
        bits = torch.frombuffer(stream, dtype=torch.int64)
        return bits.bitwise_and_(2**53 - 1).to(torch.float64).mul_(2.0**-53)
