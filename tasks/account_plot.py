"""Two drawings of a release: its privacy profile, and its epsilon over the weights."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from accounting.budget import PrivacyBudget
from accounting.errors import AccountingError, InvalidInput, RemergeError
from accounting.frontier import Point
from accounting.words import rounded_up
from tasks.account_bounds import Account, Line, bound_of, epsilon_of, profile_of
from tasks.account_frontier import draw_frontier
from tasks.account_report import bound_words, release_in_words
from tasks.account_runs import Release, Run

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {  # Okabe and Ito: told apart by colour-blind people too
    "joint": "#000000",
    "generic": "#0072B2",
    "shifted": "#009E73",
    "stepwise": "#999999",
    "random_selection_pld": "#D55E00",
    "random_selection_rdp": "#CC79A7",
    "joint_rdp": "#56B4E9",
    "basic_composition": "#E69F00",
    "advanced_composition": "#8C6D31",
}
OVER_WEIGHTS = ("joint", "generic", "shifted", "stepwise", "random_selection_pld", "random_selection_rdp")
COMPOSITIONS = ("basic_composition", "advanced_composition")  # known only at one delta at a time
_PATIENCE = 2.0  # seconds for the points of a set of curves, where each takes long


def require_plot_path(path: Path) -> None:
    """Refuse a file that could not be written, before anything is computed.

    Raises:
        InvalidInput: an unknown kind of file, or no such folder.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput(f"--plot {path}: the file's name must end in {', '.join(SUFFIXES)}.")
    if not path.parent.is_dir():
        raise InvalidInput(f"--plot {path}: there is no folder {path.parent}.")


