"""How the commands' tables look: no frame, so that more fits in a terminal of 80 columns, and words are not cut."""

from __future__ import annotations

from rich.table import Table


def plain_table(title: str, *columns: str) -> Table:
    """An empty table; a column whose name begins with `>` is set to the right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(name, justify="right" if name != column else "left", header_style="underline")
    return table
