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
from twofour.packed import unpack
from twofour.quantize.activations import round_tokens

#: Weights that are floating point at the same time.
STRIP = 1 << 22


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
        sums = _product_of_codes(codes, unpack(values[rows], meta[rows], columns))
        parts.append(sums.mul_(token_scale).mul_(scale[rows].float().t()))
    y = torch.cat(parts, dim=-1)
    if bias is not None:
        y.add_(bias.float())
    return y.to(x.dtype).reshape(*x.shape[:-1], len(values))


def _product_of_codes(codes: Tensor, weight: Tensor) -> Tensor:
    """codes·weightᵀ in float32."""
    if codes.dtype != torch.int8:
        return codes.float() @ weight.float().t()
    if codes.device.type == "cpu":
        return torch._int_mm(codes, weight.t()).float()
    # A GPU's integer product asks for certain shapes; float64 has none and is exact as well.
    return (codes.double() @ weight.double().t()).float()


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
