"""Which way the clipped sums are had: by trial on synthetic rows, and never by a way that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
from opacus.grad_sample.utils import register_grad_sampler, register_norm_sampler
from torch import Tensor, nn

from accounting.errors import InvalidInput
from tasks.data import Rows
from tasks.models import build
from tasks.objective import CROSS_ENTROPY
from tasks.training import mode_choice
from tests.tasks.training import networks
from tests.tasks.training.test_reference import network, train

Build = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    mode_choice._known.clear()
    mode_choice._fit.clear()
    yield
    mode_choice._known.clear()
    mode_choice._fit.clear()


@pytest.fixture
def own_rules() -> Iterator[None]:
    """Rules that a test registers with Opacus are taken back."""
    kinds: list[Any] = [GradSampleModule, GradSampleHooksFastGradientClipping]
    tables = [kind.GRAD_SAMPLERS for kind in kinds] + [GradSampleHooksFastGradientClipping.NORM_SAMPLERS]
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def choose(small: Any, module: nn.Module | None = None) -> tuple[str, str]:
    return mode_choice.choose_mode(
        module or build(small.recipe.network),
        small.recipe.candidate("only"),
        small.recipe.execution,
        CROSS_ENTROPY,
        network_digest=small.recipe.network.sha256(),
        public_rows=small.splits.public_train.features,
        classes=3,
        what="The network",
    )


def right_modes() -> set[str]:
    (seconds,) = mode_choice._known.values()
    return set(seconds)


def test_regressions_have_a_closed_form_and_are_not_tried(small_portfolio: Build) -> None:
    assert choose(small_portfolio())[0] == "closed_form"
    assert not mode_choice._known
    assert choose(small_portfolio(clipping="per_layer"))[0] in ("hooks", "functorch")
    assert right_modes() == {"hooks", "functorch"}


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "sequence", "users_own_layer"])
def test_every_mode_is_right_for_ordinary_networks(small_portfolio: Build, name: str) -> None:
    small = small_portfolio(**network(name))
    mode, reason = choose(small)
    assert right_modes() == {"hooks", "functorch", "ghost"}
    (seconds,) = mode_choice._known.values()
    assert seconds[mode] == min(seconds.values())
    assert reason == "the fastest of hooks, functorch, ghost in a trial on 256 synthetic rows"


def test_what_the_recipe_says_is_done(small_portfolio: Build) -> None:
    for mode in ("hooks", "functorch", "ghost"):
        small = small_portfolio(**network("perceptron"), execution={"grad_sample_mode": mode})
        assert choose(small) == (mode, "as the recipe says")


@pytest.mark.parametrize(
    ("mode", "changes", "sentence"),
    [
        (
            "closed_form",
            network("perceptron"),
            "closed_form is for softmax and logistic regression with flat",
        ),
        (
            "closed_form",
            {"clipping": "per_layer"},
            "closed_form is for softmax and logistic regression with flat",
        ),
        (
            "ghost",
            {"clipping": "per_layer"},
            "ghost cannot clip layers apart; set it to auto, or clipping to flat",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    small_portfolio: Build, mode: str, changes: dict[str, Any], sentence: str
) -> None:
    small = small_portfolio(**changes, execution={"grad_sample_mode": mode})
    with pytest.raises(InvalidInput, match=sentence):
        train(small)


def halved_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    """A faulty rule, as a user might register one: half of each norm."""
    gradients = right_gradients(layer, activations, backprops)
    return {parameter: gradient.flatten(1).norm(dim=1) / 2 for parameter, gradient in gradients.items()}


def right_gradients(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    bent = torch.tanh(activations[0] @ layer.weight.T)
    scaled = backprops * layer.scale * (1 - bent**2)
    return {
        layer.weight: torch.einsum("no,ni->noi", scaled, activations[0]),
        layer.scale: backprops * bent,
    }


@pytest.mark.parametrize("limit", [0.1, 1000.0])
def test_ghost_clipping_with_wrong_norms_is_out(
    small_portfolio: Build, own_rules: None, limit: float
) -> None:
    """Also where nothing is clipped, so that the sums are equal; it would be released unclipped later."""
    register_grad_sampler(networks.ScaledLinear)(right_gradients)
    register_norm_sampler(networks.ScaledLinear)(halved_norms)
    small = small_portfolio(**network("users_own_layer"), max_grad_norm=limit)
    assert choose(small)[0] != "ghost"
    assert right_modes() == {"hooks", "functorch"}
    asked = small_portfolio(
        **network("users_own_layer"), max_grad_norm=limit, execution={"grad_sample_mode": "ghost"}
    )
    with pytest.raises(InvalidInput, match=r"are computed wrongly by Opacus \(grad_sample_mode ghost\)"):
        train(asked)


def test_a_top_that_starts_at_zero_hides_nothing(small_portfolio: Build, own_rules: None) -> None:
    """With zeros above it a layer has no gradient yet, so its wrong norms would be right by accident."""
    register_grad_sampler(networks.ScaledLinear)(right_gradients)
    register_norm_sampler(networks.ScaledLinear)(halved_norms)
    module = networks.users_own_layer()
    nn.init.zeros_(module[1].weight)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert choose(small_portfolio(**network("users_own_layer")), module)[0] != "ghost"
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def failing(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    raise KeyError("no rule for this")


def test_a_mode_that_fails_is_out(small_portfolio: Build, own_rules: None) -> None:
    register_norm_sampler(networks.ScaledLinear)(failing)
    choose(small_portfolio(**network("users_own_layer")))
    assert right_modes() == {"hooks", "functorch"}


def test_ghost_clipping_is_never_its_own_judge(small_portfolio: Build, own_rules: None) -> None:
    """Without per-record gradients to compare with, it is out as well."""
    register_norm_sampler(networks.ScaledLinear)(halved_norms)
    register_grad_sampler(networks.ScaledLinear)(failing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opacus.grad_sample.grad_sample_module.ft_compute_per_sample_gradient", failing)
        with pytest.raises(
            InvalidInput, match="Opacus cannot compute the gradient of each record in layer `0`"
        ):
            choose(small_portfolio(**network("users_own_layer")))


def test_no_private_row_is_in_the_trial(small_portfolio: Build) -> None:
    """Nothing but shapes goes in: the choice takes no rows, and other private rows give the same trial."""
    seen: list[Tensor] = []

    class Watching(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            if not torch._C._functorch.is_functorch_wrapped_tensor(rows):
                seen.append(rows.detach().clone())
            return super().forward(rows)

    module = nn.Sequential(Watching(5, 4), nn.Linear(4, 3))
    small = small_portfolio(**network("perceptron"))
    choose(small, module)
    private = {row.tobytes() for row in small.splits.private.features}
    assert seen
    assert not any(row.numpy().tobytes() in private for rows in seen for row in rows)


def test_the_trial_leaves_nothing_behind(small_portfolio: Build) -> None:
    """Neither in the module nor in torch's random numbers; and it is done once for a network."""
    small = small_portfolio(**network("perceptron"))
    module = build(small.recipe.network)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    chosen = choose(small, module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(
        parameter.grad is None and not hasattr(parameter, "grad_sample") for parameter in module.parameters()
    )
    assert not any(layer._forward_hooks for layer in module.modules())
    assert torch.equal(random, torch.get_rng_state())
    (seconds,) = mode_choice._known.values()
    assert choose(small, module) == chosen
    assert next(iter(mode_choice._known.values())) is seconds


def test_the_choice_is_in_the_notes(small_portfolio: Build) -> None:
    private = small_portfolio(**network("perceptron"))
    rows = private.splits.private
    longer = Rows(features=np.tile(rows.features, (2, 1))[:50], labels=np.tile(rows.labels, 2)[:50])
    for splits in (private.splits, replace(private.splits, private=longer)):
        note = train(private, splits=splits).trajectory.notes["grad_sample_mode"]
        assert note.endswith("in a trial on 256 synthetic rows")
