"""What the numbers say, in sentences that follow from them alone."""

from __future__ import annotations

from statistics import fmean

from tasks.dp_merging_experiment.results import Results
from tasks.dp_merging_experiment.setting import (
    NAIVE,
    NO_ANCHOR,
    NO_FLATNESS,
    PAIRED,
    ZERO_COST,
    Family,
    Setting,
)
from tasks.dp_merging_experiment.summary import (
    Difference,
    Number,
    Tally,
    best_operator,
    difference,
    gap_by,
    mean_of,
    merged_by,
    over_seeds,
    tally,
)


def in_short(setting: Setting, results: Results, family: Family) -> list[str]:
    """Where the gains appear in a family, and where they do not."""
    first, last = setting.epsilons[0], setting.epsilons[-1]
    sentences = [_start(setting, results, family)]
    for method in (PAIRED, ZERO_COST):
        found = tally(results, setting, family, (method, NAIVE))
        sentences.append(
            comparison(family.method(method).title, found) + " " + _where(setting, results, family, method)
        )
    sentences += [
        _gap(setting, results, family),
        _own(setting, results, family),
        _sharpness_and_drift(setting, results, family),
        _ablation(setting, results, family),
    ]
    sentences += [_best(setting, results, family, epsilon) for epsilon in (first, last)]
    return sentences


def _start(setting: Setting, results: Results, family: Family) -> str:
    """Whether private training and merging are worth anything beside the public start."""
    start = fmean(results.starts[family.name, seed].mean() for seed in setting.seeds)
    parts = []
    for epsilon in setting.epsilons:
        own = over_seeds(results, setting, family, NAIVE, epsilon, lambda group: group.own_mean()).mean
        merged = over_seeds(results, setting, family, NAIVE, epsilon, merged_by("average")).mean
        parts.append(f"{100 * own:.1f} % and {100 * merged:.1f} % at epsilon {epsilon:g}")
    return (
        f"Scale: the public start has {100 * start:.1f} % on average over the tasks; with naive DP-SGD the tasks' own "
        "models, and their average, have " + ", ".join(parts) + "."
    )


def comparison(title: str, found: Tally) -> str:
    """How often a method's merges are above naive DP-SGD's."""
    said = "a gain" if found.is_gain else "a loss" if found.is_loss else "no clear gain or loss"
    return (
        f"{title}: {said} over naive DP-SGD: its merges are better in {found.better} of {found.total} pairs of "
        f"operator and budget, worse in {found.worse} and undecided in {found.undecided}, by "
        f"{100 * found.mean:+.1f} points on average."
    )


def verdict(setting: Setting, results: Results) -> str:
    """The experiment in one sentence: whether merges of either kind of DP-Merging are clearly better, and where."""
    found = {
        (family.title, family.method(method).title): tally(results, setting, family, (method, NAIVE))
        for family in setting.families
        for method in (PAIRED, ZERO_COST)
    }
    gains = [
        f"{method} on {title[0].lower()}{title[1:]}" for (title, method), one in found.items() if one.is_gain
    ]
    better = sum(one.better for one in found.values())
    total = sum(one.total for one in found.values())
    if gains:
        return (
            f"At this size the paper's gains appear for {' and '.join(gains)}, and not otherwise: beside naive "
            f"DP-SGD it is clearly better in {better} of all {total} comparisons."
        )
    worse = sum(one.worse for one in found.values())
    return (
        "At this size the paper's gains do not appear: beside naive DP-SGD (by tasks, kind, operator and budget), "
        f"DP-Merging is clearly better in {better} of {total} comparisons, clearly worse in {worse}, and "
        f"{total - better - worse} are undecided."
    )


def _where(setting: Setting, results: Results, family: Family, method: str) -> str:
    by_budget, by_operator = [], []
    for epsilon in setting.epsilons:
        found = Tally.of(_against_naive(setting, results, family, method, None, epsilon))
        by_budget.append(
            f"{100 * found.mean:+.1f} points at epsilon {epsilon:g} ({found.better} better, {found.worse} worse)"
        )
    for operator in family.operators:
        found = Tally.of(_against_naive(setting, results, family, method, operator.name, None))
        by_operator.append(f"{operator.name} {100 * found.mean:+.1f}")
    return (
        f"By budget, over the operators: {', '.join(by_budget)}. By operator, over the budgets, in points: "
        f"{', '.join(by_operator)}."
    )


