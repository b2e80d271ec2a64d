"""Torch's threads, where the same bytes are wanted again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """How many threads add numbers up changes how the sum is rounded; what is made again must have the same bytes."""
    import torch  # late: importing torch takes seconds

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
