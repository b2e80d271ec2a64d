"""Which rows each step sees: all of them, or a Poisson sample, as Opacus draws it; nothing else is accounted for.

There are no shuffled batches of a fixed size: their rows are not drawn independently, and the accounting of
Poisson sampling does not hold for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from tasks.data import Rows

if TYPE_CHECKING:
    import torch
    from opacus.optimizers import DPOptimizer
    from torch import Tensor


def batches(
    rows: Rows,
    *,
    sampling_probability: float,
    physical_batch_size: int | None,
    optimizer: DPOptimizer,
    generator: torch.Generator,
    device: str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of features and labels, for ever; a Poisson batch may be empty.

    A batch of more than `physical_batch_size` rows comes in parts: Opacus's BatchMemoryManager tells the optimizer
    which part is the last one, so that noise is added, and a step counted, once a batch.

    Args:
        generator: of the Poisson coins.
        device: where a whole batch, always the same, is kept; others are made on the CPU.
    """
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    stored = _Stored(rows)
    full_batch = sampling_probability == 1.0
    if full_batch and (physical_batch_size is None or physical_batch_size >= len(stored)):
        return repeat((stored.features.to(device), stored.labels.to(device)))
    loader = _loader(stored, sampling_probability, generator)
    if physical_batch_size is not None:
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical_batch_size, optimizer=optimizer
        )
        with manager as loader:
            return chain.from_iterable(repeat(loader))
    return chain.from_iterable(repeat(loader))


def _loader(stored: _Stored, sampling_probability: float, generator: torch.Generator) -> Any:
    from opacus.data_loader import DPDataLoader
    from torch.utils.data import DataLoader

    if sampling_probability == 1.0:
        return DataLoader(stored, batch_size=len(stored), collate_fn=_as_is, generator=generator)
    return DPDataLoader(stored, sample_rate=sampling_probability, collate_fn=_as_is, generator=generator)


class _Stored:
    """A torch data set that hands out whole batches; an empty batch has zero rows of the right shape."""

    def __init__(self, rows: Rows) -> None:
        self.features = _shared(rows.features)
        self.labels = _shared(rows.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        import torch

        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.features[chosen], self.labels[chosen]


def _shared(values: Any) -> Tensor:
    """A tensor on the array's own memory: several candidates read the same rows, and none writes to them."""
    import torch

    return torch.from_numpy(values)


def _as_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch
