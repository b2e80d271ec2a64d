"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

OPERATORS = "linear, average, task_arithmetic, ties, dare, fisher, regmean, pcb, wudi or slerp"

MergeOptions = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE of the merge, for example density=0.3; repeat for several"),
]