def draw_account(
    account: Account,
    path: Path,
    *,
    certified: str | None,
    budget: PrivacyBudget | None = None,
    frontier: Sequence[Point] = (),
) -> None:
    """Draw a release's bounds to a file.

    Left: delta over epsilon by every bound. Right, where the release has weights: epsilon at the account's
    delta over the weight of the least private run, the others keeping their proportions.

    Args:
        account: of the release.
        path: .png, .svg or .pdf.
        certified: the name of the bound that is drawn thick; None where nothing is certified.
        budget: marked where there is one.
        frontier: drawn as one panel more where there is one.

    Raises:
        InvalidInput: nothing to draw, or the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: no window system, and no state

    lines = [line for line in account.lines.values() if line.epsilon is not None]
    if not lines:
        raise InvalidInput(f"--plot {path}: there is nothing to draw, since no bound has a finite epsilon.")
    panels: list[Callable[[Any], None]] = [
        lambda axes: _draw_profile(axes, account, lines, certified, budget)
    ]
    if account.release.kind in ("linear_combination", "random_selection") and len(account.release.runs) > 1:
        panels.append(lambda axes: _draw_over_weights(axes, account, lines, certified, budget))
    if any(point.objective is not None for point in frontier):
        panels.append(lambda axes: draw_frontier(axes, frontier, budget))
    figure = Figure(figsize=(1.2 + 5.3 * len(panels), 5.8), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for draw, axes in zip(panels, every, strict=True):
        draw(axes)
    handles = {
        label: handle for a in every for handle, label in zip(*a.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=1 + len(panels), frameon=False
    )
    figure.suptitle(_title(account.release), fontsize=12)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidInput(f"--plot {path} cannot be written: {error.strerror}.") from None


def _draw_profile(
    axes: Any, account: Account, lines: Sequence[Line], certified: str | None, budget: PrivacyBudget | None
) -> None:
    points = [line.epsilon or 0.0 for line in lines]
    best = account.lines[certified].epsilon if certified else None
    reference = [best] if best else points
    if budget is not None:
        reference.append(budget.epsilon)
    width = 1.25 * max(min(max(points), 4 * max(reference)), max(reference), 1e-9)
    least = account.delta * 1e-3
    for line in lines:
        epsilons, deltas = _profile(line, account, width, least)
        axes.plot(epsilons, deltas, **_style(line.name, certified))
    axes.axhline(
        account.delta, color="#555555", linewidth=0.8, linestyle=":", label=f"delta {account.delta:g}"
    )
    _mark_budget(axes.axvline, budget)
    if best is not None:
        axes.plot([best], [account.delta], **_star(best))
    axes.set(
        yscale="log",
        xlim=(0, width),
        ylim=(least, 1.5),
        xlabel="epsilon (nats)",
        ylabel="delta (probability)",
        title="Privacy profile",
    )
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)


def _profile(line: Line, account: Account, width: float, least: float) -> tuple[list[float], list[float]]:
    """Points of a curve; where a bound cannot resolve delta the curve ends."""
    if line.bound is None:
        return [], []
    if line.name not in COMPOSITIONS:
        epsilons = np.linspace(0.0, width, 201).tolist()
        floor = max(line.bound.profile.smallest_delta, least / 10)
        deltas = [line.bound.delta(epsilon) for epsilon in epsilons]
        return epsilons, [delta if delta >= floor else math.nan for delta in deltas]
    began = time.monotonic()
    points = [(line.epsilon or 0.0, account.delta)]
    with suppress(RemergeError):
        bound_of(line.name, account.release, 0.5)
    for delta in np.geomspace(0.5, least, _affordable(time.monotonic() - began, 41)).tolist():
        try:
            bound = bound_of(line.name, account.release, delta)
            points.append((epsilon_of(bound, account.release, delta), delta))
        except RemergeError:
            continue
    points.sort(key=lambda point: (point[0], -point[1]))
    return [epsilon for epsilon, _ in points], [delta for _, delta in points]


def _draw_over_weights(
    axes: Any, account: Account, lines: Sequence[Line], certified: str | None, budget: PrivacyBudget | None
) -> None:
    release, delta = account.release, account.delta
    run = max(release.runs, key=lambda run: _own_epsilon(run, account))
    here = dict(zip((run.name for run in release.runs), release.weights or (), strict=True))[run.name]
    names = [line.name for line in lines if line.name in OVER_WEIGHTS]
    began = time.monotonic()
    for name in names:
        _epsilon_at(name, release, run, 0.5, delta)
    inside = _inside(time.monotonic() - began)
    for name in names:
        epsilons = [_epsilon_at(name, release, run, weight, delta) for weight in inside]
        axes.plot(inside, epsilons, **_style(name, certified))
    ends = [_least_sound(release, run, weight, delta) for weight in (0.0, 1.0)]
    axes.plot(
        [0.0, 1.0],
        ends,
        linestyle="none",
        marker="o",
        markerfacecolor="white",
        color="black",
        zorder=4,
        clip_on=False,
        label=f"without {run.name}; {run.name} alone",
    )
    _mark_budget(axes.axhline, budget)
    best = account.lines[certified].epsilon if certified else None
    if best is not None:
        axes.plot([here], [best], **_star(best))
    others = [other.name for other in release.runs if other is not run]
    rest = f"goes to {others[0]}" if len(others) == 1 else "is shared as stated"
    axes.set(
        xlim=(0, 1),
        ylim=(0, 1.08 * axes.get_ylim()[1]),
        xlabel=f"weight of {run.name} (the rest {rest})",
        ylabel=f"epsilon (nats) at delta {delta:g}",
        title="Epsilon over the weights",
    )
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)


def _affordable(seconds: float, most: int) -> int:
    """How many points to compute where one takes so long: at least six."""
    return int(min(max(_PATIENCE / max(seconds, 1e-9), 6), most))


def _inside(seconds: float) -> list[float]:
    """Weights strictly between 0 and 1, as many as patience allows; dense near the ends, where curves bend."""
    count = _affordable(seconds, 80)
    near = np.geomspace(1e-4, 0.02, count // 8 + 1)
    return sorted({*np.linspace(0.02, 0.98, count).tolist(), *near.tolist(), *(1 - near).tolist()})


def _least_sound(release: Release, run: Run, weight: float, delta: float) -> float:
    names = [name for name in OVER_WEIGHTS if name != "stepwise"]
    found = [_epsilon_at(name, release, run, weight, delta) for name in names]
    return min((epsilon for epsilon in found if not math.isnan(epsilon)), default=math.nan)


def _epsilon_at(name: str, release: Release, run: Run, weight: float, delta: float) -> float:
    """With `weight` on one run and the others in proportion; NaN where the bound does not apply."""
    rest = math.fsum(w for r, w in zip(release.runs, release.weights or (), strict=True) if r is not run)
    shares = [
        weight if r is run else w / rest * (1 - weight)
        for r, w in zip(release.runs, release.weights or (), strict=True)
    ]
    used = [(r, share) for r, share in zip(release.runs, shares, strict=True) if share > 0]
    moved = replace(release, runs=tuple(r for r, _ in used), weights=tuple(share for _, share in used))
    try:
        return epsilon_of(bound_of(name, moved, delta), moved, delta)
    except RemergeError:
        return math.nan


def _own_epsilon(run: Run, account: Account) -> float:
    try:
        return profile_of(run, account.release.relation).epsilon(account.delta)
    except AccountingError:
        return math.inf


def _style(name: str, certified: str | None) -> dict[str, Any]:
    unsound = name == "stepwise"
    return {
        "color": COLOURS.get(name, "#6A3D9A"),
        "linewidth": 2.6 if name == certified else 1.4,
        "linestyle": "--" if unsound else "-",
        "label": bound_words(name) + (" (not a guarantee)" if unsound else ""),
        "zorder": 3 if name == certified else 2,
    }


def _star(epsilon: float) -> dict[str, Any]:
    return {
        "marker": "*",
        "markersize": 15,
        "color": "#F0E442",
        "markeredgecolor": "black",
        "linestyle": "none",
        "zorder": 5,
        "label": f"certified: epsilon {rounded_up(epsilon)}",
    }


def _mark_budget(line: Any, budget: PrivacyBudget | None) -> None:
    if budget is not None:
        line(
            budget.epsilon,
            color="#B22222",
            linewidth=1.0,
            linestyle="-.",
            label=f"budget: epsilon {budget.epsilon:g}",
        )


def _title(release: Release) -> str:
    """At most two lines."""
    lines = textwrap.wrap(release_in_words(release), 110)
    return "\n".join(lines if len(lines) <= 2 else [lines[0], lines[1][:106] + " ..."])
