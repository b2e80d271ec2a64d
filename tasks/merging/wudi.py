"""WUDI: for each linear layer the task vector that disturbs every candidate's own least, without any data.

The rows of a layer's task vector T_i = W_i - W0, shape (outputs, inputs), span what its inputs looked like in
training, so a merged task vector T disturbs candidate i by (T - T_i) T_i'. It minimises, with S = sum_i T_i,

    sum_i c_i * |(T - T_i) T_i'|^2 + r * |T - S|^2,      c_i = w_i / |T_i|^2,   r = ridge * trace(G) / inputs,

in Frobenius norms, which has the closed form T = (sum_i c_i T_i T_i' T_i + r S) (G + r I)^-1, G = sum_i c_i T_i' T_i.
A layer whose T_i is 0 for a candidate disturbs it by nothing, and the candidate has no say in it. Released is
W0 + scale * T; all other tensors are w0 + scale * sum_i w_i * tau_i. Layers are the tensors with two dimensions, and
those with four (convolutions), flattened behind the outputs. Weights must be positive; within a layer only their
ratios matter. The candidates are taken in the order of their names.

Source: Cheng et al. 2025, "Whoever started the interference should end it", arXiv 2503.08099, equation for the loss.
We differ: the authors begin at S and make 300 steps of Adam, each of at most the learning rate 1e-5 for an element,
and stop there; we take the minimum, and the ridge holds it at S where the loss says next to nothing (as r goes to 0,
T becomes the limit of gradient descent from S, which is the solution of least norm; a larger ridge is like stopping
earlier). Weights and convolutions are ours; theirs are equal weights, and averages of what is not linear. mergekit does
not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod, sqrt

import numpy as np

from tasks.merging.elimination import product, solved
from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options, ridge, scaling


def _rule(options: Options) -> str:
    return (
        f"WUDI: each linear or convolutional layer is public start + {options['scale']!r} x the task vector that "
        "minimises the weighted interference with each candidate's, with a ridge of "
        f"{options['ridge']!r} toward their sum; other parameters are public start + {options['scale']!r} x sum of "
        "weight x (value - public start); in float64 and rounded once to the candidates' type; "
        f"{SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    scale = inputs.options["scale"]

    def merged(tensor: str) -> Iterator[np.ndarray]:
        shape = inputs.shapes[tensor]
        if len(shape) in (2, 4) and prod(shape):
            vectors = inputs.task_vectors(tensor).reshape(len(inputs.names), shape[0], -1)
            found = least_interference(vectors, inputs.weights, inputs.options["ridge"])
            yield inputs.base(tensor) + scale * found.reshape(-1)
            return
        for span in inputs.spans(tensor):
            vectors = inputs.task_vectors(tensor, span)
            total = np.zeros(vectors.shape[1])
            for weight, vector in zip(inputs.weights, vectors, strict=True):
                total += weight * vector
            yield inputs.base(tensor, span) + scale * total

    return merged


def least_interference(vectors: np.ndarray, weights: Sequence[float], stiffness: float) -> np.ndarray:
    """The merged task vector of one layer, shape (outputs, inputs), from shape (candidates, outputs, inputs);
    `stiffness` is the option `ridge`."""
    outputs, columns = vectors.shape[1:]
    total, sums = 0.0, np.zeros((outputs, columns))
    moved = []  # (root of c_i) * T_i
    for vector, weight in zip(vectors, weights, strict=True):
        size = float(np.sum(vector * vector))
        if size > 0:
            moved.append(vector * sqrt(weight / size))
            sums += vector
            total += weight  # the trace of c_i * T_i' T_i
    if not moved:
        return sums
    level = stiffness * total / columns
    if len(moved) * outputs < columns:
        return sums + _by_rows(moved, vectors, sums, level)
    gram, right = np.zeros((columns, columns)), level * sums
    for one, vector in zip(moved, _of_moved(vectors), strict=True):
        own = product(one.T, one)
        gram += own
        right += product(vector, own)
    np.fill_diagonal(gram, np.diag(gram) + level)
    return solved(gram, right)


def _by_rows(moved: Sequence[np.ndarray], vectors: np.ndarray, sums: np.ndarray, level: float) -> np.ndarray:
    """T - S where the candidates' rows are fewer than the inputs: with A = all rows of `moved`,
    T - S = sum_i (T_i - S) A_i' (A A' + r I)^-1 A, the same by the identity of Woodbury, from a smaller matrix."""
    rows = np.concatenate(moved)
    gram = product(rows, rows.T)
    np.fill_diagonal(gram, np.diag(gram) + level)
    apart = [product(vector - sums, one.T) for one, vector in zip(moved, _of_moved(vectors), strict=True)]
    return product(solved(gram, np.concatenate(apart, axis=1)), rows)


def _of_moved(vectors: np.ndarray) -> list[np.ndarray]:
    return [vector for vector in vectors if vector.any()]


WUDI = Operator(
    name="wudi",
    needs=Needs(base=True),
    options={"ridge": ridge(1e-6), "scale": scaling(1.0)},
    weights="positive",
    rule=_rule,
    prepare=_prepare,
)
