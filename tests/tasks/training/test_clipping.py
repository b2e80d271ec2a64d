"""No record moves a sum further than max_grad_norm, in any mode: huge, tiny and absent gradients included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tasks.data import Rows
from tasks.models import build, initial_state, softmax_regression, state_from_bytes
from tasks.objective import CROSS_ENTROPY
from tasks.randomness import unpredictable_generator
from tasks.recipes import CandidateRecipe
from tasks.training.batches import batches
from tasks.training.clippers import clipper
from tasks.training.optimizers import private_optimizer
from tasks.training.recording import TrainingFailed
from tasks.training.sequence_norms import linear_norms
from tests.tasks.training import networks
from tests.tasks.training.by_hand import clipped, gradients
from tests.tasks.training.test_reference import network, train

Build = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
LIMIT = 0.5


class NoNoise:
    """Shows the clipped sum itself."""

    description = "none, for a test"

    def added(self, total: Tensor, deviation: float) -> Tensor:
        return total.clone()


def candidate_of(**changes: Any) -> CandidateRecipe:
    fields: dict[str, Any] = {
        "name": "only",
        "steps": 1,
        "noise_multiplier": 1.0,
        "max_grad_norm": LIMIT,
        "learning_rate": 1.0,
        "expected_batch_size": 1.0,
    }
    return CandidateRecipe(**{**fields, **changes})


def moved(module: nn.Module, mode: str, rows: Rows, candidate: CandidateRecipe) -> list[Tensor]:
    """How far one step without noise, with learning rate 1 and divisor 1, moves each parameter; float64."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    try:
        # the parameters are moved from 0, so that nothing is lost in a difference; the gradient is that before
        way = clipper(mode, module, candidate, CROSS_ENTROPY, noise=NoNoise())
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), before, strict=True):
                parameter.copy_(value)
        way.network.train()
        way.optimizer.zero_grad()
        way.backward(torch.tensor(rows.features), torch.tensor(rows.labels))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        way.optimizer.step()
        return [-parameter.detach().double() for parameter in module.parameters()]
    finally:
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), before, strict=True):
                parameter.copy_(value)


def fresh(name: str) -> nn.Module:
    torch.manual_seed(5)
    return getattr(networks, name)()


def norm(parts: list[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())


def odd_rows(seed: int, count: int = 12) -> Rows:
    """From far below to far above ordinary rows."""
    numbers = np.random.default_rng(seed)
    scales = np.logspace(-12, 6, count)[:, None]
    return Rows(
        features=(numbers.normal(size=(count, 5)) * scales).astype(np.float32),
        labels=numbers.integers(3, size=count),
    )


MODES = [
    ("hooks", "flat"),
    ("functorch", "flat"),
    ("ghost", "flat"),
    ("hooks", "per_layer"),
    ("functorch", "per_layer"),
]


@pytest.mark.parametrize(("mode", "clipping"), MODES)
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "sequence", "dead_start"])
def test_a_record_alone(name: str, mode: str, clipping: str) -> None:
    """Its share is its true gradient, by autograd in float64, times min(1, C / (norm + 1e-6)), and at most C long."""
    rows, lengths = odd_rows(1), []
    for limit in (LIMIT, 1e-3, 100.0):
        candidate = candidate_of(max_grad_norm=limit, clipping=clipping)
        for index in range(0, len(rows), 2 if limit == LIMIT else 5):
            one = Rows(features=rows.features[index : index + 1], labels=rows.labels[index : index + 1])
            found = moved(fresh(name), mode, one, candidate)
            true = gradients(fresh(name).double(), one, 0)
            expected = clipped(true, candidate)
            lengths.append(norm(expected))
            assert norm(found) <= limit * (1 + 1e-5)
            for part, right in zip(found, expected, strict=True):
                assert torch.allclose(part, right, rtol=1e-3, atol=1e-6 * norm(true))
    assert max(lengths) > 0.99 * LIMIT  # some are clipped
    if name == "dead_start":
        assert min(lengths) == 0


@pytest.mark.parametrize(("mode", "clipping"), MODES)
@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_together_each_record_is_clipped_by_itself(name: str, mode: str, clipping: str) -> None:
    """A huge neighbour neither shrinks an ordinary record's share nor hides in it."""
    rows, candidate = odd_rows(2), candidate_of(clipping=clipping)
    found = moved(fresh(name), mode, rows, candidate)
    total = [torch.zeros_like(part) for part in found]
    for index in range(len(rows)):
        for sum_, part in zip(
            total, clipped(gradients(fresh(name).double(), rows, index), candidate), strict=True
        ):
            sum_ += part
    for part, right in zip(found, total, strict=True):
        assert torch.allclose(part, right, rtol=1e-3, atol=1e-4)
    assert norm(found) <= LIMIT * len(rows) * (1 + 1e-5)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost", "closed_form"])
