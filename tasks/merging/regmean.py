"""RegMean: for each linear layer the weights whose outputs are nearest, in squares, to every candidate's own.

With G_i the mean of x x' over the inputs x of a layer of candidate i, its entries off the diagonal multiplied by
`shrink`, and W_i the layer's weight, shape (outputs, inputs):

    W = (sum_i w_i * W_i (G_i + r I)) (sum_i w_i * (G_i + r I))^-1,      r = ridge * mean of sum_i w_i * G_i's diagonal,

the least squares sum_i w_i * |W x - W_i x|^2, and the weighted mean in directions that no input has. All other tensors
get the weighted mean. G_i comes from public rows alone (`tasks.merging.statistics`), else it is refused. A convolution
is such a layer too: its inputs are the patches that it sees, and its weight is flattened behind the outputs. The
weights must be on the simplex. The candidates are taken in the order of their names.

Source: Jin et al. 2023, "Dataless knowledge fusion by merging weights of language models", arXiv 2212.09849, with its
alpha as `shrink`. We differ: means over rows instead of sums, so that the weights alone say how candidates count; the
ridge, because a pixel that is always 0 leaves the paper's inverse undefined; and convolutions.
mergekit does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from accounting.errors import IncompatibleCandidates
from tasks.merging.elimination import product, solved
from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options, ridge, unit


def _rule(options: Options) -> str:
    return (
        "RegMean: the weight of each linear or convolutional layer minimises the weighted squares of the distances of "
        "its outputs to each candidate's, by the second moments of the layers' inputs on public rows, those off the "
        f"diagonal times {options['shrink']!r}, with a ridge of {options['ridge']!r} of their mean diagonal; other "
        "parameters are sum of weight x value; in float64 and rounded once to the candidates' type; "
        f"{SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    shrink = inputs.options["shrink"]

    def merged(tensor: str) -> Iterator[np.ndarray]:
        if not inputs.has_statistic(tensor):
            for span in inputs.spans(tensor):
                total = np.zeros(span.stop - span.start)
                for k, weight in enumerate(inputs.weights):
                    total += weight * inputs.candidate(k, tensor, span)
                yield total
            return
        shape = inputs.shapes[tensor]
        columns = prod(shape[1:])
        moments, right = np.zeros((columns, columns)), np.zeros((shape[0], columns))
        mean = np.zeros((shape[0], columns))
        for k, weight in enumerate(inputs.weights):
            own = inputs.statistic(k, tensor).reshape(columns, columns)
            _require_moments(inputs.names[k], tensor, own)
            diagonal = np.diag(own).copy()
            own *= shrink
            np.fill_diagonal(own, diagonal)
            values = inputs.candidate(k, tensor).reshape(shape[0], columns)
            right += weight * product(values, own)
            mean += weight * values
            own *= weight
            moments += own
        level = inputs.options["ridge"] * float(np.trace(moments)) / columns
        if level == 0:  # no input was ever anything but 0
            yield mean.reshape(-1)
            return
        np.fill_diagonal(moments, np.diag(moments) + level)
        yield solved(moments, right + level * mean).reshape(-1)

    return merged


def _require_moments(candidate: str, tensor: str, moments: np.ndarray) -> None:
    if (np.diag(moments) < 0).any() or not np.array_equal(moments, moments.T):
        raise IncompatibleCandidates(
            f"The statistics file of candidate {candidate} holds no second moments for tensor {tensor}; make it "
            "again from public rows."
        )


REGMEAN = Operator(
    name="regmean",
    needs=Needs(statistics="gram"),
    options={"shrink": unit(0.9), "ridge": ridge(1e-6)},
    weights="simplex",
    rule=_rule,
    prepare=_prepare,
)
