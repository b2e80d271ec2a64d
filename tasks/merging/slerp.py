"""SLERP for two: along the great circle between two models, tensor by tensor.

    theta = sin(w_a * angle) / sin(angle) * theta_a + sin(w_b * angle) / sin(angle) * theta_b,

`angle` being the one between the two tensors as vectors, for weights on the simplex; w_b is the usual t. Where the
tensors point nearly the same or opposite ways (|cos angle| > 0.9995) or one of them is 0, theta = w_a * theta_a +
w_b * theta_b. Lengths are not interpolated by themselves: the formula is applied to the tensors as they are. The
bytes depend, in float64's last unit and so almost never after rounding to float32, on the machine's arc cosine and
sine.

Source: Shoemake 1985, "Animating rotation with quaternion curves", SIGGRAPH. mergekit's `slerp` gives the same,
computed in float32; we go through a tensor twice, in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import acos, sin, sqrt

import numpy as np

from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options

NEARLY_PARALLEL = 0.9995
TINY = 1e-8  # a norm at most this long has no direction


def _rule(options: Options) -> str:
    return (
        "SLERP: each tensor is sin(weight x angle) / sin(angle) x value, added up over both candidates, the angle "
        "being the one between their tensors, or sum of weight x value where these are nearly parallel; in float64 "
        f"and rounded once to the candidates' type; {SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    def factors(tensor: str) -> tuple[float, float]:
        first, second = inputs.weights
        squares = [0.0, 0.0]
        together = 0.0
        for span in inputs.spans(tensor):
            one, other = inputs.candidate(0, tensor, span), inputs.candidate(1, tensor, span)
            squares[0] += float(np.sum(one * one))
            squares[1] += float(np.sum(other * other))
            together += float(np.sum(one * other))
        lengths = [sqrt(square) if sqrt(square) > TINY else 1.0 for square in squares]
        cosine = min(1.0, max(-1.0, together / lengths[0] / lengths[1]))
        if abs(cosine) > NEARLY_PARALLEL:
            return first, second
        angle = acos(cosine)
        return sin(first * angle) / sin(angle), sin(second * angle) / sin(angle)

    def merged(tensor: str) -> Iterator[np.ndarray]:
        first, second = factors(tensor)
        for span in inputs.spans(tensor):
            yield first * inputs.candidate(0, tensor, span) + second * inputs.candidate(1, tensor, span)

    return merged


SLERP = Operator(
    name="slerp",
    needs=Needs(models=2, same_bytes_everywhere=False),
    weights="simplex",
    rule=_rule,
    prepare=_prepare,
)
