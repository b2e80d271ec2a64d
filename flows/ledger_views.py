"""What `remerge ledger` prints: the releases of a lineage, and what they cost together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from accounting.budget import require_open_unit
from accounting.errors import InvalidInput
from flows.tables import plain_table
from infra.documents import LedgerEntry
from infra.settings import Settings
from tasks.cumulative import Figures, ledger_figures
from tasks.report import weights_in_words
from tasks.services import open_services

NOT_ADDITIVE = (
    "Epsilons of single releases do not add up. Failed checks and releases that were only intended count too: the "
    "ledger cannot tell who saw them. Draws count as what was drawn. A region's own figure holds where its releases "
    "were chosen without looking at parameters released in other regions."
)


def print_ledger(
    console: Console, settings: Settings, lineage: str | None, delta: float, *, as_json: bool
) -> None:
    """Print one lineage's ledger, or every one's.

    Raises:
        InvalidInput: the lineage has no ledger, or delta is not in [1e-300, 1).
        Corrupted: a chain is broken.
    """
    require_open_unit("delta", delta)
    store = open_services(settings).ledger
    known = store.lineages()
    if lineage is not None and lineage not in known:
        raise InvalidInput(
            f"There is no ledger of {lineage!r} (known lineages: {', '.join(known) or 'none yet'})."
        )
    chosen = known if lineage is None else [lineage]
    books = {name: store.entries(name) for name in chosen}
    if as_json:
        document = {
            name: _document(entries, ledger_figures(entries, delta), delta) for name, entries in books.items()
        }
        console.print_json(json.dumps(document, allow_nan=False))
        return
    if not books:
        console.print("Nothing was ever released, so there is no ledger yet.")
    for name, entries in books.items():
        console.print(_entries_table(name, entries))
        found = ledger_figures(entries, delta)
        console.print(_figures_table(found, delta))
        if found.reason is not None:
            console.print(found.reason, highlight=False, soft_wrap=True)
    if books:
        console.print(NOT_ADDITIVE, highlight=False)


def _entries_table(name: str, entries: Sequence[LedgerEntry]) -> Table:
    table = plain_table(
        f"Ledger of {name}", ">entry", "written at (UTC)", "region", "release", "kind", "what"
    )
    for entry in entries:
        what = _what(entry)
        table.add_row(
            str(entry.serial),
            f"{entry.written_at:%Y-%m-%d %H:%M}",
            entry.region,
            entry.release_id[:12],
            entry.kind.replace("_", " "),
            what if entry.drawn is None else f"{what} (drawn: {entry.drawn})",
        )
    return table


def _what(entry: LedgerEntry) -> str:
    parts = []
    for outcome in entry.outcomes:
        if outcome.coefficients is None:
            content = "everything about " + ", ".join(outcome.candidates)
        else:
            content = weights_in_words(outcome.coefficients)
        parts.append(
            content if len(entry.outcomes) == 1 else f"{content} with probability {outcome.weight:.4g}"
        )
    return "; ".join(parts)


def _figures_table(found: Figures, delta: float) -> Table:
    table = plain_table(f"Together, at delta {delta:g}", "who holds", ">releases", ">epsilon")
    for region, figure in found.by_region.items():
        table.add_row(f"the releases of {region}", str(found.counts[region]), _number(figure))
    everywhere = sum(found.counts.values())
    table.add_row("those of all regions (colluding)", str(everywhere), _number(found.everywhere))
    return table


def _number(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{math.ceil(epsilon * 1e4) / 1e4:.4f}"


def _document(entries: Sequence[LedgerEntry], found: Figures, delta: float) -> dict[str, Any]:
    return {
        "delta": delta,
        "epsilon": found.everywhere,
        "by_region": dict(found.by_region),
        "releases": dict(found.counts),
        "reason": found.reason,
        "entries": [entry.model_dump(mode="json") for entry in entries],
    }
