"""Training a model that is quantized already: its codes stay, and what they are multiplied with learns.

To move a scale moves all weights under it by the same factor. So there are few numbers to train (one for 64
kept weights in int4, one a row in 8 bits; norms and biases beside them), and with them few moments: what must
fit into memory is a byte and a half a weight, the activations and the teacher; other recipes have sixteen
bytes a weight. (PEQA, arXiv 2305.14152, tunes large models so for a task; here it is for what was lost.)

No code changes, so no zero does: the pattern cannot break, and the files have the size and the speed they
had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.errors import InputError
from twofour.quantize.activations import as_rounded, straight_through
from twofour.quantize.rounding import per_column
from twofour.quantize.schemes import Scheme
from twofour.recover.masks import ddp_ignore


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that hold codes, by name. (They are nn.QuantizedLinear, of a room that comes after this.)"""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "scheme", None), Scheme)
    }


class LearntScales(nn.Module):
    """Stands for a quantized linear layer while its scales are trained, and then puts them into it.

    What is learnt is the logarithm of each scale's factor: one rate then suits large and small ones, and none
    changes its sign. It multiplies with scales as they will be stored, beside a layer of `dtype`.
    """

    codes: Tensor
    start: Tensor

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__()
        packed, self._scheme, self._dtype = module.packed, module.scheme, dtype
        start = packed.scale.detach().float()
        codes = replace(packed, scale=torch.ones_like(start)).unpack(torch.float32)
        kept = torch.float8_e4m3fn if self._scheme.codes == "fp8" else torch.int8
        # Neither is of the model's state: they do not change, and the layer itself has them.
        self.register_buffer("codes", codes.to(kept), persistent=False)
        self.register_buffer("start", start, persistent=False)
        self.scale_change = nn.Parameter(torch.zeros_like(start))
        self.bias = module.bias
        self._module = [module]  # not a submodule: its tensors are not trained, moved or saved

    def scale(self) -> Tensor:
        scale = self.start * self.scale_change.exp()
        return straight_through(scale, self._scheme.rounded_scale(scale.detach(), self._dtype))

    @property
    def weight(self) -> Tensor:
        """To read, for models that look at it."""
        return _dequantized(self.scale(), self.codes, self._scheme, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y: Tensor = _Product.apply(
            as_rounded(x, self._scheme).to(dtype), self.scale(), self.codes, self._scheme
        )
        return y if self.bias is None else y + self.bias.to(dtype)

    @torch.no_grad()
    def learnt(self) -> Any:
        """The layer itself, with the scales as they are now."""
        module = self._module[0].to(self.codes.device)
        module.load_state_dict({"weight_scale": self.scale().to(module.weight_scale.dtype)}, strict=False)
        return module


def _dequantized(scale: Tensor, codes: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    return (codes.float() * per_column(scale, scheme, codes.shape[1])).to(dtype)


class _Product(torch.autograd.Function):
    """x · (codes · scale)ᵀ. For the way back the weight is made again: to keep those of all layers would take
    more memory than all else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, codes: Tensor, scheme: Scheme) -> Tensor:
        ctx.save_for_backward(x, scale, codes)
        ctx.scheme = scheme
        return F.linear(x, _dequantized(scale, codes, scheme, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, scale, codes = ctx.saved_tensors
        (grad,), scheme = grads, ctx.scheme
        of_x = grad @ _dequantized(scale, codes, scheme, grad.dtype) if ctx.needs_input_grad[0] else None
        of_weight = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        each = of_weight.float() * codes.float()
        if scheme.group is not None:
            short = scale.shape[1] * scheme.group - each.shape[1]
            each = F.pad(each, (0, short)).unflatten(1, (scale.shape[1], scheme.group))
        return of_x, each.sum(-1).reshape(scale.shape), None, None


def learn_scales_(model: nn.Module, stored: Mapping[str, torch.dtype]) -> dict[str, LearntScales]:
    """Put such a layer in the place of every quantized one. `stored`: what its scales will be stored as."""
    found = quantized_layers(model)
    for name, module in found.items():
        if set(module.stored_as(name)) != {name}:
            raise InputError(
                "layers that are fused cannot be trained.", layer=name, hint="Call twofour.unfuse_ first."
            )
        if module.layer.kind == "conv2d":
            raise InputError("the scales of a convolution cannot be trained.", layer=name)
    learning = {
        name: LearntScales(module, stored.get(f"{name}.weight_scale", module.weight_scale.dtype))
        for name, module in found.items()
    }
    for name, stand_in in learning.items():
        model.set_submodule(name, stand_in)
    ddp_ignore(model, add=_buffer_names(learning))
    return learning


def put_back_(model: nn.Module, learning: Mapping[str, LearntScales]) -> None:
    """The layers themselves again, with what was learnt."""
    ddp_ignore(model, remove=_buffer_names(learning))
    for name, stand_in in learning.items():
        model.set_submodule(name, stand_in.learnt())


def _buffer_names(learning: Iterable[str]) -> list[str]:
    return [f"{name}.{buffer}" for name in learning for buffer in ("codes", "start")]
