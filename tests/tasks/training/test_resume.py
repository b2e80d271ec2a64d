"""A run killed at any moment goes on as if never killed: no step lost, none counted twice, no noise used again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accounting.errors import InvalidInput
from accounting.joint_release import single_run
from accounting.trajectory import Trajectory, union_of_segments
from tasks.models import build, initial_state
from tasks.training import Checkpoint, TrainedCandidate, train_candidate
from tasks.validation import share_right
from tests.tasks.training.by_hand import train_by_hand
from tests.tasks.training.child_run import HERE, Prepared, Story, main, prepared, save, saved, train
from tests.tasks.training.test_reference import require_equal

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
POISSON = {"sampling_probability": 0.3, "expected_batch_size": 12}


class Stop(Exception):
    """Ends a run from one of its hooks, as a kill would at that place."""


@pytest.fixture(scope="module")
def children() -> Any:
    """Processes forked from one that has imported torch already: real ones, really killed, without the wait."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([HERE])
    return context


def killed_again_and_again(
    children: Any, folder: Path, fields: dict[str, Any], *, kills: int, seed: int
) -> TrainedCandidate:
    """Train in children, each killed after it has logged a random number of lines more; the last one is let be."""
    chance, log = random.Random(seed), folder / "log"
    for number in range(kills + 1):
        before = log.read_bytes().count(b"\n") if log.exists() else 0
        child = children.Process(target=main, args=(folder, fields, 0.002))
        child.start()
        deadline = time.monotonic() + 120
        wanted = before + chance.randrange(1, 16)
        while number < kills and child.is_alive() and time.monotonic() < deadline:
            if log.exists() and log.read_bytes().count(b"\n") >= wanted:
                os.kill(child.pid, signal.SIGKILL)
                break
            time.sleep(0.0005)
        child.join(120)
        assert child.exitcode in (0, -signal.SIGKILL)
        if (folder / "done").exists():
            break
    return pickle.loads((folder / "done").read_bytes())


def stopped_again_and_again(small: Prepared, folder: Path, *, seed: int, stops: int = 4) -> TrainedCandidate:
    """The same in this process: an exception from a random hook after a random number of its calls."""
    chance = random.Random(seed)
    for _ in range(stops):
        left = [chance.randrange(1, 9)]
        place = chance.choice(["on_step", "on_monitor", "on_checkpoint"])

        def stop(*told: Any, left: list[int] = left, place: str = place) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Stop
            if place == "on_checkpoint":
                save(told[0], folder)

        try:
            return train(small, folder, resume=saved(folder), **{place: stop})
        except Stop:
            continue
    return train(small, folder, resume=saved(folder))


def segment_steps(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    """Each executed step's mechanism, without the names of the stretches."""
    return [
        replace(segment, id="-", parent=None, steps=1).mechanism_key()
        for segment in trajectory.segments
        for _ in range(segment.steps)
    ]


def require_as_never_killed(small: Prepared, folder: Path, trained: TrainedCandidate) -> None:
    candidate, story = small.recipe.candidate("only"), Story.of(folder)
    parameters = len(list(build(small.recipe.network).parameters()))
    whole = train_candidate(
        candidate,
        recipe=small.recipe,
        splits=small.splits,
        initial=initial_state(small.recipe.network, 7),
        run_id="run",
        data_digest="0" * 64,
    )
    trajectory = trained.trajectory
    # the same accounting: step by step, in total, and in epsilon
    assert trajectory.steps == whole.trajectory.steps == candidate.steps
    assert segment_steps(trajectory) == segment_steps(whole.trajectory)
    epsilon, undisturbed = (single_run(one).epsilon(1e-5) for one in (trajectory, whole.trajectory))
    assert epsilon == pytest.approx(undisturbed, rel=1e-12)
    # no noise twice, over all processes
    drawn = [draw for draws in story.draws for draw in draws]
    assert len(set(drawn)) == len(drawn)
    # stretches: ids once, each goes on where the one before was left, one for each process that is in the model
    ids = [segment.id for segment in trajectory.segments]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"run:[0-9a-f]{{16}}:{number}", id_) for number, id_ in enumerate(ids))
    for before, after in zip(trajectory.segments, trajectory.segments[1:], strict=False):
        assert after.parent is not None
        assert (after.parent.run, after.parent.segment, after.parent.step) == ("run", before.id, before.steps)
    used = sorted({start for start in story.starts if start < trajectory.steps})
    tokens = dict.fromkeys(segment.id.split(":")[1] for segment in trajectory.segments)
    by_token = [sum(s.steps for s in trajectory.segments if token in s.id) for token in tokens]
    if candidate.early_stopping is None:
        assert by_token == [
            end - start for start, end in zip(used, [*used[1:], candidate.steps], strict=True)
        ]
        # each monitored step once
        assert [metrics["step"] for metrics in trained.metrics] == list(range(1, candidate.steps + 1))
        # every process drew one noise a parameter and release, those steps that were lost included
        releases = (candidate.steps - story.starts[-1]) * (2 if candidate.is_paired else 1)
        assert len(story.draws[-1]) == releases * parameters
    # the model is that of the surviving noise
    if candidate.is_full_batch and candidate.early_stopping is None:
        require_equal(
            trained.model,
            train_by_hand(small, noise=story.surviving(small)),
            2e-4 if "adam" in candidate.optimizer else 2e-5,
        )


