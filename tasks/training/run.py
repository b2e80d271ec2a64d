"""A run under way: the loop over its steps, and how it is saved, restored and finished."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from accounting.errors import InvalidInput, RemergeError
from accounting.trajectory import Trajectory
from tasks.data import Rows, Splits
from tasks.models import state_bytes
from tasks.recipes import CandidateRecipe, Recipe
from tasks.training.batches import batches
from tasks.training.checkpoints import Checkpoint, resume_key
from tasks.training.clippers import Clipper
from tasks.training.descent import descent
from tasks.training.fitness import FrozenPart, keep_frozen
from tasks.training.group import Group
from tasks.training.history import History
from tasks.training.mode_choice import physical_batch_size
from tasks.training.monitors import Monitor
from tasks.training.recording import ExecutedStep, StepRecorder, Stretch, TrainingFailed
from tasks.training.schedule import learning_rates
from tasks.training.stopping import Progress
from tasks.validation import share_right

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

CHECKPOINT_SECONDS = 30.0  # of training between two checkpoints, unless the recipe counts in steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCandidate:
    """A finished run, or a copy kept on its way."""

    name: str
    model: bytes = field(repr=False)  # contents of model.safetensors
    trajectory: Trajectory
    metrics: tuple[dict[str, float], ...] = field(repr=False)  # one mapping for each look, by metric name
    public_train_accuracy: float  # in [0, 1]
    kept: tuple[TrainedCandidate, ...] = ()  # of the recipe's keep_checkpoints


class Run:
    """A run under way: what changes from step to step, and how it is saved, restored and finished."""

    def __init__(
        self,
        *,
        candidate: CandidateRecipe,
        recipe: Recipe,
        splits: Splits,
        module: nn.Module,
        clipper: Clipper,
        history: History,
        frozen: FrozenPart,
        run_id: str,
        group: Group,
    ) -> None:
        self.candidate = candidate
        self.recipe = recipe
        self.public_train = splits.public_train
        self.private: Rows = group.share(splits.private)  # type: ignore[arg-type]
        self.module = module
        self.clipper = clipper
        self.history = history
        self.frozen = frozen
        self.group = group
        self.rates = learning_rates(candidate)
        self.recorder = StepRecorder(dp_merging=candidate.dp_merging)
        self.descent = descent(clipper.optimizer, candidate.dp_merging, backward=self._backward)
        self.stretches: tuple[Stretch, ...] = (Stretch(run_id=run_id, token=secrets.token_hex(8)),)
        self.metrics: list[dict[str, float]] = []
        self.kept: dict[int, Mapping[str, Tensor]] = {}
        self.progress = Progress()
        self.key = resume_key(
            recipe,
            candidate.name,
            data_digest=history.data_digest,
            initialisation_digest=history.initialisation_digest,
            library_versions=history.versions,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, in a new stretch."""
        if checkpoint.key != self.key or checkpoint.candidate != self.candidate.name:
            raise InvalidInput(
                f"The checkpoint of candidate {checkpoint.candidate} is of another recipe, other data or other "
                f"versions of the libraries than candidate {self.candidate.name} has now; train anew."
            )
        (here,) = self.stretches
        self.recorder = StepRecorder(checkpoint.steps, self.candidate.dp_merging)
        self.stretches = (*checkpoint.stretches, replace(here, first_step=checkpoint.step))
        self.module.load_state_dict(checkpoint.parameters)
        parameters = self.clipper.optimizer.params
        for name, tensor in checkpoint.optimizer.items():
            number, _, entry = name.partition(".")
            device = tensor.device if entry == "step" else parameters[int(number)].device
            self.clipper.optimizer.state[parameters[int(number)]][entry] = tensor.to(device, copy=True)
        self.metrics = list(checkpoint.metrics)
        self.kept = dict(checkpoint.kept)
        numbers = {name: int(value) for name, value in checkpoint.stopping.items() if name != "best_accuracy"}
        if checkpoint.stopping:
            best = {"best_accuracy": checkpoint.stopping["best_accuracy"], "best": dict(checkpoint.best)}
            self.progress = Progress(**numbers, **best)  # type: ignore[arg-type]

    def train(
        self,
        coins: torch.Generator,
        *,
        on_step: Callable[[int], None],
        on_monitor: Callable[[int, dict[str, float]], None],
        on_checkpoint: Callable[[Checkpoint], None],
    ) -> None:
        """Take the steps that are left."""
        optimizer, device = self.clipper.optimizer, self.history.device
        # In place of Opacus's accountant: ours reads the trajectory.
        optimizer.attach_step_hook(self.recorder)
        candidate, done = self.candidate, len(self.recorder.steps)
        monitor = self._monitor(done)
        self._training_mode()
        rows_seen, saved = 0, time.monotonic()
        for features, labels in batches(
            self.private,
            sampling_probability=candidate.sampling_probability,
            physical_batch_size=self._rows_at_once(),
            optimizer=optimizer,
            generator=coins,
            device=device,
        ):
            self.descent.prepare()
            self._backward(features, labels)
            monitor.see(self.clipper, len(labels), look=self.group.leads and monitor.due(done + 1))
            rows_seen += len(labels)
            optimizer.param_groups[0]["lr"] = self.rates[done]
            self.descent.finish(features, labels)
            if len(self.recorder.steps) == done:
                continue  # a part of a batch
            done += 1
            if candidate.is_full_batch and rows_seen != len(self.private):
                raise TrainingFailed(f"Candidate {candidate.name}: a full-batch step did not see every row.")
            rows_seen = 0
            if done in candidate.keep_checkpoints:
                self.kept[done] = self._state()
            stop = self._stops(done)
            if self.group.leads and (stop or monitor.due(done)):
                last = stop or done == candidate.steps
                self.metrics.append(monitor.look(done, self.clipper, self.module, last=last))
                on_monitor(done, dict(self.metrics[-1]))
            self._training_mode()
            on_step(done)
            if stop or done == candidate.steps:
                return
            if self.group.leads and self._save_now(done, time.monotonic() - saved):
                on_checkpoint(self.checkpoint())
                saved = time.monotonic()

    def _backward(self, features: Tensor, labels: Tensor) -> None:
        device = self.history.device
        try:
            self.clipper.backward(features.to(device), labels.to(device))
        except RemergeError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's network raises
            raise TrainingFailed(
                f"Candidate {self.candidate.name}: the network failed with {type(error).__name__} on private rows; "
                "what it said is left out, for it may quote them. Try the network on public rows in training mode, in "
                "batches of every size."
            ) from None

    def checkpoint(self) -> Checkpoint:
        """The run as it stands."""
        optimizer = self.clipper.optimizer
        progress = self.progress
        numbers = asdict(progress) if progress.best_step else {}
        return Checkpoint(
            key=self.key,
            candidate=self.candidate.name,
            step=len(self.recorder.steps),
            steps=tuple(self.recorder.steps),
            stretches=self.stretches,
            parameters=self._state(),
            optimizer={
                f"{number}.{name}": value.detach().clone()
                for number, parameter in enumerate(optimizer.params)
                for name, value in optimizer.state.get(parameter, {}).items()
                if value is not None
            },
            metrics=tuple(self.metrics),
            kept=dict(self.kept),
            best=progress.best,
            stopping={name: value for name, value in numbers.items() if name != "best"},
        )

    def finished(self) -> TrainedCandidate:
        """The run's result, and the copies kept on its way."""
        steps, state = self.recorder.steps, self._state()
        if self.history.adapted:
            state = self.progress.best or state
            planned, best = self.candidate.steps, self.progress.best_step or len(steps)
            self.history.notes["early_stopping"] = (
                f"stopped after {len(steps)} of {planned} steps, and kept the parameters after {best}, by public-train "
                f"rows; all {planned} steps are charged"
            )
        return self._as_candidate(
            self.candidate.name,
            state,
            self.history.charged(steps, self.rates),
            kept=tuple(
                self._as_candidate(name, self.kept[step], steps[:step])
                for name, step in zip(self.candidate.kept_names, self.candidate.keep_checkpoints, strict=True)
            ),
        )

    def _as_candidate(
        self,
        name: str,
        state: Mapping[str, Tensor],
        steps: Sequence[ExecutedStep],
        kept: tuple[TrainedCandidate, ...] = (),
    ) -> TrainedCandidate:
        _require_finite(state, name, len(steps))
        self.module.load_state_dict(state)
        return TrainedCandidate(
            name=name,
            model=state_bytes(state),
            trajectory=self.history.trajectory(steps, self.stretches),
            metrics=tuple(one for one in self.metrics if one["step"] <= len(steps)),
            public_train_accuracy=share_right(self.module, self.public_train),
            kept=kept,
        )

    def _monitor(self, done: int) -> Monitor:
        return Monitor(
            every=self.recipe.execution.monitor_every,
            steps=self.candidate.steps,
            done=done,
            public_train=self.public_train,
            epsilon_after=self._epsilon if self.history.noise_is_secret else None,
            full_batch=self.candidate.is_full_batch,
        )

    def _epsilon(self, step: int) -> float:
        steps = self.history.charged(self.recorder.steps[:step], self.rates)
        return self.history.epsilon(steps, self.stretches)

    def _rows_at_once(self) -> int | None:
        if self.clipper.mode == "closed_form" and self.recipe.execution.physical_batch_size is None:
            return None  # no record's gradient is held, so all rows may come at once
        return physical_batch_size(self.module, self.recipe.execution)

    def _stops(self, done: int) -> bool:
        settings = self.candidate.early_stopping
        if settings is None:
            return False
        if done % settings.every and done != self.candidate.steps:
            return False
        stop = False
        if self.group.leads:
            accuracy = share_right(self.module, self.public_train)
            stop = self.progress.saw(done, accuracy, self._state(), settings)
        return self.group.agreed(stop)

    def _save_now(self, done: int, seconds: float) -> bool:
        every = self.recipe.execution.checkpoint_every
        return done % every == 0 if every else seconds >= CHECKPOINT_SECONDS

    def _training_mode(self) -> None:
        self.clipper.network.train()
        keep_frozen(self.clipper.network)

    def _state(self) -> dict[str, Tensor]:
        """The parameters, and whatever else a state dictionary holds, which training must not have changed."""
        self.frozen.require_unchanged(self.module, f"Candidate {self.candidate.name}")
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}


def _require_finite(state: Mapping[str, Tensor], name: str, steps: int) -> None:
    import torch

    if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
        raise TrainingFailed(
            f"Candidate {name} diverged: its parameters are not finite after {steps} "
            "steps; lower its learning_rate, or raise its expected_batch_size."
        )
