"""`best`: the stack of methods that measures best per minute. The default where there is calibration text.

Masks and weights of each layer by ADMM, then the whole block tuned against the dense model's outputs, with a
guard. Which parts are in it, and what each is worth, was measured: docs/accuracy.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.prune.admm import ADMM
from twofour.prune.hessian import require_inputs
from twofour.prune.reconstruct import Reconstruct

LAYERS = ADMM()

#: Where there is little text a third pass mostly learns it by heart: a round has two then.
TUNING = Reconstruct(epochs=2, one_more_from=20_000)


@dataclass(frozen=True)
class Best:
    """Options of the two steps: `layers`, one by one, and `reconstruct`, the block as a whole."""

    layers: ADMM = LAYERS
    reconstruct: Reconstruct = TUNING

    name: ClassVar[str] = "best"
    needs_inputs: ClassVar[bool] = True

    def prune(self, matrix: Tensor, layer: str | None = None, inputs: Gram | None = None) -> Tensor:
        """The pruned matrix before its block is tuned: for one weight alone this is ADMM."""
        require_inputs(self.name, matrix, layer, inputs)
        return self.layers.prune(matrix, layer, inputs)
