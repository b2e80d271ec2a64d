"""Releases of every kind with all their documents, made by the product's own functions from tiny runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import safetensors.numpy

from accounting.budget import NeighboringRelation, PrivacyBudget
from accounting.certificate import Certificate
from accounting.plan import Plan
from accounting.solver import solve
from accounting.task_sets import solve_tasks
from accounting.trajectory import Candidate, ParentStep, Segment, Trajectory
from infra.canonical import canonical_json, sha256_hex
from infra.documents import Draw, LedgerEntry, Policy, PortfolioManifest, release_id_of
from tasks import drawing, promotion
from tasks.candidates import LoadedCandidate
from tasks.certifying import certify
from tasks.cumulative import figures_after
from tasks.merging import needs
from tasks.past import past_of
from tasks.policy_merges import options_of
from tasks.release_merging import Material
from tasks.report import release_files, release_manifest
from tasks.validation import Verdict
from tasks.verifying import Evidence

REPLACE = NeighboringRelation.REPLACE_ONE
VERSIONED = "clinic"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How to make one certificate, and which bound it must come out with."""

    bound: str
    noises: tuple[float, ...]
    epsilon: float
    policy: Mapping[str, Any]
    steps: int = 6
    relation: NeighboringRelation = REPLACE
    run: Mapping[str, Any]
    scores: Mapping[str, float] | None = None
    tasks: Mapping[str, str] = field(default_factory=dict)  # by candidate, of several tasks

    def data_digest_of(self, candidate: str) -> str:
        """Of the private rows: each task has its own."""
        return "d" * 64 if candidate not in self.tasks else sha256_hex(self.tasks[candidate].encode())


KINDS = {
    "generic": Kind(
        bound="generic",
        noises=(4.0, 32.0),
        epsilon=2.2,
        policy={"mechanisms": ["linear_combination"]},
        run={},
        steps=2,
    ),
    "shifted": Kind(
        bound="shifted",
        noises=(8.0, 16.0, 32.0),
        epsilon=0.6,
        policy={"mechanisms": ["linear_combination"]},
        run={"update_lipschitz": 0.98, "update_lipschitz_reason": "a test"},
    ),
    "joint": Kind(
        bound="joint",
        noises=(16.0, 32.0),
        epsilon=2.0,
        policy={"mechanisms": ["linear_combination"]},
        run={"momentum": 0.9},
    ),
    "random_selection": Kind(
        bound="random_selection_pld",
        noises=(4.0, 8.0, 16.0),
        epsilon=1.5,
        policy={"mechanisms": ["random_selection"]},
        run={},
    ),
    "mixture": Kind(
        bound="mixture",
        noises=(36.0, 18.0, 10.0, 5.0),
        epsilon=1.6,
        policy={"mechanisms": ["mixture"], "realised_epsilon_cap": 6.0},
        run={},
    ),
    "poisson": Kind(
        bound="joint",
        noises=(1.0, 2.0),
        epsilon=4.0,
        policy={"mechanisms": ["linear_combination"], "neighboring_relation": "add_or_remove_one"},
        run={"sampling_probability": 0.05, "sampler": "poisson"},
        steps=100,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    ),
    "poisson_selection": Kind(
        bound="random_selection_pld",
        noises=(1.0, 2.0),
        epsilon=2.0,
        policy={"mechanisms": ["random_selection"]},
        run={"sampling_probability": 0.05, "sampler": "poisson"},
        steps=40,
    ),
    "validation": Kind(
        bound="joint",
        noises=(16.0, 24.0, 32.0),
        epsilon=2.5,
        policy={"mechanisms": ["linear_combination"], "selection": "validation"},
        run={},
        scores={"c0": 0.9, "c1": 0.8, "c2": 0.1},
    ),
    "unaccounted": Kind(
        bound="random_selection_pld",
        noises=(4.0, 8.0, 16.0),
        epsilon=1.5,
        policy={"mechanisms": ["random_selection"], "selection": "validation_unaccounted"},
        run={},
        scores={"c0": 0.9, "c1": 0.8, "c2": 0.1},
    ),
    "operator": Kind(
        bound="joint",
        noises=(16.0, 24.0, 32.0),
        epsilon=2.0,
        policy={"merge": "ties", "merge_options": {"density": 0.4, "scale": 1.0, "normalize": True}},
        run={},
    ),
    "tasks": Kind(
        bound="parallel_tasks",
        noises=(16.0, 24.0, 32.0),
        epsilon=2.0,
        policy={"neighboring_relation": "add_or_remove_one"},
        run={},
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        tasks={"c0": "left", "c1": "right", "c2": "right"},
    ),
}
START = safetensors.numpy.save({"weight": np.array([0.5, -0.25, 1.0], dtype=np.float32)})


