"""Wanda: a weight matters as much as it moves the output, |w| times the norm of the channel it multiplies.

Two equal weights are not equally important if one of them reads a channel that is a hundred times larger, and
language models have such channels. Wanda (arXiv 2306.11695) is magnitude pruning that knows this. It needs
one forward pass over some text, inverts nothing and leaves the kept weights as they are: the cheapest method
that is usable on a language model without training.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.pattern import keep_best, require_finite
from twofour.prune.hessian import require_inputs


@dataclass(frozen=True)
class Wanda:
    """Options of the method: it has none.

    >>> import torch
    >>> inputs = Gram(4)
    >>> inputs.add(torch.tensor([[9.0, 1.0, 1.0, 1.0]]))
    >>> Wanda().prune(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), inputs=inputs)
    tensor([[1., 0., 0., 4.]])
    """

    name = "wanda"
    needs_inputs = True

    def prune(self, matrix: Tensor, layer: str | None = None, inputs: Gram | None = None) -> Tensor:
        """The matrix with the two lower |w|·norm of each group set to zero."""
        require_finite(matrix, layer)
        known = require_inputs(self.name, matrix, layer, inputs)
        # float32, or close scores become ties: bfloat16 has 8 bits and the product needs 16.
        score = matrix.detach().float().abs() * known.channel_norms.to(matrix.device)
        # where() rather than a product: -1·0 would leave a negative zero behind.
        return matrix.where(keep_best(score), 0)
