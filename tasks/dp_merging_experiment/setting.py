"""What is compared, in public numbers only: two families of tasks, five ways to train, and the merge operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NAIVE, PAIRED, ZERO_COST = "naive", "paired", "zero-cost"
NO_ANCHOR, NO_FLATNESS = "paired-no-anchor", "anchor-only"
DELTA = 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
RELATION = "add_or_remove_one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a family."""

    name: str
    title: str
    loader: str  # of tasks.data's kind
    arguments: Mapping[str, Any]
    classes: int
    nominal_rows: int  # public: about how many private rows there are; the expected batch is its share


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train; with ascent None and no anchor it is plain DP-SGD."""

    name: str
    title: str
    learning_rate: float
    ascent: str | None = None  # as `tasks.recipes.DpMerging`
    radius: float | None = None
    anchor: float = 0.0

    @property
    def is_paired(self) -> bool:
        return self.ascent == "same_batch"

    def dp_merging(self) -> dict[str, Any] | None:
        """What a recipe's candidate says of it."""
        if self.ascent is None and not self.anchor:
            return None
        return {"ascent": self.ascent or "none", "radius": self.radius, "anchor": self.anchor}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A merge operator with its options and weights."""

    name: str  # one of tasks.merging.OPERATORS
    options: Mapping[str, Any] = field(default_factory=dict)
    by_size: bool = False  # weights by the tasks' nominal rows; else equal ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Tasks of one common input shape, trained from one public start."""

    name: str
    title: str
    tasks: tuple[Task, ...]
    trunk: Mapping[str, Any]  # factory and arguments
    width: int  # numbers that the trunk gives a row
    shape: tuple[int, ...]  # of a row
    pretraining: Mapping[str, Any]  # steps, learning_rate, batch_size; the seed is the run's
    pretraining_rows: int  # public rows of each task that the start is pre-trained on, at most
    steps: int
    sampling_probability: float
    max_grad_norm: float
    methods: tuple[Method, ...]
    operators: tuple[Operator, ...]

    def task(self, name: str) -> Task:
        return next(one for one in self.tasks if one.name == name)

    def method(self, name: str) -> Method:
        return next(one for one in self.methods if one.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The whole experiment."""

    families: tuple[Family, ...]
    epsilons: tuple[float, ...] = EPSILONS
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    delta: float = DELTA
    test_rows: int = 2_000  # of each task, at most, the first ones of its held-out part

    def family(self, name: str) -> Family:
        return next(one for one in self.families if one.name == name)


def quick(setting: Setting) -> Setting:
    """Two seeds and the two outer budgets, for a few minutes."""
    return replace(setting, epsilons=(min(setting.epsilons), max(setting.epsilons)), seeds=setting.seeds[:2])