def trajectory(name: str, noise: float, kind: Kind) -> Trajectory:
    """One run of two segments, the second with a smaller learning rate."""
    first = Segment(
        id=f"{name}:0",
        steps=kind.steps - 1,
        noise_multiplier=noise,
        max_grad_norm=1.5,
        learning_rate=0.1,
        expected_batch_size=100.0,
        **kind.run,
    )
    second = replace(
        first,
        id=f"{name}:1",
        steps=1,
        learning_rate=0.08,
        parent=ParentStep(run=name, segment=first.id, step=first.steps),
    )
    return Trajectory(
        portfolio=VERSIONED,
        lineage="patients",
        unit="record",
        neighboring_relation=kind.relation,
        data_digest=kind.data_digest_of(name),
        initialisation_digest="e" * 64,
        feature_radius=1.0,
        n_max=100,
        segments=(first, second),
        library_versions={"torch": "2"},
        notes={"noise": "secret"},
    )


def evidence_of(kind: Kind) -> tuple[Certificate, Evidence]:
    """A certificate with every document that it speaks of."""
    runs = {f"c{i}": trajectory(f"c{i}", noise, kind) for i, noise in enumerate(kind.noises)}
    stored = {name: canonical_json(run.to_dict()) for name, run in runs.items()}
    models = {name: _model(i, kind.tasks.get(name)) for i, name in enumerate(runs)}
    portfolio = _portfolio(kind, stored, models)
    policy = Policy.from_fields(
        {
            "region": "eu",
            "serial": 3,
            "epsilon": kind.epsilon,
            "delta": 1e-5,
            "portfolio": portfolio.reference,
            "effective_at": "2026-01-01T00:00:00Z",
            "author": "test",
            **kind.policy,
        },
        "policy",
    )
    candidates = [Candidate(name=name, trajectory=run) for name, run in runs.items()]
    plan = _plan(kind, policy, candidates)
    material = Material(start=START)
    release_id = release_id_of(policy, portfolio)
    draw = drawing.draw(release_id, plan.outcomes) if len(plan.outcomes) > 1 else None
    consulted = tuple(kind.scores or ())
    old = [Candidate(name="old", trajectory=trajectory("old", kind.noises[-1], kind))]
    by_noise = policy.model_copy(update={"region": "us", "selection": "noise", "realised_epsilon_cap": None})
    before = _entry(
        by_noise,
        portfolio,
        _plan(replace(kind, scores=None, epsilon=50.0, tasks={}), by_noise, old),
        old,
        draw=None,
        release_id="f" * 64,
        certificate_sha256="0" * 64,
    )
    figures = figures_after(past_of([before], release_id), policy, plan, draw, candidates, consulted)
    assert figures is not None
    certificate = certify(release_id, policy, portfolio, plan, draw, figures)
    assert certificate.bound == kind.bound, certificate.bound
    assert len(certificate.candidates) > 1
    loaded = {
        name: LoadedCandidate(name=name, model=models[name], trajectory=run) for name, run in runs.items()
    }
    model = promotion.merge(plan, draw, loaded, material)
    files = release_files(model, certificate, draw)
    return certificate, Evidence(
        certificate=files["certificate.json"],
        trajectories=stored,
        policy=policy,
        portfolio=portfolio,
        release=_release(policy, portfolio, release_id, files),
        draw=draw,
        model=model,
        candidates=models,
        material=material,
        ledger=(
            before,
            _entry(
                policy,
                portfolio,
                plan,
                candidates,
                draw=draw,
                release_id=release_id,
                certificate_sha256=sha256_hex(files["certificate.json"]),
                consulted=consulted,
                before=before,
            ),
        ),
    )