def _against_naive(
    setting: Setting,
    results: Results,
    family: Family,
    method: str,
    operator: str | None,
    epsilon: float | None,
) -> list[Difference]:
    """Of one operator or all, at one budget or all."""
    return [
        difference(results, setting, family, (method, NAIVE), budget, merged_by(one.name))
        for one in family.operators
        if operator in (None, one.name)
        for budget in setting.epsilons
        if epsilon in (None, budget)
    ]


def _sharpness_and_drift(setting: Setting, results: Results, family: Family) -> str:
    parts = []
    for method in (PAIRED, ZERO_COST):
        words = [
            f"{name} {_direction(_all_budgets(setting, results, family, method, mean_of(name)))}"
            for name in ("sharpness", "drift")
        ]
        parts.append(f"{family.method(method).title}: {' and '.join(words)}")
    return "Beside naive DP-SGD, of the tasks' own models, " + "; ".join(parts) + "."


def _all_budgets(
    setting: Setting, results: Results, family: Family, method: str, number: Number
) -> list[Difference]:
    return [
        difference(results, setting, family, (method, NAIVE), epsilon, number) for epsilon in setting.epsilons
    ]


def _direction(found: list[Difference]) -> str:
    """How a number differs over the budgets."""
    signs = [one.sign for one in found]
    lower, higher, total = signs.count(-1), signs.count(1), len(signs)
    if lower == total:
        return "is lower at every budget"
    if higher == total:
        return "is higher at every budget"
    if not (lower or higher):
        return "does not differ beyond its scatter"
    return f"is lower at {lower}, higher at {higher} and undecided at {total - lower - higher} of {total} budgets"


def _gap(setting: Setting, results: Results, family: Family) -> str:
    """A gap can narrow because merges are better or because own models are worse, so all three are told."""
    parts = []
    for method in (PAIRED, ZERO_COST):
        gap, own, merged = (
            fmean(one.mean for one in _all_budgets(setting, results, family, method, number))
            for number in (gap_by("average"), lambda group: group.own_mean(), merged_by("average"))
        )
        found = _all_budgets(setting, results, family, method, gap_by("average"))
        parts.append(
            f"{family.method(method).title} {_direction(found)} ({100 * gap:+.1f} points on average: own models "
            f"{100 * own:+.1f}, merges {100 * merged:+.1f})"
        )
    return "The merge gap of averaging, beside naive DP-SGD's: " + "; ".join(parts) + "."


def _own(setting: Setting, results: Results, family: Family) -> str:
    parts = []
    for method in (PAIRED, ZERO_COST):
        found = _all_budgets(setting, results, family, method, lambda group: group.own_mean())
        mean = sum(one.mean for one in found) / len(found)
        parts.append(
            f"{family.method(method).title} {_direction(found)} ({100 * mean:+.1f} points on average)"
        )
    return "The tasks' own accuracy, beside naive DP-SGD's: " + "; ".join(parts) + "."


def _ablation(setting: Setting, results: Results, family: Family) -> str:
    parts = []
    for words, pair in (
        ("the anchor added to the paired method", (PAIRED, NO_ANCHOR)),
        ("paired flatness added to the anchor", (PAIRED, NO_FLATNESS)),
        ("zero-cost flatness added to the anchor", (ZERO_COST, NO_FLATNESS)),
        ("the anchor alone added to naive DP-SGD", (NO_FLATNESS, NAIVE)),
    ):
        found = tally(results, setting, family, pair)
        parts.append(
            f"{words} changes merged accuracy by {100 * found.mean:+.1f} points on average ({found.better} of "
            f"{found.total} better, {found.worse} worse)"
        )
    return "Ablation: " + "; ".join(parts) + "."


def _best(setting: Setting, results: Results, family: Family, epsilon: float) -> str:
    parts = []
    for method in (NAIVE, PAIRED, ZERO_COST):
        operator = best_operator(results, setting, family, method, epsilon)
        mean = over_seeds(results, setting, family, method, epsilon, merged_by(operator)).mean
        parts.append(f"{family.method(method).title} {100 * mean:.1f} % ({operator})")
    return (
        f"The best operator of each at epsilon {epsilon:g}, picked after the fact: " + ", ".join(parts) + "."
    )
