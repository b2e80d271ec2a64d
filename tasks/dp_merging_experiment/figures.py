"""The figures of the page: merged accuracy by operator, and how sharp and how far away the tasks' models are."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from tasks.dp_merging_experiment.results import Results
from tasks.dp_merging_experiment.setting import NAIVE, PAIRED, ZERO_COST, Family, Setting
from tasks.dp_merging_experiment.summary import mean_of, merged_by, over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito: told apart by colour-blind people too.
STYLES = {
    NAIVE: {"color": "#000000", "marker": "o", "linestyle": "-"},
    PAIRED: {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    ZERO_COST: {"color": "#D55E00", "marker": "^", "linestyle": "-."},
}
COLUMNS = 5


def draw_merges(results: Results, setting: Setting, family: Family) -> Figure:
    """Accuracy over the budget: the tasks' own models, then a panel for each operator."""
    from matplotlib.figure import Figure  # no pyplot: no window system, and no state

    names = ["own models", *(one.name for one in family.operators)]
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(11.0, 2.6 * rows + 0.7), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    start = sum(results.starts[family.name, seed].mean() for seed in setting.seeds) / len(setting.seeds)
    for panel, name in zip(panels, names, strict=False):
        number = (lambda group: group.own_mean()) if name == "own models" else merged_by(name)
        for method, style in STYLES.items():
            _line(panel, results, setting, family, method, number, 100.0, style)
        panel.axhline(100 * start, color="#999999", linewidth=0.8, linestyle=":", label="public start")
        panel.set_title(name.replace("_", " "), fontsize=9)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    for panel in panels[::COLUMNS]:
        panel.set_ylabel("accuracy, %", fontsize=8)
    _finish(figure, panels[: len(names)], setting)
    figure.suptitle(f"{family.title}: mean accuracy over the tasks", fontsize=11)
    return figure


def draw_shape(results: Results, setting: Setting, family: Family) -> Figure:
    """Sharpness, drift and cosine of the private models over the budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.1), layout="constrained")
    panels = figure.subplots(1, 3)
    numbers = (
        ("sharpness, nats", mean_of("sharpness")),
        ("drift of the trunk, L2", mean_of("drift")),
        ("cosine between tasks", lambda group: group.cosine),
    )
    for panel, (label, number) in zip(panels, numbers, strict=True):
        for method, style in STYLES.items():
            _line(panel, results, setting, family, method, number, 1.0, style)
        panel.set_ylabel(label, fontsize=8)
    _finish(figure, panels, setting)
    figure.suptitle(f"{family.title}: where the private models lie", fontsize=11)
    return figure


def png(figure: Figure) -> bytes:
    """The same figure gives the same bytes with the same matplotlib."""
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=90, metadata={"Software": None})
    return held.getvalue()


def _line(
    panel: Axes, results: Results, setting: Setting, family: Family, method: str, number, factor: float, style
) -> None:  # type: ignore[no-untyped-def]
    found = [over_seeds(results, setting, family, method, epsilon, number) for epsilon in setting.epsilons]
    panel.errorbar(
        setting.epsilons,
        [factor * one.mean for one in found],
        yerr=[factor * one.deviation for one in found],
        label=family.method(method).title,
        markersize=3.5,
        linewidth=1.1,
        capsize=2,
        **style,
    )


def _finish(figure: Figure, panels, setting: Setting) -> None:  # type: ignore[no-untyped-def]
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(setting.epsilons, [f"{epsilon:g}" for epsilon in setting.epsilons])
        panel.set_xlabel("epsilon", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(color="#dddddd", linewidth=0.6)
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
