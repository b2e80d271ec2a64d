"""Learning rates step by step: a public staircase, fixed before training, so that a trajectory stays short."""

from __future__ import annotations

import math

from tasks.recipes import CandidateRecipe


def learning_rates(candidate: CandidateRecipe) -> tuple[float, ...]:
    """The learning rate of each step, shape (steps,).

    Warm-up and schedule are each cut into `schedule_stages` even plateaus, as far as there are steps. The rate of
    a warm-up plateau is that of its end, of a schedule's plateau that of its middle: no rate is ever zero.
    """
    highest = candidate.learning_rate
    warmup = [
        highest * ((stage + 1) / stages)  # in this order: the last one is the highest to the last bit
        for stage, stages in _stages(candidate.warmup_steps, candidate.schedule_stages)
    ]
    rest = [
        highest * _share_left(candidate.learning_rate_schedule, (stage + 0.5) / stages)
        for stage, stages in _stages(candidate.steps - candidate.warmup_steps, candidate.schedule_stages)
    ]
    return (*warmup, *rest)


def _stages(steps: int, wanted: int) -> list[tuple[int, int]]:
    """For each step the number of its plateau, from 0, and how many plateaus there are."""
    stages = min(steps, wanted)
    return [(step * stages // steps, stages) for step in range(steps)]


def _share_left(schedule: str, done: float) -> float:
    """Share of the highest rate where `done`, in (0, 1), of the schedule is over."""
    if schedule == "linear":
        return 1 - done
    if schedule == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1.0
