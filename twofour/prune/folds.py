"""Channels of a model that may change their order together, and the change itself.

A *fold* is a set of tensors whose channels can be reordered without changing what the model computes: the
columns of the layers that read the channels, the rows (biases, norms, BatchNorm statistics) of whatever makes
them. Nothing is left to do at run time, which is why it is called folding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from twofour.select import Layer

#: See `twofour.prune.fold_candidates`.
Kind = Literal["chain", "heads", "residual"]


@dataclass(frozen=True)
class Constraint:
    """Which permutations of `size` channels are allowed: any, or only within blocks of `block` neighbours."""

    size: int
    block: int | None = None

    def random(self, generator: torch.Generator) -> Tensor:
        block = self.block or self.size
        inside = torch.rand(self.size // block, block, generator=generator).argsort(1)
        return (inside + torch.arange(0, self.size, block)[:, None]).reshape(-1)


@dataclass(frozen=True, eq=False)
class Site:
    """One tensor that a permutation reorders: `channels` [copies, size] is where along `dim` each one is.

    There is more than one copy where several parts of a tensor have the same channels: the query heads of
    one key-value head, or gate and up in one fused weight.
    """

    module: nn.Module
    tensor: str
    dim: int
    channels: Tensor

    def places(self, permutation: Tensor) -> Tensor:
        """Along `dim`, which old place each new one is taken from."""
        index = torch.arange(getattr(self.module, self.tensor).shape[self.dim])
        for copy in self.channels:
            index[copy] = copy[permutation]
        return index

    def permute(self, permutation: Tensor) -> None:
        tensor = getattr(self.module, self.tensor)
        # Into the same memory: what is tied stays tied, and what is on a GPU stays there.
        with torch.no_grad():
            tensor.copy_(tensor.index_select(self.dim, self.places(permutation).to(tensor.device)))


@dataclass(frozen=True, eq=False)
class Fold:
    """Channels that may change their order.

    `consumers` are the layers to prune that read them: their columns are what 2:4 groups. `reads` are the
    columns of all layers that read them, by name; others (a router, an output head) have to follow too.
    """

    kind: Kind
    consumers: tuple[Layer, ...]
    producers: tuple[str, ...]
    constraint: Constraint
    sites: tuple[Site, ...]
    reads: Mapping[str, Site]

    @property
    def name(self) -> str:
        return "residual stream" if self.kind == "residual" else self.consumers[0].name


def apply(fold: Fold, permutation: Tensor) -> None:
    """Reorder the channels of a fold in place: new channel j is the old channel `permutation[j]`."""
    done: set[tuple[int, int]] = set()
    for site in fold.sites:
        # Tied weights are one tensor with two names, and must move once.
        tensor = id(getattr(site.module, site.tensor))
        if (tensor, site.dim) not in done:
            done.add((tensor, site.dim))
            site.permute(permutation.cpu())
