"""The two families of the experiment, with the numbers that were tuned for them (see the page on how)."""

from __future__ import annotations

from tasks.dp_merging_experiment.setting import (
    NAIVE,
    NO_ANCHOR,
    NO_FLATNESS,
    PAIRED,
    ZERO_COST,
    Family,
    Method,
    Operator,
    Setting,
    Task,
)

_GREY = "tasks.data.grey_images:grey_images"
_TEXTS = "tasks.data.rated_texts:rated_texts"


def methods(learning_rates: dict[str, float], radii: dict[str, float], anchor: float) -> tuple[Method, ...]:
    """The five ways to train; the ablations take the paired method's numbers."""
    paired = learning_rates[PAIRED]
    return (
        Method(name=NAIVE, title="naive DP-SGD", learning_rate=learning_rates[NAIVE]),
        Method(
            name=PAIRED,
            title="DP-Merging, paired",
            learning_rate=paired,
            ascent="same_batch",
            radius=radii[PAIRED],
            anchor=anchor,
        ),
        Method(
            name=ZERO_COST,
            title="DP-Merging, zero-cost",
            learning_rate=learning_rates[ZERO_COST],
            ascent="previous_gradient",
            radius=radii[ZERO_COST],
            anchor=anchor,
        ),
        Method(
            name=NO_ANCHOR,
            title="paired without the anchor",
            learning_rate=paired,
            ascent="same_batch",
            radius=radii[PAIRED],
        ),
        Method(
            name=NO_FLATNESS,
            title="the anchor without flatness",
            learning_rate=learning_rates[ZERO_COST],
            anchor=anchor,
        ),
    )


def operators(options: dict[str, dict[str, float]], *, by_size: bool) -> tuple[Operator, ...]:
    """All operators for more than two tasks. With equal weights `linear` is `average`, byte for byte."""
    names = (
        "average",
        *(("linear",) if by_size else ()),
        "task_arithmetic",
        "ties",
        "dare",
        "fisher",
        "regmean",
    )
    return tuple(
        Operator(name=name, options=options.get(name, {}), by_size=name == "linear")
        for name in (*names, "pcb", "wudi")
    )


IMAGES = Family(
    name="images",
    title="Four image tasks",
    tasks=(
        Task(
            name="mnist",
            title="MNIST",
            loader=_GREY,
            arguments={"of": "mnist", "private_rows": 10_000, "halved": True},
            classes=10,
            nominal_rows=10_000,
        ),
        Task(
            name="fashion",
            title="Fashion-MNIST",
            loader=_GREY,
            arguments={"of": "fashion_mnist", "private_rows": 10_000, "halved": True},
            classes=10,
            nominal_rows=10_000,
        ),
        Task(
            name="cifar-first",
            title="CIFAR-10, classes 0 to 4",
            loader=_GREY,
            arguments={"of": "cifar10", "private_rows": 20_000, "classes": [0, 1, 2, 3, 4], "halved": True},
            classes=5,
            nominal_rows=10_000,
        ),
        Task(
            name="cifar-last",
            title="CIFAR-10, classes 5 to 9",
            loader=_GREY,
            arguments={"of": "cifar10", "private_rows": 20_000, "classes": [5, 6, 7, 8, 9], "halved": True},
            classes=5,
            nominal_rows=10_000,
        ),
    ),
    trunk={
        "factory": "tasks.dp_merging_experiment.networks:perceptron_trunk",
        "arguments": {"features": 196, "hidden": 48, "width": 24},
    },
    width=24,
    shape=(1, 14, 14),
    pretraining={"steps": 150, "learning_rate": 0.002, "batch_size": 128},
    pretraining_rows=250,
    steps=80,
    sampling_probability=0.02,
    max_grad_norm=1.0,
    methods=methods({NAIVE: 1.0, PAIRED: 0.5, ZERO_COST: 1.0}, {PAIRED: 0.1, ZERO_COST: 0.1}, anchor=0.0025),
    operators=operators(
        {
            "task_arithmetic": {"scale": 1.5},
            "ties": {"density": 0.8},
            "dare": {"density": 0.8, "scale": 1.5},
            "pcb": {"density": 0.2},
            "wudi": {"scale": 0.5, "ridge": 1.0},
        },
        by_size=False,
    ),
)

TEXTS = Family(
    name="texts",
    title="Four sets of rated texts",
    tasks=tuple(
        Task(name=name, title=title, loader=_TEXTS, arguments={"of": name}, classes=2, nominal_rows=rows)
        for name, title, rows in (
            ("tweets", "tweets", 2_500),
            ("amazon", "Amazon reviews", 2_200),
            ("movies", "film reviews", 6_300),
            ("news", "New York Times editorials", 3_000),
        )
    ),
    trunk={
        "factory": "tasks.dp_merging_experiment.networks:perceptron_trunk",
        "arguments": {"features": 384, "hidden": 32, "width": 16},
    },
    width=16,
    shape=(384,),
    pretraining={"steps": 100, "learning_rate": 0.002, "batch_size": 64},
    pretraining_rows=100,
    steps=80,
    sampling_probability=0.05,
    max_grad_norm=1.0,
    methods=methods({NAIVE: 0.5, PAIRED: 0.5, ZERO_COST: 0.5}, {PAIRED: 2.0, ZERO_COST: 0.1}, anchor=0.0025),
    operators=operators(
        {
            "task_arithmetic": {"scale": 1.5},
            "ties": {"density": 0.2},
            "dare": {"density": 0.5, "scale": 1.5},
            "pcb": {"density": 0.2},
            "wudi": {"scale": 0.5, "ridge": 1.0},
        },
        by_size=True,
    ),
)

SETTING = Setting(families=(IMAGES, TEXTS))
