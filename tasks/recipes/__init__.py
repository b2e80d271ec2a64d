"""Portfolio recipes: what to train, in public literals only, read from a YAML file."""

from tasks.recipes.documents import (
    MAX_STEPS,
    CandidateRecipe,
    DataRecipe,
    DpMerging,
    EarlyStopping,
    Execution,
    Recipe,
)
from tasks.recipes.files import find_recipe, load_recipe, parse_recipe

__all__ = [
    "MAX_STEPS",
    "CandidateRecipe",
    "DataRecipe",
    "DpMerging",
    "EarlyStopping",
    "Execution",
    "Recipe",
    "find_recipe",
    "load_recipe",
    "parse_recipe",
]
