"""The reference kernels: unpack, then multiply. Right on every device; all others are tested against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.ops import library
from twofour.packed import unpack


def linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    compressed: Tensor | None = None,
) -> Tensor:
    weight = unpack(values, meta, columns, scale, dtype=x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


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
library.impl("linear_input_grad", linear_input_grad, "CompositeExplicitAutograd")
library.impl("unpack", unpack_weight, "CompositeExplicitAutograd")
