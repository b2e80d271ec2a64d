"""Candidates as the solver takes them: pulled, checked against the manifest, and fit to be accounted together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accounting.errors import IncompatibleCandidates, InvalidInput
from accounting.trajectory import Candidate, Trajectory
from infra.documents import Policy, PortfolioManifest

UTILITY_RULES = ("stated", "public_twin")  # selection rules that go by the utility of that source


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCandidate:
    """A candidate's file and history, both already checked by digest."""

    name: str
    model: bytes  # contents of model.safetensors
    trajectory: Trajectory


def accountable(
    manifest: PortfolioManifest, policy: Policy, loaded: Mapping[str, LoadedCandidate]
) -> tuple[Candidate, ...]:
    """Check that the trajectories are of this portfolio and of the policy's kind of privacy.

    Returns:
        The solver's candidates, in the manifest's order, with their utilities where the policy's selection rule
        looks at those.

    Raises:
        IncompatibleCandidates: a trajectory of another portfolio, lineage, unit, initialisation or
            neighbouring relation; the sentence names the candidate and what to do.
        InvalidInput: as `require_utilities`.
    """
    require_utilities(manifest, policy.selection)
    for record in manifest.candidates:
        trajectory = loaded[record.name].trajectory
        for name, value in recorded_of(manifest, record.name).items():
            found = str(getattr(trajectory, name))
            if found != value:
                raise IncompatibleCandidates(
                    f"Candidate {record.name} of {manifest.reference} has a trajectory of another {name} "
                    f"({found} instead of {value}); train the portfolio again with `remerge train`."
                )
    if manifest.unit != policy.unit:
        raise IncompatibleCandidates(
            f"{manifest.reference} protects a {manifest.unit}, but the policy's unit is {policy.unit}; set the "
            f"policy for a portfolio of that unit."
        )
    require_relation(manifest, policy.neighboring_relation)
    by_utility = policy.selection in UTILITY_RULES
    return tuple(
        Candidate(
            name=record.name,
            trajectory=loaded[record.name].trajectory,
            utility=record.utility if by_utility else None,
        )
        for record in manifest.candidates
    )


def recorded_of(manifest: PortfolioManifest, candidate: str) -> dict[str, str]:
    """What a candidate's trajectory must say of itself, by field, for all that the portfolio's manifest says."""
    return {
        "portfolio": manifest.name,
        "lineage": manifest.lineage,
        "unit": manifest.unit,
        "neighboring_relation": manifest.neighboring_relation,
        "initialisation_digest": manifest.initialisation_digest,
        "data_digest": manifest.private_digest_of(candidate),
    }


def require_utilities(manifest: PortfolioManifest, selection: str) -> None:
    """Refuse a portfolio whose candidates have no utilities of the kind that a selection rule goes by.

    Raises:
        InvalidInput: naming candidates and what to do.
    """
    lacking = [record.name for record in manifest.candidates if record.utility_source != selection]
    if selection not in UTILITY_RULES or not lacking:
        return
    on_the_way = [name for name in lacking if _is_kept_checkpoint(name, manifest)]
    if on_the_way == lacking:
        raise InvalidInput(
            f"Selection {selection} compares candidates by utilities, but {_some(lacking)} of {manifest.reference} "
            f"{'is a checkpoint' if len(lacking) == 1 else 'are checkpoints'} kept on the way, which have none: train "
            "the portfolio without `keep_checkpoints`, or set the policy with `--selection noise`."
        )
    lacking = [name for name in lacking if name not in on_the_way]
    if selection == "stated":
        what, remedy = "no stated utility", "state a `utility` for every candidate in its recipe"
    else:
        what, remedy = "no public twin", "set `public_twins: true` in its recipe"
    raise InvalidInput(
        f"Selection {selection} compares candidates by utilities, but {_some(lacking)} of {manifest.reference} "
        f"{'has' if len(lacking) == 1 else 'have'} {what}: {remedy} and train the portfolio again with "
        "`remerge train`, or set the policy with `--selection noise`."
    )


def _is_kept_checkpoint(name: str, manifest: PortfolioManifest) -> bool:
    """Whether a candidate is called like a checkpoint of another one, `<name>-at-<step>`."""
    origin, _, step = name.rpartition("-at-")
    return step.isdigit() and any(record.name == origin for record in manifest.candidates)


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"


def require_relation(manifest: PortfolioManifest, relation: str) -> None:
    """Refuse a portfolio that was trained and recorded for other neighbours than a policy speaks of.

    Raises:
        IncompatibleCandidates: with both relations, and what to do.
    """
    if manifest.neighboring_relation != relation:
        raise IncompatibleCandidates(
            f"{manifest.reference} was trained and recorded under {manifest.neighboring_relation}, but the policy "
            f"demands {relation}; set the policy with `--neighboring-relation {manifest.neighboring_relation}`, or "
            f"train a portfolio under {relation}."
        )
