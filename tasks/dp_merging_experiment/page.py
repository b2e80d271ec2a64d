"""The page of the experiment: tables, and words that are computed from the same numbers."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime

from tasks.dp_merging_experiment.calibration import noise_multiplier
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
    Difference,
    Number,
    Spread,
    difference,
    gap_by,
    mean_of,
    merged_by,
    over_seeds,
)
from tasks.dp_merging_experiment.words import in_short
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
    ]
    for family in setting.families:
        lines += [f"**{family.title}**", "", *(f"- {one}" for one in in_short(setting, results, family)), ""]
    lines += _setting(setting, results, split_rules)
    for family in setting.families:
        lines += _family(setting, results, family, figures.get(family.name))
    lines += _limits(setting, results)
    return "\n".join(lines).rstrip() + "\n"


def _setting(setting: Setting, results: Results, split_rules: Mapping[tuple[str, str], str]) -> list[str]:
    lines = ["## Setting", ""]
    for family in setting.families:
        start = results.starts[family.name, setting.seeds[0]]
        pretraining = family.pretraining
        lines += [
            f"**{family.title}**: {', '.join(task.title for task in family.tasks)}. The network has "
            f"{start.parameters:,} parameters: a trunk of {start.trunk_parameters:,} "
            f"(`{family.trunk['factory']}`, {_arguments(family.trunk['arguments'])}) and a linear head for each task. "
            f"The public start is pre-trained without privacy on up to {family.pretraining_rows} public-train rows of "
            f"each task ({pretraining['steps']} steps of Adam at {pretraining['learning_rate']:g}, batches of "
            f"{pretraining['batch_size']}), once for each seed, heads included. Each private run takes {family.steps} "
            f"steps of SGD, Poisson batches at probability {family.sampling_probability:g}, gradients clipped to "
            f"{family.max_grad_norm:g}.",
            "",
        ]
    lines += [
        table(
            ("task", "about so many private rows", "public start", "how the rows are split"),
            [
                (
                    task.title,
                    f"{task.nominal_rows:,}",
                    _percent(
                        Spread.of(
                            [results.starts[family.name, seed].accuracy[task.name] for seed in setting.seeds]
                        )
                    ),
                    split_rules[family.name, task.name],
                )
                for family in setting.families
                for task in family.tasks
            ],
        ).rstrip(),
        "",
        "Of the public-train rows every second one is for pre-training, up to the limit; the others are looked at: "
        "hyper-parameters were chosen by them and the statistics for Fisher weighting and RegMean come from them. Of "
        f"the public-gate rows the first {setting.test_rows:,} are the test rows. The data are verified by checksum, "
        "and the command refuses data in which a record is in two parts or in two tasks of a family: so a merge is "
        "as private as the least private of its tasks (parallel composition).",
        "",
        f"Guarantee: (epsilon, {setting.delta:g}) for each task, add-or-remove-one, unit one image or one text, real-"
        "number arithmetic as everywhere. Noise is calibrated by `accounting.calibration` and every epsilon was "
        "computed again from the trajectory as executed. A paired step releases two gradients of one batch and needs "
        "sqrt(2) times the noise; the zero-cost variant and the anchor need none. Noise and batches are drawn from "
        "the operating system's entropy: a seed names a public start that all methods share, and a second run of the "
        "experiment gives other last digits.",
        "",
        table(
            (
                "tasks",
                "method",
                "learning rate",
                "radius",
                "anchor",
                *(f"noise at epsilon {epsilon:g}" for epsilon in setting.epsilons),
            ),
            [
                (
                    family.name,
                    method.title,
                    f"{method.learning_rate:g}",
                    "" if method.radius is None else f"{method.radius:g}",
                    f"{method.anchor:g}" if method.anchor else "",
                    *(
                        f"{noise_multiplier(family, method, epsilon=epsilon, delta=setting.delta):.3f}"
                        for epsilon in setting.epsilons
                    ),
                )
                for family in setting.families
                for method in family.methods
            ],
        ).rstrip(),
        "",
        "Learning rate, radius, anchor and the operators' options were chosen by `remerge experiment dp-merging "
        "--tune`: trial runs from a public start of their own at epsilon 2, compared on the public rows that are "
        "looked at, by the mean merged accuracy over operators; each operator's options are those that are best on "
        "average over the three chosen methods, the same for all. The ablations take the numbers of the methods that "
        "they cut. Trials train on the private rows, so with rows that are really private this search would have to "
        "be paid for, or be made on public rows. Operators merge trunks; heads are kept. Options:",
        "",
    ]
    for family in setting.families:
        options = "; ".join(
            f"{one.name}" + (f" ({_arguments(one.options)})" if one.options else "")
            for one in family.operators
        )
        by_size = (
            " Weights are equal, and of `linear` proportional to the tasks' rows."
            if any(one.by_size for one in family.operators)
            else " Weights are equal; `linear` is then `average`, byte for byte. SLERP is for two models and left out."
        )
        lines += [f"- {family.title}: {options}.{by_size}"]
    return [*lines, ""]


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
                        _percent(
                            over_seeds(
                                results, setting, family, method.name, epsilon, merged_by(operator.name)
                            )
                        )
                        for method in main
                    ),
                    *(
                        _points(
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
                        _percent(over_seeds(results, setting, family, method.name, epsilon, gap_by(name)))
                        for method in main
                    ),
                    *(
                        _points(difference(results, setting, family, (other, NAIVE), epsilon, gap_by(name)))
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
                        _percent(
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
                        _points(difference(results, setting, family, pair, epsilon, merged_by("average")))
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
                            _number(
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
        found.append(_percent(Spread.of(values)))
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
                    _percent(over_seeds(results, setting, family, method.name, epsilon, number))
                    for epsilon in setting.epsilons
                ),
            )
            for method in methods
        ],
    ).rstrip()


def _percent(spread: Spread) -> str:
    return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}"


def _number(spread: Spread, digits: int) -> str:
    return f"{spread.mean:.{digits}f} ± {spread.deviation:.{digits}f}"


def _points(one: Difference) -> str:
    text = f"{100 * one.mean:+.1f} ± {100 * one.half_width:.1f}"
    return f"**{text}**" if one.sign else text


def _arguments(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items())
