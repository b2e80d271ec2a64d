"""TIES: trim each task vector, elect a sign for each parameter, and merge only the values that agree with it.

With task vectors tau_i = theta_i - w0:

1. trim: of each tau_i keep the `density` largest by magnitude (all that are as large as the last one kept), counted
   over the whole model; set the others to 0;
2. elect: sign_p = the sign of sum_i w_i * tau_i,p, where a sum of exactly 0 elects +;
3. merge: over A_p, the candidates whose trimmed value is not 0 and has the elected sign,
   theta_p = w0_p + scale * (sum over A_p of w_i * tau_i,p) / (sum over A_p of w_i), a mean, or with
   `normalize: false` without the division. Where A_p is empty, theta_p = w0_p.

Weights must be positive. With equal weights this is the paper's formula (scale is its lambda). A parameter's products
are added up in the order of their size, so neither the order of the candidates nor their names can turn an election.

Source: Yadav et al. 2023, "TIES-Merging", arXiv 2306.01708. mergekit's `ties` differs: it trims each tensor by itself
and leaves what is as large as the last one kept to the sorting; the authors' programs trim the whole model and keep
one more, as `>= kthvalue` does. For a sum of exactly 0 they elect the majority's sign over all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options, flag, scaling, share
from tasks.merging.ranking import ranked


def _rule(options: Options) -> str:
    mean = "divided by the sum of their weights" if options["normalize"] else "not divided"
    return (
        f"TIES: of each candidate's difference to the public start the share {options['density']!r} that is largest "
        "in magnitude is kept; the sign of its weighted sum is elected for each parameter; each parameter is public "
        f"start + {options['scale']!r} x the weighted sum of the differences with that sign, {mean}, in float64 and "
        f"rounded once to the candidates' type; {SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    limits = trimming_limits(inputs, inputs.options["density"])
    weights = np.array(inputs.weights)[:, None]

    def merged(tensor: str) -> Iterator[np.ndarray]:
        for span in inputs.spans(tensor):
            vectors = inputs.task_vectors(tensor, span)
            vectors[np.abs(vectors) < limits] = 0
            products = weights * vectors
            elected = np.where(_added(products) >= 0, 1.0, -1.0)
            agree = np.sign(products) == elected
            total = _added(np.where(agree, products, 0))
            if inputs.options["normalize"]:
                divisor = _added(np.where(agree, weights, 0))
                total /= np.where(divisor > 0, divisor, 1)
            yield inputs.base(tensor, span) + inputs.options["scale"] * total

    return merged


def trimming_limits(inputs: Inputs, density: float) -> np.ndarray:
    """The least magnitude to keep of each candidate's task vector, shape (candidates, 1)."""
    size = inputs.size
    kept = max(1, int(density * size))
    if not size:
        return np.zeros((len(inputs.names), 1))
    return ranked(
        lambda: (np.abs(inputs.task_vectors(tensor, span)) for tensor, span in inputs.all_spans()),
        [size - kept],
    )


def _added(values: np.ndarray) -> np.ndarray:
    """Sums over the candidates, whose order does not matter."""
    ordered = np.sort(values, axis=0)
    total = ordered[0].copy()
    for row in ordered[1:]:
        total += row
    return total


TIES = Operator(
    name="ties",
    needs=Needs(base=True),
    options={"density": share(0.2), "scale": scaling(1.0), "normalize": flag(True)},
    weights="positive",
    rule=_rule,
    prepare=_prepare,
)
