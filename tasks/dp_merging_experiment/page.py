"""The page of the experiment: tables, and words that are computed from the same numbers."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime

from tasks.dp_merging_experiment.cells import number as number_cell
from tasks.dp_merging_experiment.cells import percent, points
from tasks.dp_merging_experiment.page_setting import setting_in_words
from tasks.dp_merging_experiment.results import Results
from tasks.dp_merging_experiment.setting import (
    NAIVE,
    NO_ANCHOR,
    NO_FLATNESS,
    PAIRED,
    ZERO_COST,
    Family,
    Method,
    Setting,
)
from tasks.dp_merging_experiment.summary import (
    Number,
    Spread,
    difference,
    gap_by,
    mean_of,
    merged_by,
    over_seeds,
)
from tasks.dp_merging_experiment.words import in_short, verdict
from tasks.report import table

MAIN = (NAIVE, PAIRED, ZERO_COST)


def experiment_page(
    setting: Setting,
    results: Results,
    *,
    command: str,
    split_rules: Mapping[tuple[str, str], str],
    figures: Mapping[str, tuple[str, str]],
    versions: Mapping[str, str],
) -> str:
    """Markdown with every table.

    Args:
        command: that made this page.
        split_rules: by family and task, in words.
        figures: by family, the file names of its two figures beside the page.
        versions: of the libraries.
    """
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# DP-Merging on small real tasks",
        "",
        f"Made by `{command}` on {datetime.now(UTC):%Y-%m-%d} (Python {platform.python_version()}, {libraries}).",
        "",
        "Several tasks, each with private data of its own, are fine-tuned under differential privacy from one public "
        "start and merged into one model. DP-Merging (arXiv 2608.26655) trains the tasks' models to be flat and near "
        "that start, so that they merge better. Here it stands beside plain DP-SGD at equal (epsilon, delta), on "
        "networks and data far smaller than the paper's. Accuracies are on test rows that nothing was trained on or "
        f"chosen by; `±` is the standard deviation over {len(setting.seeds)} seeds; intervals are 95 % by Student's "
        "t over seeds and not corrected for how many there are.",
        "",
        "## In short",
        "",
        verdict(setting, results),
        "",
    ]
    for family in setting.families:
        lines += [f"**{family.title}**", "", *(f"- {one}" for one in in_short(setting, results, family)), ""]
    lines += setting_in_words(setting, results, split_rules)
    for family in setting.families:
        lines += _family(setting, results, family, figures.get(family.name))
    lines += _limits(setting, results)
    return "\n".join(lines).rstrip() + "\n"


def _family(setting: Setting, results: Results, family: Family, figures: tuple[str, str] | None) -> list[str]:
    lines = [f"## {family.title}", ""]
    if figures is not None:
        lines += [f"![Accuracy of merges over the budget]({figures[0]})", ""]
    main = [family.method(name) for name in MAIN]
    lines += [
        "### Each task's own model",
        "",
        "Mean accuracy over the tasks before any merge, %.",
        "",
        _by_budget(setting, results, family, family.methods, lambda group: group.own_mean()),
        "",
        "### Merges",
        "",
        "Mean accuracy over the tasks after the merge, %, and by how many points DP-Merging is above naive DP-SGD from "
        "the same starts. **Bold**: the interval leaves 0 out.",
        "",
        table(
            (
                "operator",
                "epsilon",
                *(method.title for method in main),
                "paired - naive",
                "zero-cost - naive",
            ),
            [
                (
                    operator.name,
                    f"{epsilon:g}",
                    *(
                        percent(
                            over_seeds(
                                results, setting, family, method.name, epsilon, merged_by(operator.name)
                            )
                        )
                        for method in main
                    ),
                    *(
                        points(
                            difference(
                                results, setting, family, (name, NAIVE), epsilon, merged_by(operator.name)
                            )
                        )
                        for name in (PAIRED, ZERO_COST)
                    ),
                )
                for operator in family.operators
                for epsilon in setting.epsilons
            ],
        ).rstrip(),
        "",
        "### Merge gap",
        "",
        "Points of accuracy that a task loses on average when its own model is replaced by the merge.",
        "",
        table(
            (
                "operator",
                "epsilon",
                *(method.title for method in main),
                "paired - naive",
                "zero-cost - naive",
            ),
            [
                (
                    name,
                    f"{epsilon:g}",
                    *(
                        percent(over_seeds(results, setting, family, method.name, epsilon, gap_by(name)))
                        for method in main
                    ),
                    *(
                        points(difference(results, setting, family, (other, NAIVE), epsilon, gap_by(name)))
                        for other in (PAIRED, ZERO_COST)
                    ),
                )
                for name in ("average", "task_arithmetic")
                for epsilon in setting.epsilons
            ],
        ).rstrip(),
        "",
        "### Ablation",
        "",
        "Merged accuracy by averaging and by task arithmetic, %.",
        "",
        table(
            ("operator", "method", *(f"epsilon {epsilon:g}" for epsilon in setting.epsilons)),
            [
                (
                    operator,
                    method.title,
                    *(
                        percent(
                            over_seeds(results, setting, family, method.name, epsilon, merged_by(operator))
                        )
                        for epsilon in setting.epsilons
                    ),
                )
                for operator in ("average", "task_arithmetic")
                for method in family.methods
            ],
        ).rstrip(),
        "",
        "What a part of the method adds to averaged accuracy, in points. Where the table of methods gives the two "
        "compared other learning rates or noise, the difference has that in it too.",
        "",
        table(
            ("compared", *(f"epsilon {epsilon:g}" for epsilon in setting.epsilons)),
            [
                (
                    words,
                    *(
                        points(difference(results, setting, family, pair, epsilon, merged_by("average")))
                        for epsilon in setting.epsilons
                    ),
                )
                for words, pair in (
                    ("the anchor (paired with it - without)", (PAIRED, NO_ANCHOR)),
                    ("paired flatness (paired - the anchor alone)", (PAIRED, NO_FLATNESS)),
                    ("zero-cost flatness (zero-cost - the anchor alone)", (ZERO_COST, NO_FLATNESS)),
                    ("the anchor alone (it - naive)", (NO_FLATNESS, NAIVE)),
                )
            ],
        ).rstrip(),
        "",
        "### Where the private models lie",
        "",
    ]
    if figures is not None:
        lines += [f"![Sharpness, drift and cosines]({figures[1]})", ""]
    lines += [
        "Sharpness: nats by which the test loss of a task's own model rises 0.5 (L2) up its gradient. Drift: L2 "
        "distance of the trunk from the public start. Cosine: between the tasks' trunks' changes, mean over pairs. "
        "Means over tasks.",
        "",
    ]
    for label, number, digits in (
        ("sharpness", mean_of("sharpness"), 3),
        ("drift", mean_of("drift"), 2),
        ("cosine", lambda group: group.cosine, 3),
    ):
        lines += [
            table(
                (label, *(f"epsilon {epsilon:g}" for epsilon in setting.epsilons)),
                [
                    (
                        method.title,
                        *(
                            number_cell(
                                over_seeds(results, setting, family, method.name, epsilon, number), digits
                            )
                            for epsilon in setting.epsilons
                        ),
                    )
                    for method in family.methods
                ],
            ).rstrip(),
            "",
        ]
    return lines + _by_task(setting, results, family)


def _by_task(setting: Setting, results: Results, family: Family) -> list[str]:
    epsilon = setting.epsilons[len(setting.epsilons) // 2 - 1]
    rows = []
    for task in family.tasks:
        own = _one_task(setting, results, family, task.name, epsilon, None)
        merged = _one_task(setting, results, family, task.name, epsilon, "average")
        rows.append((task.title, *own, *merged))
    names = [family.method(name).title for name in MAIN]
    return [
        f"### Task by task, epsilon {epsilon:g}, averaged, %",
        "",
        table(
            ("task", *(f"own: {name}" for name in names), *(f"merged: {name}" for name in names)), rows
        ).rstrip(),
        "",
    ]


def _one_task(
    setting: Setting, results: Results, family: Family, task: str, epsilon: float, operator: str | None
) -> list[str]:
    found = []
    for method in MAIN:
        groups = [results.groups[family.name, method, epsilon, seed] for seed in setting.seeds]
        values = [
            group.own[task].accuracy if operator is None else group.merged[operator][task] for group in groups
        ]
        found.append(percent(Spread.of(values)))
    return found


def _limits(setting: Setting, results: Results) -> list[str]:
    seconds = [one.seconds for group in results.groups.values() for one in group.own.values()]
    merging = sum(group.seconds for group in results.groups.values())
    largest = max(
        one.epsilon / epsilon
        for (_, _, epsilon, _), group in results.groups.items()
        for one in group.own.values()
    )
    return [
        "## What this does not show",
        "",
        "- Networks of ten thousand parameters trained from a weak start for some dozen steps are not the paper's "
        "large pre-trained models: here noise moves a model as far as learning does. Nothing follows for other sizes.",
        "- One set of hyper-parameters for all budgets, from one small search; another search could move any column.",
        "- About one interval in twenty leaves 0 out by chance, in a table too.",
        "- The rows are published data sets, which is why accuracies of private models may be printed at all: no "
        "certificate covers a page like this.",
        "",
        "## Cost",
        "",
        f"{len(seconds)} private runs, {sum(seconds) / len(seconds):.1f} s each on average ({max(seconds):.0f} s the "
        f"longest, on a busy machine with two cores), {sum(seconds) / 60:.0f} minutes of training in all; merging took "
        f"{merging:.0f} s. The largest epsilon as executed is {largest:.4f} times its target.",
        "",
    ]


def _by_budget(
    setting: Setting, results: Results, family: Family, methods: tuple[Method, ...], number: Number
) -> str:
    return table(
        ("method", *(f"epsilon {epsilon:g}" for epsilon in setting.epsilons)),
        [
            (
                method.title,
                *(
                    percent(over_seeds(results, setting, family, method.name, epsilon, number))
                    for epsilon in setting.epsilons
                ),
            )
            for method in methods
        ],
    ).rstrip()
