"""Adapters that merge into a 2:4 weight: y = x·(W + mask ∘ (α/r)·B·A)ᵀ + b, with W frozen.

An ordinary adapter is a dense matrix: merged into a 2:4 weight it fills the zeros. Multiplied by the mask it
cannot. It then has to be applied as a matrix, not as two thin products beside the weight, so it saves the
memory of gradients and optimizer states (r·(n + k) numbers instead of n·k), not time.

The mask is where W is not zero. W is frozen, so that never changes and nothing is stored for it. The sum
W + mask ∘ (α/r)·B·A, as large as the weight, lives only inside a product: backward makes it again
rather than have every layer of the model keep one.

The sum is rounded to the dtype of W in every forward, not only when it is merged: a model in bfloat16 is
trained as what it will be, and its merged logits are the unmerged ones. The adapters themselves are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from twofour.errors import InputError
from twofour.pattern import check_pattern, require_finite
from twofour.select import Layer, require_layers, select


def add_masked_lora_(
    model: nn.Module,
    rank: int,
    alpha: float,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[nn.Parameter]:
    """Give every eligible linear layer of a 2:4 model a masked adapter, and freeze everything else.

    >>> from twofour import prune_
    >>> model = prune_(nn.Sequential(nn.Linear(64, 32)))
    >>> [tuple(p.shape) for p in add_masked_lora_(model, rank=4, alpha=8)]
    [(4, 64), (32, 4)]

    Returns what is to be trained: for each layer A [r, k], random, and B [n, r], zero, so that the model
    begins as it was. They are parameters `lora_a` and `lora_b` of the layer, saved and loaded like others.
    `include` and `exclude` are the patterns of `prune_`. Convolutions stay as they are, frozen too.
    """
    if rank < 1:
        raise InputError(f"the rank of an adapter must be at least 1, not {rank}.")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise InputError(f"alpha must be a number above 0, not {alpha}.")
    if any(isinstance(module, MaskedLora) for module in model.modules()):
        raise InputError("the model has masked adapters already.", hint="merge_masked_lora_(model) first.")
    selection = require_layers(select(model, include, exclude))
    layers = [layer for layer in selection.layers if layer.kind != "conv2d"]
    if not layers:
        raise InputError("the model has no linear layer for an adapter.", hint="Use another recipe.")
    for layer in layers:
        _require_2_of_4(layer, model.get_submodule(layer.name))
    model.requires_grad_(False)
    return [
        parameter
        for layer in layers
        for parameter in _add_(model.get_submodule(layer.name), layer, rank, alpha)
    ]


@torch.no_grad()
def merge_masked_lora_(model: nn.Module) -> nn.Module:
    """Merge all masked adapters into their weights: plain layers again, and 2:4.

    Logits stay what they were. The parameters stay frozen: `model.requires_grad_(True)` to train on.
    """
    adapted = [module for module in model.modules() if isinstance(module, MaskedLora)]
    if not adapted:
        raise InputError("the model has no masked adapters.", hint="add_masked_lora_(model, ...) first.")
    for module in adapted:
        if type(module) is not _class_for(module.plain):
            raise InputError(
                f"a layer with an adapter has become a {type(module).__name__}: no plain one is left of it.",
                hint="With FSDP2 call fully_shard on the blocks of the model, not on single layers.",
            )
    for module in adapted:
        module.merge_()
    return model


class MaskedLora(nn.Module):
    """What a layer with a masked adapter has more than others; always mixed into a linear one."""

    plain: Any  # the class that the layer had before, and will have again
    weight: Any
    bias: Any
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    lora_transposed: bool  # Conv1D has its weight as [k, n]

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        elif x.dtype != self.weight.dtype:
            raise InputError(
                f"the input is {x.dtype} but the weight is {self.weight.dtype}.",
                hint="Convert one of them with .to(dtype), or use autocast.",
            )
        return _MaskedProduct.apply(
            *(x, self.weight, self.lora_a, self.lora_b, self.bias),
            *(self.lora_scale, self.lora_transposed),
        )

    def merge_(self) -> None:
        merged = _merged(self.weight, self.lora_a, self.lora_b, self.lora_scale, self.lora_transposed)
        self.weight.copy_(merged)
        del self.lora_a, self.lora_b, self.lora_scale, self.lora_transposed
        self.__class__ = self.plain

    def extra_repr(self) -> str:
        rank = self.lora_a.shape[0]
        return f"{super().extra_repr()}, rank={rank}, scale={self.lora_scale:g}".removeprefix(", ")


class MaskedLoraLinear(MaskedLora, nn.Linear):
    """`nn.Linear` with a masked adapter."""

    plain = nn.Linear


@cache
def _class_for(base: Any) -> Any:
    if base is nn.Linear:
        return MaskedLoraLinear
    # transformers' Conv1D, without importing transformers here.
    return type(f"MaskedLora{base.__name__}", (MaskedLora, base), {"__module__": __name__, "plain": base})


def _add_(module: Any, layer: Layer, rank: int, alpha: float) -> tuple[nn.Parameter, nn.Parameter]:
    weight = module.weight
    options = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
    rows, columns = layer.shape
    plain: Any = type(module)
    module.__class__ = _class_for(plain)
    module.lora_a = nn.Parameter(torch.empty(rank, columns, **options))
    module.lora_b = nn.Parameter(torch.zeros(rows, rank, **options))
    nn.init.kaiming_uniform_(module.lora_a, a=math.sqrt(5))  # what nn.Linear begins with
    module.lora_scale = alpha / rank
    module.lora_transposed = layer.kind == "conv1d"
    return module.lora_a, module.lora_b


def _merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """W + mask ∘ scale·B·A in the layout and dtype of W. One rounding, at the end."""
    product = (b @ a).mul_(scale)
    if transposed:
        product = product.t()
    total = torch.where(weight != 0, weight + product, 0)
    return total.to(weight.dtype)


class _MaskedProduct(torch.autograd.Function):
    """x·mergedᵀ + bias, of which backward keeps only what was there anyway: x, W, A and B.

    Autocast is off inside, since B·A belongs in float32 and a backward may run with it or without.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scale: float,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale, ctx.transposed = scale, transposed
        ctx.bias_dtype = None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            matrix = _matrix(x, weight, a, b, scale, transposed)
            return F.linear(x, matrix, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, a, b = ctx.saved_tensors
        needs_x, _, needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_a = grad_b = grad_bias = None
        with torch.autocast(x.device.type, enabled=False):
            if needs_x:
                grad_x = gradient @ _matrix(x, weight, a, b, ctx.scale, ctx.transposed)
            if needs_a or needs_b:
                of_matrix = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
                kept = (weight.t() if ctx.transposed else weight) != 0
                of_product = torch.where(kept, of_matrix, 0).to(a.dtype).mul_(ctx.scale)
                grad_a = b.t() @ of_product if needs_a else None
                grad_b = of_product @ a.t() if needs_b else None
            if needs_bias:  # somebody wants to train it too
                grad_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_a, grad_b, grad_bias, None, None


def _matrix(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """The merged weight as [n, k] in the dtype to compute in."""
    merged = _merged(weight, a, b, scale, transposed).to(x.dtype)
    return merged.t() if transposed else merged


def _require_2_of_4(layer: Layer, module: nn.Module) -> None:
    weight = module.get_parameter("weight").detach()
    if weight.is_meta:
        return
    require_finite(weight, layer.name)
    first = check_pattern(layer.to_matrix(weight)).first
    if first is not None:
        raise InputError(
            f"row {first.row}, group {first.group} keeps {first.kept} of 4 weights, {list(first.values)}, "
            "and 2:4 allows 2: there is no mask for an adapter.",
            layer=layer.name,
            hint="Prune it first with twofour.prune_(model), or leave this layer out with exclude.",
        )