def test_a_regression_s_record(mode: str) -> None:
    rows, candidate = odd_rows(3), candidate_of()
    for index in range(len(rows)):
        one = Rows(features=rows.features[index : index + 1], labels=rows.labels[index : index + 1])
        torch.manual_seed(1)
        module = softmax_regression(5, 3)
        right = clipped(gradients(in_float64(module), one, 0), candidate)
        found = moved(module, mode, one, candidate)
        assert norm(found) <= LIMIT * (1 + 1e-5)
        assert torch.allclose(found[0], right[0], rtol=1e-3, atol=1e-12)


def in_float64(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double()


@pytest.mark.parametrize("places", [2, 50])
def test_places_that_nearly_cancel_are_not_underestimated(places: int) -> None:
    """One linear layer, seen at places that nearly cancel: Opacus's own ghost rule gives 0 for some norms."""

    class Contrast(nn.Module):
        """The first place's result less the last one's, enlarged."""

        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 3), scale

        def forward(self, rows: Tensor) -> Tensor:
            given = self.layer(rows)
            return self.scale * (given[:, 0] - given[:, -1])

    numbers = np.random.default_rng(4)
    for nearness in (1e-1, 1e-2, 1e-3, 1e-4):
        base = numbers.normal(size=(8, 1, 3))
        features = base + nearness * numbers.normal(size=(8, places, 3))
        rows = Rows(features=features.astype(np.float32), labels=numbers.integers(3, size=8))
        for index in range(8):
            one = Rows(features=rows.features[index : index + 1], labels=rows.labels[index : index + 1])
            torch.manual_seed(2)
            module = Contrast(1 / nearness)
            true = norm(gradients(in_float64(module), one, 0))
            limit = true / 3
            found = norm(moved(module, "ghost", one, candidate_of(max_grad_norm=limit)))
            assert found <= limit * (1 + 1e-3)
            assert found >= limit * (1 - 1e-3) / (1 + 1e-6 / true)


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3), (4, 40, 3), (2, 3, 4, 3), (3, 1, 3)])
def test_norms_of_linear_layers_over_any_number_of_places(shape: tuple[int, ...]) -> None:
    """Also for four dimensions, for which Opacus's rule has no answer."""
    torch.manual_seed(3)
    layer = nn.Linear(3, 5)
    seen, given = torch.randn(shape), torch.randn(*shape[:-1], 5)
    norms = linear_norms(layer, [seen], given)
    for row in range(shape[0]):
        places = seen[row].reshape(-1, 3).double(), given[row].reshape(-1, 5).double()
        assert float(norms[layer.weight][row]) == pytest.approx(
            float((places[1].T @ places[0]).norm()), rel=1e-5
        )
        assert float(norms[layer.bias][row]) == pytest.approx(float(places[1].sum(0).norm()), rel=1e-5)
    layer.bias.requires_grad_(False)
    assert set(linear_norms(layer, [seen], given)) == {layer.weight}


def test_ghost_clipping_changes_opacus_s_rules_for_its_own_network_only() -> None:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleHooksFastGradientClipping,
    )
    from opacus.grad_sample.linear import compute_linear_norm_sample

    clipper("ghost", fresh("perceptron"), candidate_of(), CROSS_ENTROPY, noise=NoNoise())
    assert GradSampleHooksFastGradientClipping.NORM_SAMPLERS[nn.Linear] is compute_linear_norm_sample


def test_large_images_with_groups_and_strides() -> None:
    """Convolutions over many places: the three modes agree with autograd, far above and far below the limit."""

    def picture_network() -> nn.Module:
        torch.manual_seed(6)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3, dilation=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        )

    numbers = np.random.default_rng(5)
    for size in (1e-6, 1.0, 1e6):
        rows = Rows(
            features=(size * numbers.normal(size=(1, 2, 48, 48))).astype(np.float32), labels=np.array([1])
        )
        true = gradients(picture_network().double(), rows, 0)
        for limit in (norm(true) / 50, norm(true) * 50):
            candidate = candidate_of(max_grad_norm=limit)
            right = clipped(true, candidate)
            for mode in ("hooks", "functorch", "ghost"):
                found = moved(picture_network(), mode, rows, candidate)
                assert norm(found) <= limit * (1 + 1e-5)
                for part, expected in zip(found, right, strict=True):
                    assert torch.allclose(part, expected, rtol=1e-3, atol=1e-4 * norm(right))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost", "closed_form"])
