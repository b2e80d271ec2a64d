"""What the calculator answers, in tables and sentences that a privacy officer could read."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from accounting.bounds import STEPWISE_ASSUMPTION, Bound
from accounting.words import rounded_up
from tasks.account_answer import Answer
from tasks.account_bounds import KIND_WORDS, Account
from tasks.account_frontier import worth
from tasks.account_runs import Release

BOUND_WORDS = {
    "joint": "joint release",
    "generic": "generic, last steps merged",
    "shifted": "shifted interpolation",
    "stepwise": "step-wise formula",
    "random_selection_pld": "random selection, exact",
    "random_selection_rdp": "random selection, Renyi",
    "joint_rdp": "joint release, Renyi",
    "basic_composition": "basic composition",
    "advanced_composition": "advanced composition",
    "mixture": "mixture of merges",
}
MECHANISM_WORDS = {**KIND_WORDS, "best_single": "one run alone"}
NOT_A_GUARANTEE = f"Not a guarantee for DP-SGD. It assumes: {STEPWISE_ASSUMPTION}"
SELECTION_WORDS = {
    "noise": "The weights depend on the runs' public hyper-parameters and the budget alone: of runs of one "
    "recipe, those that leave the least noise in the released parameters.",
    "stated": "The weights give the largest expected utility, by the utilities that the file states. If those "
    "were measured on the privately trained models, choosing by them costs privacy that is not accounted here.",
}


def bound_words(name: str) -> str:
    """A bound's name for people."""
    return BOUND_WORDS.get(name, name.replace("_", " "))


def release_in_words(release: Release) -> str:
    """For example `linear combination of 0.25 a + 0.75 b`."""
    words = KIND_WORDS[release.kind]
    if release.weights is None:
        return f"{words} of {', '.join(run.name for run in release.runs)}"
    names = {run.name: weight for run, weight in zip(release.runs, release.weights, strict=True)}
    if release.kind == "mixture":
        return f"{words}, on average {weights_in_words(names)}"
    return f"{words} of {weights_in_words(names)}{_noise_in_words(release.fresh_noise)}"


def _noise_in_words(fresh_noise: float) -> str:
    return f", with fresh noise of standard deviation {rounded_up(fresh_noise)}" if fresh_noise else ""


def weights_in_words(weights: Mapping[str, float]) -> str:
    """For example `0.25 a + 0.75 b`; a run alone is only named."""
    if len(weights) == 1:
        return next(iter(weights)) + " alone"
    return " + ".join(f"{weight:.6g} {name}" for name, weight in weights.items())


