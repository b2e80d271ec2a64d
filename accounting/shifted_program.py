"""Which share of a record's influence to pay in which step: the program behind shifted interpolation.

A run's hidden parameters under two neighbouring data sets are kept within `z_t` of each other: a step moves
them apart by at most `s_t` (sensitivity), stretches their distance by at most `c_t` (Lipschitz constant of the
update without its noise), and shifting the step's noise, of standard deviation `nu_t`, by a *payment* `a_t`
brings them together again:

    z_t = c_t z_{t-1} + s_t - a_t >= 0,   z_0 = 0,   at the cost (a_t / nu_t)^2.

What is left, `R_i = c_T z_{T-1} + s_T`, is what run i brings into the merge; the merge's own noise must hide
`W = sum_i lambda_i R_i`, at the cost `W^2 / V`, `V = tau^2 + sum_i lambda_i^2 nu_{i,T}^2`. The sum of all
costs is mu^2.

**The best payments, exactly.** In units of R (`C_t` the product of all later c), write `b_t = C_t a_t`; then a
step costs `b_t^2 / x_t`, `x_t = C_t^2 nu_t^2`, and z >= 0 says that the sums of b stay below those of
`C_t s_t`. For a given price `theta_i = lambda_i W / V` of what a run leaves over, its best payments are
`b_t = x_t min(theta_i, g_t)`, where g are the slopes of the greatest convex minorant of the points
(sum of x, sum of C s): the Karush-Kuhn-Tucker multipliers of z >= 0 are the increases of g. The minorant does
not depend on theta, so the runs meet in one monotone equation for W, which sorting its kinks solves.

**Equal steps are one block**, however many: for c <= 1 the points of a block lie on a concave curve, which a
convex minorant touches at the ends only. For c > 1 they lie on a convex one: there up to 256 steps are taken
one by one and longer stretches in blocks of constant payments over which c grows by 2 % at most (which loses
less than 1e-4 of a cost); all before the last 40 e-folds of growth is paid at once.

**Rounding.** Nothing here trusts the optimum. `carry` follows the payments it is given through the recursion,
z rounded up, and clips a payment to what is owed; `cost` is rounded up too. Any payments are then a valid
bound, since paying more than is owed merely wastes: z = max(0, c z + s - a) is proved by the same coupling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accounting.errors import InvalidInput
from accounting.rounding import ULP, sum_up, up

Array = NDArray[np.float64]

_GROWTH = 40.0  # e-folds: a debt that would grow by more is paid at once
_DECAY = -300.0  # e-folds: what is forgotten by more is never paid, and C^2 stays above the smallest float
_SINGLE = 256  # steps of a growing stretch that are taken one by one
_GROWTH_IN_BLOCK = 0.02
_OVERPAID = 1e-9  # relative: a payment above what is owed by more than rounding


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks in order, begun with z = 0, and the convex minorant of what they let a record move.

    The arrays `unit` and `slope` have one entry a block: at price theta the payment of the block's last step
    is `min(theta, slope) * unit`. `x` and `debt` have one a pool of blocks of one slope: at prices above
    `pool_slope` a pool pays its whole debt, below `theta * x`, in units of R.
    """

    blocks: tuple[Block, ...]
    unit: Array
    slope: Array
    x: Array
    debt: Array
    pool_slope: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A run's own steps: what is settled whatever the weights, what is open, and the last step."""

    settled: tuple[Chunk, ...]  # each must end with z = 0
    paid: tuple[Stretch, ...]  # every step paid at once
    open: Chunk
    last: Stretch | None  # None: the run has no step of its own, or its path is a shared prefix

    @property
    def settled_cost(self) -> float:
        """The cost of all that must end with z = 0, rounded up; infinite where a step there has no noise."""
        at_once = (stretch.steps * cost(stretch.moved, stretch.noise) for stretch in self.paid)
        return sum_up([*at_once, *map(_settle, self.settled)]) * (1 + 4 * ULP)


