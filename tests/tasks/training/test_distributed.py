"""Several processes for one candidate: the same steps as one process takes, noise added once, nothing left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accounting.errors import InvalidInput
from accounting.trajectory import Trajectory
from tasks.data import Rows
from tasks.models import initial_state, state_from_bytes
from tasks.training import Checkpoint, TrainingFailed, train_candidate
from tasks.training.processes import ProcessLost, work_together
from tests.tasks.training.in_group import Case, end_badly, train_all

Build = Callable[..., Any]

LAYERS = "{factory: tests.tasks.training.in_group:two_layers, arguments: {classes: 3}}"
POISSON = {"sampling_probability": 0.5, "expected_batch_size": 19}
NOBODY = {"sampling_probability": 1e-9, "expected_batch_size": 8}
MERGING = "{ascent: %s, radius: 0.3, anchor: 0.1}"
STOPPING = "{every: 2, patience: 2, min_improvement: 0.5}"

# By name: what the recipe says, and how it is carried out. An odd number of rows, so the shares differ.
SAME_AS_ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "closed form": ({"max_grad_norm": 0.3, "momentum": 0.9}, {"grad_sample_mode": "closed_form"}),
    "closed form in parts": ({}, {"grad_sample_mode": "closed_form", "physical_batch_size": 3}),
    "hooks": ({"network": LAYERS, "max_grad_norm": 0.3}, {"grad_sample_mode": "hooks"}),
    "hooks in parts, more of them in one process": (
        {"network": LAYERS},
        {"grad_sample_mode": "hooks", "physical_batch_size": 3},
    ),
    "ghost": ({"network": LAYERS, "max_grad_norm": 0.3}, {"grad_sample_mode": "ghost"}),
    "ghost in parts": ({"network": LAYERS}, {"grad_sample_mode": "ghost", "physical_batch_size": 3}),
    "functorch": ({"network": LAYERS}, {"grad_sample_mode": "functorch"}),
    "layers apart": ({"network": LAYERS, "clipping": "per_layer", "max_grad_norm": 0.3}, {"processes": 2}),
    "layers apart, empty": ({"network": LAYERS, "clipping": "per_layer", **NOBODY}, {"processes": 2}),
    "closed form, empty": (NOBODY, {"grad_sample_mode": "closed_form"}),
    "hooks, empty": ({"network": LAYERS, **NOBODY}, {"grad_sample_mode": "hooks", "physical_batch_size": 3}),
    "ghost, empty": ({"network": LAYERS, **NOBODY}, {"grad_sample_mode": "ghost"}),
    "Adam, a schedule, kept copies and checkpoints": (
        {
            "optimizer": "adam",
            "learning_rate": 0.01,
            "learning_rate_schedule": "cosine",
            "schedule_stages": 4,
            "keep_checkpoints": "[3, 7]",
        },
        {"checkpoint_every": 5},
    ),
    "two releases of one batch": (
        {"network": LAYERS, "max_grad_norm": 0.3, "dp_merging": MERGING % "same_batch"},
        {"grad_sample_mode": "ghost", "physical_batch_size": 3},
    ),
    "two releases of one batch, empty": (
        {"network": LAYERS, **NOBODY, "dp_merging": MERGING % "same_batch"},
        {"grad_sample_mode": "hooks"},
    ),
    "the gradient of the step before": (
        {"max_grad_norm": 0.3, "optimizer": "adamw", "dp_merging": MERGING % "previous_gradient"},
        {"grad_sample_mode": "closed_form"},
    ),
    "early stopping": ({"network": LAYERS, "early_stopping": STOPPING}, {"grad_sample_mode": "hooks"}),
}


def plain(trajectory: Trajectory) -> Trajectory:
    """Without what names the processes, which are others."""
    unnamed = [
        replace(one, id=str(number), parent=one.parent and replace(one.parent, segment=str(number - 1)))
        for number, one in enumerate(trajectory.segments)
    ]
    return replace(trajectory, segments=tuple(unnamed), notes={})


def close(one: bytes, other: bytes) -> bool:
    left, right = state_from_bytes(one), state_from_bytes(other)
    return all(np.allclose(left[name].numpy(), right[name].numpy(), rtol=0, atol=2e-5) for name in left)


def one_hot(small: Any) -> Any:
    """40 private rows, each with an entry of its own: a step moves the columns of the rows it saw, and no other."""
    rows = Rows(features=np.eye(40, dtype=np.float32), labels=np.zeros(40, dtype=np.int64))
    public = Rows(features=np.eye(40, dtype=np.float32)[:20], labels=np.arange(20) % 3)
    return replace(small.splits, private=rows, public_train=public, public_gate=public)


def test_two_processes_take_the_steps_of_one(small_portfolio: Build) -> None:
    def case(changes: dict[str, Any], execution: dict[str, Any], **more: Any) -> Case:
        small = small_portfolio(rows=37, execution=execution, **changes)
        return Case(recipe=small.recipe, splits=small.splits, **more)

    cases = {name: case(*settings) for name, settings in SAME_AS_ALONE.items()}
    kept = "Adam, a schedule, kept copies and checkpoints"
    alone = train_all(cases=cases)
    middle = alone[kept].checkpoints[0]
    assert Checkpoint.from_bytes(middle).step == 5
    cases["resumed"] = replace(cases[kept], resume_from=middle)
    alone |= train_all(cases={"resumed": cases["resumed"]})

    once = small_portfolio(
        network="{factory: tasks.models:softmax_regression, arguments: {features: 40, classes: 3}}",
        **{**POISSON, "steps": 1, "noise_multiplier": 1e-9},
    )
    coins = Case(recipe=once.recipe, splits=one_hot(once), coins_of_their_own=True)
    together = work_together(
        train_all, size=2, arguments={"cases": {**cases, "coins": coins}}, heard={}, what="A test"
    )

    for name, expected in alone.items():
        outcome = together[name]
        # All end with the same parameters; only the first one keeps the best ones of early stopping.
        assert len(outcome.models_of_all) == (2 if name == "early stopping" else 1), name
        assert close(outcome.model, expected.model), name
        assert plain(outcome.trajectory) == plain(expected.trajectory), name
        assert outcome.trajectory.notes["processes"].startswith("2, each with its share"), name
        looked = [one["step"] for one in outcome.metrics]
        assert looked == [one["step"] for one in expected.metrics], name
    assert 0 < together["early stopping"].trajectory.steps == 12
    assert "stopped after 6 of 12" in together["early stopping"].trajectory.notes["early_stopping"]
    for one, expected in zip(together[kept].kept, alone[kept].kept, strict=True):
        assert (one.name, plain(one.trajectory)) == (expected.name, plain(expected.trajectory))
        assert close(one.model, expected.model)
    assert [Checkpoint.from_bytes(one).step for one in together[kept].checkpoints] == [5, 10]
    assert (
        len({one.id for one in together["resumed"].trajectory.segments}) == 5
    )  # four rates, one of them cut

    outcome, initial = together["coins"], initial_state(once.recipe.network, 7)["weight"]
    moved = (state_from_bytes(outcome.model)["weight"] - initial).abs().sum(dim=0) > 1e-4
    first, second = moved[0::2].tolist(), moved[1::2].tolist()  # shares: every second row
    assert first != second  # fails once in a million runs
    assert 0 < sum(first) < 20  # so does each of these
    assert 0 < sum(second) < 20
    (segment,) = outcome.trajectory.segments
    assert (segment.steps, segment.expected_batch_size, segment.sampling_probability, segment.sampler) == (
        1,
        19,
        0.5,
        "poisson",
    )


def arguments(small: Any, **more: Any) -> dict[str, Any]:
    return {
        "recipe": small.recipe,
        "splits": small.splits,
        "initial": initial_state(small.recipe.network, small.recipe.initialisation_seed),
        "run_id": "run",
        "data_digest": "0" * 64,
        **more,
    }


def children(of: int) -> list[int]:
    found = [path.read_text().split() for path in Path(f"/proc/{of}/task").glob("*/children")]
    return [
        int(pid)
        for pids in found
        for pid in pids
        if b"take_part" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_killed_process_ends_all_and_the_run_goes_on_from_its_checkpoint(small_portfolio: Build) -> None:
    small = small_portfolio(
        **POISSON, steps=60, execution={"processes": 2, "checkpoint_every": 3, "monitor_every": 2}
    )
    candidate = small.recipe.candidate("only")
    steps: list[int] = []
    looks: list[int] = []
    saved: list[Checkpoint] = []
    pids: list[int] = []

    def kill_one(step: int) -> None:
        steps.append(step)
        if step == 7:
            pids.extend(children(os.getpid()))
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(
        ProcessLost, match=r"of candidate only ended because process 2 of 2 was killed by sig"
    ) as lost:
        train_candidate(
            candidate,
            **arguments(
                small,
                on_step=kill_one,
                on_monitor=lambda step, metrics: looks.append(step),
                on_checkpoint=saved.append,
            ),
        )
    assert lost.value.retryable
    assert pickle.loads(pickle.dumps(lost.value)).retryable
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert steps == list(range(1, len(steps) + 1))
    assert looks[:3] == [2, 4, 6]
    assert [checkpoint.step for checkpoint in saved[:2]] == [3, 6]

    after: list[int] = []
    trained = train_candidate(
        candidate, **arguments(small, run_id="again", resume_from=saved[1], on_step=after.append)
    )
    assert after == list(range(7, 61))
    assert [one.steps for one in trained.trajectory.segments] == [6, 54]
    assert [one.id.split(":")[0] for one in trained.trajectory.segments] == ["run", "again"]
    assert [one.expected_batch_size for one in trained.trajectory.segments] == [19, 19]
    assert "AES-256" in trained.trajectory.notes["noise_source"]
    assert trained.metrics[-1]["step"] == 60
    assert not children(os.getpid())


class Stop(Exception):
    """What a callback may raise."""


@pytest.mark.parametrize(
    ("how", "kind", "sentence"),
    [
        ("in a sentence", TrainingFailed, r"^Candidate a diverged\.$"),
        (
            "without a sentence",
            ProcessLost,
            "^A test ended because process 2 of 2 failed with ValueError; set execution.processes to 1",
        ),
        ("never", Stop, "^the store is gone$"),
    ],
)
def test_one_failure_ends_all(how: str, kind: type[Exception], sentence: str) -> None:
    """The cause is told, not the connection that the others lost by it, and no value that an error quotes."""

    def begun() -> None:
        if how == "never":
            raise Stop("the store is gone")

    with pytest.raises(kind, match=sentence) as failed:
        work_together(end_badly, size=2, arguments={"how": how}, heard={"begun": begun}, what="A test")
    notes = "".join(getattr(failed.value, "__notes__", []))
    assert ("in end_badly" in notes) is (how == "without a sentence")
    assert "4711" not in str(failed.value) + notes
    assert not getattr(failed.value, "retryable", False)
    assert not children(os.getpid())


def test_what_several_processes_cannot_do_is_said_before_any_starts(small_portfolio: Build) -> None:
    few = small_portfolio(rows=1, execution={"processes": 2})
    with pytest.raises(InvalidInput, match=r"needs a private row of its own; set execution\.processes to 1"):
        train_candidate(few.recipe.candidate("only"), **arguments(few))
    apart = small_portfolio(
        network=LAYERS, clipping="per_layer", execution={"processes": 2, "grad_sample_mode": "functorch"}
    )
    with pytest.raises(InvalidInput, match="functorch cannot clip layers apart in several processes"):
        train_all(cases={"apart": Case(recipe=apart.recipe, splits=apart.splits)})


def test_no_process_outlives_a_killed_parent() -> None:
    script = """
from tasks.training.processes import work_together
from tests.tasks.training.in_group import end_badly

begun = lambda: print("begun", flush=True)
work_together(end_badly, size=2, arguments={"how": "never"}, heard={"begun": begun}, what="A test")
"""
    before = set(Path("/dev/shm").iterdir())
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    pids = children(parent.pid)
    parent.kill()
    parent.communicate()
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    assert not {path.name for path in set(Path("/dev/shm").iterdir()) - before if "remerge" in path.name}
