"""Whether a policy's budget can be met by what a group's recipe will train: asked before anything is trained."""

from __future__ import annotations

import math

from accounting.errors import InvalidInput, RemergeError
from accounting.joint_release import single_run
from accounting.words import rounded_up
from infra.documents import Policy
from tasks.noise_choice import shape_of
from tasks.recipes import CandidateRecipe
from tasks.task_groups.recipes import Group


def require_reachable(group: Group, policy: Policy) -> None:
    """Refuse a budget below what a task's most private candidate will cost alone.

    One candidate of each task is merged, and no bound of a merge is below that of a candidate in it. A budget that
    passes may still be too small: for tasks that share records, under replace-one, or where many releases count.

    Raises:
        InvalidInput: naming the task, its least epsilon and the policy's.
    """
    for task, own in group.tasks.items():
        least = min(_epsilon(candidate, group, policy.delta) for candidate in own.candidates)
        if least > policy.epsilon:
            raise InvalidInput(
                f"No candidate of task {task} will reach epsilon {policy.epsilon:g} at delta {policy.delta:g}: the "
                f"most private one will have {rounded_up(least)}. Add a candidate with more noise or fewer steps to "
                "the recipe, or give a larger --epsilon."
            )


def _epsilon(candidate: CandidateRecipe, group: Group, delta: float) -> float:
    """Of the run, or of the first copy kept on its way; infinity where this delta cannot be resolved."""
    steps = min((candidate.steps, *candidate.keep_checkpoints))
    shape = shape_of(candidate.model_copy(update={"steps": steps}), relation=group.neighboring_relation)
    try:
        return single_run(shape.run(candidate.noise_multiplier)).epsilon(delta)
    except RemergeError:
        return math.inf