def test_what_is_not_a_number_never_passes_as_one(mode: str) -> None:
    """A gradient that overflows makes the step useless or adds nothing; it never adds more than C."""
    for size in (1e19, 1e30, 3e38):
        torch.manual_seed(1)
        rows = Rows(features=np.full((1, 5), size, dtype=np.float32), labels=np.array([0]))
        (found,) = moved(softmax_regression(5, 3), mode, rows, candidate_of())
        length = float(found.norm())
        assert not length > LIMIT * (1 + 1e-5)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost", "closed_form"])
@pytest.mark.parametrize("physical", [None, 3])
def test_nothing_is_left_over_from_one_step_to_the_next(mode: str, physical: int | None) -> None:
    """Ordinary, empty, ordinary batches: each sum is that of its own rows alone."""
    rows, candidate = odd_rows(7), candidate_of(steps=9, sampling_probability=0.12, learning_rate=1e-30)
    torch.manual_seed(1)
    module = softmax_regression(5, 3)
    plain = in_float64(module)
    sums: list[Tensor] = []

    class Watching(NoNoise):
        def added(self, total: Tensor, deviation: float) -> Tensor:
            sums.append(total.detach().double().clone())
            return total.clone()

    way = clipper(mode, module, candidate, CROSS_ENTROPY, noise=Watching())
    way.network.train()
    generator = torch.Generator().manual_seed(11)
    expected, sizes = [torch.zeros(3, 5, dtype=torch.float64)], [0]
    for features, labels in batches(
        rows,
        sampling_probability=0.12,
        physical_batch_size=physical,
        optimizer=way.optimizer,
        generator=generator,
    ):
        way.optimizer.zero_grad()
        way.backward(features, labels)
        part = Rows(features=features.numpy(), labels=labels.numpy())
        for index in range(len(part)):
            expected[-1] += clipped(gradients(plain, part, index), candidate)[0]
        sizes[-1] += len(part)
        before = len(sums)
        way.optimizer.step()
        if len(sums) == before:
            continue
        assert torch.allclose(sums[-1], expected[-1], rtol=1e-3, atol=1e-6)
        if len(sums) == 25:
            break
        expected.append(torch.zeros(3, 5, dtype=torch.float64))
        sizes.append(0)
    assert 0 in sizes
    assert max(sizes) > 3


def drawn(rows: Rows, *, seed: int, physical: int | None, steps: int) -> list[int]:
    """The sizes of the batches that those coins give."""
    candidate = candidate_of()
    optimizer = private_optimizer(fresh("perceptron"), candidate, mode="hooks", noise=NoNoise())
    sizes, size = [], 0
    stream = batches(
        rows,
        sampling_probability=0.3,
        physical_batch_size=physical,
        optimizer=optimizer,
        generator=torch.Generator().manual_seed(seed),
    )
    while len(sizes) < steps:
        features, labels = next(stream)
        assert len(features) == len(labels)
        size += len(labels)
        if not optimizer._check_skip_next_step():
            sizes.append(size)
            size = 0
    return sizes


def test_coins_fall_as_accounted_and_whatever_the_rows_hold() -> None:
    """The batches follow from the coins and the number of rows alone; parts leave them as they are."""
    numbers = np.random.default_rng(0)
    rows = Rows(features=numbers.normal(size=(40, 5)).astype(np.float32), labels=numbers.integers(3, size=40))
    others = Rows(features=np.zeros((40, 5), dtype=np.float32), labels=np.zeros(40, dtype=np.int64))
    sizes = drawn(rows, seed=3, physical=None, steps=60)
    assert sizes == drawn(others, seed=3, physical=None, steps=60)
    assert sizes == drawn(rows, seed=3, physical=4, steps=60)
    assert sizes != drawn(rows, seed=4, physical=None, steps=60)


def test_each_row_is_in_a_batch_with_its_own_probability() -> None:
    """1,500 batches of fresh coins: frequencies of rows and of pairs within six standard errors of independence."""
    count, steps, q = 12, 1500, 0.3
    rows = Rows(features=np.eye(count, 5, dtype=np.float32), labels=np.arange(count))
    optimizer = private_optimizer(fresh("perceptron"), candidate_of(), mode="hooks", noise=NoNoise())
    stream = batches(
        rows,
        sampling_probability=q,
        physical_batch_size=None,
        optimizer=optimizer,
        generator=unpredictable_generator(),
    )
    there = np.zeros((steps, count))
    for step in range(steps):
        there[step, next(stream)[1].numpy()] = 1
    assert np.abs(there.mean(axis=0) - q).max() < 6 * (q * (1 - q) / steps) ** 0.5
    centred = (there - q) / (q * (1 - q)) ** 0.5
    together = centred.T @ centred / steps
    np.fill_diagonal(together, 0)
    assert np.abs(together).max() < 6 / steps**0.5
    assert np.abs((centred[:-1] * centred[1:]).mean(axis=0)).max() < 6 / steps**0.5


