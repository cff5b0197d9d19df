"""A linear layer with two thin matrices beside its weight: y = W·x + L·(R·x) + b.

What they are for and how they are found is in `twofour.prune.lowrank`. The layer is changed in place into a
subclass of what it was: it keeps its tensors under their names (`weight_values`, `weight_meta`, `bias`), and
`lowrank_left` [n, r] and `lowrank_right` [r, k] come beside them. They are ordinary parameters: they follow
`.to()`, go into the state dict, and can be trained while the packed weight is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.errors import InputError
from twofour.nn.linear import SparseLinear
from twofour.nn.modules import PackedModule
from twofour.packed import packed_shapes
from twofour.select import Layer, as_layer

Module = TypeVar("Module", bound=nn.Module)

_SIDES = ("lowrank_left", "lowrank_right")


class LowRank(nn.Module):
    """What is added to a layer; always mixed into a linear one."""

    lowrank_left: nn.Parameter
    lowrank_right: nn.Parameter

    @property
    def rank(self) -> int:
        return self.lowrank_right.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lowrank_right), self.lowrank_left)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}".removeprefix(", ")


class LowRankLinear(LowRank, SparseLinear):
    """A packed linear layer with its compensation."""


class LowRankDense(LowRank, nn.Linear):
    """The same before packing: a pruned `nn.Linear` with its compensation."""


def add_lowrank_(module: Module, left: Tensor, right: Tensor, name: str | None = None) -> Module:
    """Give a linear layer, packed or dense, its compensation. In place; the module stays the same object.

    >>> layer = add_lowrank_(nn.Linear(8, 4), torch.ones(4, 1), torch.ones(1, 8))
    >>> layer
    LowRankDense(in_features=8, out_features=4, bias=True, rank=1)
    """
    rows, columns = _shape(module, name)
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        raise InputError(
            f"a compensation is [n, r] and [r, k], not {list(left.shape)} and {list(right.shape)}.",
            layer=name,
        )
    if (left.shape[0], right.shape[1]) != (rows, columns):
        raise InputError(
            f"a compensation for [{left.shape[0]}, {right.shape[1]}] does not fit a layer of "
            f"[{rows}, {columns}].",
            layer=name,
        )
    like = next(p for p in module.parameters(recurse=False) if p.is_floating_point())
    new = (x.detach().to(like.device, like.dtype, copy=True).contiguous() for x in (left, right))
    _put_on(module, [nn.Parameter(tensor) for tensor in new])
    return module


def empty_lowrank_(module: Module, rank: int, name: str | None = None) -> Module:
    """The same with zeros, to load tensors into."""
    rows, columns = _shape(module, name)
    like = next(module.parameters())
    left = torch.zeros(rows, rank, device=like.device)
    return add_lowrank_(module, left, torch.zeros(rank, columns, device=like.device), name)


def lowrank_layers(model: nn.Module) -> dict[str, LowRank]:
    """The compensated layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}


@contextmanager
def lowrank_aside(model: nn.Module) -> Iterator[list[str]]:
    """The dense layers of a model as they are without their compensation, and the names of these layers.

    While a model is packed its layers are plain ones; afterwards whatever stands in their places, packed or
    not, has the same compensation.
    """
    taken: dict[str, list[nn.Parameter]] = {}
    for name, module in lowrank_layers(model).items():
        if not isinstance(module, PackedModule):
            taken[name] = [getattr(module, side) for side in _SIDES]
            for side in _SIDES:
                delattr(module, side)
            module.__class__ = type(module).__bases__[1]  # what `_class_for` was given
    try:
        yield list(taken)
    finally:
        for name, parameters in taken.items():
            _put_on(model.get_submodule(name), parameters)


@dataclass(frozen=True)
class LowRankCost:
    """What a compensation adds to a packed layer; shares are of what the packed layer itself takes."""

    bytes: int
    flops_per_token: int
    bytes_share: float
    flops_share: float


def lowrank_cost(layer: Layer, rank: int, dtype: torch.dtype) -> LowRankCost:
    """Extra bytes, and extra operations for each token (a product is two).

    >>> lowrank_cost(Layer("q_proj", "linear", (4096, 4096)), 64, torch.bfloat16)
    LowRankCost(bytes=1048576, flops_per_token=1048576, bytes_share=0.0555..., flops_share=0.0625)
    """
    rows, columns = layer.shape[:2]
    weights = rank * (rows + columns)
    values, meta = packed_shapes(rows, columns)
    packed_bytes = values[0] * values[1] * dtype.itemsize + meta[0] * meta[1]
    return LowRankCost(
        bytes=weights * dtype.itemsize,
        flops_per_token=2 * weights,
        bytes_share=weights * dtype.itemsize / packed_bytes,
        flops_share=weights / (rows * columns / 2),
    )


def _shape(module: nn.Module, name: str | None) -> tuple[int, ...]:
    """[n, k] of a layer that can be compensated."""
    if type(module) is SparseLinear:
        return module.layer.shape
    layer = as_layer(name or "", module)
    if isinstance(module, LowRank):
        raise InputError("it has a low-rank compensation already.", layer=name)
    if isinstance(layer, str) or layer.kind == "conv2d" or isinstance(module, PackedModule):
        raise InputError(
            f"a {type(module).__name__} cannot have a low-rank compensation.",
            layer=name,
            hint="Only linear layers can; leave it out.",
        )
    return layer.shape


def _put_on(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    kind: Any = type(module)
    module.__class__ = _class_for(kind)
    for side, parameter in zip(_SIDES, parameters, strict=True):
        module.register_parameter(side, parameter)


@cache
def _class_for(base: Any) -> Any:
    if base is SparseLinear:
        return LowRankLinear
    if base is nn.Linear:
        return LowRankDense
    # transformers' Conv1D, without importing transformers here.
    return type(f"LowRank{base.__name__}", (LowRank, base), {"__module__": __name__})
