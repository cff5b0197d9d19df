"""The reference kernels: unpack, then multiply. Right on every device; all others are tested against it.

Quantized weights become floating point a strip of rows at a time, so that the whole is never in memory.

Where activations are rounded, each token gets its own scale: its largest magnitude over the largest code. The
products of codes are added up (exactly, for int8) and the scales of token and row multiply the sums:

    a token of zeros        gives the bias
    infinity or NaN in it   gives NaN in all outputs of that token, and in no other
    a token of tiny numbers (below 1e-38 over the largest code) counts as zeros
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.ops import library
from twofour.packed import as_stored, unpack
from twofour.quantize.activations import round_tokens

#: Weights that are floating point at the same time.
STRIP = 1 << 22

#: Columns of int8 codes whose products add up exactly in float32: at most half of them are kept, and 1024
#: times 127·128 is less than 2²⁴.
EXACT = 2048

#: Tokens for which an integer product is quicker than making the weight float32.
FEW = 3


def linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    compressed: Tensor | None = None,
) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    if scale is None:
        return F.linear(x, unpack(values, meta, columns, dtype=x.dtype), bias)
    values, meta, scale = as_stored(values, meta, scale)
    assert scale is not None
    parts = [
        F.linear(x, unpack(values[rows], meta[rows], columns, scale[rows], dtype=x.dtype))
        for rows in _strips(len(values), columns)
    ]
    y = torch.cat(parts, dim=-1)
    return y if bias is None else y.add_(bias)


def quantized_linear(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None, columns: int
) -> Tensor:
    codes, token_scale = round_tokens(x.reshape(-1, columns), values.dtype)
    parts = []
    for rows in _strips(len(values), columns):
        weight = unpack(values[rows], meta[rows], columns)
        sums = (_sums_of_int8 if values.dtype == torch.int8 else _sums)(codes, weight)
        parts.append(sums.mul_(token_scale).mul_(scale[rows].float().t()))
    y = torch.cat(parts, dim=-1)
    if bias is not None:
        y.add_(bias.float())
    return y.to(x.dtype).reshape(*x.shape[:-1], len(values))


def _sums(codes: Tensor, weight: Tensor) -> Tensor:
    """codes·weightᵀ, both codes, in float32: also under autocast, whose 16 bits cannot hold the sums."""
    with torch.autocast(codes.device.type, enabled=False):
        return codes.float() @ weight.float().t()


def _sums_of_int8(codes: Tensor, weight: Tensor) -> Tensor:
    """The same without an error but that of the last rounding, to float32.

    The integer product of torch is up to thirty times slower than float32 on a CPU without instructions for
    it, unless there are so few tokens that making the weight float32 would take longer. On a GPU it asks for
    certain shapes, and a float32 product may be one of fewer bits there.
    """
    if codes.device.type != "cpu":
        return (codes.double() @ weight.double().t()).float()
    if len(codes) <= FEW:
        return torch._int_mm(codes, weight.t()).float()
    if codes.shape[1] <= EXACT:
        return _sums(codes, weight)
    pieces = zip(codes.split(EXACT, 1), weight.split(EXACT, 1), strict=True)
    return sum((_sums(*piece).double() for piece in pieces), torch.zeros((), dtype=torch.float64)).float()


def _strips(rows: int, columns: int) -> list[slice]:
    """Rows to dequantize at a time."""
    step = max(1, STRIP // max(columns, 1))
    return [slice(first, first + step) for first in range(0, max(rows, 1), step)]


def gated_linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    activation: str,
    compressed: Tensor | None = None,
) -> Tensor:
    return gate(linear(x, values, meta, scale, bias, columns), activation)


def quantized_gated_linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    columns: int,
    activation: str,
) -> Tensor:
    return gate(quantized_linear(x, values, meta, scale, bias, columns), activation)


def gate(both: Tensor, activation: str) -> Tensor:
    """activate(first half of the features) * second half."""
    first, second = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first).mul_(second)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def linear_input_grad(
    grad: Tensor, values: Tensor, meta: Tensor, scale: Tensor | None, columns: int
) -> Tensor:
    return grad @ unpack(values, meta, columns, scale, dtype=grad.dtype)


def unpack_weight(
    values: Tensor, meta: Tensor, scale: Tensor | None, columns: int, dtype: torch.dtype | None = None
) -> Tensor:
    return unpack(values, meta, columns, scale, dtype)


# "CompositeExplicitAutograd" is every device that has no kernel of its own.
library.impl("linear", linear, "CompositeExplicitAutograd")
library.impl("gated_linear", gated_linear, "CompositeExplicitAutograd")
library.impl("quantized_linear", quantized_linear, "CompositeExplicitAutograd")
library.impl("quantized_gated_linear", quantized_gated_linear, "CompositeExplicitAutograd")
library.impl("linear_input_grad", linear_input_grad, "CompositeExplicitAutograd")
library.impl("unpack", unpack_weight, "CompositeExplicitAutograd")
