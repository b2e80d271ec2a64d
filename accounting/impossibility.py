"""No free lunch: how sensitive a merge rule that knows nothing of its mechanisms may be to one model.

A rule `h(theta_1, theta_2; eps', delta')` that promises (eps', delta') for whatever (eps_2, delta_2)-private
mechanism made theta_2 must keep its promise for the worst of them, randomised response: the two values of
theta_2 between which h differs most, in total variation t, are output with probabilities r and 1 - r on one
data set and 1 - r and r on its neighbour, `r = (e^eps_2 + delta_2) / (e^eps_2 + 1)`. Let E be the event on
which h differs by t, and p the smaller of its two probabilities, at most 1 - t. The promise on E reads

    p + r t <= e^eps' (p + (1 - r) t) + delta'.

It is weakest at p = 1 - t, which gives the published threshold on t. The promise on the complement of E,
data sets exchanged, forbids such a large p; the sum of the two no longer contains p and gives the tighter one:
t times the total variation of randomised response may not exceed the largest that (eps', delta') allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting.budget import require_non_negative, require_number
from accounting.errors import InvalidInput
from accounting.rounding import ULP

_SLACK = 64 * ULP  # relative; ten times the rounding of the quotients below
_SMALLEST = 5e-324  # of the doubles, for quotients so small that relative slack is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityThresholds:
    """The largest total-variation sensitivity to theta_2 that a blind merge rule can afford: two answers.

    Each is a necessary condition: a rule above either of them breaks its promise for some mechanism. A rule
    below both is not thereby private.
    """

    published: float  # total variation, in [0, 1], rounded up
    complementary: float  # the same with the complementary event; never above `published`

    @property
    def smallest(self) -> float:
        """The one that decides."""
        return min(self.published, self.complementary)

    @property
    def smaller(self) -> str:
        """Which is smaller: "complementary", or "equal" (where both are 1, or eps' = 0)."""
        return "complementary" if self.complementary < self.published else "equal"


def sensitivity_thresholds(
    epsilon: float, delta: float, *, other_epsilon: float, other_delta: float
) -> SensitivityThresholds:
    """Both thresholds on the sensitivity of a merge rule that promises (epsilon, delta).

    Args:
        epsilon: eps', what the rule promises of the merged model; nats, >= 0, finite.
        delta: delta', in [0, 1].
        other_epsilon: eps_2 of the mechanism that made theta_2; nats, >= 0, finite.
        other_delta: delta_2, in [0, 1]; 1 stands for a theta_2 without any privacy.

    Returns:
        Total variations in [0, 1], rounded up: "above this the promise is broken" stays true. 0 for
        eps' = delta' = 0, which allow no influence at all.

    Raises:
        InvalidInput: NaN, or a value outside these ranges.

    Source: arXiv 2604.20985, no free lunch; the complementary event is added here.
    """
    published = published_threshold(epsilon, delta, other_epsilon=other_epsilon, other_delta=other_delta)
    complementary = complementary_threshold(
        epsilon, delta, other_epsilon=other_epsilon, other_delta=other_delta
    )
    # Never above the published one on paper, so the lesser of the two rounded numbers is still an upper bound.
    return SensitivityThresholds(published=published, complementary=min(published, complementary))


def published_threshold(epsilon: float, delta: float, *, other_epsilon: float, other_delta: float) -> float:
    """`(delta' + e^eps' - 1)(e^eps_2 + 1) / (e^(eps_2 + eps') + delta_2 e^eps' + delta_2 - 1)`, at most 1.

    1 where the denominator is 0 (theta_2 then carries nothing about the record, and eps' = 0). Arguments,
    errors and rounding as for `sensitivity_thresholds`.

    Source: arXiv 2604.20985, no free lunch.
    """
    _check(epsilon, delta, other_epsilon, other_delta)
    # Both sides times e^-(eps' + eps_2): sums of positive terms that cannot overflow.
    shrunk, other_shrunk = math.exp(-epsilon), math.exp(-other_epsilon)
    allowed = delta * shrunk - math.expm1(-epsilon)
    revealed = other_delta * other_shrunk * (1 + shrunk) - math.expm1(-(epsilon + other_epsilon))
    return _clipped_quotient(allowed, revealed, 1 + other_shrunk)


def complementary_threshold(
    epsilon: float, delta: float, *, other_epsilon: float, other_delta: float
) -> float:
    """`[(e^eps' - 1 + 2 delta') / (e^eps' + 1)] / [(e^eps_2 - 1 + 2 delta_2) / (e^eps_2 + 1)]`, at most 1.

    The quotient of the largest total variations that (eps', delta') and (eps_2, delta_2) allow; 1 where the
    latter is 0. Attained: some rule on the threshold keeps its promise against randomised response.
    Arguments, errors and rounding as for `sensitivity_thresholds`.

    Source: Kairouz, Oh and Viswanath 2015 (what (eps, delta) allows); see the module's own derivation.
    """
    _check(epsilon, delta, other_epsilon, other_delta)
    shrunk, other_shrunk = math.exp(-epsilon), math.exp(-other_epsilon)
    allowed = 2 * delta * shrunk - math.expm1(-epsilon)
    revealed = 2 * other_delta * other_shrunk - math.expm1(-other_epsilon)
    return _clipped_quotient(allowed, revealed, (1 + other_shrunk) / (1 + shrunk))


def _clipped_quotient(allowed: float, revealed: float, factor: float) -> float:
    """`allowed / revealed * factor` rounded up and at most 1; 1 where nothing is revealed."""
    if not revealed > 0:
        return 1.0
    if not allowed > 0:
        return 0.0
    return min(allowed / revealed * factor * (1 + _SLACK) + 4 * _SMALLEST, 1.0)


def _check(epsilon: float, delta: float, other_epsilon: float, other_delta: float) -> None:
    require_non_negative("epsilon", epsilon)
    require_non_negative("other_epsilon", other_epsilon)
    for name, value in (("delta", delta), ("other_delta", other_delta)):
        if not 0 <= require_number(name, value) <= 1:
            raise InvalidInput(f"{name} must lie in [0, 1], but {value!r} was given.")
