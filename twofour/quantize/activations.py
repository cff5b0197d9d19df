"""Activations in 8 bits: each token gets its own scale, its largest magnitude over the largest code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twofour.quantize.schemes import Scheme


def round_tokens(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens [tokens, k] as codes of `dtype` (int8 or fp8), and the scale of each [tokens, 1] in float32.

    A token that is not finite has the scale NaN, and so its products are.
    """
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True) if wide.shape[1] else wide.new_zeros(len(wide), 1)
    finite = largest.isfinite()
    scale = largest / limit
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)  # also where it is NaN
    scaled = torch.where(finite, wide / scale, 0.0).clamp_(-limit, limit)
    codes = scaled.round_().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return codes, torch.where(finite, scale, torch.nan)


def as_rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """What a layer of this scheme makes of its input before it multiplies. Gradients pass straight through.

    >>> as_rounded(torch.tensor([[127.0, 3.4]]), Scheme("int8", "int8", rounds_activations=True))
    tensor([[127.,   3.]])
    """
    if not scheme.rounds_activations:
        return x
    with torch.no_grad():
        codes, scale = round_tokens(x.reshape(-1, x.shape[-1]), scheme.stored)
        rounded = (codes.float() * scale).to(x.dtype).reshape(x.shape)
    return straight_through(x, rounded)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """What x was rounded to, with the gradient that x has: as if it had not been rounded."""
    return _StraightThrough.apply(x, rounded) if x.requires_grad else rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def round_inputs(module: nn.Module, scheme: Scheme) -> RemovableHandle:
    """Let a dense layer round its input as the quantized one will, until the handle is removed."""
    return module.register_forward_pre_hook(lambda _, args: (as_rounded(args[0], scheme), *args[1:]))
