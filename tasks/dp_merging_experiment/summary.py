"""Means, spreads and paired differences over seeds: pure functions of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from tasks.dp_merging_experiment.results import GroupResult, Results
from tasks.dp_merging_experiment.setting import Family, Setting

CONFIDENCE = 0.95
Number = Callable[[GroupResult], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Numbers over seeds."""

    mean: float
    deviation: float  # standard deviation over seeds, with n - 1; 0 for one seed

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean=fmean(values), deviation=stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much more a method has than another one from the same public starts."""

    mean: float
    half_width: float  # of the 95 % interval by Student's t over seeds; infinite for one seed

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference:
        from scipy.stats import t  # late: importing scipy.stats takes a second

        if len(values) < 2:
            return cls(mean=fmean(values), half_width=math.inf)
        factor = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
        return cls(mean=fmean(values), half_width=factor * stdev(values) / math.sqrt(len(values)))

    @property
    def sign(self) -> int:
        """1: above 0; -1: below; 0: the interval has 0 in it."""
        if self.mean - self.half_width > 0:
            return 1
        return -1 if self.mean + self.half_width < 0 else 0


def over_seeds(
    results: Results, setting: Setting, family: Family, method: str, epsilon: float, number: Number
) -> Spread:
    """A number's mean and spread over seeds."""
    return Spread.of([number(results.groups[family.name, method, epsilon, seed]) for seed in setting.seeds])


def difference(
    results: Results, setting: Setting, family: Family, pair: tuple[str, str], epsilon: float, number: Number
) -> Difference:
    """A number's difference between two methods, seed by seed: the first one's minus the second one's."""
    first, second = pair
    return Difference.of(
        [
            number(results.groups[family.name, first, epsilon, seed])
            - number(results.groups[family.name, second, epsilon, seed])
            for seed in setting.seeds
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many comparisons went which way, and by how much on average."""

    better: int
    worse: int
    undecided: int
    mean: float  # of all differences

    @classmethod
    def of(cls, differences: Sequence[Difference]) -> Tally:
        signs = [one.sign for one in differences]
        return cls(
            better=signs.count(1),
            worse=signs.count(-1),
            undecided=signs.count(0),
            mean=fmean(one.mean for one in differences),
        )

    @property
    def total(self) -> int:
        return self.better + self.worse + self.undecided

    @property
    def is_gain(self) -> bool:
        """At least half of the comparisons are decided, and for the better."""
        return self.better > self.worse and self.better >= self.total / 2

    @property
    def is_loss(self) -> bool:
        return self.worse > self.better and self.worse >= self.total / 2


def merged_by(operator: str) -> Number:
    return lambda group: group.merged_mean(operator)


def gap_by(operator: str) -> Number:
    return lambda group: group.gap(operator)


def mean_of(what: str) -> Number:
    return lambda group: group.mean(what)


def tally(results: Results, setting: Setting, family: Family, pair: tuple[str, str]) -> Tally:
    """Merged accuracy of two methods compared, under every operator at every budget."""
    return Tally.of(
        [
            difference(results, setting, family, pair, epsilon, merged_by(operator.name))
            for operator in family.operators
            for epsilon in setting.epsilons
        ]
    )


def best_operator(results: Results, setting: Setting, family: Family, method: str, epsilon: float) -> str:
    """The operator with the highest mean merged accuracy, chosen after the fact."""
    return max(
        (one.name for one in family.operators),
        key=lambda name: over_seeds(results, setting, family, method, epsilon, merged_by(name)).mean,
    )
