"""PCB-Merging: parameters compete within a candidate and between candidates; the weakest are dropped, the others
weigh by their score.

With task vectors tau_i = theta_i - w0 of all n candidates, and everything "of tau_i" taken over the whole model:

1. clip: |tau_i| is limited to its 0.01% and 99.99% quantiles, giving t_i with tau_i's signs;
2. balance within: a_i = exp(n * N(|t_i|)^2), N mapping the least to 0 and the largest to 1;
3. balance between: b_i = tanh(tau_i * sum_j tau_j);
4. drop: c_i = a_i * b_i, raised to its (1 - `density`) quantile, and mapped to [0, 1] as before: s_i;
5. merge: theta = w0 + scale * (sum_i w_i * s_i * t_i) / (sum_i w_i * s_i), or with `normalize: false` divided by
   sum_i s_i, so that w_i is the paper's lambda_i. Where the divisor is 0, theta = w0.

Weights must be positive. Where all of a candidate's values are the same, N is 1 (nobody is weaker). The candidates are
taken in the order of their names. The bytes depend, in float64's last unit and so almost never after rounding to
float32, on the machine's exponential and hyperbolic tangent.

Source: Du et al. 2024, "Parameter competition balancing for model merging", arXiv 2410.02396, as the authors' program
computes it (https://github.com/duguodong7/pcb-merging): the paper's formulas have softmax in the places of exp and
tanh, and no clipping. mergekit does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options, flag, scaling, share
from tasks.merging.ranking import ranked

CLIPPED = 0.0001  # the share at either end


def _rule(options: Options) -> str:
    divisor = "weight x score" if options["normalize"] else "score"
    return (
        f"PCB-Merging: each parameter is public start + {options['scale']!r} x sum of weight x score x clipped "
        f"(value - public start) over sum of {divisor}, the score saying how large the difference is within the "
        "candidate and how well it agrees with the other candidates', 0 for all but the share "
        f"{options['density']!r} with the best scores; in float64 and rounded once to the candidates' type; "
        f"{SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    if not inputs.size:
        return lambda tensor: iter(())
    size = inputs.size
    weights = np.array(inputs.weights)[:, None]
    bounds = ranked(
        lambda: (np.abs(inputs.task_vectors(tensor, span)) for tensor, span in inputs.all_spans()),
        [int(size * CLIPPED), max(0, int(size * (1 - CLIPPED) - 1))],
    )
    low, high = np.minimum(bounds[:, :1], bounds[:, 1:]), bounds[:, 1:]

    def scores(vectors: np.ndarray) -> np.ndarray:
        within = np.exp(len(vectors) * _unit(np.clip(np.abs(vectors), low, high), low, high) ** 2)
        between = np.zeros(vectors.shape[1])
        for vector in vectors:
            between += vector
        return within * np.tanh(vectors * between)

    kept = ranked(
        lambda: (scores(inputs.task_vectors(tensor, span)) for tensor, span in inputs.all_spans()),
        [min(size - 1, int(size * (1 - inputs.options["density"]))), size - 1],
    )
    least, best = kept[:, :1], kept[:, 1:]

    def merged(tensor: str) -> Iterator[np.ndarray]:
        for span in inputs.spans(tensor):
            vectors = inputs.task_vectors(tensor, span)
            score = _unit(np.maximum(scores(vectors), least), least, best)
            clipped = np.sign(vectors) * np.clip(np.abs(vectors), low, high)
            total, divisor = np.zeros(vectors.shape[1]), np.zeros(vectors.shape[1])
            for k in range(len(vectors)):
                total += weights[k] * score[k] * clipped[k]
                divisor += (weights[k] if inputs.options["normalize"] else 1.0) * score[k]
            total /= np.where(divisor > 0, divisor, 1)
            yield inputs.base(tensor, span) + inputs.options["scale"] * total

    return merged


def _unit(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Mapped from [low, high] to [0, 1], by row; 1 where low and high are the same."""
    same = high == low
    return np.where(same, 1.0, (values - low) / np.where(same, 1.0, high - low))


PCB = Operator(
    name="pcb",
    needs=Needs(base=True, same_bytes_everywhere=False),
    options={"density": share(0.1), "scale": scaling(1.0), "normalize": flag(True)},
    weights="positive",
    rule=_rule,
    prepare=_prepare,
)
