"""The operators that PyTorch knows: schemas, shapes for tracing, and gradients.

    twofour::linear(x, values, meta, scale?, bias?, columns,         x·Wᵀ + bias with W packed
                    compressed?)                                     (and, for cuSPARSELt, in its own form)
    twofour::gated_linear(x, values, meta, scale?, bias?, columns,   activate(g)*h with [g, h] = x·Wᵀ
                          activation, compressed?)
    twofour::quantized_linear(x, values, meta, scale, bias?,         as linear, but every token of x is first
                              columns)                               rounded to the 8-bit type of the values
    twofour::quantized_gated_linear(…, columns, activation)          as gated_linear, likewise
    twofour::linear_input_grad(grad, values, meta, scale?, columns)  grad·W, its gradient for x
    twofour::unpack(values, meta, scale?, columns, dtype?)           W
    twofour::rope(q, k, cos, sin, heads_dim, round_steps)            q and k turned (see kernels/rope.py)

They take the plain tensors of the packed form (see packed.py), so `torch.compile` and `torch.export` need
to know nothing of us. The kernels are in `twofour/kernels/` and register themselves.
Packed weights are frozen: there is a gradient for x and for the bias, none for the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twofour.errors import TwoFourError

library = torch.library.Library("twofour", "DEF")
library.define(
    "linear(Tensor x, Tensor values, Tensor meta, Tensor? scale, Tensor? bias, int columns, "
    "Tensor? compressed=None) -> Tensor"
)
library.define(
    "gated_linear(Tensor x, Tensor values, Tensor meta, Tensor? scale, Tensor? bias, int columns, "
    "str activation, Tensor? compressed=None) -> Tensor"
)
library.define(
    "quantized_linear(Tensor x, Tensor values, Tensor meta, Tensor scale, Tensor? bias, int columns) "
    "-> Tensor"
)
library.define(
    "quantized_gated_linear(Tensor x, Tensor values, Tensor meta, Tensor scale, Tensor? bias, int columns, "
    "str activation) -> Tensor"
)
library.define(
    "linear_input_grad(Tensor grad, Tensor values, Tensor meta, Tensor? scale, int columns) -> Tensor"
)
library.define(
    "unpack(Tensor values, Tensor meta, Tensor? scale, int columns, ScalarType? dtype=None) -> Tensor"
)
library.define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, int heads_dim, bool round_steps) -> (Tensor, Tensor)"
)

linear = torch.ops.twofour.linear.default
gated_linear = torch.ops.twofour.gated_linear.default
quantized_linear = torch.ops.twofour.quantized_linear.default
quantized_gated_linear = torch.ops.twofour.quantized_gated_linear.default
linear_input_grad = torch.ops.twofour.linear_input_grad.default
unpack = torch.ops.twofour.unpack.default
rope = torch.ops.twofour.rope.default


@torch.library.register_fake("twofour::linear", lib=library)
def _(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    compressed: Tensor | None = None,
) -> Tensor:
    torch._check(x.shape[-1] == columns, lambda: f"x has {x.shape[-1]} features, the layer takes {columns}")
    return x.new_empty(*x.shape[:-1], values.shape[0])


@torch.library.register_fake("twofour::gated_linear", lib=library)
def _(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    activation: str,
    compressed: Tensor | None = None,
) -> Tensor:
    torch._check(x.shape[-1] == columns, lambda: f"x has {x.shape[-1]} features, the layer takes {columns}")
    return x.new_empty(*x.shape[:-1], values.shape[0] // 2)


@torch.library.register_fake("twofour::quantized_linear", lib=library)
def _(x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    torch._check(x.shape[-1] == columns, lambda: f"x has {x.shape[-1]} features, the layer takes {columns}")
    return x.new_empty(*x.shape[:-1], values.shape[0])


@torch.library.register_fake("twofour::quantized_gated_linear", lib=library)
def _(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    columns: int,
    activation: str,
) -> Tensor:
    torch._check(x.shape[-1] == columns, lambda: f"x has {x.shape[-1]} features, the layer takes {columns}")
    return x.new_empty(*x.shape[:-1], values.shape[0] // 2)


@torch.library.register_fake("twofour::linear_input_grad", lib=library)
def _(grad: Tensor, values: Tensor, meta: Tensor, scale: Tensor | None, columns: int) -> Tensor:
    rows = values.shape[0]
    torch._check(
        grad.shape[-1] == rows, lambda: f"grad has {grad.shape[-1]} features, the layer gives {rows}"
    )
    return grad.new_empty(*grad.shape[:-1], columns)


@torch.library.register_fake("twofour::unpack", lib=library)
def _(
    values: Tensor, meta: Tensor, scale: Tensor | None, columns: int, dtype: torch.dtype | None = None
) -> Tensor:
    stored = values.dtype if scale is None else scale.dtype
    return values.new_empty(*values.shape[:-1], columns, dtype=dtype or stored)


@torch.library.register_fake("twofour::rope", lib=library)
def _(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, round_steps: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _frozen(needed: bool) -> None:
    if needed:
        raise TwoFourError(
            "packed weights are frozen and have no gradient.",
            hint="Train the pruned model before packing it, or train adapters beside it.",
        )


def _keep_for_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, values, meta, scale, bias, columns, *_ = inputs
    ctx.save_for_backward(values, meta, scale)
    ctx.columns = columns
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_values, _, _, needs_bias, *_ = ctx.needs_input_grad
    _frozen(needs_values)
    values, meta, scale = ctx.saved_tensors
    grad_x = linear_input_grad(grad, values, meta, scale, ctx.columns) if needs_x else None
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype) if needs_bias else None
    return grad_x, None, None, None, grad_bias, None, None


def _quantized_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Straight through: rounding has no slope of its own, so x gets the gradient of the plain product."""
    return _linear_backward(ctx, grad)[:-1]


def _keep_for_input_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, values, meta, scale, ctx.columns = inputs
    ctx.save_for_backward(values, meta, scale)


def _input_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _frozen(ctx.needs_input_grad[1])
    values, meta, scale = ctx.saved_tensors
    return linear(grad, values, meta, scale, None, ctx.columns), None, None, None, None


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    _frozen(True)
    return (None,) * 5


for _name, _backward, _keep in (
    ("linear", _linear_backward, _keep_for_linear),
    ("quantized_linear", _quantized_backward, _keep_for_linear),
    ("linear_input_grad", _input_grad_backward, _keep_for_input_grad),
    ("unpack", _unpack_backward, None),
):
    torch.library.register_autograd(f"twofour::{_name}", _backward, setup_context=_keep, lib=library)
