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
one by one and longer stretches in blocks of constant payments over which debts grow by 2 % at most (which loses
less than 1e-4 of a cost); what would grow by more than 40 e-folds there, or 150 in all, is paid at once.

**Rounding.** Nothing here trusts the optimum. `feasible` lowers payments to what is owed, and `carry` follows
any payments through the recursion, z and costs rounded up. Where rounding alone leaves a payment above what
is owed, z = max(0, c z + s - a), which the same coupling proves: the excess is wasted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accounting.errors import InvalidInput
from accounting.rounding import ULP
from accounting.shifted_blocks import Block, Stretch, after_block, block_of, cost, growing_pieces, total_up

Array = NDArray[np.float64]

_GROWTH = 150.0  # e-folds: a debt that would grow by more is paid at once, which keeps C^2 finite
_DECAY = -300.0  # e-folds: what is forgotten by more is never paid, and C^2 stays above the smallest float
_SINGLE = 256  # steps of a growing stretch that are taken one by one
_OVERPAID = 1e-9  # relative: a payment above what is owed by more than rounding


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
        return total_up([*at_once, *map(_settle, self.settled)]) * (1 + 4 * ULP)


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
            first, at_once, final = growing_pieces(stretch)
            parts[-1] += first
            if at_once:
                paid.append(replace(stretch, steps=at_once))
                parts.append(final)
        elif stretch.lipschitz > 1:
            parts[-1] += [replace(stretch, steps=1)] * stretch.steps
        else:
            parts[-1].append(stretch)
    if last is None or math.isinf(last.lipschitz):
        parts.append([])
    after = math.log(last.lipschitz) if last and 0 < last.lipschitz < math.inf else 0.0
    settled, open_ = [], _chunk([], 0.0)
    for index, part in enumerate(parts):
        *closed, newest = _chunks(part, after if index == len(parts) - 1 else 0.0)
        settled += closed
        if index == len(parts) - 1:
            open_ = newest
        else:
            settled.append(newest)
    return Path(settled=tuple(settled), paid=tuple(paid), open=open_, last=last)


def carry(chunk: Chunk, payments: Sequence[float]) -> tuple[float, float]:
    """Follow payments through a chunk.

    Args:
        chunk: its blocks, begun with z = 0.
        payments: of each block's last step, >= 0, shape (blocks,).

    Returns:
        (z at the end, the sum of the costs), both rounded up.

    Raises:
        InvalidInput: payments that are negative or NaN, or that make z negative.
    """
    _require_payments(chunk, payments)
    z, costs = 0.0, []
    for block, wanted in zip(chunk.blocks, payments, strict=True):
        z, paid = after_block(block, z, wanted)
        if wanted > paid * (1 + _OVERPAID):
            raise InvalidInput("A payment exceeds what is owed, which would make z negative.")
        costs.append(cost(paid, block.noise) * block.square_sum * (1 + block.slack))
    return z, total_up(costs)


def feasible(chunk: Chunk, payments: Sequence[float]) -> list[float]:
    """Payments lowered to what is owed at their step, where they exceed it.

    Raises:
        InvalidInput: payments that are negative or NaN.
    """
    _require_payments(chunk, payments)
    z, lowered = 0.0, []
    for block, wanted in zip(chunk.blocks, payments, strict=True):
        z, paid = after_block(block, z, wanted)
        lowered.append(paid)
    return lowered


def _require_payments(chunk: Chunk, payments: Sequence[float]) -> None:
    if len(payments) != len(chunk.blocks):
        raise InvalidInput(f"{len(payments)} payments were given for {len(chunk.blocks)} blocks of steps.")
    for payment in payments:
        if not payment >= 0:
            raise InvalidInput(f"Payments must be numbers of at least 0, but {payment!r} was given.")


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


def payments_at(chunk: Chunk, theta: float) -> list[float]:
    """The best payments of each block's last step at price theta; infinity pays all debts by the end.

    A pool that pays its whole debt pays in its last block what is really owed then, so that rounding is not
    carried on and stretched.
    """
    capped = np.where(chunk.unit > 0, np.minimum(chunk.slope, theta), 0.0) * chunk.unit
    settles = np.append(chunk.slope[1:] != chunk.slope[:-1], True)[: len(chunk.slope)]
    whole = settles & (chunk.slope <= theta) & (chunk.unit > 0)
    return feasible(chunk, np.where(whole, math.inf, capped).tolist())


def _settle(chunk: Chunk) -> float:
    """The cost of a chunk that must end with z = 0: what rounding leaves over is paid in the last step."""
    if not chunk.blocks:
        return 0.0
    payments = payments_at(chunk, math.inf)
    left, paid = carry(chunk, payments)
    noise = chunk.blocks[-1].noise
    if left == 0:
        return paid
    if noise == 0:
        return math.inf
    return paid + left / noise * ((2 * payments[-1] + left) / noise) * (1 + 8 * ULP)


def _chunks(stretches: Iterable[Stretch], after: float) -> list[Chunk]:
    """Cut where a debt would grow by more than 150 e-folds; the last chunk is followed by e^after."""
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
    blocks = tuple(block_of(stretch) for stretch in stretches)
    scales, total = [], after
    for block in reversed(blocks):
        scales.append(math.exp(total) if total > _DECAY else 0.0)  # C after the block
        total += block.log_growth
    units: list[float] = []
    pools: list[list[float]] = []  # x, debt, blocks
    for block, scale in zip(blocks, reversed(scales), strict=True):
        unit = scale * block.noise * block.noise
        if block.constant:
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