FULL: dict[str, dict[str, Any]] = {
    "closed form, SGD with momentum": {
        "network": "softmax",
        "momentum": 0.9,
        "execution": {"checkpoint_every": 1, "grad_sample_mode": "closed_form"},
    },
    "hooks, Adam": {
        "optimizer": "adam",
        "learning_rate": 0.02,
        "execution": {"checkpoint_every": 2, "grad_sample_mode": "hooks"},
    },
    "the gradient of the step before, AdamW": {
        "optimizer": "adamw",
        "learning_rate": 0.02,
        "dp_merging": {"ascent": "previous_gradient", "radius": 0.3, "anchor": 0.1},
        "execution": {"checkpoint_every": 2, "grad_sample_mode": "ghost"},
    },
    "two releases of one batch, in parts": {
        "momentum": 0.5,
        "dp_merging": {"ascent": "same_batch", "radius": 0.3, "anchor": 0.1},
        "execution": {"checkpoint_every": 1, "grad_sample_mode": "hooks", "physical_batch_size": 7},
    },
    "ghost, parts, Poisson, momentum": {
        **POISSON,
        "momentum": 0.9,
        "execution": {"checkpoint_every": 3, "grad_sample_mode": "ghost", "physical_batch_size": 5},
    },
}


@pytest.mark.parametrize("case", FULL)
def test_killed_and_resumed(children: Any, tmp_path: Path, case: str) -> None:
    trained = killed_again_and_again(children, tmp_path, FULL[case], kills=3, seed=len(case))
    assert len(Story.of(tmp_path).starts) >= 2  # it was killed
    require_as_never_killed(prepared(**FULL[case]), tmp_path, trained)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", FULL)
def test_killed_and_resumed_many_times(children: Any, tmp_path: Path, case: str, seed: int) -> None:
    trained = killed_again_and_again(children, tmp_path, FULL[case], kills=15, seed=seed)
    require_as_never_killed(prepared(**FULL[case]), tmp_path, trained)


