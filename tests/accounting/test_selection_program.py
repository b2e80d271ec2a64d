"""The exact linear program: optimal, feasible, sparse, and right where a tolerance would hide a delta."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from accounting.selection_program import maximise, undominated

FLOATS = st.floats(min_value=0, max_value=1)


def exact_rows(weights: dict[int, Fraction], rows: np.ndarray) -> list[Fraction]:
    return [sum((w * Fraction(float(row[j])) for j, w in weights.items()), Fraction(0)) for row in rows]


@given(
    data=st.lists(st.tuples(st.floats(min_value=-5, max_value=5), FLOATS, FLOATS), min_size=1, max_size=12),
    limit=st.floats(min_value=0.01, max_value=1),
)
def test_agrees_with_a_general_solver_and_is_exactly_feasible(
    data: list[tuple[float, float, float]], limit: float
) -> None:
    utilities = np.array([row[0] for row in data])
    rows = np.array([[row[1] for row in data], [row[2] for row in data]])
    weights = maximise(utilities, rows, Fraction(limit))
    reference = linprog(-utilities, A_ub=rows, b_ub=[limit] * 2, A_eq=np.ones((1, len(data))), b_eq=[1])
    if weights is None:
        assert not reference.success or rows.max(axis=0).min() > limit * (1 - 1e-6)
        return
    assert sum(weights.values()) == 1
    assert all(weight > 0 for weight in weights.values())
    assert len(weights) <= 3
    assert all(used <= Fraction(limit) for used in exact_rows(weights, rows))
    value = float(sum(w * Fraction(float(utilities[j])) for j, w in weights.items()))
    if reference.success:
        assert value >= -reference.fun - 1e-6  # the general solver may cheat by its tolerance


@given(seed=st.integers(min_value=0, max_value=10**6), digits=st.integers(min_value=1, max_value=250))
def test_no_random_feasible_point_is_better(seed: int, digits: int) -> None:
    random = np.random.default_rng(seed)
    utilities = random.normal(size=8)
    rows = 10.0 ** random.uniform(-digits, 0, size=(2, 8))
    limit = 10.0 ** -(digits / 2)
    weights = maximise(utilities, rows, Fraction(limit))
    for _ in range(30):
        point = random.dirichlet(np.full(8, 0.3))
        safest = int(np.argmin(rows.max(axis=0)))
        share = random.uniform() ** 8
        point = share * point + (1 - share) * np.eye(8)[safest]
        if np.all(rows @ point <= limit * (1 - 1e-12)):
            assert weights is not None
            value = sum(float(w) * utilities[j] for j, w in weights.items())
            assert value >= float(point @ utilities) - 1e-12


def test_two_candidates_each_too_loud_in_one_direction_may_fit_together() -> None:
    rows = np.array([[1e-3, 1e-7], [1e-7, 1e-3]])
    weights = maximise(np.array([1.0, 2.0]), rows, Fraction(6e-4))
    assert weights is not None
    assert float(weights[1]) == pytest.approx(0.6, rel=1e-3)
    assert maximise(np.array([1.0, 2.0]), rows, Fraction(4e-4)) is None


def test_a_weight_below_any_tolerance_is_found() -> None:
    """delta 1e-300: the optimal weight on the loud candidate is about 1e-300 and no less."""
    rows = np.array([[1e-320, 1.0]])
    weights = maximise(np.array([0.0, 1.0]), rows, Fraction(1e-300))
    assert weights is not None
    assert float(weights[1]) == pytest.approx(1e-300, rel=1e-9)


def test_equal_candidates_take_the_first() -> None:
    utilities, rows = np.array([1.0, 2.0, 2.0, 2.0]), np.array([[0.0, 0.5, 0.5, 0.5]])
    assert set(maximise(utilities, rows, Fraction(1, 4)) or {}) == {0, 1}
    assert maximise(utilities, rows, Fraction(1, 2)) == {1: Fraction(1)}


def test_only_undominated_candidates_are_kept() -> None:
    utilities = np.array([1.0, 2.0, 2.0, 3.0, 0.0])
    rows = np.array([[0.1, 0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.1, 0.3, 0.05]])
    assert undominated(utilities, rows).tolist() == [1, 3, 4]
