"""Magnitude: keep the two largest of every four weights. No data, no update, seconds.

The baseline of every comparison, and the right start when the whole training is repeated afterwards
(arXiv 2104.08378). One-shot on a language model it does great damage: measure before you use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.pattern import keep_best, require_finite


@dataclass(frozen=True)
class Magnitude:
    """Options of the method: it has none."""

    name: ClassVar[str] = "magnitude"
    needs_inputs: ClassVar[bool] = False

    def prune(self, matrix: Tensor, layer: str | None = None, inputs: Gram | None = None) -> Tensor:
        """The matrix with the two smaller magnitudes of each group set to zero."""
        require_finite(matrix, layer)
        # In int8 the magnitude of -128 does not exist.
        magnitude = matrix.abs() if matrix.is_floating_point() else matrix.long().abs()
        # where() rather than a product: -1·0 would leave a negative zero behind.
        return matrix.where(keep_best(magnitude), 0)