CASES: dict[str, dict[str, Any]] = {
    **FULL,
    "hooks, Poisson": {**POISSON, "execution": {"checkpoint_every": 1, "grad_sample_mode": "hooks"}},
    "the gradient of the step before, Poisson": {
        **POISSON,
        "dp_merging": {"ascent": "previous_gradient", "radius": 0.3},
        "execution": {"checkpoint_every": 3, "grad_sample_mode": "ghost", "physical_batch_size": 7},
    },
    "AdamW with a schedule, in stages": {
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "learning_rate": 0.02,
        "execution": {"checkpoint_every": 3, "grad_sample_mode": "functorch"},
    },
    "per layer, parts": {
        "clipping": "per_layer",
        "momentum": 0.5,
        "weight_decay": 0.01,
        "execution": {"checkpoint_every": 2, "grad_sample_mode": "hooks", "physical_batch_size": 7},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed(tmp_path: Path, case: str) -> None:
    for seed in range(2):
        small, folder = prepared(**CASES[case]), tmp_path / str(seed)
        folder.mkdir()
        trained = stopped_again_and_again(small, folder, seed=seed)
        require_as_never_killed(small, folder, trained)


def test_a_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stages of four steps, checkpoints every three: a stage is in two stretches."""
    small = prepared(
        learning_rate_schedule="linear",
        schedule_stages=4,
        execution={"checkpoint_every": 3, "grad_sample_mode": "hooks"},
    )
    with pytest.raises(Stop):
        train(small, tmp_path, resume=None, on_step=_stop_at(7))
    trained = train(small, tmp_path, resume=saved(tmp_path))
    rates = [0.3 * share for share in (0.875, 0.625, 0.375, 0.125) for _ in range(4)]
    recorded = [s.learning_rate for s in trained.trajectory.segments for _ in range(s.steps)]
    assert recorded == pytest.approx(rates, rel=1e-15)
    assert [segment.steps for segment in trained.trajectory.segments] == [4, 2, 2, 4, 4]
    assert trained.trajectory.notes["resumed"] == "from checkpoints after 6 steps, each time with fresh noise"
    by_hand = train_by_hand(small, noise=Story.of(tmp_path).surviving(small), rates=rates)
    require_equal(trained.model, by_hand, 2e-5)


def test_kept_checkpoints_survive(tmp_path: Path) -> None:
    """Each is the model of its own steps' surviving noise, and its segments are the run's first ones."""
    fields = {
        "keep_checkpoints": [3, 8, 15],
        "execution": {"checkpoint_every": 2, "grad_sample_mode": "hooks"},
    }
    small = prepared(**fields)
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        trained = stopped_again_and_again(small, folder, seed=seed)
        require_as_never_killed(small, folder, trained)
        assert [kept.name for kept in trained.kept] == ["only-at-3", "only-at-8", "only-at-15"]
        for kept, steps in zip(trained.kept, (3, 8, 15), strict=True):
            assert kept.trajectory.steps == steps
            by_hand = train_by_hand(small, noise=Story.of(folder).surviving(small), steps=steps)
            require_equal(kept.model, by_hand, 2e-5)
            ids = [segment.id for segment in kept.trajectory.segments]
            assert ids == [segment.id for segment in trained.trajectory.segments][: len(ids)]
        together = (trained.trajectory, *(kept.trajectory for kept in trained.kept))
        assert sum(segment.steps for segment in union_of_segments(together)) == 16


def test_early_stopping_goes_on_as_it_was(tmp_path: Path) -> None:
    """When it stops and what it keeps is what the public rows say of the surviving steps."""
    stopping = {"every": 2, "patience": 3, "min_improvement": 0.02}
    small = prepared(
        early_stopping=stopping, steps=40, execution={"checkpoint_every": 1, "grad_sample_mode": "hooks"}
    )
    early = 0
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        trained = stopped_again_and_again(small, folder, seed=seed)
        noise = list(Story.of(folder).surviving(small))
        best, best_at, without = -1.0, 0, 0
        for step in range(2, 41, 2):
            state = train_by_hand(small, noise=iter(noise), steps=step)
            module = build(small.recipe.network)
            module.load_state_dict(state)
            accuracy = share_right(module, small.splits.public_train)
            if accuracy > best + (0.02 if best_at else 0):
                best, best_at, without, kept = accuracy, step, 0, state
            else:
                without += 1
            if without == 3:
                break
        early += step < 40
        note = trained.trajectory.notes["early_stopping"]
        assert note.startswith(f"stopped after {step} of 40 steps, and kept the parameters after {best_at},")
        require_equal(trained.model, kept, 2e-5)
        assert trained.trajectory.steps == 40
        assert {segment.schedule for segment in trained.trajectory.segments} == {"adapted"}
        whole = prepared(steps=40, execution={"grad_sample_mode": "hooks"})
        undisturbed = train(whole, tmp_path, resume=None)
        assert single_run(trained.trajectory).epsilon(1e-5) == pytest.approx(
            single_run(undisturbed.trajectory).epsilon(1e-5), rel=1e-12
        )
    assert early


def test_two_that_go_on_from_one_checkpoint_share_its_steps_only(tmp_path: Path) -> None:
    """Their noise is their own; together they are a prefix counted once, and two suffixes."""
    small = prepared(momentum=0.9, execution={"checkpoint_every": 6, "grad_sample_mode": "hooks"})
    with pytest.raises(Stop):
        train(small, tmp_path, resume=None, on_step=_stop_at(8))
    point = saved(tmp_path)
    assert point is not None
    assert point.step == 6
    content = point.to_bytes()
    one, other = (train(small, tmp_path, resume=point) for _ in range(2))
    assert point.to_bytes() == content  # the first one's momenta are not in what the second one starts from
    union = union_of_segments((one.trajectory, other.trajectory))
    assert [segment.steps for segment in union] == [6, 10, 10]
    assert one.model != other.model
    prefix, suffix, second = union
    assert suffix.parent == second.parent
    assert suffix.parent is not None
    assert (suffix.parent.segment, suffix.parent.step) == (prefix.id, 6)
    drawn = [draw for draws in Story.of(tmp_path).draws for draw in draws]
    assert len(set(drawn)) == len(drawn)


def test_the_killed_process_itself_may_go_on_too(tmp_path: Path) -> None:
    """It was only slow: it ends beside the one that resumed its checkpoint, and both are accounted."""
    small, points = prepared(execution={"checkpoint_every": 5, "grad_sample_mode": "hooks"}), []
    slow = train(small, tmp_path, resume=None, on_checkpoint=points.append)
    quick = train(small, tmp_path, resume=Checkpoint.from_bytes(points[0].to_bytes()))
    union = union_of_segments((slow.trajectory, quick.trajectory))
    assert [segment.steps for segment in union] == [16, 11]
    assert union[1].parent is not None
    assert (union[1].parent.segment, union[1].parent.step) == (union[0].id, 5)


def test_a_checkpoint_is_a_copy(tmp_path: Path) -> None:
    """What the run does afterwards changes neither its parameters nor the optimizer's state."""
    points: list[tuple[Checkpoint, bytes]] = []
    for optimizer in ("sgd", "adam"):
        small = prepared(
            optimizer=optimizer,
            momentum=0.9 if optimizer == "sgd" else 0.0,
            keep_checkpoints=[2],
            execution={"checkpoint_every": 1, "grad_sample_mode": "hooks"},
        )
        train(
            small, tmp_path, resume=None, on_checkpoint=lambda point: points.append((point, point.to_bytes()))
        )
    assert len(points) == 30  # never after the last step
    for point, content in points:
        assert point.to_bytes() == content


def test_what_is_in_a_checkpoint_comes_back(tmp_path: Path) -> None:
    small, points = (
        prepared(
            optimizer="adam",
            keep_checkpoints=[1],
            execution={"checkpoint_every": 2, "grad_sample_mode": "hooks"},
        ),
        [],
    )
    train(small, tmp_path, resume=None, on_checkpoint=points.append)
    for point in points:
        back = Checkpoint.from_bytes(point.to_bytes())
        for name in ("key", "candidate", "step", "steps", "stretches", "metrics", "stopping"):
            assert getattr(back, name) == getattr(point, name)
        for name in ("parameters", "optimizer", "best"):
            one, other = getattr(back, name), getattr(point, name)
            assert set(one) == set(other)
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert set(back.kept) == {1}
        assert back.to_bytes() == point.to_bytes()
    assert {name.partition(".")[2] for name in points[0].optimizer} == {"step", "exp_avg", "exp_avg_sq"}


def test_no_generator_s_state_is_in_a_checkpoint(tmp_path: Path) -> None:
    """Nothing that noise or coins could be made of again: resumed twice, both differ in noise and in coins."""
    small = prepared(**POISSON, execution={"checkpoint_every": 4, "grad_sample_mode": "hooks"})
    with pytest.raises(Stop):
        train(small, tmp_path, resume=None, on_step=_stop_at(5))
    point = saved(tmp_path)
    sizes = [
        [metrics["private/batch_size"] for metrics in train(small, tmp_path, resume=point).metrics]
        for _ in range(2)
    ]
    assert sizes[0][:4] == sizes[1][:4]
    assert sizes[0][4:] != sizes[1][4:]


@pytest.mark.parametrize("damage", ["cut", "one bit", "empty", "appended", "something else"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    small = prepared(execution={"checkpoint_every": 4, "grad_sample_mode": "hooks"})
    train(small, tmp_path, resume=None)
    content = (tmp_path / "checkpoint").read_bytes()
    assert Checkpoint.from_bytes(content).step == 12
    broken = {
        "cut": content[:-7],
        "one bit": content[:500] + bytes([content[500] ^ 1]) + content[501:],
        "empty": b"",
        "appended": content + b"\0",
        "something else": b"PK\x03\x04 not a checkpoint",
    }[damage]
    with pytest.raises(InvalidInput, match=r"^A checkpoint is damaged: [^.]+\.$"):
        Checkpoint.from_bytes(broken)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    execution = {"checkpoint_every": 4, "grad_sample_mode": "hooks"}
    train(prepared(execution=execution), tmp_path, resume=None)
    point = saved(tmp_path)
    assert point is not None
    sentence = "is of another recipe, other data or other versions of the libraries than candidate only has now; train"
    for change in (
        {"steps": 17},
        {"noise_multiplier": 2.1},
        {"max_grad_norm": 0.6},
        {"learning_rate": 0.31},
        {"expected_batch_size": 41},
        {"sampling_probability": 0.5},
        {"optimizer": "adam"},
        {"clipping": "per_layer"},
        {"keep_checkpoints": [5]},
        {"momentum": 0.5},
        {"network": "softmax"},
    ):
        other = prepared(execution=execution, **change)
        with pytest.raises(InvalidInput, match=sentence):
            train(other, tmp_path, resume=point)
    small = prepared(execution=execution)
    for change in (
        {"data_digest": "1" * 64},
        {"initial": {name: value + 1 for name, value in initial_state(small.recipe.network, 7).items()}},
    ):
        with pytest.raises(InvalidInput, match=sentence):
            train(small, tmp_path, resume=point, **change)
    with pytest.raises(InvalidInput, match=sentence):
        train(small, tmp_path, resume=replace(point, candidate="other"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.training.candidate.library_versions", lambda: {"torch": "9"})
        with pytest.raises(InvalidInput, match=sentence):
            train(small, tmp_path, resume=point)


def test_how_a_training_is_carried_out_may_change(tmp_path: Path) -> None:
    """Another grad-sample mode, other parts, other looks: speed only, so the checkpoint stays good."""
    train(prepared(execution={"checkpoint_every": 6, "grad_sample_mode": "hooks"}), tmp_path, resume=None)
    other = prepared(execution={"grad_sample_mode": "ghost", "physical_batch_size": 3, "monitor_every": 4})
    trained = train(other, tmp_path, resume=saved(tmp_path))
    assert trained.trajectory.steps == 16
    assert [one["step"] for one in trained.metrics] == [*range(1, 13), 16]


def test_two_candidates_in_two_threads_do_not_meet(tmp_path: Path) -> None:
    """Trained side by side, each is what its own noise says."""
    runs: dict[int, tuple[Prepared, TrainedCandidate]] = {}
    initial = initial_state(prepared(execution={}).recipe.network, 7)

    def one(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        mode = ("hooks", "ghost", "functorch", "hooks")[number]
        small = prepared(
            momentum=0.5,
            max_grad_norm=0.2 + number / 10,
            execution={"grad_sample_mode": mode, "physical_batch_size": 9},
        )
        runs[number] = (small, train(small, folder, resume=None, initial=initial))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 4
    for number, (small, trained) in runs.items():
        by_hand = train_by_hand(small, noise=Story.of(tmp_path / str(number)).surviving(small))
        require_equal(trained.model, by_hand, 2e-5)
        assert trained.trajectory.segments[0].max_grad_norm == 0.2 + number / 10


def _stop_at(step: int) -> Callable[[int], None]:
    def stop(done: int) -> None:
        if done == step:
            raise Stop

    return stop
