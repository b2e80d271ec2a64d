"""A diagnosis drawn: loss along each task's path to the merge, and the cosines of the task vectors."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from tasks.diagnostics.diagnosing import Diagnosis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito: told apart by colour-blind people too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#000000")
MARKERS = "osD^vP*X"


def draw_paths(diagnosis: Diagnosis) -> Figure:
    """Loss and accuracy on public rows from each task's own model to the merge."""
    from matplotlib.figure import Figure  # no pyplot: no window system, and no state

    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, one in enumerate(diagnosis.tasks):
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 4,
            "label": one.task,
        }
        positions = [point.position for point in one.path]
        left.plot(positions, [point.loss for point in one.path], **style)
        right.plot(positions, [100 * point.accuracy for point in one.path], **style)
    left.set_ylabel("mean loss, nats")
    right.set_ylabel("accuracy, %")
    for axes in (left, right):
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["own model", "1/4", "1/2", "3/4", "merge"])
        axes.grid(color="#dddddd", linewidth=0.6)
    handles, labels = left.get_legend_handles_labels()
    columns = min(len(labels), 4)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle("From each task's own model to the merge, on its public rows")
    return figure


def draw_cosines(diagnosis: Diagnosis) -> Figure:
    """The matrix of cosines between task vectors, each number written in its cell."""
    from matplotlib.figure import Figure

    names = [one.task for one in diagnosis.tasks]
    side = 2.6 + 0.75 * len(names)
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(diagnosis.cosines, vmin=-1, vmax=1, cmap="PuOr")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    axes.set_yticks(range(len(names)), names)
    for row, values in enumerate(diagnosis.cosines):
        for column, value in enumerate(values):
            dark = abs(value) > 0.6
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black"
            )
    figure.colorbar(image, ax=axes, shrink=0.8, label="cosine")
    axes.set_title("Cosines of task vectors")
    return figure


def pages(diagnosis: Diagnosis) -> dict[str, bytes]:
    """The drawings as PNG files by file name."""
    figures = {"paths.png": draw_paths(diagnosis), "cosines.png": draw_cosines(diagnosis)}
    files = {}
    for name, figure in figures.items():
        held = io.BytesIO()
        figure.savefig(held, format="png", dpi=130)
        files[name] = held.getvalue()
    return files
