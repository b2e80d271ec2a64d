"""A diagnosis as a section of a Markdown page."""

from __future__ import annotations

from tasks.diagnostics.diagnosing import Diagnosis


def section(diagnosis: Diagnosis) -> str:
    """What every task lost by the merge, and why, for the decision page."""
    lines = [
        "## How the merge went",
        "",
        "Measured on the tasks' public-train rows, with the tasks' own models, which are not released. Sharpness is by "
        f"how many nats the loss rises {diagnosis.radius:g} (L2) up its gradient; drift is the shared parameters' "
        "distance from the public start.",
        "",
        "| task | accuracy alone | merged | merge gap | sharpness alone | merged | drift |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in diagnosis.tasks:
        lines.append(
            f"| {one.task} | {one.own.accuracy:.3f} | {one.merged.accuracy:.3f} | {one.merge_gap:+.3f} "
            f"| {one.own_sharpness:.3g} | {one.merged_sharpness:.3g} | {one.drift:.3g} |"
        )
    return "\n".join(lines) + "\n"
