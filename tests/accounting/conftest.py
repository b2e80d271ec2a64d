"""What the accounting tests share: runs of one recipe, published numbers, and a fixed hypothesis profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from accounting.budget import NeighboringRelation
from accounting.trajectory import Candidate, ParentStep, Segment, Trajectory

settings.register_profile("accounting", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("accounting")

RunMaker = Callable[..., Trajectory]


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Published and 60-digit numbers."""
    return json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.fixture(scope="session")
def make_segment() -> Callable[..., Segment]:
    def build(name: str, noise_multiplier: float, steps: int = 20, **changes: Any) -> Segment:
        sampling = changes.pop("sampling_probability", 1.0)
        values: dict[str, Any] = {
            "id": name,
            "steps": steps,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": 1.0,
            "learning_rate": 0.1,
            "expected_batch_size": 100.0,
            "sampling_probability": sampling,
            "sampler": "full_batch" if sampling == 1.0 else "poisson",
        }
        return Segment(**(values | changes))

    return build


@pytest.fixture(scope="session")
def make_run(make_segment: Callable[..., Segment]) -> RunMaker:
    """A run of one segment, or of several given as `segments` (their parents are filled in)."""

    def build(
        name: str = "s",
        noise_multiplier: float = 16.0,
        steps: int = 20,
        *,
        relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
        segments: list[Segment] | None = None,
        lineage: str = "patients",
        unit: str = "record",
        **changes: Any,
    ) -> Trajectory:
        if segments is None:
            segments = [make_segment(name, noise_multiplier, steps, **changes)]
        path = [segments[0]]
        for segment in segments[1:]:
            parent = ParentStep(run=name, segment=path[-1].id, step=path[-1].steps)
            values = {f: getattr(segment, f) for f in Segment.__dataclass_fields__}
            path.append(Segment(**(values | {"parent": parent})))
        return Trajectory(
            portfolio="clinic@1",
            lineage=lineage,
            unit=unit,
            neighboring_relation=relation,
            data_digest="keyed-digest",
            initialisation_digest="init-digest",
            feature_radius=None,
            n_max=None,
            segments=tuple(path),
        )

    return build


@pytest.fixture(scope="session")
def make_candidates(make_run: RunMaker) -> Callable[..., list[Candidate]]:
    """Candidates c0, c1, ... of one recipe with the given noise multipliers."""

    def build(noise_multipliers: list[float], **changes: Any) -> list[Candidate]:
        return [
            Candidate(name=f"c{i}", trajectory=make_run(f"s{i}", noise, **changes))
            for i, noise in enumerate(noise_multipliers)
        ]

    return build
