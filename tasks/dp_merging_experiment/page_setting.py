"""The part of the page that says what was compared: tasks, rows, networks, methods, operators."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.dp_merging_experiment.calibration import noise_multiplier
from tasks.dp_merging_experiment.cells import arguments_in_words, percent
from tasks.dp_merging_experiment.results import Results
from tasks.dp_merging_experiment.setting import Setting
from tasks.dp_merging_experiment.summary import Spread
from tasks.report import table


def setting_in_words(
    setting: Setting, results: Results, split_rules: Mapping[tuple[str, str], str]
) -> list[str]:
    """Markdown lines; arguments as of `tasks.dp_merging_experiment.page.experiment_page`."""
    lines = ["## Setting", ""]
    for family in setting.families:
        start = results.starts[family.name, setting.seeds[0]]
        pretraining = family.pretraining
        lines += [
            f"**{family.title}**: {', '.join(task.title for task in family.tasks)}. The network has "
            f"{start.parameters:,} parameters: a trunk of {start.trunk_parameters:,} "
            f"(`{family.trunk['factory']}`, {arguments_in_words(family.trunk['arguments'])}) and a linear head for "
            f"each task. The public start is pre-trained without privacy on up to {family.pretraining_rows} "
            f"public-train rows of each task ({pretraining['steps']} steps of Adam at "
            f"{pretraining['learning_rate']:g}, batches of {pretraining['batch_size']}), once for each seed, heads "
            f"included. Each private run takes {family.steps} steps of SGD, Poisson batches at probability "
            f"{family.sampling_probability:g}, gradients clipped to {family.max_grad_norm:g}.",
            "",
        ]
    lines += [
        table(
            ("task", "about so many private rows", "public start", "how the rows are split"),
            [
                (
                    task.title,
                    f"{task.nominal_rows:,}",
                    percent(
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
        "as private as the least private of its tasks (parallel composition). The guarantee is about the rows kept: a "
        "cut at a number of rows is fit for published data, not a rule by which private rows could be chosen.",
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
            f"{one.name}" + (f" ({arguments_in_words(one.options)})" if one.options else "")
            for one in family.operators
        )
        by_size = (
            " Weights are equal, and of `linear` proportional to the tasks' rows."
            if any(one.by_size for one in family.operators)
            else " Weights are equal; `linear` is then `average`, byte for byte. SLERP is for two models and left out."
        )
        lines += [f"- {family.title}: {options}.{by_size}"]
    return [*lines, ""]
