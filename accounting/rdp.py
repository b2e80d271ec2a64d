"""Renyi differential privacy: a second accountant, shown beside the exact one and never tighter than it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from accounting.budget import NeighboringRelation, require_non_negative
from accounting.errors import AccountingError, InvalidInput
from accounting.pld import PoissonGroup, full_batch_mu, poisson_groups
from accounting.profile import PrivacyProfile
from accounting.rounding import ULP, up
from accounting.trajectory import Segment

Array = NDArray[np.float64]

# Orders are spaced geometrically in (order - 1); the ends are where the search is given up.
_LEAST_ORDER = 1.01  # below, the conversion is unstable and never useful
_LAST_ORDER_CLOSED_FORM = 1e9
_LAST_ORDER_POISSON = 4096
_LEAST_NOISE = 1e-100  # of Poisson steps: no order has a finite value below
_SLACK = 1e-10  # relative; the library's series are good to about 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RdpProfile(PrivacyProfile):
    """A Renyi curve: an upper bound `values` on the Renyi divergence at each of `orders`, in both directions.

    Source of the conversion: Canonne, Kamath and Steinke 2020, proposition 12.
    """

    orders: Array  # > 1, increasing, shape (orders,)
    values: Array  # nats, >= 0, shape (orders,); infinity where nothing is known

    def __post_init__(self) -> None:
        if self.orders.shape != self.values.shape or self.orders.ndim != 1 or not len(self.orders):
            raise InvalidInput("An RDP curve needs as many values as orders, and at least one.")
        if not (np.all(self.orders > 1) and np.all(self.values >= 0)):
            raise InvalidInput("RDP orders must exceed 1, and values must be at least 0 and not NaN.")

    def deltas(self, epsilon: float) -> tuple[float, float]:
        eps = require_non_negative("epsilon", epsilon)
        with np.errstate(over="ignore"):
            logs = (self.orders - 1) * (self.values - eps + np.log1p(-1 / self.orders)) - np.log(self.orders)
        least = min(float(np.min(logs)), 0.0)
        value = min(up(math.exp(least + _SLACK * (1 + abs(least)))), 1.0)
        return value, value

    def epsilon(self, delta: float) -> float:
        return self.epsilon_and_order(delta)[0]

    def epsilon_and_order(self, delta: float) -> tuple[float, float]:
        """The least epsilon over the orders (nats, rounded up, `math.inf` if none), and that order."""
        self._require_reachable(delta)
        epsilons = (
            self.values
            + np.log1p(-1 / self.orders)
            - (math.log(delta) + np.log(self.orders)) / (self.orders - 1)
        )
        best = int(np.argmin(epsilons))
        value = max(float(epsilons[best]), 0.0)
        return (up(value * (1 + _SLACK)) if value > 0 else 0.0), float(self.orders[best])


def rdp_profile(segments: Iterable[Segment], relation: NeighboringRelation, delta: float) -> RdpProfile:
    """The Renyi curve of distinct segments composed, on orders that serve `delta`.

    Full batch: `order * mu^2 / 2`, any relation. Poisson: only add-or-remove and zero-out, through
    dp_accounting's sampled Gaussian mechanism.

    Args:
        segments: each executed step once.
        relation: neighbouring data sets.
        delta: in (0, 1); the grid is widened until the best order for it is interior, or one of the ends
            1.01, 1e9 (full batch) or 4096 (Poisson) is reached.

    Raises:
        AccountingError: Poisson sampling under replace-one, for which no Renyi bound is implemented (the
            library's accountant ignores that relation), or a run without noise.

    Source: Mironov 2017, proposition 7; Mironov, Talwar and Zhang 2019.
    """
    segments = tuple(segments)
    groups = poisson_groups(segments)
    last = _LAST_ORDER_POISSON if groups else _LAST_ORDER_CLOSED_FORM
    upper = 64.0
    while True:
        orders = order_grid(upper, whole=bool(groups))
        profile = RdpProfile(orders=orders, values=rdp_values(segments, relation, orders))
        _, order = profile.epsilon_and_order(delta)
        if order < orders[-1] or upper >= last:
            return profile
        upper = min(upper * 16, last)


def rdp_values(segments: Iterable[Segment], relation: NeighboringRelation, orders: Array) -> Array:
    """The Renyi divergence of distinct segments composed, an upper bound in nats. Shape (orders,).

    Raises:
        AccountingError: as `rdp_profile`.
    """
    segments = tuple(segments)
    groups = poisson_groups(segments)
    if any(segment.noise_multiplier == 0 for segment in segments):
        raise AccountingError("A run without noise has no Renyi bound.")
    if groups and relation is NeighboringRelation.REPLACE_ONE:
        raise AccountingError(
            "No Renyi bound is implemented for Poisson sampling under replace-one; use the PLD accountant."
        )
    mu = full_batch_mu(segments, relation)
    values: Array = orders * (mu * mu / 2) * (1 + 4 * ULP)
    if groups:
        values = values + _poisson_values(groups, tuple(orders.tolist())) * (1 + _SLACK)
    return values


def order_grid(upper: float, *, whole: bool) -> Array:
    """Orders from 1.01 to `upper`, dense near 1; above 16 only whole numbers where `whole`."""
    orders = 1 + np.geomspace(_LEAST_ORDER - 1, upper - 1, int(40 * math.log10(upper / 0.01)))
    if whole:
        orders = np.where(orders > 16, np.rint(orders), orders)
    return np.unique(orders)


@lru_cache(maxsize=256)
def _poisson_values(groups: tuple[PoissonGroup, ...], orders: tuple[float, ...]) -> Array:
    if any(group.noise_multiplier < _LEAST_NOISE for group in groups):  # the library divides by its square
        return np.full(len(orders), np.inf)
    accountant = RdpAccountant(list(orders), dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _without_warnings():
        for group in groups:
            step = dp_accounting.PoissonSampledDpEvent(
                group.sampling_probability, dp_accounting.GaussianDpEvent(group.noise_multiplier)
            )
            accountant.compose(dp_accounting.SelfComposedDpEvent(step, group.steps))
    values: Array = np.maximum(np.asarray(accountant._rdp, dtype=float), 0.0)
    values[np.isnan(values)] = np.inf
    return values


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the library, which logs a line for each order whose series does not converge.

    Such an order gets an infinite value, which is sound and speaks for itself.
    """
    logger = logging.getLogger("absl")

    def refuse(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)
