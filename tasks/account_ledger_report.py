"""The calculator's cumulative figures, as a JSON-ready document, in tables and in sentences."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from accounting.words import rounded_up
from tasks.account_ledger import Figure, LedgerAccount, Told
from tasks.account_report import assumption_sentences, release_in_words

NO_SUM = (
    "The epsilons of releases alone do not add up to this. Together it can be less than their sum, where two "
    "releases tell the same, and more, where each tells what the other hid. Each of them holds only for somebody who "
    "never sees another release."
)
NOT_GAUSSIAN = "There is no mu: a step was Poisson sampled, or a draw is still to come."


def ledger_document(account: LedgerAccount) -> dict[str, Any]:
    """JSON-ready: no infinity, no NaN, and under `reasons` one for every null."""
    together = account.together
    figures = {f"by_region.{region}": figure for region, figure in account.by_region.items()}
    figures |= {f"releases.{position}": figure for position, figure in enumerate(account.alone)}
    named = {"epsilon": together, **figures}
    reasons = {name: figure.reason for name, figure in named.items() if figure.reason is not None}
    if together.mu is None:
        reasons["mu"] = together.reason or NOT_GAUSSIAN
    further = {name: list(account.further_assumptions(figure)) for name, figure in figures.items()}
    return {
        "epsilon": together.epsilon,
        "mu": together.mu,
        "by_region": {region: figure.epsilon for region, figure in account.by_region.items()},
        "delta": account.delta,
        "neighboring_relation": account.relation.value,
        "number_of_releases": len(account.releases),
        "draws_to_come": sum(told.to_come for told in account.releases),
        "releases": [
            _release(told, figure) for told, figure in zip(account.releases, account.alone, strict=True)
        ],
        "reasons": reasons,
        "assumptions": list(together.assumptions),
        "further_assumptions": {name: texts for name, texts in further.items() if texts},
        "source": None if not together.assumptions or together.bound is None else together.bound.source,
    }


def _release(told: Told, figure: Figure) -> dict[str, Any]:
    """`epsilon` is the release's own, alone."""
    release = told.release
    names = [run.name for run in release.runs]
    shown: object = names if release.weights is None else dict(zip(names, release.weights, strict=True))
    document: dict[str, Any] = {"region": told.region, release.kind: shown}
    if release.fresh_noise:
        document["fresh_noise"] = release.fresh_noise
    if told.drawn is not None:
        document["drawn"] = told.drawn
    return {**document, "epsilon": figure.epsilon}


def releases_table(account: LedgerAccount) -> Table:
    """Each release, and what it alone would cost."""
    table = Table(title=f"Each release alone, at delta {account.delta:g}", title_justify="left")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("region", overflow="fold")
    table.add_column("release", overflow="fold")
    table.add_column("epsilon alone", justify="right")
    for number, (told, figure) in enumerate(zip(account.releases, account.alone, strict=True), start=1):
        table.add_row(str(number), escape(told.region), escape(told_in_words(told)), _epsilon(figure))
    return table


def regions_table(account: LedgerAccount) -> Table:
    """What the releases of each region tell together, and those of all regions."""
    table = Table(title=f"Releases together, at delta {account.delta:g}", title_justify="left")
    table.add_column("known to somebody who sees", overflow="fold")
    table.add_column("releases", justify="right", no_wrap=True)
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("mu", justify="right", no_wrap=True)
    for region, figure in account.by_region.items():
        count = sum(told.region == region for told in account.releases)
        table.add_row(escape(region), str(count), _epsilon(figure), _mu(figure))
    together = account.together
    table.add_section()
    table.add_row(
        "[bold]all regions (colluding)[/]",
        f"{len(account.releases)}",
        f"[bold]{_epsilon(together)}[/]",
        _mu(together),
    )
    return table


def told_in_words(told: Told) -> str:
    """For example `random selection of 0.5 a + 0.5 b, a was drawn`."""
    words = release_in_words(told.release)
    if told.drawn is not None:
        return f"{words}, {told.drawn} was drawn"
    return f"{words}, draw still to come" if told.to_come else words


def ledger_sentences(account: LedgerAccount) -> list[str]:
    """The colluding figure, what the others mean, and what they rest on; Rich markup."""
    together, count, regions = account.together, len(account.releases), len(account.by_region)
    if count == 1:
        whole = "The one release has"
    else:
        over = "of one region" if regions == 1 else f"over all {regions} regions"
        whole = f"All {count} releases together, {over}, have"
    if together.bound is None or together.epsilon is None:
        sentences = [f"[bold red]No guarantee[/] for all releases together: {escape(together.reason or '')}"]
    else:
        sentences = [
            f"{whole} [bold]epsilon {rounded_up(together.epsilon)}[/] at delta {account.delta:g} under "
            f"{account.relation}. Source: {escape(together.bound.source)}."
        ]
    if count > 1:
        sentences.append(NO_SUM)
    sentences += _without_figure(account)
    if together.bound is not None and together.epsilon is not None:
        sentences += assumption_sentences(together.bound)
    further = [
        text
        for figure in (*account.by_region.values(), *account.alone)
        for text in account.further_assumptions(figure)
    ]
    if further:
        sentences.append("The figures of single regions and single releases also need:")
        sentences += [f"  - {escape(text)}" for text in dict.fromkeys(further)]
    return sentences


def _without_figure(account: LedgerAccount) -> list[str]:
    """Why a region or a release has none."""
    named = [(f"region {region}", figure) for region, figure in account.by_region.items()]
    named += [(f"release number {number}", figure) for number, figure in enumerate(account.alone, start=1)]
    return [
        escape(f"No epsilon for {name} alone. {figure.reason}") for name, figure in named if figure.reason
    ]


def _epsilon(figure: Figure) -> str:
    return "-" if figure.epsilon is None else rounded_up(figure.epsilon)


def _mu(figure: Figure) -> str:
    return "" if figure.mu is None else rounded_up(figure.mu)
