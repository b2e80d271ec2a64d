"""The plan: which starts, runs and scorings a setting asks for, each with the key of everything it depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infra.canonical import digest
from tasks.dp_merging_experiment.setting import RELATION, Family, Method, Operator, Setting, Task

VERSION = 1  # of how a start, a run or a scoring is made: raise it when that changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A public start: pre-trained without privacy on public rows of all tasks of a family."""

    family: Family
    seed: int

    @property
    def key(self) -> str:
        return digest(self.depends_on())

    def depends_on(self) -> dict[str, Any]:
        family = self.family
        return {
            "version": VERSION,
            "tasks": {
                task.name: {"loader": task.loader, "arguments": dict(task.arguments), "classes": task.classes}
                for task in family.tasks
            },
            "trunk": dict(family.trunk),
            "width": family.width,
            "shape": list(family.shape),
            "pretraining": dict(family.pretraining),
            "pretraining_rows": family.pretraining_rows,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One private training: a task, a method, a budget, a seed."""

    family: Family
    task: Task
    method: Method
    epsilon: float  # nats, the target
    delta: float
    seed: int  # of the public start; the private noise and batches are drawn afresh, whatever the seed
    test_rows: int

    @property
    def start(self) -> Start:
        return Start(family=self.family, seed=self.seed)

    @property
    def key(self) -> str:
        return digest(self.depends_on())

    def depends_on(self) -> dict[str, Any]:
        method = self.method
        return {
            "version": VERSION,
            "start": self.start.key,
            "task": self.task.name,
            "nominal_rows": self.task.nominal_rows,
            "steps": self.family.steps,
            "sampling_probability": self.family.sampling_probability,
            "max_grad_norm": self.family.max_grad_norm,
            "learning_rate": method.learning_rate,
            "dp_merging": method.dp_merging(),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": RELATION,
            "seed": self.seed,
            "test_rows": self.test_rows,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The merges, by every operator, of one model of each task: of a method, a budget and a seed."""

    family: Family
    method: Method
    epsilon: float
    delta: float
    seed: int
    test_rows: int

    @property
    def runs(self) -> tuple[Run, ...]:
        """Of each task of the family, in its order."""
        return tuple(
            Run(
                family=self.family,
                task=task,
                method=self.method,
                epsilon=self.epsilon,
                delta=self.delta,
                seed=self.seed,
                test_rows=self.test_rows,
            )
            for task in self.family.tasks
        )

    def key(self, operator: Operator) -> str:
        """Of one operator's merge: so operators can be added without training anything again."""
        return digest(
            {
                "version": VERSION,
                "runs": [run.key for run in self.runs],
                "operator": operator.name,
                "options": dict(operator.options),
                "by_size": operator.by_size,
            }
        )


def starts(setting: Setting) -> list[Start]:
    return [Start(family=family, seed=seed) for family in setting.families for seed in setting.seeds]


def scorings(setting: Setting) -> list[Scoring]:
    """All groups of runs that are merged; seeds outermost, so that what is there early covers everything once."""
    return [
        Scoring(
            family=family,
            method=method,
            epsilon=epsilon,
            delta=setting.delta,
            seed=seed,
            test_rows=setting.test_rows,
        )
        for seed in setting.seeds
        for family in setting.families
        for method in family.methods
        for epsilon in setting.epsilons
    ]


def runs(setting: Setting) -> Iterator[Run]:
    """All private trainings, in the order of `scorings`; none is named twice."""
    seen: set[str] = set()
    for scoring in scorings(setting):
        for run in scoring.runs:
            if run.key not in seen:
                seen.add(run.key)
                yield run
