"""How the experiment's numbers were chosen: trial runs of seeds of their own, compared on public rows.

Trials train on the private rows, as the experiment does, so choosing by them would cost privacy if those rows were
private; here they are published ones. Test rows and the experiment's seeds play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tasks.dp_merging_experiment.plan import Scoring, scorings
from tasks.dp_merging_experiment.scoring import MERGES
from tasks.dp_merging_experiment.setting import Family, Method, Operator, Setting
from tasks.dp_merging_experiment.store import Store

SEEDS = (101,)
EPSILON = 2.0
LEARNING_RATES = (0.5, 1.0, 2.0, 4.0)
STEPS = tuple(  # learning rate, radius, anchor: of both kinds of ascent
    (rate, radius, anchor)
    for rate in (0.5, 1.0, 2.0)
    for radius, anchor in ((0.1, 0.0025), (0.1, 0.01), (0.5, 0.0025), (2.0, 0.0025), (5.0, 0.0025))
)
OPERATORS = (
    Operator(name="average"),
    *(Operator(name="task_arithmetic", options={"scale": scale}) for scale in (1.5, 2.0, 3.0)),
    *(Operator(name="ties", options={"density": density}) for density in (0.2, 0.5, 0.8)),
    *(Operator(name="dare", options={"density": density, "scale": 1.5}) for density in (0.5, 0.8)),
    *(Operator(name="pcb", options={"density": density}) for density in (0.2, 0.5, 0.8)),
    *(
        Operator(name="wudi", options={"scale": scale, "ridge": ridge})
        for scale in (0.25, 0.5)
        for ridge in (1e-6, 1.0)
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What an operator made of a method's models, on the rows that are looked at."""

    family: str
    method: Method
    operator: Operator
    accuracy: float  # mean over tasks and tuning seeds, in [0, 1]


def trials(family: Family) -> Family:
    """The family with every method that is tried, and every operator."""
    naive = [Method(name=f"naive-{rate:g}", title="naive", learning_rate=rate) for rate in LEARNING_RATES]
    climbing = [
        Method(
            name=f"{ascent}-{rate:g}-{radius:g}-{anchor:g}",
            title=ascent,
            learning_rate=rate,
            ascent=ascent,
            radius=radius,
            anchor=anchor,
        )
        for ascent in ("same_batch", "previous_gradient")
        for rate, radius, anchor in STEPS
    ]
    return replace(family, methods=(*naive, *climbing), operators=OPERATORS)


def tuning(setting: Setting) -> Setting:
    """The setting of all trials: another plan for the same workers."""
    return replace(
        setting,
        families=tuple(trials(family) for family in setting.families),
        epsilons=(EPSILON,),
        seeds=SEEDS,
    )


def found(setting: Setting, store: Store) -> list[Trial]:
    """All finished trials of `tuning(...)`, the best of each family first."""
    by_trial: dict[tuple[str, str, int], list[float]] = {}
    named: dict[tuple[str, str, int], tuple[Scoring, Operator]] = {}
    for scoring in scorings(setting):
        for number, operator in enumerate(scoring.family.operators):
            result = store.result(MERGES, scoring.key(operator))
            if result is not None:
                key = (scoring.family.name, scoring.method.name, number)
                by_trial.setdefault(key, []).append(float(np.mean(list(result["looked_at"].values()))))
                named[key] = (scoring, operator)
    rows = [
        Trial(
            family=key[0],
            method=named[key][0].method,
            operator=named[key][1],
            accuracy=float(np.mean(accuracies)),
        )
        for key, accuracies in by_trial.items()
    ]
    return sorted(rows, key=lambda one: (one.family, -one.accuracy))


def score(rows: Sequence[Trial], family: str, method: Method) -> float:
    """What methods are compared by: the mean over operators of the accuracy with each one's best options."""
    best: dict[str, float] = {}
    for one in rows:
        if (one.family, one.method) == (family, method):
            best[one.operator.name] = max(best.get(one.operator.name, 0.0), one.accuracy)
    return float(np.mean(list(best.values())))


def chosen(rows: Sequence[Trial], family: str) -> dict[str, Method]:
    """The best method of each title: naive, same_batch, previous_gradient."""
    methods = {one.method.name: one.method for one in rows if one.family == family}
    best: dict[str, Method] = {}
    for method in sorted(methods.values(), key=lambda one: score(rows, family, one)):
        best[method.title] = method
    return best


def chosen_options(rows: Sequence[Trial], family: str) -> dict[str, Operator]:
    """The options of each operator that are best on average over the chosen methods: the same for all of them."""
    methods = chosen(rows, family).values()
    found: dict[str, list[tuple[float, Operator]]] = {}
    for operator in OPERATORS:
        accuracies = [
            one.accuracy
            for one in rows
            if one.family == family and one.operator == operator and one.method in methods
        ]
        found.setdefault(operator.name, []).append((float(np.mean(accuracies)), operator))
    return {name: max(options, key=lambda one: one[0])[1] for name, options in found.items()}
