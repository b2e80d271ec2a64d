"""Task vectors: where training went from the public start, as one long vector of the shared parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accounting.errors import IncompatibleCandidates, InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float64]


def task_vector(model: Mapping[str, Tensor], start: Mapping[str, Tensor], prefix: str = "") -> Array:
    """tau = theta - w0 over the floating-point parameters whose names begin with `prefix`.

    Args:
        model: a task's parameters, by name.
        start: the public start's, of the same names and shapes.
        prefix: of the parameters that all tasks share; "" for all.

    Returns:
        float64, shape (parameters,), in the order of the names.

    Raises:
        IncompatibleCandidates: names or shapes differ.
        InvalidInput: no parameter is meant.
    """
    own, public = _named(model, prefix), _named(start, prefix)
    if set(own) != set(public):
        name = sorted(set(own) ^ set(public))[0]
        raise IncompatibleCandidates(
            f"The model and the public start have different parameters: {name} is only in one of them."
        )
    if not own:
        raise InvalidInput(f"No parameter's name begins with {prefix!r}; name the prefix of the shared ones.")
    parts = []
    for name in sorted(own):
        if own[name].shape != public[name].shape:
            raise IncompatibleCandidates(
                f"Parameter {name} has shape {tuple(own[name].shape)} in the model and "
                f"{tuple(public[name].shape)} in the public start."
            )
        difference = own[name].detach().cpu().double() - public[name].detach().cpu().double()
        parts.append(difference.numpy().ravel())
    return np.concatenate(parts)


def drift(vector: Array) -> float:
    """L2 norm of a task vector: how far the parameters went from the public start, in their own units."""
    return float(np.linalg.norm(vector))


def cosines(vectors: Sequence[Array]) -> Array:
    """Cosine of the angle between each two task vectors.

    Args:
        vectors: at least one, shape (parameters,) each.

    Returns:
        Shape (tasks, tasks), in [-1, 1], symmetric; 0 beside a task that never left the start, itself included.
    """
    if not vectors or len({vector.shape for vector in vectors}) > 1:
        raise InvalidInput("Cosines need at least one task vector, and all of one length.")
    units = [vector / length if (length := drift(vector)) > 0 else vector * 0.0 for vector in vectors]
    found = np.clip([[float(one @ other) for other in units] for one in units], -1.0, 1.0)
    return np.asarray(found, dtype=np.float64)


def _named(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in state.items()
        if name.startswith(prefix) and tensor.is_floating_point()
    }
