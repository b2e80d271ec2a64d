"""What a blind merge rule can afford: exact values, the order of the two thresholds, and rules really tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import mpmath
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from accounting.errors import InvalidInput
from accounting.impossibility import (
    complementary_threshold,
    published_threshold,
    sensitivity_thresholds,
)

EPSILONS = (0.0, 1e-12, 1e-3, 0.3, 1.0, 4.0, 30.0, 1e4)
DELTAS = (0.0, 1e-300, 1e-9, 1e-3, 0.4, 1.0)
Distribution = tuple[Fraction, ...]


def exactly(epsilon: float, delta: float, other_epsilon: float, other_delta: float) -> tuple[mpmath.mpf, ...]:
    """Both thresholds as published, with digits enough for `e^eps - 1 + 1e-300`."""
    with mpmath.workdps(400):
        e, d, e2, d2 = (mpmath.mpf(value) for value in (epsilon, delta, other_epsilon, other_delta))
        below = mpmath.exp(e2 + e) + d2 * mpmath.exp(e) + d2 - 1
        first = mpmath.mpf(1)
        if below != 0:
            first = min(first, (d + mpmath.exp(e) - 1) * (mpmath.exp(e2) + 1) / below)
        revealed = (mpmath.exp(e2) - 1 + 2 * d2) / (mpmath.exp(e2) + 1)
        second = mpmath.mpf(1)
        if revealed != 0:
            second = min(second, (mpmath.exp(e) - 1 + 2 * d) / (mpmath.exp(e) + 1) / revealed)
        return first, second


@pytest.mark.parametrize("other_epsilon", EPSILONS)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_values_are_exact_rounded_up_and_in_order(epsilon: float, other_epsilon: float) -> None:
    for delta, other_delta in product(DELTAS, DELTAS):
        found = sensitivity_thresholds(epsilon, delta, other_epsilon=other_epsilon, other_delta=other_delta)
        published, complementary = exactly(epsilon, delta, other_epsilon, other_delta)
        for value, truth in ((found.published, published), (found.complementary, complementary)):
            assert truth <= value <= truth * (1 + mpmath.mpf(10) ** -13) + mpmath.mpf(10) ** -320
            assert value <= 1
        assert found.complementary <= found.published
        assert found.smallest == found.complementary
        assert (found.smaller == "equal") == (found.complementary == found.published)


@given(
    epsilon=st.floats(0, 50),
    delta=st.floats(0, 1),
    other_epsilon=st.floats(0, 50),
    other_delta=st.floats(0, 1),
)
def test_any_value_is_an_upper_bound(
    epsilon: float, delta: float, other_epsilon: float, other_delta: float
) -> None:
    found = sensitivity_thresholds(epsilon, delta, other_epsilon=other_epsilon, other_delta=other_delta)
    published, complementary = exactly(epsilon, delta, other_epsilon, other_delta)
    assert published <= found.published <= 1
    assert complementary <= found.complementary <= found.published


def test_limits() -> None:
    def both(*values: float) -> tuple[float, float]:
        found = sensitivity_thresholds(values[0], values[1], other_epsilon=values[2], other_delta=values[3])
        return found.published, found.complementary

    # theta_2 carries nothing: any rule will do, also in the case 0/0.
    assert both(0.0, 0.0, 0.0, 0.0) == (1.0, 1.0)
    assert both(1.0, 1e-5, 0.0, 0.0) == (1.0, 1.0)
    # Nothing may be revealed, and theta_2 reveals something: no influence at all.
    assert both(0.0, 0.0, 1.0, 0.0) == (0.0, 0.0)
    # The rule need promise no more than theta_2 already satisfies.
    assert both(2.0, 1e-5, 2.0, 1e-5) == pytest.approx((1.0, 1.0), abs=1e-14)
    assert both(3.0, 1e-5, 2.0, 1e-6) == (1.0, 1.0)
    # Nothing is known of theta_2: eps' = 0 leaves delta' of influence, published and tighter alike.
    assert both(0.0, 1e-3, 1.0, 1.0) == pytest.approx((1e-3, 1e-3), rel=1e-13)
    assert both(0.0, 1e-3, 1e4, 0.0) == pytest.approx((1e-3, 1e-3), rel=1e-13)
    # Without deltas and with a huge eps_2: 1 - e^-eps' published, tanh(eps' / 2) with the complement.
    assert both(1.0, 0.0, 1e4, 0.0) == pytest.approx((1 - math.exp(-1), math.tanh(0.5)), rel=1e-13)
    # The smallest doubles do not turn into 0/0.
    assert both(5e-324, 0.0, 5e-324, 0.0) == pytest.approx((1.0, 1.0))
    assert both(0.0, 5e-324, 1.0, 0.0)[1] > 0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "1", None, True])
def test_invalid_input_is_refused(bad: float) -> None:
    good = {"epsilon": 1.0, "delta": 0.1, "other_epsilon": 1.0, "other_delta": 0.1}
    for name in good:
        with pytest.raises(InvalidInput, match=name):
            sensitivity_thresholds(**(good | {name: bad}))
    with pytest.raises(InvalidInput, match="delta"):
        published_threshold(1.0, 1.5, other_epsilon=1.0, other_delta=0.0)
    with pytest.raises(InvalidInput, match="other_delta"):
        complementary_threshold(1.0, 0.5, other_epsilon=1.0, other_delta=1.5)


# Rules really tried. Everything is rational: budgets are given by e^eps.


def randomised_response(growth: Fraction, delta: Fraction) -> tuple[Fraction, Fraction]:
    """P(theta_2 = "b") on a data set and on its neighbour: exactly (log growth, delta)-private."""
    likely = (growth + delta) / (growth + 1)
    return likely, 1 - likely


def merged(rule: tuple[Distribution, Distribution], likely: Fraction) -> Distribution:
    """What comes out: the rule's output given theta_2, summed over theta_2. theta_1 is fixed."""
    return tuple((1 - likely) * a + likely * b for a, b in zip(*rule, strict=True))


