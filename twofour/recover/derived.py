"""Layers that multiply with something made of their weight, while the weight itself is what is trained.

    mask_moves   the two largest of every four count, the other two are zero for now      (adaptive.py)
    rounds_to    what is left is rounded to the codes of a scheme, and the input too where
                 the scheme rounds activations                                             (rounded.py)

In this order: only what the mask keeps has a code. Neither has a useful slope, so the gradient passes both as
if they were not there (straight through): a pruned weight goes on learning, and so does one that is too far
from the next code to be seen.

A layer changes its class for it and keeps its parameters, with their names: the optimizer, DDP, FSDP2 and the
state dict see what they saw before. `plain_again` gives the class back.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.quantize.activations import as_rounded, straight_through
from twofour.quantize.rounding import per_column
from twofour.quantize.schemes import Scheme
from twofour.select import Layer


class Derived(nn.Module):
    """What such a layer has more than others; always mixed into one that multiplies."""

    derived_layer: Layer
    derived_from: Any  # the class that the layer had before, and will have again
    mask_moves: bool
    rounds_to: Scheme | None
    rounds_from: torch.dtype  # what the weight will be stored as: that is what has codes
    rounding_scale: Tensor  # [n, 1] or [n, ⌈k/group⌉], kept up to date by who rounds

    def derived_weight(self) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        made = weight.detach()
        if self.mask_moves:
            made = torch.where(largest_two(self.derived_layer, made), made, 0)
        if self.rounds_to is not None:
            made = self._rounded(made, self.rounds_to)
        return straight_through(weight, made)

    def derived_input(self, x: Tensor) -> Tensor:
        return x if self.rounds_to is None else as_rounded(x, self.rounds_to)

    def _rounded(self, weight: Tensor, scheme: Scheme) -> Tensor:
        layer = self.derived_layer
        matrix = layer.to_matrix(weight.to(self.rounds_from).float())
        scale = per_column(self.rounding_scale, scheme, layer.columns)
        return layer.from_matrix(scheme.to_codes(matrix / scale) * scale).to(weight.dtype)


class DerivedLinear(Derived, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.derived_input(x), self.derived_weight(), self.bias)


class DerivedConv2d(Derived, nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:  # whose input is never rounded: nor is it when it runs
        return self._conv_forward(x, self.derived_weight(), self.bias)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    x = self.derived_input(x)
    flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.derived_weight())
    return flat.view(*x.shape[:-1], self.nf)


@cache
def derived_class(plain: Any) -> Any:
    if plain is nn.Linear:
        return DerivedLinear
    if plain is nn.Conv2d:
        return DerivedConv2d
    # transformers' Conv1D, without importing transformers here.
    return type(
        f"Derived{plain.__name__}", (Derived, plain), {"__module__": __name__, "forward": _conv1d_forward}
    )


def derive(module: Any, layer: Layer) -> None:
    """Let a plain layer be a derived one, of which nothing is different yet. One that is stays it."""
    if not isinstance(module, Derived):
        plain: Any = type(module)
        module.derived_layer, module.derived_from = layer, plain
        module.__class__ = derived_class(plain)
        module.mask_moves = False
        module.rounds_to = None


def plain_again(module: Any) -> None:
    """Give a layer its plain class back, unless something is still made of its weight."""
    if not module.mask_moves and module.rounds_to is None:
        module.__class__ = module.derived_from
        del module.derived_layer, module.derived_from, module.mask_moves, module.rounds_to


def largest_two(layer: Layer, weight: Tensor) -> Tensor:
    """True for the two largest of every four, equal ones from the left, in the layout of the weight.

    `pattern.keep_best` by magnitude, which looks for NaN first: that would wait for the GPU in every step
    and break a compiled graph. Here six comparisons, and who wins two of its three is kept.
    """
    matrix = layer.to_matrix(weight.detach().abs())
    columns = matrix.shape[-1]
    # -1 is less than any magnitude, so what fills up the last group is never kept before a weight.
    a, b, c, d = F.pad(matrix, (0, -columns % 4), value=-1.0).unflatten(-1, (-1, 4)).unbind(-1)
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    kept = (_two_of(ab, ac, ad), _two_of(~ab, bc, bd), _two_of(~ac, ~bc, cd), _two_of(~ad, ~bd, ~cd))
    return layer.from_matrix(torch.stack(kept, dim=-1).flatten(-2)[..., :columns])


def _two_of(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x & y) | (z & (x | y))
