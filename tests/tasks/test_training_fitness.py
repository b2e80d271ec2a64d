"""What may not be trained with differential privacy, and is refused with a sentence that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn

from accounting.errors import InvalidInput
from tasks.models import multilayer_perceptron, resnet18, small_cnn, softmax_regression
from tasks.training.fitness import FrozenPart, FrozenPartChanged, keep_frozen, require_trainable

IMAGES = np.random.default_rng(1).normal(size=(5, 3, 8, 8)).astype(np.float32)
FLAT = np.random.default_rng(2).normal(size=(5, 6)).astype(np.float32)
TOKENS = np.random.default_rng(3).integers(20, size=(5, 7)).astype(np.float32)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(4)


def tried(module: nn.Module, rows: np.ndarray = FLAT, mode: str = "hooks") -> None:
    require_trainable(module, rows, what="The network", grad_sample_mode=mode)


def around(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3))


def of_parts(forward: Any, **parts: nn.Module | nn.Parameter | torch.Tensor) -> nn.Module:
    """A network of a user's own: `forward(network, rows)`."""

    class UsersOwn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

        def forward(self, rows: torch.Tensor) -> Any:
            return forward(self, rows)

    return UsersOwn()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(20, 4),
            DPLSTM(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(rows.long()))[0][:, -1])


class Scaled(nn.Module):
    """A parameter of its own that only functorch can handle."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scale * rows


class Single(nn.Module):
    """Insists on float32, as code with an explicit cast does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight(rows.float())


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (lambda: softmax_regression(6, 3), FLAT),
        (lambda: multilayer_perceptron(6, 3, hidden=[5, 4], activation="relu"), FLAT),
        (lambda: small_cnn(3, 16, 4), np.tile(IMAGES, (1, 1, 2, 2))),
        (lambda: around(nn.Dropout(0.5)), FLAT),
        (lambda: around(nn.LayerNorm(4)), FLAT),
        (lambda: around(Scaled()), FLAT),
        (Single, FLAT),
    ],
    ids=[
        "softmax",
        "perceptron",
        "cnn",
        "dropout",
        "layer-norm",
        "own-parameter",
        "float32-only",
    ],
)
def test_networks_whose_records_keep_to_themselves_pass(module: Any, rows: np.ndarray, mode: str) -> None:
    tried(module(), rows, mode)


def test_a_resnet_passes_under_ghost_clipping() -> None:
    tried(resnet18(3, 4, groups=8), IMAGES[:3], "ghost")


def test_words_through_an_embedding_and_opacus_lstm_pass() -> None:
    tried(Tokens(), TOKENS)


def test_the_trial_leaves_the_network_and_the_random_numbers_alone() -> None:
    module = around(nn.Dropout(0.5)).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tried(module)
    assert torch.equal(torch.rand(3), expected)
    assert not module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(hasattr(tensor, "grad_sample") for tensor in module.parameters())


