"""The block that a ResNet repeats; a module of its own, as it needs torch at once."""

from __future__ import annotations

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, and the input added to what they give; the second activation follows the sum."""

    def __init__(self, before: int, after: int, *, stride: int, groups: int) -> None:
        """Channels before and after; `groups` of each GroupNorm must divide the channels after."""
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(groups, after),
        )
        self.shortcut: nn.Module = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.GroupNorm(groups, after)
            )
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(rows, before, height, width) -> (rows, after, height / stride, width / stride)."""
        return torch.relu(self.change(images) + self.shortcut(images))