def leak(
    rule: tuple[Distribution, Distribution], growth: Fraction, pair: tuple[Fraction, Fraction]
) -> Fraction:
    """The least delta' that the released model satisfies with e^eps' = growth: all events, both directions."""
    here, there = (merged(rule, likely) for likely in pair)
    return max(hockey_stick(here, there, growth), hockey_stick(there, here, growth))


def hockey_stick(p: Distribution, q: Distribution, growth: Fraction) -> Fraction:
    events = product((0, 1), repeat=len(p))
    return max(
        sum((x - growth * y) * inside for x, y, inside in zip(p, q, event, strict=True)) for event in events
    )


def sensitivity(rule: tuple[Distribution, Distribution]) -> Fraction:
    return sum(abs(a - b) for a, b in zip(*rule, strict=True)) / 2


BUDGETS = [  # e^eps', delta', e^eps_2, delta_2
    (Fraction(3, 2), Fraction(1, 1000), Fraction(4), Fraction(1, 100)),
    (Fraction(2), Fraction(0), Fraction(9), Fraction(0)),
    (Fraction(1), Fraction(1, 50), Fraction(3), Fraction(1, 10)),
    (Fraction(11, 10), Fraction(1, 20), Fraction(20), Fraction(1, 3)),
    (Fraction(5), Fraction(1, 10**5), Fraction(6), Fraction(1, 10**6)),
]


def thresholds(
    growth: Fraction, delta: Fraction, other_growth: Fraction, other_delta: Fraction
) -> tuple[Fraction, Fraction]:
    """From what each event allows, and the product's two numbers checked against it."""
    likely, unlikely = randomised_response(other_growth, other_delta)
    complementary = (growth - 1 + 2 * delta) / ((growth + 1) * (likely - unlikely))
    published = (growth - 1 + delta) / (likely * (1 + growth) - 1)
    found = sensitivity_thresholds(
        math.log(growth), float(delta), other_epsilon=math.log(other_growth), other_delta=float(other_delta)
    )
    assert found.published == pytest.approx(float(published), rel=1e-12)
    assert found.complementary == pytest.approx(float(complementary), rel=1e-12)
    return published, complementary


def binary_rule(p: Fraction, t: Fraction) -> tuple[Distribution, Distribution]:
    """Answers "yes" with probability p after one theta_2 and p + t after the other."""
    return (p, 1 - p), (p + t, 1 - p - t)


def shares(count: int) -> Iterator[Fraction]:
    return (Fraction(i, count) for i in range(count + 1))


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_rule_above_the_threshold_breaks_its_promise(budget: tuple[Fraction, ...]) -> None:
    growth, delta, other_growth, other_delta = budget
    _, threshold = thresholds(*budget)
    pair = randomised_response(other_growth, other_delta)
    assert hockey_stick((pair[0], 1 - pair[0]), (pair[1], 1 - pair[1]), other_growth) == other_delta
    above = threshold * Fraction(1001, 1000)
    assert above < 1
    for share in shares(40):
        rule = binary_rule(share * (1 - above), above)
        assert sensitivity(rule) == above
        assert leak(rule, growth, pair) > delta


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_rule_on_the_threshold_keeps_its_promise(budget: tuple[Fraction, ...]) -> None:
    """The tighter threshold is exact; a rule between the two shows that the published one is not."""
    growth, delta, other_growth, other_delta = budget
    published, threshold = thresholds(*budget)
    pair = likely, unlikely = randomised_response(other_growth, other_delta)
    p = Fraction(0)
    if growth > 1:
        p = (threshold * (likely - growth * unlikely) - delta) / (growth - 1)
    rule = binary_rule(p, threshold)
    assert 0 <= p <= 1 - threshold
    assert leak(rule, growth, pair) == delta
    if growth > 1:
        between = (published + threshold) / 2
        assert threshold < between < published
        assert all(
            leak(binary_rule(share * (1 - between), between), growth, pair) > delta for share in shares(40)
        )


@given(
    rows=st.lists(st.integers(0, 30), min_size=6, max_size=6),
    budget=st.sampled_from(BUDGETS),
)
def test_rules_with_more_outputs_obey_it_too(rows: list[int], budget: tuple[Fraction, ...]) -> None:
    growth, delta, other_growth, other_delta = budget
    assume(sum(rows[:3]) and sum(rows[3:]))
    first, second = (tuple(Fraction(n, sum(part)) for n in part) for part in (rows[:3], rows[3:]))
    _, threshold = thresholds(*budget)
    broken = leak((first, second), growth, randomised_response(other_growth, other_delta)) > delta
    assert broken or sensitivity((first, second)) <= threshold
