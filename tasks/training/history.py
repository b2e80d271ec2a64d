"""What is known of a run beforehand, and the trajectory that its executed steps make of it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from accounting.joint_release import single_run
from accounting.trajectory import Trajectory, parse_relation
from tasks.data import Enforced
from tasks.objective import Objective
from tasks.randomness import executed_probability
from tasks.recipes import CandidateRecipe, Recipe
from tasks.training.noise import INJECTED
from tasks.training.recording import ExecutedStep, Stretch, segments


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The parts of a trajectory that no step changes."""

    recipe: Recipe
    candidate: CandidateRecipe
    enforced: Enforced
    objective: Objective
    regression: bool  # see tasks.models.is_regression
    data_digest: str
    initialisation_digest: str
    device: str
    versions: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def adapted(self) -> bool:
        """Whether when the run stops depends on its data."""
        return self.candidate.early_stopping is not None

    @property
    def noise_is_secret(self) -> bool:
        """Whether the run has an epsilon at all: noise from a public seed hides nothing."""
        return self.notes["noise_source"] != INJECTED

    def trajectory(self, steps: Sequence[ExecutedStep], stretches: Sequence[Stretch]) -> Trajectory:
        """The history of a run that ended with these steps, at least one."""
        stretches = [stretch for stretch in stretches if stretch.first_step < len(steps)]
        notes = dict(self.notes)
        if len(stretches) > 1:
            after = ", ".join(str(stretch.first_step) for stretch in stretches[1:])
            notes["resumed"] = f"from checkpoints after {after} steps, each time with fresh noise"
        return Trajectory(
            portfolio=self.recipe.name,
            lineage=self.recipe.lineage,
            unit=self.recipe.unit,
            neighboring_relation=parse_relation(self.recipe.neighboring_relation),
            data_digest=self.data_digest,
            initialisation_digest=self.initialisation_digest,
            feature_radius=self.enforced.feature_radius,
            n_max=self.enforced.n_max,
            segments=segments(
                steps,
                stretches=stretches,
                sampling_probability=executed_probability(self.candidate.sampling_probability),
                regression=self.regression,
                objective=self.objective,
                enforced=self.enforced,
                adapted=self.adapted,
            ),
            device=self.device,
            library_versions=self.versions,
            notes=notes,
        )

    def charged(self, steps: Sequence[ExecutedStep], rates: Sequence[float]) -> Sequence[ExecutedStep]:
        """The steps that the accounting counts: where early stopping decides, all of the recipe's.

        Args:
            steps: executed, at least one.
            rates: learning rate of each of the recipe's steps.
        """
        if not self.adapted:
            return steps
        return [*steps, *(replace(steps[-1], learning_rate=rate) for rate in rates[len(steps) :])]

    def epsilon(self, steps: Sequence[ExecutedStep], stretches: Sequence[Stretch]) -> float:
        """Epsilon of a run of these steps at the recipe's delta, nats; an upper bound."""
        return single_run(self.trajectory(steps, stretches)).epsilon(self.recipe.delta)


def library_versions() -> dict[str, str]:
    """Versions of what a run is computed with."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "opacus", "numpy")}
    return {"python": platform.python_version(), **versions}
