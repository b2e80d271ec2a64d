"""DP-SGD with Opacus: one recipe entry in, one model with its trajectory as executed out."""

from __future__ import annotations

import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

from accounting.errors import InvalidInput
from accounting.trajectory import Trajectory, parse_relation
from infra.canonical import sha256_hex
from tasks.data import Rows, Splits
from tasks.models import build, is_regression, state_bytes
from tasks.objective import Objective, objective_for
from tasks.randomness import COIN_SOURCE, NOISE_SOURCE, executed_probability, unpredictable_generator
from tasks.recipes import CandidateRecipe, Recipe
from tasks.training.recording import OPACUS_NORM_SLACK, StepRecorder, TrainingFailed, segments
from tasks.validation import share_right

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

PRIVATE = (
    "private/"  # prefix of metrics computed from private data without noise: for the trainer's eyes only
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCandidate:
    """A finished run."""

    name: str
    model: bytes = field(repr=False)  # contents of model.safetensors
    trajectory: Trajectory
    metrics: tuple[dict[str, float], ...] = field(repr=False)  # one mapping for each step, by metric name
    public_train_accuracy: float  # in [0, 1]


def train_candidate(
    candidate: CandidateRecipe,
    *,
    recipe: Recipe,
    splits: Splits,
    initial: Mapping[str, Tensor],
    run_id: str,
    data_digest: str,
    noise_generator: torch.Generator | None = None,
    sampling_generator: torch.Generator | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> TrainedCandidate:
    """Train one candidate.

    Each step sums the clipped per-record gradients of its batch, adds Gaussian noise of standard deviation
    noise_multiplier x max_grad_norm, divides by the *public* expected_batch_size and takes an SGD step. Safe
    to call from several threads at once; the caller decides how many threads torch uses.

    Args:
        splits: from `tasks.data.load_splits`, with private rows.
        initial: the portfolio's public initial parameters.
        run_id: unique to this attempt; names its stretches of noise.
        data_digest: keyed digest of the private rows.
        noise_generator, sampling_generator: for tests only; by default both are drawn afresh from the
            operating system's entropy.
        on_step: called after each step with the number of steps done, to show progress.

    Raises:
        TrainingFailed: the parameters are not finite at the end.
        InvalidInput: the network does not fit the data.
    """
    _silence_known_warnings()
    private, enforced = splits.private, splits.enforced
    if private is None or enforced is None:
        raise InvalidInput("Training needs private rows loaded by tasks.data.load_splits.")
    module = build(recipe.network)
    module.load_state_dict(initial)
    objective = _require_fit(module, splits, recipe)
    regression = is_regression(module)
    recorder = StepRecorder()
    network, optimizer, loader = _make_private(
        module,
        candidate,
        private,
        noise_generator=noise_generator or unpredictable_generator(),
        sampling_generator=sampling_generator or unpredictable_generator(),
    )
    optimizer.attach_step_hook(recorder)  # in place of Opacus's accountant: ours reads the trajectory
    metrics: list[dict[str, float]] = []
    batches: Iterator[tuple[Tensor, Tensor]] = islice(chain.from_iterable(repeat(loader)), candidate.steps)
    for features, labels in batches:
        network.train()
        optimizer.zero_grad()
        loss = objective.loss(network(features), labels)
        loss.backward()
        optimizer.step()
        metrics.append(
            _step_metrics(
                float(loss.detach()),
                recorder,
                module,
                splits.public_train,
                full_batch=candidate.is_full_batch,
            )
        )
        if candidate.is_full_batch and len(recorder.gradient_norms) != len(private):
            raise TrainingFailed(f"Candidate {candidate.name}: a full-batch step did not see every row.")
        on_step(len(metrics))
    _require_finite(module, candidate)
    trajectory = Trajectory(
        portfolio=recipe.name,
        lineage=recipe.lineage,
        unit=recipe.unit,
        neighboring_relation=parse_relation(recipe.neighboring_relation),
        data_digest=data_digest,
        initialisation_digest=sha256_hex(state_bytes(initial)),
        feature_radius=enforced.feature_radius,
        n_max=enforced.n_max,
        segments=segments(
            recorder.steps,
            run_id=run_id,
            sampling_probability=executed_probability(candidate.sampling_probability),
            regression=regression,
            objective=objective,
            enforced=enforced,
        ),
        device="cpu",
        library_versions=_versions(),
        notes={
            "noise_source": NOISE_SOURCE if noise_generator is None else "INJECTED FOR A TEST: NOT PRIVATE",
            "sampling_coins": COIN_SOURCE
            if sampling_generator is None
            else "INJECTED FOR A TEST: NOT PRIVATE",
        },
    )
    return TrainedCandidate(
        name=candidate.name,
        model=state_bytes(module.state_dict()),
        trajectory=trajectory,
        metrics=tuple(metrics),
        public_train_accuracy=metrics[-1]["public_train_accuracy"],
    )


def _make_private(
    module: nn.Module,
    candidate: CandidateRecipe,
    private: Rows,
    *,
    noise_generator: torch.Generator,
    sampling_generator: torch.Generator,
) -> tuple[Any, Any, DataLoader[Any]]:
    """Opacus's own modules, with its two guesses from the private data replaced by the recipe's literals.

    `make_private` takes the sampling probability to be 1 / len(loader), which is 1/3 for q = 0.3, and the
    expected batch size to be the number of private rows times that. Both must be the public constants.
    """
    import torch
    from opacus import PrivacyEngine
    from opacus.data_loader import DPDataLoader
    from torch.utils.data import DataLoader

    rows = _RowsOnDemand(private)
    loader: DataLoader[Any]
    if candidate.is_full_batch:
        loader = DataLoader(rows, batch_size=len(rows), collate_fn=_as_is, generator=sampling_generator)
    else:
        loader = DPDataLoader(
            rows,
            sample_rate=candidate.sampling_probability,
            collate_fn=_as_is,
            generator=sampling_generator,
        )
    sgd = torch.optim.SGD(
        module.parameters(),
        lr=candidate.learning_rate,
        momentum=candidate.momentum,
        weight_decay=candidate.weight_decay,
    )
    network, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=sgd,
        data_loader=loader,
        noise_multiplier=candidate.noise_multiplier,
        max_grad_norm=candidate.max_grad_norm,
        clipping=candidate.clipping,
        poisson_sampling=False,  # "leave the loader as it is": it already draws Poisson batches
        noise_generator=noise_generator,
    )
    network.forbid_grad_accumulation()  # as make_private does for Poisson batches
    optimizer.expected_batch_size = candidate.expected_batch_size
    return network, optimizer, loader


class _RowsOnDemand:
    """A torch data set that hands out whole batches; an empty batch has zero rows of the right shape."""

    def __init__(self, rows: Rows) -> None:
        import torch

        self.features = torch.tensor(rows.features)
        self.labels = torch.tensor(rows.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        import torch

        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.features[chosen], self.labels[chosen]


def _as_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def _step_metrics(
    loss: float, recorder: StepRecorder, module: nn.Module, public_train: Rows, *, full_batch: bool
) -> dict[str, float]:
    norms = recorder.gradient_norms
    metrics = {"public_train_accuracy": share_right(module, public_train)}
    if not full_batch:  # of a full batch it would be the number of private rows
        metrics[f"{PRIVATE}batch_size"] = float(len(norms))
    if len(norms):  # an empty Poisson batch has no loss and no gradients, but its noise was added
        metrics[f"{PRIVATE}loss"] = loss
        metrics[f"{PRIVATE}gradient_norm_mean"] = float(norms.mean())
        metrics[f"{PRIVATE}gradient_norm_max"] = float(norms.max())
        metrics[f"{PRIVATE}clipping_rate"] = float(
            (norms + OPACUS_NORM_SLACK > recorder.steps[-1].max_grad_norm).float().mean()
        )
    return metrics


def _require_fit(module: nn.Module, splits: Splits, recipe: Recipe) -> Objective:
    """Try the network on two public rows; what it is to be trained on follows from the scores it gives."""
    import torch

    rows = splits.public_train
    what = f"The network {recipe.network.factory} of portfolio {recipe.name}"
    try:
        with torch.no_grad():
            scores = module(torch.tensor(rows.features[:2]))
    except RuntimeError as error:
        raise InvalidInput(
            f"{what} does not take rows of shape {tuple(rows.features.shape[1:])} "
            f"({str(error).splitlines()[0]}); correct its arguments."
        ) from None
    fitting = scores.ndim == 2 and len(scores) == len(rows.features[:2])
    objective = objective_for(scores.shape[1], splits.classes) if fitting else None
    if objective is None:
        raise InvalidInput(
            f"{what} gives scores of shape {tuple(scores.shape[1:])}, but the data have {splits.classes} "
            "classes; correct its arguments: one score a class, or a single one where there are two classes."
        )
    return objective


def _require_finite(module: nn.Module, candidate: CandidateRecipe) -> None:
    import torch

    if not all(bool(torch.isfinite(tensor).all()) for tensor in module.state_dict().values()):
        raise TrainingFailed(
            f"Candidate {candidate.name} diverged: its parameters are not finite after {candidate.steps} "
            "steps; lower its learning_rate, or raise its expected_batch_size."
        )


def _silence_known_warnings() -> None:
    """Two warnings that say nothing new: the first is disclosed in the trajectory's notes instead."""
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "opacus", "numpy")}
    return {"python": platform.python_version(), **versions}
