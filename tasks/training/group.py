"""The processes that train one candidate together; usually one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tasks.data import Rows

T = TypeVar("T", str, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """This process among those that share a run by torch.distributed; the first one leads.

    Each has its share of the private rows and draws its own coins for them, so that together they draw a Poisson
    sample of all rows. Opacus's sampler for several processes is not used: it leaves out a process's empty batches.
    """

    size: int = 1
    rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process adds the noise, looks, and saves."""
        return self.rank == 0

    def share(self, rows: Rows) -> Rows:
        """The private rows of this process: every size-th one."""
        if self.size == 1:
            return rows
        mine = slice(self.rank, None, self.size)
        return Rows(
            features=np.ascontiguousarray(rows.features[mine]), labels=np.ascontiguousarray(rows.labels[mine])
        )

    def agreed(self, value: T) -> T:
        """The leader's value, for all."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def device(self) -> str:
        """Where to compute: on a GPU, where there is one, and the run is one process's."""
        import torch

        return "cuda" if self.size == 1 and torch.cuda.is_available() else "cpu"

    def notes(self) -> dict[str, str]:
        """What the trajectory says about it."""
        if self.size == 1:
            return {}
        return {
            "processes": f"{self.size}, each with its share of the rows and coins of its own; the first adds the noise"
        }


ALONE = Group()
