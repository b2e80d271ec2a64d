"""The draw: exact inverse of the cumulative weights, and read back unchanged."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.errors import InvalidInput
from tasks.drawing import check_draw, draw, drawn_index

RELEASE = "ab" * 32


def point_of(value: Fraction) -> str:
    return f"{int(value * 2**256):064x}"


def test_points_fall_on_the_candidate_that_holds_them() -> None:
    weights = {"b": 0.25, "a": 0.5, "c": 0.25}  # along [0, 1) by name: a, b, c
    assert drawn_index(point_of(Fraction(0)), weights) == 0
    assert drawn_index(point_of(Fraction(1, 2) - Fraction(1, 2**200)), weights) == 0
    assert drawn_index(point_of(Fraction(1, 2)), weights) == 1
    assert drawn_index(point_of(Fraction(3, 4)), weights) == 2
    assert drawn_index("f" * 64, weights) == 2


def test_a_weight_far_below_float_resolution_of_one_is_kept() -> None:
    weights = {"a": 1.0, "b": 1e-40}
    assert drawn_index("f" * 64, weights) == 1
    assert drawn_index(point_of(1 - Fraction(1, 10**39)), weights) == 0


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=6), st.integers(0, 2**256 - 1))
def test_every_point_falls_somewhere(raw: list[float], point: int) -> None:
    total = sum(raw)
    weights = {f"c{index}": weight / total for index, weight in enumerate(raw)}
    index = drawn_index(f"{point:064x}", weights)
    exact = [Fraction(weights[name]) for name in sorted(weights)]
    below = sum(exact[:index]) / sum(exact)
    assert below <= Fraction(point, 2**256) < below + exact[index] / sum(exact)


def test_draws_use_all_candidates_about_as_often_as_weighted() -> None:
    weights = {"a": 0.25, "b": 0.75}
    drawn = [draw(RELEASE, weights).drawn for _ in range(2000)]
    assert 380 < drawn.count("a") < 620  # 6 standard deviations
    assert len({draw(RELEASE, weights).point for _ in range(50)}) == 50


def test_a_stored_draw_must_fit() -> None:
    weights = {"a": 0.5, "b": 0.5}
    stored = draw(RELEASE, weights)
    check_draw(stored, RELEASE, weights)
    other = "b" if stored.drawn == "a" else "a"
    for wrong in (
        (stored, "cd" * 32, weights),
        (stored, RELEASE, {"a": 0.4, "b": 0.6}),
        (stored.model_copy(update={"drawn": other}), RELEASE, weights),
    ):
        with pytest.raises(InvalidInput, match="will not be drawn again"):
            check_draw(*wrong)


@pytest.mark.parametrize("weights", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}])
def test_weights_off_the_simplex_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="add up to 1"):
        drawn_index("0" * 64, weights)