def _model(number: int, task: str | None) -> bytes:
    values = np.full(3, math.pi * number, dtype=np.float32)
    if task is None:
        return safetensors.numpy.save({"weight": values})
    return safetensors.numpy.save({"trunk.weight": values, f"heads.{task}.weight": -values})


def _plan(kind: Kind, policy: Policy, candidates: list[Candidate]) -> Plan:
    budget = PrivacyBudget(epsilon=kind.epsilon, delta=1e-5)
    if kind.tasks:
        return solve_tasks(budget, candidates, kind.tasks, relation=kind.relation, records="disjoint")
    return solve(
        budget,
        candidates,
        relation=kind.relation,
        merge=policy.merge,
        merge_options=options_of(policy),
        set_size=needs(policy.merge).models,
        mechanisms=policy.mechanisms,
        selection=policy.selection,
        realised_epsilon_cap=policy.realised_epsilon_cap,
        scores=kind.scores,
    )


def _portfolio(kind: Kind, stored: Mapping[str, bytes], models: Mapping[str, bytes]) -> PortfolioManifest:
    split = {"rows": 10, "digest": "1" * 64}

    def data(private: str) -> dict[str, Any]:
        return {
            "loader": "module:function",
            "split_rule": "a rule",
            "private": {"rows": None, "digest": private},
            "public_train": split,
            "public_gate": split,
        }

    group = {
        "tasks": dict(kind.tasks),
        "records": "disjoint",
        "task_data": {task: data(kind.data_digest_of(name)) for name, task in kind.tasks.items()},
    }
    return PortfolioManifest.from_fields(
        {
            "name": VERSIONED,
            "serial": 1,
            "created_at": "2026-01-01T00:00:00Z",
            "lineage": "patients",
            "unit": "record",
            "neighboring_relation": kind.relation.value,
            "recipe_digest": "2" * 64,
            "data": data("d" * 64),
            "network": {"factory": "module:function"},
            "initialisation_digest": "e" * 64,
            "feature_radius": 1.0,
            "n_max": 100,
            "flow_run_id": None,
            "candidates": [
                {
                    "name": name,
                    "registered_model": VERSIONED,
                    "version": number,
                    "run_id": f"run-{name}",
                    "model_sha256": sha256_hex(models[name]),
                    "trajectory_sha256": sha256_hex(content),
                }
                for number, (name, content) in enumerate(stored.items(), start=1)
            ],
            **(group if kind.tasks else {}),
        },
        "manifest",
    )


def _release(
    policy: Policy, portfolio: PortfolioManifest, release_id: str, files: Mapping[str, bytes]
) -> Any:
    from infra.documents import Provenance

    return release_manifest(
        policy,
        portfolio,
        release_id,
        files,
        Verdict(passed=True, accuracy=0.9, minimum=0.5, reason=""),
        gate_rows=10,
        version=1,
        provenance=Provenance(started_by="hand"),
    )


def _entry(
    policy: Policy,
    portfolio: PortfolioManifest,
    plan: Plan,
    candidates: list[Candidate],
    *,
    draw: Draw | None,
    release_id: str,
    certificate_sha256: str,
    consulted: tuple[str, ...] = (),
    before: LedgerEntry | None = None,
) -> LedgerEntry:
    serial = 1 if before is None else before.serial + 1
    fields = promotion.ledger_fields(
        kind="intended",
        release_id=release_id,
        policy=policy,
        manifest=portfolio,
        plan=plan,
        candidates=candidates,
        draw=draw,
        certificate_sha256=certificate_sha256,
        counted=serial - 1,
        consulted=consulted,
    )
    previous = None if before is None else before.sha256()
    return LedgerEntry.from_fields({**fields, "serial": serial, "previous_digest": previous}, "entry")
