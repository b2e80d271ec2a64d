"""Weight averaging: theta = sum_i w_i * theta_i, for weights on the simplex.

The bytes are those of `linear_combination`; a policy that names no operator gets these too, and with the tighter
bounds of linear combinations. Source: Wortsman et al. 2022, "Model soups", arXiv 2203.05482 (with equal weights).
mergekit's `linear` divides whatever weights it is given by their sum; here weights that do not add up to 1 are refused.
"""

from __future__ import annotations

from tasks.merging.linear import MERGE_RULE
from tasks.merging.operator import Operator

AVERAGE = Operator(
    name="average",
    weights="simplex",
    rule=lambda options: f"weight averaging: {MERGE_RULE}; the weights are not negative and add up to 1",
)
