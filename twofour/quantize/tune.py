"""After its layers are rounded, a block is tuned as a whole: its codes, scales, norms and biases.

Compensated rounding is right for each layer by itself. What no layer can repair alone is the noise of rounded
activations, and what softmax, gates and norms make of the errors. So the block runs as it will be (weights
from codes and scales, tokens rounded where the scheme rounds them) and learns by Adam to give what the
unrounded model gives at this depth (prune/reconstruct.py has the steps, and the guard that takes a tuning
back which does not help on windows held out).

Behind each code stands a weight that may take any value: the code is what it rounds to, and gradients pass
through the rounding as if it were not there (straight-through, arXiv 1308.3432), so a code changes when its
weight has moved by half a step. Scales are learnt the same way, and used as they will be stored, with 8
significant bits. Removed weights have no weight behind them, and their codes are zero: the pattern cannot
break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from twofour.calibrate.blocks import Block
from twofour.prune.best import TUNING as PRUNED
from twofour.prune.reconstruct import Reconstruct, Reconstructed, reconstruct_
from twofour.quantize.activations import straight_through
from twofour.quantize.rounding import Quantized, per_column
from twofour.quantize.schemes import Scheme
from twofour.select import Layer

#: One round of three passes: what is left to gain is a fraction of what pruning leaves.
TUNING = Reconstruct(rounds=1, follow=1.0)

#: Towards a dense model, a teacher or the one that a joint sweep prunes, there is as much to gain as pruning
#: leaves, so blocks are tuned as after pruning. Its `follow`, one half, is also how much of what pruning has
#: changed in their inputs rounded layers repair: to aim at all of it makes outputs small, for inputs that say
#: little of what they should be are best answered by little.
TUNING_TO_DENSE = PRUNED


def tune_(
    block: Block,
    rounded: Mapping[Layer, Quantized],
    scheme: Scheme,
    dtypes: Mapping[Layer, torch.dtype],
    may_change: Callable[[str], bool] = lambda name: True,
    options: Reconstruct = TUNING,
) -> tuple[dict[Layer, Quantized], Reconstructed]:
    """New codes and scales of the block's layers; its norms and biases change in place.

    `rounded` are the layers as they are; where the scheme rounds tokens, the modules must do so already
    (`activations.round_inputs`). `may_change` gets full names of norms and biases, and can forbid one.
    """
    layers = {layer.name.removeprefix(f"{block.name}."): layer for layer in block.layers}
    before = {name: block.module.get_submodule(name) for name in layers}
    tuned = {
        name: Tuned(before[name], layer, rounded[layer], scheme, dtypes[layer])
        for name, layer in layers.items()
    }
    own = {f"{block.name}.{name}.scale" for name in tuned}
    for name, module in tuned.items():
        block.module.set_submodule(name, module)
    try:
        result = reconstruct_(block, options, lambda name: name in own or may_change(name))
    finally:
        for name, plain in before.items():
            block.module.set_submodule(name, plain)
    found = {layer: tuned[name].rounded() for name, layer in layers.items()}
    return found, replace(result, changed=tuple(name for name in result.changed if name not in own))


class Tuned(nn.Module):
    """Stands for a layer while it is tuned: `weight` and `scale` are what its codes come from.

    Both are float32. The scales are a vector, as is everything that learns at the rate of vectors.
    """

    def __init__(
        self, module: nn.Module, layer: Layer, start: Quantized, scheme: Scheme, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.from_matrix(start.weight()).contiguous())
        self.scale = nn.Parameter(start.scale.flatten().clone())
        self.bias = getattr(module, "bias", None)
        self._run: Callable[..., Tensor] = lambda tensors, x: functional_call(module, tensors, (x,))
        self._layer, self._scheme, self._dtype = layer, scheme, dtype
        self._shape = start.scale.shape

    def _codes(self) -> tuple[Tensor, Tensor]:
        scale = self.scale.reshape(self._shape)
        stored = straight_through(scale, self._scheme.rounded_scale(scale.detach(), self._dtype))
        matrix = self._layer.to_matrix(self.weight)
        scaled = matrix / per_column(stored, self._scheme, matrix.shape[1])
        inside = scaled.clamp(*self._scheme.range)  # beyond the ends of the codes a weight has no gradient
        return straight_through(inside, self._scheme.to_codes(inside.detach())), stored

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = self._codes()
        matrix = codes * per_column(scale, self._scheme, codes.shape[1])
        tensors = {"weight": self._layer.from_matrix(matrix)}
        return self._run({**tensors, **({} if self.bias is None else {"bias": self.bias})}, x)

    @torch.no_grad()
    def rounded(self) -> Quantized:
        codes, scale = self._codes()
        return Quantized(codes.detach(), scale.detach(), self._scheme)