def bounds_table(account: Account, marked: str | None) -> Table:
    """Every bound that covers this kind of release; `marked` is the one that certifies it."""
    table = Table(title=f"Bounds at delta {account.delta:g}", title_justify="left")
    table.add_column("bound", no_wrap=True)
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("mu", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for line in account.lines.values():
        if not line.covers_kind:
            continue
        words = bound_words(line.name)
        mu = "" if line.mu is None else f"{rounded_up(line.mu)}"
        if line.epsilon is None:
            table.add_row(words, "-", "", f"[dim]{escape(line.reason or '')}[/]")
        elif not line.sound:
            table.add_row(
                f"[dim]{words}[/]",
                f"[dim]({rounded_up(line.epsilon)})[/]",
                f"[dim]({mu})[/]",
                "not a guarantee",
            )
        elif line.name == marked:
            table.add_row(
                f"[bold]{words}[/]", f"[bold]{rounded_up(line.epsilon)}[/]", mu, "[green]certified[/]"
            )
        else:
            table.add_row(words, f"{rounded_up(line.epsilon)}", mu, "")
    return table


def options_table(answer: Answer) -> Table:
    """The plan and what else would have fitted the budget."""
    table = Table(
        title=f"Within epsilon {answer.budget.epsilon:g} at delta {answer.budget.delta:g}",
        title_justify="left",
    )
    table.add_column("mechanism", no_wrap=True)
    table.add_column("weights", overflow="fold")
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("expected utility", justify="right")
    table.add_column("certified by", overflow="fold")
    for option in (answer.best, *answer.alternatives):
        chosen = option is answer.best
        words = MECHANISM_WORDS[option.label]
        utility = "not known" if option.expected_utility is None else f"{option.expected_utility:.6g}"
        table.add_row(
            f"[bold green]{words}[/]" if chosen else words,
            escape(weights_in_words(option.weights))
            + (f" + fresh noise {rounded_up(option.fresh_noise)}" if option.fresh_noise else ""),
            f"{rounded_up(option.epsilon)}",
            utility,
            bound_words(option.bound),
        )
    return table


def frontier_table(answer: Answer) -> Table:
    """What other budgets would give: one row a budget, one column a mechanism."""
    what = "expected utility" if answer.selection == "stated" else "noise per parameter (standard deviation)"
    table = Table(title=f"Other budgets at delta {answer.budget.delta:g}: {what}", title_justify="left")
    table.add_column("epsilon", justify="right", no_wrap=True)
    mechanisms = dict.fromkeys(point.mechanism for point in answer.frontier)
    for mechanism in mechanisms:
        table.add_column(MECHANISM_WORDS[mechanism.value], justify="right")
    for epsilon in dict.fromkeys(point.budget_epsilon for point in answer.frontier):
        found = {p.mechanism: worth(p) for p in answer.frontier if p.budget_epsilon == epsilon}
        values = ["-" if (value := found[m]) is None else f"{value:.4g}" for m in mechanisms]
        style = "bold" if epsilon == answer.budget.epsilon else None
        table.add_row(f"{epsilon:.4g}", *values, style=style)
    return table


def bounds_sentences(account: Account) -> list[str]:
    """The certified number and what it rests on; Rich markup."""
    best = account.certified
    release = escape(release_in_words(account.release))
    if best is None or best.bound is None or best.epsilon is None:
        return [f"[bold red]No guarantee[/] for this {release}: {escape(no_guarantee(account))}"]
    sentences = [
        f"The {release} has [bold]epsilon {rounded_up(best.epsilon)}[/] at delta {account.delta:g} under "
        f"{account.release.relation}, by this bound: {bound_words(best.name)}. "
        f"Source: {escape(best.bound.source)}.",
    ]
    if account.lines["stepwise"].epsilon is not None:
        sentences.append(f"The step-wise number is {NOT_A_GUARANTEE[0].lower()}{NOT_A_GUARANTEE[1:]}")
    return sentences + assumption_sentences(best.bound)


def answer_sentences(answer: Answer) -> list[str]:
    """The plan in words, how it was chosen and what it rests on; Rich markup."""
    best = answer.best
    expected = "" if best.expected_utility is None else f", with expected utility {best.expected_utility:.6g}"
    sentences = [
        f"Release a {escape(release_in_words(answer.account.release))}: [bold]epsilon {rounded_up(best.epsilon)}[/] at "
        f"delta {answer.budget.delta:g}{expected}.",
        SELECTION_WORDS[answer.selection],
    ]
    if best.fresh_noise:
        sentences.append(
            f"Add Gaussian noise of standard deviation {best.fresh_noise!r} to each merged parameter, once, before "
            "anybody sees them: publishing the same merge again with other noise costs more than is stated here."
        )
    if answer.utility_reason is not None:
        sentences.append(f"No expected utility is shown. {answer.utility_reason}")
    sentences += [
        escape(
            f"{component.name}, drawn with probability {component.weight:.6g}, is "
            f"{weights_in_words(component.weights)}{_noise_in_words(component.fresh_noise)}."
        )
        for component in answer.components
    ]
    if answer.drawn_epsilons:
        own = ", ".join(
            f"{name} {'unknown' if epsilon is None else rounded_up(epsilon)}"
            for name, epsilon in answer.drawn_epsilons.items()
        )
        sentences.append(
            "Whoever learns what was drawn is protected by its own guarantee. Epsilon of each at this delta: "
            f"{escape(own)}."
        )
    sentences += [escape(f"{name} {reason.rstrip('.')}.") for name, reason in answer.set_aside.items()]
    sentences += [escape(note) for note in answer.notes]
    return sentences + assumption_sentences(answer.bound)


def assumption_sentences(bound: Bound) -> list[str]:
    """A heading, and one line for each assumption."""
    return [
        "This holds if all of the following is true:",
        *(f"  - {escape(text)}" for text in bound.assumptions),
    ]


def no_guarantee(account: Account) -> str:
    """Why nothing is certified: what the bounds that cover the release say, each reason once."""
    found = [line.reason for line in account.lines.values() if line.covers_kind and line.reason]
    return " ".join(dict.fromkeys(found))
