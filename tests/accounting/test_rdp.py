"""The Renyi accountant: known values, its conversion, its order grid, and that it is never below the exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian
from accounting.budget import NeighboringRelation
from accounting.errors import AccountingError, InvalidInput
from accounting.pld import profile_of
from accounting.rdp import RdpProfile, order_grid, rdp_profile, rdp_values
from accounting.trajectory import Segment

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE


@pytest.mark.parametrize("relation", list(NeighboringRelation))
def test_full_batch_curve(make_segment: Callable[..., Segment], relation: NeighboringRelation) -> None:
    orders = np.array([1.5, 2.0, 64.0])
    values = rdp_values([make_segment("a", 16.0, 20)], relation, orders)
    assert values == pytest.approx(orders * relation.full_batch_factor**2 * 20 / 16**2 / 2, rel=1e-13)


@given(mu=st.floats(min_value=1e-5, max_value=50), exponent=st.floats(min_value=-200, max_value=-0.5))
def test_exact_is_never_above_renyi_and_not_far_below(mu: float, exponent: float) -> None:
    delta = 10.0**exponent
    segment = Segment(
        id="a",
        steps=1,
        noise_multiplier=1 / mu,
        max_grad_norm=1.0,
        learning_rate=1.0,
        expected_batch_size=1.0,
    )
    epsilon, order = rdp_profile([segment], ADD_OR_REMOVE, delta).epsilon_and_order(delta)
    exact = gaussian.epsilon(mu, delta)
    assert exact <= epsilon
    if exact > 0.01:
        assert epsilon <= 1.6 * exact + 0.05
        assert order < 1e9  # interior


def test_poisson_curve_is_the_library_s(make_segment: Callable[..., Segment]) -> None:
    segment = make_segment("a", 1.0, 1000, sampling_probability=0.01)
    orders = order_grid(64.0, whole=True)
    accountant = RdpAccountant(orders.tolist())
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 1000))
    assert rdp_values([segment], ADD_OR_REMOVE, orders) == pytest.approx(accountant._rdp, rel=1e-9)
    renyi = rdp_profile([segment], ADD_OR_REMOVE, 1e-5).epsilon(1e-5)
    assert renyi <= accountant.get_epsilon(1e-5) * 1.0001
    assert profile_of([segment], ADD_OR_REMOVE).epsilon(1e-5) <= renyi


def test_orders_that_do_not_converge_are_infinite_and_quiet(
    make_segment: Callable[..., Segment], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    segment = make_segment("a", 0.285203, 1, sampling_probability=0.9)
    values = rdp_values([segment], ADD_OR_REMOVE, np.array([1.05, 2.0, 8.0]))
    assert values[0] == math.inf
    assert np.all(np.isfinite(values[1:]))
    assert caplog.text == ""
    assert "converge" not in capfd.readouterr().err


def test_replace_one_has_no_renyi_bound_with_poisson_sampling(make_segment: Callable[..., Segment]) -> None:
    segment = make_segment("a", 1.0, 10, sampling_probability=0.01)
    with pytest.raises(AccountingError, match="replace-one"):
        rdp_profile([segment], REPLACE, 1e-5)


def test_no_noise_has_no_renyi_bound(make_segment: Callable[..., Segment]) -> None:
    with pytest.raises(AccountingError, match="without noise"):
        rdp_profile([make_segment("a", 0.0)], REPLACE, 1e-5)


def test_profile_and_conversion_agree() -> None:
    orders = order_grid(1000.0, whole=False)
    profile = RdpProfile(orders=orders, values=orders / 2)
    for delta in (1e-2, 1e-5, 1e-40):
        epsilon = profile.epsilon(delta)
        assert profile.delta(epsilon) == pytest.approx(delta, rel=1e-7)
        assert gaussian.delta(1.0, epsilon) <= delta
    assert gaussian.delta(1.0, 0.0) <= profile.delta(0.0) < 1.0


def test_published_conversion() -> None:
    """Canonne, Kamath and Steinke 2020, proposition 12, worked by hand at one order."""
    profile = RdpProfile(orders=np.array([3.0]), values=np.array([0.5]))
    assert profile.epsilon(1e-6) == pytest.approx(0.5 + math.log(2 / 3) - (math.log(1e-6) + math.log(3)) / 2)
    nothing = RdpProfile(orders=np.array([3.0]), values=np.array([math.inf]))
    assert nothing.epsilon(1e-6) == math.inf
    assert nothing.delta(10.0) == 1.0


@pytest.mark.parametrize(
    ("orders", "values"),
    [([1.0], [1.0]), ([2.0], [math.nan]), ([2.0], [-1.0]), ([], []), ([2.0, 3.0], [1.0])],
)
def test_bad_curves_fail(orders: list[float], values: list[float]) -> None:
    with pytest.raises(InvalidInput):
        RdpProfile(orders=np.array(orders), values=np.array(values))


def test_order_grid_widens_until_the_best_order_is_interior(make_segment: Callable[..., Segment]) -> None:
    found: dict[str, Any] = {}
    for name, noise, delta in (("loud", 0.5, 1e-5), ("quiet", 1e4, 1e-5), ("silent", 1e12, 1e-300)):
        profile = rdp_profile([make_segment("a", noise)], REPLACE, delta)
        found[name] = profile.epsilon_and_order(delta)[1], profile.orders[-1]
    assert found["loud"][0] < found["loud"][1] == 64.0
    assert 64.0 < found["quiet"][0] < found["quiet"][1]
    assert found["silent"][1] == 1e9  # the stated end
