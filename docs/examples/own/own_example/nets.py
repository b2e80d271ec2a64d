"""A network of one hidden layer."""

import torch


def build(*, features: int, hidden: int = 16) -> torch.nn.Module:
    """Scores (rows, 2) from features (rows, features)."""
    return torch.nn.Sequential(
        torch.nn.Linear(features, hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, 2),
    )
