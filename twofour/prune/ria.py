"""RIA, relative importance and activations: a weight matters by its share of its row and of its column.

Scores that look at |w| alone can starve a whole input or output channel whose weights are all small. RIA
(ICLR 2024, "Plug-and-Play") divides each magnitude by the sums over its column and over its row, adds the two
shares, and weighs them with the norm of the input channel, tempered by a power. Costs the same as Wanda and
leaves the kept weights as they are; which of the two is better depends on the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import keep_best, require_finite
from twofour.prune.hessian import require_inputs


@dataclass(frozen=True)
class RIA:
    """Options: `power` of the channel norms; 0 ignores the data, 1 trusts it as much as Wanda does."""

    power: float = 0.5

    name = "ria"
    needs_inputs = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.power) and self.power >= 0):
            raise InputError(f"ria: power must be a finite number not below 0, got {self.power}.")

    def prune(self, matrix: Tensor, layer: str | None = None, inputs: Gram | None = None) -> Tensor:
        """The matrix with the two lower scores of each group set to zero."""
        require_finite(matrix, layer)
        known = require_inputs(self.name, matrix, layer, inputs)
        norms = known.channel_norms.to(matrix.device)
        magnitude = matrix.detach().float().abs()
        # A row or column of zeros has no shares to give; any positive divisor leaves its scores at zero.
        smallest = torch.finfo(torch.float32).tiny
        score = magnitude / magnitude.sum(0, keepdim=True).clamp(min=smallest)
        score += magnitude / magnitude.sum(1, keepdim=True).clamp(min=smallest)
        score *= norms**self.power
        # where() rather than a product: -1·0 would leave a negative zero behind.
        return matrix.where(keep_best(score), 0)
