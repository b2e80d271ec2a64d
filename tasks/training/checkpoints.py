"""Checkpoints: everything that a killed run needs to go on, in one file, and nothing that would replay its noise.

No generator state is in it. A resumed run draws fresh noise and fresh coins, and its steps begin a new stretch with
segment ids of their own; the steps after the checkpoint that the killed process still took are in no model, so they
are not counted. A checkpoint is private material, like a candidate: its parameters are what the run would release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from accounting.errors import InvalidInput
from infra.canonical import digest, sha256_hex
from tasks.recipes import Recipe
from tasks.training.recording import ExecutedStep, Stretch

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "remerge/checkpoint/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A run after `step` steps."""

    key: str  # of what is trained, see `resume_key`
    candidate: str
    step: int
    steps: tuple[ExecutedStep, ...] = field(repr=False)  # as executed so far, shape (step,)
    stretches: tuple[Stretch, ...]
    parameters: Mapping[str, Tensor] = field(repr=False)
    optimizer: Mapping[str, Tensor] = field(repr=False)  # "<parameter's number>.<name>", such as momenta
    metrics: tuple[dict[str, float], ...] = field(repr=False)
    kept: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)  # by step
    best: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # of early stopping
    stopping: Mapping[str, float] = field(default_factory=dict)  # its numbers

    def to_bytes(self) -> bytes:
        """One file: the SHA-256 of the rest, a line's end, and a safetensors file."""
        import safetensors.torch

        tensors = {f"parameters/{name}": tensor for name, tensor in self.parameters.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self.optimizer.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        for step, state in self.kept.items():
            tensors |= {f"kept/{step}/{name}": tensor for name, tensor in state.items()}
        story = {
            "schema": SCHEMA,
            "key": self.key,
            "candidate": self.candidate,
            "step": self.step,
            "steps": [[len(list(group)), asdict(one)] for one, group in groupby(self.steps)],
            "stretches": [asdict(one) for one in self.stretches],
            "metrics": list(self.metrics),
            "stopping": dict(self.stopping),
        }
        content = safetensors.torch.save(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            metadata={"story": json.dumps(story)},
        )
        return sha256_hex(content).encode() + b"\n" + content

    @staticmethod
    def from_bytes(content: bytes) -> Checkpoint:
        """Read what `to_bytes` wrote.

        Raises:
            InvalidInput: it is damaged.
        """
        import safetensors.torch

        recorded, _, rest = content.partition(b"\n")
        if sha256_hex(rest).encode() != recorded:
            raise InvalidInput("A checkpoint is damaged: its SHA-256 is not the one recorded in it.")
        length = int.from_bytes(rest[:8], "little")
        story: dict[str, Any] = json.loads(json.loads(rest[8 : 8 + length])["__metadata__"]["story"])
        if story.pop("schema") != SCHEMA:
            raise InvalidInput("A checkpoint was written by another version of remerge; train anew.")
        parts: dict[str, dict[str, Tensor]] = {"parameters": {}, "optimizer": {}, "best": {}, "kept": {}}
        for name, tensor in safetensors.torch.load(rest).items():
            part, _, inner = name.partition("/")
            parts[part][inner] = tensor
        kept: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["kept"].items():
            step, _, inner = name.partition("/")
            kept.setdefault(int(step), {})[inner] = tensor
        steps = tuple(
            step for count, fields in story.pop("steps") for step in [ExecutedStep(**fields)] * count
        )
        stretches = tuple(Stretch(**fields) for fields in story.pop("stretches"))
        return Checkpoint(
            **{**story, "metrics": tuple(story["metrics"])},
            steps=steps,
            stretches=stretches,
            parameters=parts["parameters"],
            optimizer=parts["optimizer"],
            best=parts["best"],
            kept=kept,
        )


def resume_key(
    recipe: Recipe,
    candidate: str,
    *,
    data_digest: str,
    initialisation_digest: str,
    library_versions: Mapping[str, str],
) -> str:
    """Digest of everything that decides what a run learns and guarantees: only an equal run may be resumed.

    Args:
        data_digest: keyed digest of the private rows, so that the key does not give them away either.
    """
    fields = recipe.model_dump(mode="json", exclude={"candidates", "execution"})
    return digest(
        {
            "recipe": fields,
            "candidate": recipe.candidate(candidate).model_dump(mode="json"),
            "data": data_digest,
            "initialisation": initialisation_digest,
            "versions": dict(library_versions),
        }
    )