def prepare(stretches: Sequence[Stretch], *, ends_at_zero: bool = False) -> Path:
    """Cut a run's own steps where z must be 0, and lay out each part's minorant.

    Args:
        stretches: from z = 0 on, in order; may be empty.
        ends_at_zero: for a prefix shared with other runs: all of it is settled, nothing stays open.
    """
    body, last = list(stretches), None
    if body and not ends_at_zero:
        last = replace(body[-1], steps=1)
        body[-1:] = [replace(last, steps=body[-1].steps - 1)] if body[-1].steps > 1 else []
    if last is not None and last.lipschitz == 0:  # forgets all that was before
        body = []
    parts: list[list[Stretch]] = [[]]
    paid: list[Stretch] = []
    for stretch in body:
        if stretch.lipschitz == 0:  # nothing before counts; z restarts at 0
            parts, paid = [[replace(stretch, steps=1, lipschitz=1.0)]], []
        elif math.isinf(stretch.lipschitz):  # z must be 0 before each of these steps
            if stretch.steps > 1:
                paid.append(replace(stretch, steps=stretch.steps - 1))
            parts.append([replace(stretch, steps=1, lipschitz=1.0)])
        elif stretch.lipschitz > 1 and stretch.steps > _SINGLE:
            at_once, pieces = _growing(stretch)
            if at_once:
                paid.append(replace(stretch, steps=at_once))
                parts.append([])
            parts[-1] += pieces
        elif stretch.lipschitz > 1:
            parts[-1] += [replace(stretch, steps=1)] * stretch.steps
        else:
            parts[-1].append(stretch)
    if last is None or math.isinf(last.lipschitz):
        parts.append([])
    after = math.log(last.lipschitz) if last and 0 < last.lipschitz < math.inf else 0.0
    settled, open_ = [], _chunk([], 0.0)
    for index, part in enumerate(parts):
        *closed, final = _chunks(part, after if index == len(parts) - 1 else 0.0)
        settled += closed
        if index == len(parts) - 1:
            open_ = final
        else:
            settled.append(final)
    return Path(settled=tuple(settled), paid=tuple(paid), open=open_, last=last)


def carry(chunk: Chunk, payments: Sequence[float], *, strict: bool = True) -> tuple[float, float]:
    """Follow payments through a chunk.

    Args:
        chunk: its blocks, begun with z = 0.
        payments: of each block's last step, >= 0, shape (blocks,).
        strict: refuse a payment above what is owed; else clip it to that.

    Returns:
        (z at the end, the sum of the costs), both rounded up.

    Raises:
        InvalidInput: payments that are negative or NaN, or (strict) make z negative.
    """
    if len(payments) != len(chunk.blocks):
        raise InvalidInput(f"{len(payments)} payments were given for {len(chunk.blocks)} blocks of steps.")
    z, costs = 0.0, []
    for block, given in zip(chunk.blocks, payments, strict=True):
        payment = float(given)
        if not payment >= 0:
            raise InvalidInput(f"Payments must be numbers of at least 0, but {payment!r} was given.")
        kept = block.growth * z * (1 + block.growth_slack)
        owed = kept + block.moved * block.moved_sum
        if payment * block.paid_sum > owed:
            if strict and payment * block.paid_sum > owed * (1 + _OVERPAID):
                raise InvalidInput("A payment exceeds what is owed, which would make z negative.")
            payment = owed / block.paid_sum
        if block.moved_sum == block.paid_sum:  # exact where payment and movement nearly cancel
            gained = (block.moved - payment) * block.moved_sum
            error = block.slack * abs(gained)
        else:
            gained = block.moved * block.moved_sum - payment * block.paid_sum
            error = block.slack * (block.moved * block.moved_sum + payment * block.paid_sum)
        error += 8 * ULP * (kept + abs(gained))
        z = max(0.0, kept + gained + error)
        costs.append(cost(payment, block.noise) * block.square_sum * (1 + block.slack))
    return z, sum_up(costs)


def cost(shift: float, noise: float) -> float:
    """`(shift / noise)^2`, rounded up; 0 for no shift, infinite for a shift without noise."""
    if shift == 0:
        return 0.0
    ratio = shift / noise if noise > 0 else math.inf
    return ratio * ratio * (1 + 8 * ULP)


