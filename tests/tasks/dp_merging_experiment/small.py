"""A small setting on real digits: two tasks, so few steps that a run takes a fraction of a second."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np

from tasks.data import Rows, Splits, digits
from tasks.dp_merging_experiment.setting import NAIVE, PAIRED, Family, Method, Operator, Setting, Task


def some_digits(*, with_private: bool, classes: Sequence[int]) -> Splits:
    """The loader: the built-in digits of some classes, labelled from 0 on."""
    all_of_them = digits(with_private=with_private)

    def chosen(rows: Rows) -> Rows:
        kept = np.isin(rows.labels, list(classes))
        return Rows(features=rows.features[kept], labels=rows.labels[kept] - min(classes))

    return Splits(
        private=None if all_of_them.private is None else chosen(all_of_them.private),
        public_train=chosen(all_of_them.public_train),
        public_gate=chosen(all_of_them.public_gate),
        classes=len(classes),
        split_rule="that of the digits",
    )


def deadly(**arguments: Any) -> Splits:
    """A loader that kills the process that calls it."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(arguments)


def task(name: str, classes: list[int]) -> Task:
    return Task(
        name=name,
        title=f"digits {classes[0]} to {classes[-1]}",
        loader="tests.tasks.dp_merging_experiment.small:some_digits",
        arguments={"classes": classes},
        classes=len(classes),
        nominal_rows=600,
    )


def family(**changes: Any) -> Family:
    fields: dict[str, Any] = {
        "name": "digits",
        "title": "Two halves of the digits",
        "tasks": (task("low", [0, 1, 2, 3, 4]), task("high", [5, 6, 7, 8, 9])),
        "trunk": {
            "factory": "tasks.dp_merging_experiment.networks:perceptron_trunk",
            "arguments": {"features": 65, "hidden": 8, "width": 6},
        },
        "width": 6,
        "shape": (65,),
        "pretraining": {"steps": 5, "learning_rate": 0.01, "batch_size": 32},
        "pretraining_rows": 40,
        "steps": 3,
        "sampling_probability": 0.1,
        "max_grad_norm": 1.0,
        "methods": (
            Method(name=NAIVE, title="naive DP-SGD", learning_rate=1.0),
            Method(
                name=PAIRED,
                title="paired",
                learning_rate=1.0,
                ascent="same_batch",
                radius=0.1,
                anchor=0.01,
            ),
        ),
        "operators": (Operator(name="average"), Operator(name="regmean")),
    }
    return Family(**{**fields, **changes})


def setting(**changes: Any) -> Setting:
    fields: dict[str, Any] = {"families": (family(),), "epsilons": (2.0,), "seeds": (1, 2), "test_rows": 50}
    return Setting(**{**fields, **changes})
