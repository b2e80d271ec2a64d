"""DARE: drop parameters of each task vector at random, and rescale what is left.

    theta = w0 + scale * sum_i w_i * m_i * tau_i / density,      tau_i = theta_i - w0,

m_i,p being 1 with probability `density` and else 0; with `rescale: false` nothing is divided by the density.

The masks are public: they follow from `seed`, the candidate's name, the tensor's name and the place in it, so they
neither cost nor give privacy, and another order of the candidates changes nothing; another name of a candidate does.
The bits are Philox's (numpy's `random_raw`, which numpy keeps as it is), keyed by SHA-256 of seed and names: a
parameter is kept where its 64 bits are below density * 2**64.

Source: Yu et al. 2024, "Language models are super Mario", arXiv 2311.03099 (which drops with probability
p = 1 - density and rescales by 1 / (1 - p)). mergekit's `dare_linear` draws from torch's generator and rescales each
tensor so that its L1 norm is what it was, instead of by 1 / density.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator

import numpy as np

from tasks.merging.inputs import Inputs
from tasks.merging.operator import SAME_CANDIDATES, Needs, Operator, Options, flag, scaling, share, whole


def _rule(options: Options) -> str:
    rescaled = " / density" if options["rescale"] else ""
    return (
        f"DARE: each parameter is public start + {options['scale']!r} x sum of weight x mask x (value - public "
        f"start){rescaled}, where a public generator with seed {options['seed']} keeps a parameter with probability "
        f"{options['density']!r}, its density; in float64 and rounded once to the candidates' type; {SAME_CANDIDATES}"
    )


def _prepare(inputs: Inputs) -> Callable[[str], Iterator[np.ndarray]]:
    density = inputs.options["density"]
    factor = inputs.options["scale"]

    def merged(tensor: str) -> Iterator[np.ndarray]:
        for span in inputs.spans(tensor):
            start = inputs.base(tensor, span)
            total = np.zeros_like(start)
            for k, weight in enumerate(inputs.weights):
                kept = mask(inputs.options["seed"], inputs.names[k], tensor, span, density)
                vector = inputs.candidate(k, tensor, span) - start
                if inputs.options["rescale"]:
                    vector /= density
                total += np.where(kept, weight * vector, 0)
            yield start + factor * total

    return merged


def mask(seed: int, candidate: str, tensor: str, span: slice, density: float) -> np.ndarray:
    """Which parameters of a part of a candidate's tensor are kept, booleans; the part begins at a multiple of 4."""
    count = span.stop - span.start
    if density >= 1:
        return np.ones(count, bool)
    words = json.dumps(["remerge DARE", seed, candidate, tensor]).encode()
    key = int.from_bytes(hashlib.sha256(words).digest()[:16], "little")
    bits = np.random.Philox(counter=span.start // 4, key=key).random_raw(count)  # 4 numbers for each count
    return bits < np.uint64(int(density * 2**64))


DARE = Operator(
    name="dare",
    needs=Needs(base=True),
    options={"density": share(0.5), "seed": whole(0), "rescale": flag(True), "scale": scaling(1.0)},
    rule=_rule,
    prepare=_prepare,
)
