"""Merge candidates' parameters: post-processing, so it costs no privacy beyond what the certificate covers.

`linear_combination` and `merge_files` make convex linear combinations, which have privacy bounds of their own.
`merge_models` and `merge_model_files` merge by any operator of OPERATORS: each has a small module with its formula,
its source and where it differs from mergekit. Whatever an operator does, it is covered by the joint release of its
candidates, as long as beside them it reads nothing private: the public start, and statistics from public rows.

Common to all: numbers are widened to float64, merged there and rounded once (to nearest, ties to even) to the
candidates' own type; tensors that are not floating point must be equal in all candidates and are copied; names, shapes
and types must be the same in all candidates and in the public start; weights are used exactly as they are, and where
an operator is a mean, its formula says by what it divides; what is not finite is refused.
"""

from tasks.merging.linear import MERGE_RULE, PIECE, linear_combination, merge_files
from tasks.merging.merge import (
    OPERATORS,
    checked_options,
    merge_model_files,
    merge_models,
    merge_rule,
    needs,
)
from tasks.merging.operator import Needs

__all__ = [
    "MERGE_RULE",
    "OPERATORS",
    "PIECE",
    "Needs",
    "checked_options",
    "linear_combination",
    "merge_files",
    "merge_model_files",
    "merge_models",
    "merge_rule",
    "needs",
]
