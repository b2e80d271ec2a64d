"""Task arithmetic: theta = w0 + scale * sum_i w_i * (theta_i - w0).

Source: Ilharco et al. 2023, "Editing models with task arithmetic", arXiv 2212.04089; a negative weight makes a model
forget a task. mergekit's `task_arithmetic` gives the same with `normalize: false`, its default, but computes in the
models' own type; its `lambda` is our scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options, scaling


def _rule(options: Options) -> str:
    return (
        f"task arithmetic: each parameter is public start + {options['scale']!r} x sum of weight x (value - public "
        f"start), in float64 and rounded once to the candidates' type; {SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    def merged(tensor: str) -> Iterator[np.ndarray]:
        for span in inputs.spans(tensor):
            start = inputs.base(tensor, span)
            total = np.zeros_like(start)
            for k, weight in enumerate(inputs.weights):
                total += weight * (inputs.candidate(k, tensor, span) - start)
            yield start + inputs.options["scale"] * total

    return merged


TASK_ARITHMETIC = Operator(
    name="task_arithmetic",
    needs=Needs(base=True),
    options={"scale": scaling(1.0)},
    rule=_rule,
    prepare=_prepare,
)
