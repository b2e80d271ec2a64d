"""What a tuning tries: geometric ranges around the recipe's own values, nearest first, within a number of trials."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from accounting.budget import LARGEST_EPSILON, LEAST_EPSILON
from accounting.errors import InvalidInput
from tasks.recipes import CandidateRecipe

NORM_FACTORS = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)  # of the median gradient norm of public rows at the start
EPSILON_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
RATE_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
LEAST_TRIALS = 4  # one a stage, and one of the recipe as it is
MOST_TRIALS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """The ranges of the three stages. The first entry of each is the recipe's own, and the last goes first."""

    norms: tuple[float, ...]  # clipping norms, to be tried without noise at the recipe's learning rate
    epsilons: tuple[float, ...]  # nats, the target first
    sampling_probabilities: tuple[float, ...]
    learning_rates: tuple[float, ...]

    @property
    def trials(self) -> int:
        """Of all stages, and the one of the recipe's own values at the target."""
        return len(self.norms) + len(self.epsilons) + self.last_stage + 1

    @property
    def last_stage(self) -> int:
        return len(self.sampling_probabilities) * len(self.learning_rates)

    def within(self, most: int) -> SearchPlan:
        """The plan without the outermost values of whichever stage has the most trials, until it fits.

        Args:
            most: trials, at least 4.

        Raises:
            InvalidInput: there is not one trial for each stage.
        """
        if not LEAST_TRIALS <= most <= MOST_TRIALS:
            raise InvalidInput(
                f"--budget-trials must be from {LEAST_TRIALS}, one for each stage and one of the recipe's own values, "
                f"to {MOST_TRIALS}, but {most} was given."
            )
        plan = self
        while plan.trials > most:
            plan = plan._smaller()
        return plan

    def _smaller(self) -> SearchPlan:
        longest = max(len(self.norms), len(self.epsilons), self.last_stage)
        if longest == self.last_stage:
            if len(self.learning_rates) >= len(self.sampling_probabilities):
                return replace(self, learning_rates=self.learning_rates[:-1])
            return replace(self, sampling_probabilities=self.sampling_probabilities[:-1])
        if longest == len(self.norms):
            return replace(self, norms=self.norms[:-1])
        return replace(self, epsilons=self.epsilons[:-1])


def search_plan(candidate: CandidateRecipe, *, epsilon: float, median_norm: float) -> SearchPlan:
    """The whole search for one candidate.

    Args:
        epsilon: the target, nats.
        median_norm: of public rows' gradients at the public initialisation.

    Raises:
        InvalidInput: the gradients are zero or not finite.
    """
    if not (median_norm > 0 and math.isfinite(median_norm)):
        raise InvalidInput(
            "Half of the public-train rows have no usable gradient at the start, so there is no range of clipping "
            "norms to try; look at the network's initialisation and the rows."
        )
    own, q = candidate.max_grad_norm, candidate.sampling_probability
    norms = {own, *(_short(median_norm * factor) for factor in NORM_FACTORS)}
    return SearchPlan(
        norms=tuple(sorted(norms, key=lambda norm: (abs(math.log(norm / own)), norm))),
        epsilons=tuple(
            target
            for factor in EPSILON_FACTORS
            if LEAST_EPSILON <= (target := epsilon * factor) <= LARGEST_EPSILON or factor == 1
        ),
        sampling_probabilities=tuple(dict.fromkeys(p for p in (q, 1.0, q / 2, 2 * q) if p <= 1)),
        learning_rates=tuple(candidate.learning_rate * factor for factor in RATE_FACTORS),
    )


def _short(value: float) -> float:
    """Three significant digits: a constant that people can read, and public like what it was computed from."""
    return float(f"{value:.3g}")