def test_the_divisor_and_the_noise_are_the_recipe_s_whatever_the_batch() -> None:
    for clipping, mode in (
        ("flat", "hooks"),
        ("per_layer", "hooks"),
        ("flat", "ghost"),
        ("flat", "closed_form"),
    ):
        candidate = candidate_of(expected_batch_size=7.5, noise_multiplier=1.3, clipping=clipping)
        optimizer = private_optimizer(fresh("perceptron"), candidate, mode=mode, noise=NoNoise())
        assert optimizer.expected_batch_size == 7.5
        assert optimizer.noise_multiplier * optimizer.max_grad_norm == 1.3 * LIMIT
        assert optimizer.loss_reduction == "mean"
    per_layer = private_optimizer(
        fresh("perceptron"), candidate_of(clipping="per_layer"), mode="hooks", noise=NoNoise()
    )
    assert np.linalg.norm(np.float32(per_layer.max_grad_norms).astype(np.float64)) <= LIMIT


def test_one_record_more_moves_a_trained_step_no_further_than_accounted(small_portfolio: Build) -> None:
    """Through train_candidate itself: one step with and without a record, each mode, B = 10."""
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(
            **network("convolutions"),
            steps=1,
            noise_multiplier=1e-9,
            max_grad_norm=0.2,
            learning_rate=1.0,
            expected_batch_size=10,
            execution={"grad_sample_mode": mode},
        )
        everybody = small.splits.private
        initial = initial_state(small.recipe.network, small.recipe.initialisation_seed)
        names = [name for name, _ in build(small.recipe.network).named_parameters()]

        def step(
            private: Rows, small: Any = small, names: list[str] = names, initial: Any = initial
        ) -> Tensor:
            model = state_from_bytes(train(small, splits=replace(small.splits, private=private)).model)
            return torch.cat([(model[name] - initial[name]).double().flatten() for name in names])

        together = step(everybody)
        for row in (0, 39):
            rest = Rows(
                features=np.delete(everybody.features, row, axis=0), labels=np.delete(everybody.labels, row)
            )
            assert float((together - step(rest)).norm()) <= 0.2 / 10 * (1 + 1e-4)


@pytest.mark.parametrize(
    ("mode", "clipping"),
    [(mode, "flat") for mode in ("hooks", "functorch", "ghost", "closed_form")] + [("hooks", "per_layer")],
)
@pytest.mark.parametrize("parts", [None, 7])
def test_a_record_without_a_finite_gradient_adds_nothing(
    small_portfolio: Build, mode: str, clipping: str, parts: int | None
) -> None:
    """Its row is so long that float32 overflows; the model is that of the other records, not NaN."""
    kind = {} if mode == "closed_form" else network("perceptron")
    small = small_portfolio(
        **kind,
        clipping=clipping,
        execution={"grad_sample_mode": mode, "physical_batch_size": parts},
    )
    private = small.splits.private
    features = private.features.copy()
    features[[3, 20]] = 3e38
    poisoned = Rows(features=features, labels=private.labels)
    rest = Rows(features=np.delete(features, [3, 20], axis=0), labels=np.delete(private.labels, [3, 20]))
    with_them = train(small, splits=replace(small.splits, private=poisoned))
    without = train(small, splits=replace(small.splits, private=rest))
    one, other = state_from_bytes(with_them.model), state_from_bytes(without.model)
    for name, tensor in one.items():
        assert torch.isfinite(tensor).all()
        if mode in ("ghost", "closed_form"):  # elsewhere their gradients are finite, and clipped
            assert torch.allclose(tensor, other[name], rtol=0, atol=1e-5)


def test_a_network_that_divides_by_a_row_s_length(small_portfolio: Build) -> None:
    """A row of zeros gives NaN; the run goes on as if it were not there."""
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(**network("by_length"), execution={"grad_sample_mode": mode})
        private = small.splits.private
        features = private.features.copy()
        features[5] = 0
        poisoned = replace(small.splits, private=Rows(features=features, labels=private.labels))
        rest = replace(
            small.splits,
            private=Rows(features=np.delete(features, 5, axis=0), labels=np.delete(private.labels, 5)),
        )
        one, other = (state_from_bytes(train(small, splits=splits).model) for splits in (poisoned, rest))
        for name, tensor in one.items():
            assert torch.allclose(tensor, other[name], rtol=0, atol=1e-5)


def test_what_a_network_says_of_private_rows_is_not_quoted(small_portfolio: Build) -> None:
    small = small_portfolio(**network("that_quotes"), execution={"grad_sample_mode": "hooks"})
    with pytest.raises(TrainingFailed) as caught:
        train(small)
    assert "the network failed with ValueError on private rows" in caught.value.message
    assert not any(character.isdigit() for character in caught.value.message)
    assert caught.value.__suppress_context__