class CentredByTheBatch(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(dim=0) if self.training else rows


class Faintly(nn.Module):
    """A millionth of the other records."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1e-6 * rows.sum(dim=0)


class ByCount(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * len(rows)


class OnlyLargerBatches(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(dim=0) if len(rows) > 4 else rows


class RunningMean(nn.Module):
    """Mixes nothing within a batch: each batch is centred by the earlier ones."""

    def __init__(self, *, buffer: bool, used: bool = True) -> None:
        super().__init__()
        self.used = used
        if buffer:
            self.register_buffer("mean", torch.zeros(4), persistent=False)
        else:
            self.mean = torch.zeros(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        centred = rows - self.mean if self.used else rows
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * rows.detach().mean(dim=0)
        return centred


class ScaledByTheFirstBatch(nn.Module):
    """Initialised by the first batch that it sees, and the same ever after."""

    scale: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = rows.detach().std(dim=0)
        return rows / self.scale


class MixesBackwards(torch.autograd.Function):
    """Its scores are in order; its gradients are everybody's."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 0.5 * gradient.mean(dim=0)


class DrawnByTheBatch(nn.Dropout):
    """Dropout in name."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.mean() * (torch.rand(len(rows), 4, dtype=rows.dtype) < 0.5)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (
            CentredByTheBatch(),
            r"layer `1` \(CentredByTheBatch\) gives for a record depends on the other records",
        ),
        (Faintly(), r"layer `1` \(Faintly\) gives for a record depends"),
        (ByCount(), "depend on how many records the batch has"),
        (OnlyLargerBatches(), "its scores depend on how many records"),
        (RunningMean(buffer=True), "its forward writes to `1.mean`"),
        (RunningMean(buffer=True, used=False), "its forward writes to `1.mean`"),
        (RunningMean(buffer=False), "depend on the batches that were seen before"),
        (ScaledByTheFirstBatch(), r"layer `1` \(ScaledByTheFirstBatch\) gives for a record depends"),
        (DrawnByTheBatch(), r"layer `1` \(DrawnByTheBatch\) gives for a record depends"),
        (nn.Softmax(dim=0), r"layer `1` \(Softmax\) gives for a record depends"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_layers_through_which_one_record_moves_others_are_refused(
    layer: nn.Module, sentence: str, mode: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        tried(around(layer), mode=mode)


def test_records_that_mix_outside_any_layer_are_refused() -> None:
    def forward(network: Any, rows: torch.Tensor) -> torch.Tensor:
        return network.head(rows / rows.norm())

    with pytest.raises(InvalidInput, match="depends on the other records of the batch"):
        tried(of_parts(forward, head=nn.Linear(6, 3)))


def test_records_that_mix_below_a_layer_that_starts_at_zero_are_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 4), CentredByTheBatch(), nn.Linear(4, 3))
    nn.init.zeros_(module[2].weight)
    with pytest.raises(InvalidInput, match="CentredByTheBatch"):
        tried(module)


def test_records_that_mix_on_the_way_back_only_are_refused() -> None:
    def forward(network: Any, rows: torch.Tensor) -> torch.Tensor:
        return network.head(MixesBackwards.apply(network.body(rows)))

    with pytest.raises(
        InvalidInput, match=r"the gradients of `body.weight`, `body.bias` depend on the other records"
    ):
        tried(of_parts(forward, body=nn.Linear(6, 4), head=nn.Linear(4, 3)))


def test_a_parameter_that_mixes_records_by_itself_is_refused() -> None:
    def forward(network: Any, rows: torch.Tensor) -> torch.Tensor:
        return network.head(rows) + network.weight * rows.mean()

    module = of_parts(forward, head=nn.Linear(6, 3), weight=nn.Parameter(torch.ones(3)))
    for mode in ("hooks", "functorch", "ghost"):
        with pytest.raises(InvalidInput, match=r"the network itself \(UsersOwn\) gives for a record depends"):
            tried(module, mode=mode)


def test_random_numbers_of_its_own_cannot_be_judged() -> None:
    def forward(network: Any, rows: torch.Tensor) -> torch.Tensor:
        return network.head(nn.functional.dropout(rows, 0.5, network.training))

    with pytest.raises(
        InvalidInput, match=r"at random outside torch's dropout layers.*use torch.nn.Dropout layers"
    ):
        tried(of_parts(forward, head=nn.Linear(6, 3)))


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (
            lambda: around(nn.BatchNorm1d(4)),
            r"layer `1` \(BatchNorm1d\) keeps statistics of whole batches.*GroupNorm",
        ),
        (lambda: around(nn.SyncBatchNorm(4)), r"layer `1` \(SyncBatchNorm\) keeps"),
        (lambda: around(nn.BatchNorm1d(4, affine=False)), r"let the factory put it into eval mode"),
        (
            lambda: around(nn.BatchNorm1d(4, track_running_stats=False).requires_grad_(False).eval()),
            "normalises by the batch, even in eval mode",
        ),
        (
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
            ),
            r"layer `1` \(InstanceNorm2d\)",
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6))),
            r"layer `0` .*; layer `1.0` ",
        ),
        (lambda: around(nn.ReLU(inplace=True)), r"make `1` not in-place \(inplace=False\)"),
        (lambda: nn.Sequential(nn.LSTM(6, 3)), r"layer `0` \(LSTM\) hides its weights.*opacus.layers.DPLSTM"),
        (lambda: nn.Sequential(nn.GRU(6, 3)), "DPGRU"),
        (lambda: nn.Sequential(nn.MultiheadAttention(6, 1)), "DPMultiheadAttention"),
        (lambda: nn.Linear(6, 3).requires_grad_(False), "none of its parameters is trained"),
        (lambda: nn.Linear(6, 3).half(), r"`weight`, `bias` are torch.float16"),
        (lambda: nn.Linear(6, 3, dtype=torch.complex64), "are torch.complex64"),
        (lambda: nn.LazyLinear(3), "`weight`, `bias` have no shape yet"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3, bias=False)),
            "cannot compute the gradient of each record in",
        ),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)), "The network cannot be trained"),
        (
            lambda: of_parts(
                lambda network, rows: rows @ (network.weight * network.mask),
                weight=nn.Parameter(torch.ones(6, 3)),
                mask=torch.ones(6, 3),
            ),
            "trained parameters beside `mask`",
        ),
        (
            lambda: of_parts(
                lambda network, rows: nn.functional.linear(rows, network.head.weight), head=nn.Linear(6, 3)
            ),
            "finds no gradient of each record for `head.weight`, `head.bias`",
        ),
        (
            lambda: of_parts(
                lambda network, rows: network.head(rows), head=nn.Linear(6, 3), spare=nn.Linear(2, 2)
            ),
            "for `spare.weight`, `spare.bias`.*freeze or remove",
        ),
        (
            lambda: of_parts(
                lambda network, rows: network.head(rows) + rows @ network.head.weight.T, head=nn.Linear(6, 3)
            ),
            "the gradients of `head.weight` are computed wrongly by Opacus",
        ),
        (
            lambda: of_parts(lambda network, rows: network.head(rows).sum(0), head=nn.Linear(6, 3)),
            "scores of each row",
        ),
    ],
)
def test_what_opacus_cannot_handle_is_named(module: Any, sentence: str) -> None:
    rows = IMAGES if "InstanceNorm" in sentence else FLAT
    with pytest.raises(InvalidInput, match=sentence) as refused:
        tried(module(), rows)
    assert "\n" not in refused.value.message


def test_tied_parameters_are_refused_also_where_only_their_memory_is_shared() -> None:
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    shared = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    shared[1].weight = nn.Parameter(shared[0].weight.detach()[:, :])
    for module in (tied, shared):
        with pytest.raises(InvalidInput, match=r"`0\.weight`, `1\.weight` share their memory"):
            tried(module)


def test_a_layer_used_twice_passes_but_not_under_ghost_clipping() -> None:
    layer = nn.Linear(6, 6)
    module = of_parts(lambda network, rows: network.layer(network.layer(rows).tanh()), layer=layer)
    tried(module)
    with pytest.raises(InvalidInput, match="tying is not supported"):
        tried(module, mode="ghost")


def test_infinities_and_whole_numbers_inside_are_no_hindrance_and_hide_nothing() -> None:
    class Ranks(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.argsort(dim=1)

    class Masked(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.masked_fill(rows < 0, -torch.inf)

    def forward(network: Any, rows: torch.Tensor) -> torch.Tensor:
        inner = network.body(rows)
        return network.head(inner + network.ranks(rows)[:, :4] + network.masked(inner).exp())

    parts = {"body": nn.Linear(6, 4), "ranks": Ranks(), "masked": Masked(), "head": nn.Linear(4, 3)}
    tried(of_parts(forward, **parts))

    def mixing(network: Any, rows: torch.Tensor) -> torch.Tensor:
        return forward(network, rows + 1e-5 * rows.mean(dim=0))

    with pytest.raises(InvalidInput, match="depends on the other records"):
        tried(of_parts(mixing, **parts))


def test_a_network_that_stands_no_other_parameters_than_its_first_is_tried_at_those() -> None:
    def forward(network: Any, rows: torch.Tensor) -> torch.Tensor:
        return network.head(rows * network.widths.weight[0].sqrt())

    def mixing(network: Any, rows: torch.Tensor) -> torch.Tensor:
        return forward(network, rows - rows.mean(dim=0))

    for run, sentence in (
        (forward, "finds no gradient of each record for `widths.weight`"),
        (mixing, "depends on"),
    ):
        widths = nn.Linear(6, 1, bias=False)
        nn.init.constant_(widths.weight, 1e-3)  # its square root is NaN a little below
        with pytest.raises(InvalidInput, match=sentence):
            tried(of_parts(run, head=nn.Linear(6, 3), widths=widths))


def test_scores_that_are_not_finite_are_told() -> None:
    module = softmax_regression(6, 3)
    nn.init.constant_(module.weight, torch.nan)
    with pytest.raises(InvalidInput, match="gives scores that are NaN or infinite"):
        tried(module)


def test_rows_that_are_all_the_same_try_nothing() -> None:
    with pytest.raises(InvalidInput, match="all the same"):
        tried(softmax_regression(6, 3), np.ones((4, 6), dtype=np.float32))
    tried(softmax_regression(6, 3), FLAT[:2])  # two rows are enough


def frozen() -> nn.Module:
    """A BatchNorm with statistics of its own, as from a trained network, frozen below a head."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))
    module[:2].requires_grad_(False)
    module[1].running_mean.copy_(torch.arange(4.0))
    return module


def test_a_frozen_batch_norm_passes_and_is_held_in_eval_mode_by_a_real_training_step() -> None:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    module = frozen()
    tried(module, IMAGES)
    part = FrozenPart.of(module)
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked", "0.weight"} <= part.tensors.keys()
    data = TensorDataset(torch.tensor(IMAGES), torch.tensor([0, 1, 2, 0, 1]))
    network, optimizer, loader = PrivacyEngine().make_private(
        module=module.train(),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1),
        data_loader=DataLoader(data, batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    start = module[3].weight.detach().clone()
    for features, labels in loader:
        network.train()
        keep_frozen(network)
        assert module[3].training
        nn.functional.cross_entropy(network(features), labels).backward()
        optimizer.step()
    assert not torch.equal(module[3].weight, start)
    part.require_unchanged(module, "Candidate only")


def test_a_buffer_that_changed_while_training_is_told() -> None:
    module = frozen()
    part = FrozenPart.of(module)
    module.train()
    module(torch.tensor(IMAGES))  # without keep_frozen, the running statistics take the batch in
    with pytest.raises(
        FrozenPartChanged,
        match=r"Candidate only changed `1.num_batches_tracked`, `1.running_mean`, `1.running_var`",
    ):
        part.require_unchanged(module, "Candidate only")


def test_a_frozen_parameter_or_a_new_buffer_is_told_and_nan_is_no_excuse() -> None:
    module = frozen()
    module[1].running_var[0] = torch.nan
    part = FrozenPart.of(module)
    part.require_unchanged(module, "Candidate only")
    module[0].bias.data[0] += 1e-6
    module.register_buffer("memory", torch.zeros(2))
    with pytest.raises(FrozenPartChanged, match=r"changed `0.bias`, `memory` while it trained"):
        part.require_unchanged(module, "Candidate only")
