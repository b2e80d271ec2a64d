"""How much a larger budget would buy, and what a smaller one would cost: the best release of each mechanism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accounting.budget import LARGEST_EPSILON, LEAST_EPSILON, NeighboringRelation, PrivacyBudget
from accounting.errors import RemergeError
from accounting.frontier import Point, frontier
from accounting.plan import Mechanism
from accounting.trajectory import Candidate

COLOURS = {
    Mechanism.LINEAR_COMBINATION: "#009E73",
    Mechanism.RANDOM_SELECTION: "#D55E00",
    Mechanism.MIXTURE: "#6A3D9A",
}
RATIOS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # of the budget's epsilon


def frontier_of(
    candidates: Sequence[Candidate],
    budget: PrivacyBudget,
    relation: NeighboringRelation,
    mechanisms: Sequence[Mechanism],
    *,
    selection: str,
    cap: float | None,
    fresh_noise: bool,
) -> tuple[Point, ...]:
    """The solver's best at a quarter to four times a budget, at the same delta.

    Returns:
        Points as `accounting.frontier.frontier` gives them; none where nothing can be compared.
    """
    try:
        return frontier(
            candidates,
            budget.delta,
            relation,
            mechanisms,
            [e for ratio in RATIOS if LEAST_EPSILON <= (e := ratio * budget.epsilon) <= LARGEST_EPSILON],
            selection=selection,
            realised_epsilon_cap=cap,
            allow_fresh_noise=fresh_noise,
        )
    except RemergeError:
        return ()


def worth(point: Point) -> float | None:
    """What is shown of a point: the expected utility, or the noise's standard deviation per parameter."""
    if point.objective is None or point.expected_utility is not None:
        return point.expected_utility
    return math.sqrt(max(-point.objective, 0.0))


def draw_frontier(axes: Any, points: Sequence[Point], budget: PrivacyBudget | None) -> None:
    """The best of each mechanism over the budget's epsilon, on matplotlib's axes."""
    by_utility = any(point.expected_utility is not None for point in points)
    mechanisms = dict.fromkeys(point.mechanism for point in points)
    for place, mechanism in enumerate(mechanisms):
        found = [(p.budget_epsilon, worth(p)) for p in points if p.mechanism is mechanism]
        axes.plot(
            [epsilon for epsilon, _ in found],
            [math.nan if value is None else value for _, value in found],
            color=COLOURS[mechanism],
            linewidth=1.6,
            linestyle=("-", (0, (6, 2)), (0, (2, 2)))[place],  # lines that coincide stay visible
            marker="so^"[place],
            markersize=(8, 6, 4)[place],
            label=f"best {mechanism.value.replace('_', ' ')}",
        )
    if budget is not None:
        axes.axvline(budget.epsilon, color="#B22222", linewidth=1.0, linestyle="-.")
    epsilons = [point.budget_epsilon for point in points]
    axes.set(
        xscale="log",
        xlim=(min(epsilons) / 1.1, max(epsilons) * 1.1),
        xlabel="epsilon allowed (nats)",
        ylabel="expected utility" if by_utility else "noise per parameter (standard deviation)",
        title="Other budgets",
    )
    shown = epsilons[: len(epsilons) // len(mechanisms)][::2]
    axes.set_xticks(shown, [f"{epsilon:.3g}" for epsilon in shown])
    axes.minorticks_off()
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
