"""Equal steps as one block: how far a record's influence builds up, stretches and is paid, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from accounting.rounding import ULP, sum_up

_LAST = 40.0  # e-folds: what would grow by more within one stretch is paid at once,
_LEAD = 4.0  # but for the first of them, where debts from before the stretch are paid
_GROWTH_IN_BLOCK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Equal consecutive steps of one run, in the units of the parameters."""

    steps: int  # >= 1
    moved: float  # s, how far one record moves a step, > 0
    noise: float  # nu, standard deviation per coordinate, >= 0
    lipschitz: float  # c in [0, inf]; inf when unknown


@dataclass(frozen=True, slots=True)
class Block:
    """Steps paid by one rule: a in the last step, a r^k in the k-th before it (r = c for c <= 1, else 1)."""

    moved: float
    noise: float
    steps: int
    growth: float  # c^steps
    moved_sum: float  # sum of c^k
    paid_sum: float  # sum of (c r)^k
    square_sum: float  # sum of r^2k
    log_growth: float
    slack: float  # relative rounding error of the sums
    growth_slack: float

    @property
    def constant(self) -> bool:
        """Whether all steps of the block are paid the same."""
        return self.steps == 1 or self.log_growth >= 0


def block_of(stretch: Stretch) -> Block:
    """The sums of a stretch: of one step, of c <= 1, or of c > 1 with little growth."""
    c, n = stretch.lipschitz, stretch.steps
    log = math.log1p(c - 1) if 0.5 <= c <= 2 else math.log(c)
    if n == 1 or c == 1:
        sums, slack = (float(n), float(n), float(n)), 0.0
    else:
        single = math.expm1(n * log) / (c - 1)
        double = math.expm1(2 * n * log) / ((c - 1) * (c + 1))
        sums = (single, double, double) if c < 1 else (single, single, float(n))
        slack = (16 + (16 * n * log if c > 1 else 0.0)) * ULP
    return Block(
        stretch.moved,
        stretch.noise,
        n,
        c if n == 1 else math.exp(n * log),
        *sums,
        log_growth=n * log,
        slack=slack,
        growth_slack=(8 + 8 * min(n * abs(log), 800.0)) * ULP,
    )


def after_block(block: Block, z: float, wanted: float) -> tuple[float, float]:
    """(z after the block, rounded up; the payment of its last step, at most what is owed)."""
    kept = block.growth * z * (1 + block.growth_slack)
    owed = (kept + block.moved * block.moved_sum) / block.paid_sum
    paid = min(wanted, owed)
    if block.constant:  # exact where payment and movement nearly cancel
        gained = (block.moved - paid) * block.moved_sum
        error = block.slack * abs(gained)
    else:
        gained = block.moved * block.moved_sum - paid * block.paid_sum
        error = block.slack * (block.moved * block.moved_sum + paid * block.paid_sum)
    error += 8 * ULP * (kept + abs(gained))
    return max(0.0, kept + gained + error), paid


def cost(shift: float, noise: float) -> float:
    """`(shift / noise)^2`, rounded up; 0 for no shift, infinite for a shift without noise."""
    if shift == 0:
        return 0.0
    ratio = shift / noise if noise > 0 else math.inf
    return ratio * ratio * (1 + 8 * ULP)


def total_up(values: Iterable[float]) -> float:
    """The sum of non-negative numbers, rounded up; infinite where one of them is no number."""
    terms = list(values)
    return sum_up(terms) if all(term >= 0 for term in terms) else math.inf


def growing_pieces(stretch: Stretch) -> tuple[list[Stretch], int, list[Stretch]]:
    """Cut a long stretch of c > 1 into blocks: (the first ones, how many steps to pay at once, the last ones).

    Blocks of constant payments, over which a debt grows by 2 % at most, cover the first 4 and the last 40
    e-folds of growth. Between them nothing is worth leaving over: all is paid at once.
    """
    rate = math.log(stretch.lipschitz)
    size = max(math.floor(_GROWTH_IN_BLOCK / rate), 1)
    last = max(math.floor(_LAST / rate), 1)
    first = max(math.floor(_LEAD / rate), 1)
    if first + last >= stretch.steps:
        return _pieces(stretch, stretch.steps, size), 0, []
    return _pieces(stretch, first, size), stretch.steps - first - last, _pieces(stretch, last, size)


def _pieces(stretch: Stretch, steps: int, size: int) -> list[Stretch]:
    whole, odd = divmod(steps, size)
    odd_piece = [replace(stretch, steps=odd)] if odd else []
    return odd_piece + [replace(stretch, steps=size)] * whole
