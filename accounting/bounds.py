"""A type for every claim: a bound knows which theorem gave it and under which assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from accounting.ascent import ascent_assumptions
from accounting.budget import NeighboringRelation
from accounting.errors import InvalidInput
from accounting.profile import PrivacyProfile
from accounting.trajectory import Trajectory

BOUND_NAMES = (
    "joint",
    "generic",
    "shifted",
    "stepwise",
    "random_selection_pld",
    "random_selection_rdp",
    "mixture",
    "paired",
    "parallel_tasks",
    "ledger",
    "joint_rdp",
    "basic_composition",
    "advanced_composition",
)

SECRET_NOISE = (
    "The noise of every step was drawn afresh, independently of the data and of all other noise, and neither "
    "the noise nor its seed was ever shown to anybody."
)
CLIPPING_ENFORCED = (
    "Each record's gradient was clipped to the recorded norm before it was summed, and nothing else computed "
    "from the records entered the update."
)
PUBLIC_NORMALISER = (
    "The sum was divided by a public constant that does not depend on the records, never by the realised "
    "batch size."
)
POISSON_SAMPLER = (
    "Each record joined each batch by an independent coin of the recorded probability, the coins stayed "
    "secret, and an empty batch still received noise."
)
FULL_BATCH_SAMPLER = "Each step used every record exactly once."
FIXED_IN_ADVANCE = (
    "All hyper-parameters, the number of steps included, were fixed before training and without looking at "
    "the protected records."
)
ADAPTED_SCHEDULE = (
    "Where a schedule was adapted to the data, it was adapted only through already noised quantities, and "
    "the noise multipliers and the largest number of steps were fixed in advance."
)
PUBLIC_INITIALISATION = "Training started from parameters that do not depend on the protected records."
WEIGHTS_BLIND = (
    "The weights were chosen from public hyper-parameters and the budget alone, without looking at any "
    "privately trained model or its scores."
)
WEIGHTS_FREE = "The weights may have been chosen in any way, even by looking at the models."
INDEPENDENT_RUNS = "The merged runs share no step, no noise and no seed."
INDEX_REVEALED = (
    "One candidate is released, drawn once with the stated weights from a secure source; everybody may learn "
    "which one it was. A draw that failed its check is a release of its own: whoever draws again counts both."
)
LAST_MERGED_ONLY = (
    "The number covers the merged parameters alone: whoever also sees one of the merged models, or another "
    "merge of them, learns more than it says."
)
SHARED_AS_RECORDED = (
    "The merged runs share exactly the steps that are recorded as shared; all other steps have noise and seeds "
    "of their own."
)
ONE_MERGE_ONLY = (
    "The number covers the merged parameters stated here, made of the runs' last parameters, and nothing else: "
    "any other release computed from these runs (a checkpoint, another merge, a score) adds to it."
)
LIPSCHITZ_UPDATES = (
    "Where a trajectory records a factor `update_lipschitz`, each update without its noise moves any two "
    "parameter vectors apart by at most that factor, for every data set that the runs could have had."
)
EXACT_ARITHMETIC = (
    "The guarantee is proved for real numbers; floating-point rounding of the training and of its noise is "
    "not accounted for."
)
STEPWISE_ASSUMPTION = (
    "The gradients do not depend on the hidden models being merged (as in mean estimation, or a single step "
    "from a public start); this is false for ordinary DP-SGD, where this number is not a privacy guarantee."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An upper bound on the privacy loss of one release, with the theorem and assumptions behind it."""

    name: str  # one of BOUND_NAMES
    profile: PrivacyProfile
    assumptions: tuple[str, ...]  # full sentences
    source: str  # the theorem
    mu: float | None = None  # where the profile is that of a Gaussian mechanism: its mu, rounded up
    sound_for_dp_sgd: bool = True  # False: never to be certified for trained models

    def __post_init__(self) -> None:
        if self.name not in BOUND_NAMES:
            raise InvalidInput(f"bound name must be one of {', '.join(BOUND_NAMES)}, not {self.name!r}.")
        if self.mu is not None and not self.mu >= 0:
            raise InvalidInput(f"mu of a bound must be at least 0, but {self.mu!r} was given.")
        if not self.assumptions or not self.source:
            raise InvalidInput("A bound needs its assumptions and its source.")

    def epsilon(self, delta: float) -> float:
        """nats, an upper bound, at least 0; `math.inf` where there is none. See `PrivacyProfile.epsilon`.

        Raises:
            AccountingError: delta is below what the profile can resolve.
        """
        return self.profile.epsilon(delta)

    def delta(self, epsilon: float) -> float:
        """An upper bound in [0, 1] on delta at `epsilon` nats."""
        return self.profile.delta(epsilon)

    @property
    def is_private(self) -> bool:
        """Whether any finite epsilon is claimed at all: False for runs without noise."""
        return self.mu is None or math.isfinite(self.mu)


def run_assumptions(trajectories: Iterable[Trajectory], relation: NeighboringRelation) -> tuple[str, ...]:
    """What must be true of the runs themselves for any bound computed from them, as full sentences."""
    trajectories = tuple(trajectories)
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    sentences = [unit_sentence(trajectories[0].unit, relation), SECRET_NOISE, CLIPPING_ENFORCED]
    sentences += [PUBLIC_NORMALISER, PUBLIC_INITIALISATION]
    if any(segment.is_full_batch for segment in segments):
        sentences.append(FULL_BATCH_SAMPLER)
    if not all(segment.is_full_batch for segment in segments):
        sentences.append(POISSON_SAMPLER)
    adapted = any(segment.schedule != "fixed" for segment in segments)
    sentences.append(ADAPTED_SCHEDULE if adapted else FIXED_IN_ADVANCE)
    sentences.append(EXACT_ARITHMETIC)
    sentences += ascent_assumptions(trajectories)
    return tuple(sentences)


def unit_sentence(unit: str, relation: NeighboringRelation) -> str:
    """What one person is assumed to contribute, and which data sets are compared."""
    compared = {
        NeighboringRelation.ADD_OR_REMOVE_ONE: "with and without that one",
        NeighboringRelation.REPLACE_ONE: "with that one replaced by any other, their number being public",
        NeighboringRelation.REPLACE_SPECIAL: "with that one blanked out, their number being public",
    }[relation]
    return (
        f"The unit of privacy is one {unit}: the guarantee compares data sets {compared}; a person who "
        "contributes several of them is protected less, by group privacy."
    )
