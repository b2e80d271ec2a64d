"""The steps of DP-Merging are those written by hand, noise included, whatever way the gradients are had."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import dp_accounting.pld.privacy_loss_distribution as google
import pytest
import torch
from torch import Tensor

from accounting.joint_release import single_run
from accounting.trajectory import Trajectory
from tasks.models import build, initial_state
from tasks.objective import objective_for
from tasks.recipes import CandidateRecipe
from tasks.training import TrainedCandidate, TrainingFailed, train_candidate
from tasks.training.clippers import clipper
from tasks.training.descent import descent
from tasks.training.noise import SeededNoise
from tasks.training.recording import StepRecorder
from tests.tasks.training.by_hand import seeded, train_by_hand
from tests.tasks.training.test_reference import POISSON, RARE, CountingNoise, network, require_equal, train

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
Build = Callable[..., Any]
SAME = {"ascent": "same_batch", "radius": 0.3, "anchor": 0.05}
PREVIOUS = {"ascent": "previous_gradient", "radius": 0.3, "anchor": 0.05}
ANCHORED = {"ascent": "none", "anchor": 0.2}
EACH = pytest.mark.parametrize("merging", [SAME, PREVIOUS, ANCHORED], ids=lambda one: str(one["ascent"]))
FEW = {"steps": 5, "rows": 20}

CASES: dict[str, dict[str, Any]] = {
    "full batch, half of the rows clipped": {**FEW, "max_grad_norm": 0.5, "noise_multiplier": 0.1},
    "momentum and weight decay": {**FEW, "momentum": 0.9, "weight_decay": 0.05, "learning_rate": 0.2},
    "AdamW, Poisson": {
        **FEW,
        **POISSON,
        "optimizer": "adamw",
        "learning_rate": 0.05,
        "weight_decay": 0.1,
    },
    "Adam": {**FEW, "optimizer": "adam", "learning_rate": 0.05, "weight_decay": 0.1},
    "Poisson, some empty batches": RARE,
    "Poisson, only empty batches": {**RARE, "sampling_probability": 1e-9, "steps": 3},
}


@EACH
@pytest.mark.parametrize("case", CASES)
def test_every_mode(small_portfolio: Build, case: str, merging: dict[str, Any]) -> None:
    expected: dict[str, Tensor] = {}
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(
            **network("perceptron"), **CASES[case], dp_merging=merging, execution={"grad_sample_mode": mode}
        )
        expected = expected or train_by_hand(small)
        trained = train(small)
        require_equal(trained.model, expected, atol=1e-4 if "Adam" in case else 2e-5)
        assert trained.trajectory.steps == CASES[case]["steps"]
        assert trained.trajectory.notes["grad_sample_mode"].startswith(mode)


@EACH
def test_a_regression_in_closed_form(small_portfolio: Build, merging: dict[str, Any]) -> None:
    for changes in (FEW, {**FEW, **POISSON}, RARE):
        small = small_portfolio(
            max_grad_norm=0.3, **changes, dp_merging=merging, execution={"grad_sample_mode": "closed_form"}
        )
        require_equal(train(small).model, train_by_hand(small), atol=2e-5)


@EACH
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("changes", [FEW, {**FEW, **POISSON}, RARE], ids=["full batch", "Poisson", "rare"])
def test_a_batch_in_parts_is_one_step(
    small_portfolio: Build, changes: dict[str, Any], clipping: str, merging: dict[str, Any]
) -> None:
    releases = 2 if merging is SAME else 1
    expected: dict[str, Tensor] = {}
    for at_once in (1, 7, 10):
        small = small_portfolio(
            **network("perceptron"),
            **changes,
            max_grad_norm=0.3,
            clipping=clipping,
            dp_merging=merging,
            execution={
                "grad_sample_mode": "hooks" if clipping == "per_layer" else "ghost",
                "physical_batch_size": at_once,
            },
        )
        expected = expected or train_by_hand(small)
        noise = CountingNoise()
        trained = train(small, noise=noise)
        require_equal(trained.model, expected, atol=2e-5)
        assert noise.drawn == [(4, 5), (4,), (3, 4), (3,)] * (changes["steps"] * releases)
        assert noise.deviations == {2.0 * 0.3}
        (segment,) = trained.trajectory.segments
        assert segment.steps == changes["steps"]


def test_a_schedule_and_kept_copies(small_portfolio: Build) -> None:
    rates = [0.75] * 3 + [0.25] * 3
    for merging in (SAME, PREVIOUS):
        small = small_portfolio(
            **network("perceptron"),
            steps=6,
            rows=20,
            learning_rate=1.0,
            learning_rate_schedule="linear",
            schedule_stages=2,
            keep_checkpoints="[2, 5]",
            dp_merging=merging,
        )
        trained = train(small)
        require_equal(trained.model, train_by_hand(small, rates=rates), atol=2e-5)
        assert [one.steps for one in trained.trajectory.segments] == [3, 3]
        for kept, steps in zip(trained.kept, (2, 5), strict=True):
            require_equal(kept.model, train_by_hand(small, rates=rates, steps=steps), atol=2e-5)
            assert kept.trajectory.steps == steps


def test_coins_are_tossed_once_for_both_releases(small_portfolio: Build) -> None:
    left = []
    for merging in ({}, {"dp_merging": SAME}):
        coins = seeded(2)
        for at_once in (3, 50):
            train(
                small_portfolio(**POISSON, **merging, execution={"physical_batch_size": at_once}),
                sampling_generator=coins,
            )
        left.append(coins.get_state())
    assert torch.equal(*left)


class Bench:
    """An optimizer as training makes it, whose backward passes are listed; the gradients are what is put there."""

    def __init__(self, candidate: CandidateRecipe, module: torch.nn.Module) -> None:
        objective = objective_for(3, 3)
        assert objective is not None
        self.made = clipper("hooks", module, candidate, objective, noise=SeededNoise(seeded(1)))
        self.made.network.train()
        self.recorder = StepRecorder(dp_merging=candidate.dp_merging)
        self.made.optimizer.attach_step_hook(self.recorder)
        self.passes: list[tuple[Tensor, Tensor]] = []
        self.places: list[list[Tensor]] = []
        self.descent = descent(self.made.optimizer, candidate.dp_merging, backward=self.backward)

    def backward(self, features: Tensor, labels: Tensor) -> None:
        self.passes.append((features, labels))
        self.places.append(self.parameters())
        self.made.backward(features, labels)

    def parameters(self) -> list[Tensor]:
        return [one.detach().clone() for one in self.made.optimizer.params]

    def take(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            self.made.optimizer.signal_skip_step(do_skip=left > 0)
            self.descent.prepare()
            self.backward(*part)
            self.descent.finish(*part)


def bench(small: Any) -> Bench:
    module = build(small.recipe.network)
    module.load_state_dict(initial_state(small.recipe.network, small.recipe.initialisation_seed))
    return Bench(small.recipe.candidate("only"), module)


def rows_of(small: Any, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    private = small.splits.private
    features, labels = torch.tensor(private.features), torch.tensor(private.labels)
    return list(zip(features[: sum(sizes)].split(sizes), labels[: sum(sizes)].split(sizes), strict=True))


def test_the_very_same_rows_are_used_twice_and_nothing_is_left_of_them(small_portfolio: Build) -> None:
    small = small_portfolio(**network("perceptron"), dp_merging=SAME)
    made, parts = bench(small), rows_of(small, 4, 1, 7)
    for step in (1, 2):
        made.take(parts)
        assert len(made.recorder.steps) == step
        assert made.descent.parts == []  # type: ignore[attr-defined]
    assert [id(part[0]) for part in made.passes] == [id(part[0]) for part in parts] * 4
    for first, second in ((0, 3), (6, 9)):  # all parts of a pass are seen at one point, as far as the radius
        for other in (1, 2):
            assert all(map(torch.equal, made.places[first], made.places[first + other]))
            assert all(map(torch.equal, made.places[second], made.places[second + other]))
        moved = [then - now for now, then in zip(made.places[first], made.places[second], strict=True)]
        assert float(torch.cat([one.flatten() for one in moved]).norm()) == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize("merging", [SAME, PREVIOUS], ids=["same batch", "previous gradient"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_w_comes_back_bit_for_bit(small_portfolio: Build, merging: dict[str, Any], optimizer: str) -> None:
    """With a learning rate so small that a step changes no bit, a run ends where it began."""
    small = small_portfolio(
        **network("perceptron"), learning_rate=1e-30, optimizer=optimizer, dp_merging=merging
    )
    made = bench(small)
    before = made.parameters()
    for _ in range(3):
        made.take(rows_of(small, 5))
    assert all(map(torch.equal, before, made.parameters()))
    assert any(not all(map(torch.equal, before, place)) for place in made.places)  # it did climb


class NoGradient:
    """In place of every other noisy sum something without a direction; the others are as seeded."""

    description = "for a test"

    def __init__(self, value: float) -> None:
        self.value = value
        self.source = SeededNoise(seeded(1))
        self.calls = 0

    def added(self, total: Tensor, deviation: float) -> Tensor:
        self.calls += 1
        if (self.calls - 1) // 4 % 2 == 0:  # four parameters
            return torch.full_like(total, self.value)
        return self.source.added(total, deviation)


@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, math.nan, 3e38])
def test_where_the_first_gradient_has_no_direction_the_step_does_not_climb(
    small_portfolio: Build, value: float
) -> None:
    changes = {"steps": 4, "rows": 20, "expected_batch_size": 1e-3 if value == 3e38 else 40}
    changes |= {"learning_rate": 0.5 * changes["expected_batch_size"] / 40}
    paired = small_portfolio(**network("perceptron"), **changes, dp_merging={**SAME, "anchor": 0.0})
    found = train(paired, noise=NoGradient(value))
    plain = train(small_portfolio(**network("perceptron"), **changes))
    assert found.model == plain.model


def test_the_smallest_gradient_has_a_direction(small_portfolio: Build) -> None:
    made = bench(small_portfolio(**network("perceptron"), dp_merging=SAME))
    before = made.parameters()
    smallest = [torch.zeros_like(one) for one in before]
    smallest[1][2] = -1.4e-45
    made.descent.climb(smallest)  # type: ignore[attr-defined]
    moved = [now - then for now, then in zip(made.parameters(), before, strict=True)]
    assert float(moved[1][2]) == pytest.approx(-0.3, rel=1e-6)
    assert sum(int(one.count_nonzero()) for one in moved) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.9},
        {"optimizer": "adamw", "weight_decay": 0.1},
        RARE,
        {**POISSON, "clipping": "per_layer"},
    ],
    ids=["momentum", "adamw", "rare", "per layer"],
)
def test_without_radius_and_anchor_it_is_plain_dp_sgd_bit_for_bit(
    small_portfolio: Build, changes: dict[str, Any]
) -> None:
    nothing = {"ascent": "previous_gradient", "radius": 0.0}
    execution = {"grad_sample_mode": "hooks", "physical_batch_size": 7}
    found, plain = (
        train(small_portfolio(**network("perceptron"), **changes, **more, execution=execution))
        for more in ({"dp_merging": nothing}, {})
    )
    assert found.model == plain.model
    (one,), (other,) = found.trajectory.segments, plain.trajectory.segments
    assert one == replace(
        other,
        id=one.id,
        optimizer={"sgd": "dp_sam_previous_gradient"}.get(
            other.optimizer, f"dp_sam_previous_gradient+{other.optimizer}"
        ),
        update_lipschitz_reason=one.update_lipschitz_reason,
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_what_is_recorded(small_portfolio: Build, optimizer: str) -> None:
    base = "" if optimizer == "sgd" else f"+{optimizer}"
    for merging, name, radius in (
        (SAME, f"dp_sam{base}", 0.3),
        (PREVIOUS, f"dp_sam_previous_gradient{base}", 0.3),
        (ANCHORED, optimizer, 0.0),
    ):
        trained = train(small_portfolio(optimizer=optimizer, steps=2, dp_merging=merging))
        (segment,) = trained.trajectory.segments
        assert (segment.steps, segment.optimizer) == (2, name)
        assert (segment.ascent_radius, segment.anchor_strength) == (radius, merging["anchor"])
        assert segment.noise_multiplier == 2.0  # of one release
        assert segment.update_lipschitz == math.inf
        reason = "the pull towards the public start" if name == "sgd" else f"the optimizer is {name}"
        assert segment.update_lipschitz_reason.startswith(f"unknown: {reason}")
        assert Trajectory.from_dict(trained.trajectory.to_dict()) == trained.trajectory
        assert ("two noisy gradients" in trained.trajectory.notes["dp_merging"]) is (merging is SAME)


def test_two_releases_with_different_settings_are_no_step(small_portfolio: Build) -> None:
    small = small_portfolio(**network("perceptron"), dp_merging=SAME)
    made, (part,) = bench(small), rows_of(small, 6)

    def louder(features: Tensor, labels: Tensor) -> None:
        made.made.backward(features, labels)
        made.made.optimizer.noise_multiplier = 3.0

    made.descent.backward = louder  # type: ignore[attr-defined]
    with pytest.raises(
        TrainingFailed, match="two releases of a paired step must be made with the same settings"
    ):
        made.take([part])
    assert made.recorder.steps == []


def secretly(small: Any) -> TrainedCandidate:
    """As users train: noise and coins from the operating system."""
    return train_candidate(
        small.recipe.candidate("only"),
        recipe=small.recipe,
        splits=small.splits,
        initial=initial_state(small.recipe.network, small.recipe.initialisation_seed),
        run_id="run",
        data_digest="0" * 64,
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_epsilon_of_the_executed_run_is_that_of_the_paired_mechanism(
    small_portfolio: Build, optimizer: str
) -> None:
    """Against Google's accountant: one sampled Gaussian at noise_multiplier / sqrt(2) a paired step."""
    for merging, multiplier in ((SAME, 2.0 / math.sqrt(2)), (PREVIOUS, 2.0), (ANCHORED, 2.0)):
        small = small_portfolio(**POISSON, steps=8, optimizer=optimizer, dp_merging=merging)
        relation = {"neighboring_relation": "add_or_remove_one"}
        trained = secretly(replace(small, recipe=small.recipe.model_copy(update=relation)))
        (segment,) = trained.trajectory.segments
        pld = google.from_gaussian_mechanism(
            multiplier, sampling_prob=segment.sampling_probability, value_discretization_interval=1e-4
        )
        expected = pld.self_compose(8).get_epsilon_for_delta(1e-5)
        assert single_run(trained.trajectory).epsilon(1e-5) == pytest.approx(expected, rel=1e-3)
        assert trained.metrics[-1]["epsilon_so_far"] == pytest.approx(expected, rel=1e-3)