def price(chunks: Sequence[Chunk], weights: Array, moved: float, variance: float) -> float:
    """The root p = W / V of `W = moved + sum_i weights_i * (what chunk i leaves over at price weights_i p)`.

    The left-over is piecewise linear in p: with the pools in falling order of the price at which they pay in
    full, the root is the largest of (what the first pools and the last steps owe) / (V + what they pay).

    Args:
        chunks: shape (runs,).
        weights: > 0, shape (runs,).
        moved: `sum_i lambda_i s_{i,T}`.
        variance: V, > 0.
    """
    shares = np.repeat(weights, [len(chunk.x) for chunk in chunks])
    slopes, debts, x = (
        np.concatenate([np.zeros(0), *(getattr(chunk, name) for chunk in chunks)])
        for name in ("pool_slope", "debt", "x")
    )
    with np.errstate(over="ignore", under="ignore"):
        order = np.argsort(-slopes / shares, kind="stable")
        numerators = np.cumsum(np.concatenate(([moved], (shares * debts)[order])))
        denominators = np.cumsum(np.concatenate(([variance], (shares * shares * x)[order])))
    return float(np.max(numerators / denominators))


def payments_at(chunk: Chunk, theta: float) -> Array:
    """The payments of each block's last step at price theta; infinity pays all debts by the chunk's end."""
    capped = np.where(chunk.unit > 0, np.minimum(chunk.slope, theta), 0.0)
    payments: Array = capped * chunk.unit
    return payments


def _settle(chunk: Chunk) -> float:
    """The cost of a chunk that must end with z = 0: what rounding leaves over is paid in the last step."""
    if not chunk.blocks:
        return 0.0
    payments = payments_at(chunk, math.inf)
    left, paid = carry(chunk, payments.tolist(), strict=False)
    final, block = up(float(payments[-1])), chunk.blocks[-1]
    extra = math.inf if left > 0 and block.noise == 0 else 0.0
    if left > 0 and block.noise > 0:
        extra = left / block.noise * ((2 * final + left) / block.noise) * (1 + 8 * ULP)
    return paid + extra


def _growing(stretch: Stretch) -> tuple[int, list[Stretch]]:
    """How many steps of a long stretch of c > 1 are paid at once, and the pieces of the rest."""
    rate = math.log(stretch.lipschitz)
    rest = min(stretch.steps, max(math.floor(_GROWTH / rate), 1))
    size = min(rest, max(math.floor(_GROWTH_IN_BLOCK / rate), 1))
    whole, odd = divmod(rest, size)
    pieces = [replace(stretch, steps=odd)] if odd else []
    return stretch.steps - rest, pieces + [replace(stretch, steps=size)] * whole


def _chunks(stretches: Iterable[Stretch], after: float) -> list[Chunk]:
    """Cut where a debt would grow by more than 40 e-folds; the last chunk is followed by e^after."""
    parts: list[list[Stretch]] = [[]]
    ends, total = [after], after
    for stretch in reversed(list(stretches)):
        if total > _GROWTH:
            parts.append([])
            total = 0.0
            ends.append(total)
        parts[-1].append(stretch)
        total += stretch.steps * math.log(stretch.lipschitz)
    return [_chunk(part[::-1], end) for part, end in zip(parts[::-1], ends[::-1], strict=True)]


def _chunk(stretches: Sequence[Stretch], after: float) -> Chunk:
    blocks = tuple(_block(stretch) for stretch in stretches)
    scales, total = [], after
    for block in reversed(blocks):
        scales.append(math.exp(total) if total > _DECAY else 0.0)  # C after the block
        total += block.log_growth
    units: list[float] = []
    pools: list[list[float]] = []  # x, debt, blocks
    for block, scale in zip(blocks, reversed(scales), strict=True):
        unit = scale * block.noise * block.noise
        if block.log_growth > 0:  # constant payments
            unit *= block.moved_sum / block.steps
        units.append(unit)
        pools.append([unit * scale * block.paid_sum, scale * block.moved * block.moved_sum, 1])
        while len(pools) > 1 and _slope(pools[-1]) < _slope(pools[-2]):
            x, debt, count = pools.pop()
            pools[-1] = [pools[-1][0] + x, pools[-1][1] + debt, pools[-1][2] + count]
    table = np.array(pools).reshape(-1, 3)
    pool_slope = np.array([_slope(pool) for pool in pools])
    slope = np.repeat(pool_slope, table[:, 2].astype(int))
    return Chunk(blocks, np.array(units), slope, table[:, 0], table[:, 1], pool_slope)


def _slope(pool: Sequence[float]) -> float:
    return pool[1] / pool[0] if pool[0] > 0 else math.inf if pool[1] > 0 else 0.0


def _block(stretch: Stretch) -> Block:
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
