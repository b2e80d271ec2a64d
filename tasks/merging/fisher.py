"""Fisher-weighted averaging: each parameter weighs by how much it matters to its candidate.

    theta_p = (sum_i w_i * f_i,p * theta_i,p) / (sum_i w_i * f_i,p),      f_i,p = max(F_i,p, floor),

F_i being the diagonal of candidate i's Fisher information, from public rows alone (`tasks.merging.statistics`), else
refused. A mean by its formula: twice the weights give the same. Tensors without Fisher information (buffers) get the
weighted mean. Weights must be positive. The candidates are taken in the order of their names.

Source: Matena and Raffel 2022, "Merging models with Fisher-weighted averaging", arXiv 2111.09832, equation 5 with its
lambda_i as weights and its floor. mergekit does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from accounting.errors import IncompatibleCandidates
from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options, positive


def _rule(options: Options) -> str:
    return (
        "Fisher-weighted averaging: each parameter is sum of weight x information x value over sum of weight x "
        "information, the information being the diagonal Fisher information on public rows and at least "
        f"{options['floor']!r}; in float64 and rounded once to the candidates' type; {SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    floor = inputs.options["floor"]

    def information(k: int, tensor: str, span: slice) -> np.ndarray:
        if not inputs.has_statistic(tensor):
            return np.ones(span.stop - span.start)
        found = inputs.statistic(k, tensor, span)
        if (found < 0).any():
            raise IncompatibleCandidates(
                f"The statistics file of candidate {inputs.names[k]} holds negative values in tensor {tensor}, but "
                "Fisher information is never negative; make it again from public rows."
            )
        return np.maximum(found, floor)

    def merged(tensor: str) -> Iterator[np.ndarray]:
        for span in inputs.spans(tensor):
            total, divisor = np.zeros(span.stop - span.start), np.zeros(span.stop - span.start)
            for k, weight in enumerate(inputs.weights):
                share = weight * information(k, tensor, span)
                total += share * inputs.candidate(k, tensor, span)
                divisor += share
            yield total / divisor

    return merged


FISHER = Operator(
    name="fisher",
    needs=Needs(statistics="fisher"),
    options={"floor": positive(1e-6)},
    weights="positive",
    rule=_rule,
    prepare=_prepare,
)