def test_a_full_batch_pair_costs_twice_the_square(small_portfolio: Build) -> None:
    paired = single_run(secretly(small_portfolio(dp_merging=SAME, steps=3)).trajectory)
    plain = single_run(secretly(small_portfolio(steps=6)).trajectory)
    assert paired.epsilon(1e-5) == pytest.approx(plain.epsilon(1e-5), rel=1e-9)


def test_monitors_show_the_release_without_the_pull(small_portfolio: Build) -> None:
    """The anchor pulls a thousand times harder than noise pushes; it is in the model, and in no metric of noise."""
    changes = {"steps": 4, "noise_multiplier": 1e-3, "learning_rate": 1e-4, "execution": {"monitor_every": 1}}
    for ascent in ({"ascent": "none"}, {"ascent": "previous_gradient", "radius": 0.1}):
        small = small_portfolio(**changes, dp_merging={**ascent, "anchor": 1e4})
        for look in train(small).metrics:
            assert 0 < look["private/noise_norm"] < 3e-4  # 15 numbers of deviation 1e-3 x 1.4143 / 40
            assert look["private/noisy_gradient_norm"] < 1


def test_early_stopping_charges_every_pair_of_the_recipe(small_portfolio: Build) -> None:
    changes = {"steps": 9, "early_stopping": "{every: 2, patience: 1, min_improvement: 1.0}"}
    trained = train(small_portfolio(**changes, dp_merging=SAME))
    assert "stopped after 4 of 9 steps" in trained.trajectory.notes["early_stopping"]
    (segment,) = trained.trajectory.segments
    assert (segment.steps, segment.optimizer, segment.schedule) == (9, "dp_sam", "adapted")
