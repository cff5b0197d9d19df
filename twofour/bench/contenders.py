"""Ways to compute a product with a 2:4 weight of 16 bits: dense, ours, and PyTorch's own.

A contender gets the weights that the run has made, several so that they do not stay in the L2, and makes a
callable of each. quantized_contenders.py has those for weights of 8 and 4 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.packed import packed_shapes

Product = Callable[[Tensor], Tensor]

#: The weights and a bias or None; gives one product for each weight. A weight is a dense 2:4 matrix, or, for
#: contenders of quantized products, a `Packed24` of codes. Unpruned ones get what that was before pruning, a
#: full matrix or `Halves` of codes.
Factory = Callable[[list[Any], Tensor | None], Sequence[Product]]


def dense_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    return rows * columns * dtype.itemsize


def packed_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    (_, kept), (_, meta) = packed_shapes(rows, columns)
    return rows * (kept * dtype.itemsize + meta)


@dataclass(frozen=True)
class Contender:
    """A way to compute the product. A plain factory is taken for one that holds W as 2:4 in x's dtype."""

    make: Factory
    weight_bytes: Callable[[int, int, torch.dtype], float] = packed_bytes  # of rows, columns, x's dtype
    work: float = 0.5  # multiplications for each one of a dense product in x's dtype; fp8 counts half
    most_tokens: int | None = None  # beyond these it is left out: what nobody would run takes long to time
    scaled: bool = True  # False: its outputs lack the scales of the operands, so they are not compared
    unpruned: bool = False  # it gets the weights as they were before pruning


def _dense(weights: list[Tensor], bias: Tensor | None) -> list[Product]:
    return [partial(F.linear, weight=weight, bias=bias) for weight in weights]


def _twofour(weights: list[Tensor], bias: Tensor | None, memory: Any = "auto") -> list[Product]:
    from twofour.nn import SparseLinear

    made: list[Product] = []
    for weight in weights:
        rows, columns = weight.shape
        linear = nn.Linear(columns, rows, bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        made.append(SparseLinear.from_dense(linear, memory=memory).eval())
    return made


def _forced(backend: str, memory: Any, weights: list[Tensor], bias: Tensor | None) -> list[Product]:
    """One backend, whatever was measured fastest."""
    from twofour.kernels import dispatch

    def forced(layer: Product, x: Tensor) -> Tensor:
        with dispatch.force(backend):
            return layer(x)

    return [partial(forced, layer) for layer in _twofour(weights, bias, memory)]


def _torch24(weights: list[Tensor], bias: Tensor | None) -> list[Product]:
    # What to_sparse_semi_structured calls, with the backend named: the CUTLASS one refuses Hopper.
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Sparse

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in prototype stage"
        return [partial(F.linear, weight=Sparse.from_dense(weight), bias=bias) for weight in weights]


CONTENDERS: dict[str, Contender | Factory] = {
    "dense": Contender(_dense, dense_bytes, work=1.0, unpruned=True),
    "twofour": Contender(_twofour),  # what was measured fastest, for each number of tokens
    "torch24": Contender(_torch24),
}


#: Further ones where there is a GPU: every backend by itself, in its best configuration.
GPU_CONTENDERS: dict[str, Contender | Factory] = {
    "hopper": Contender(partial(_forced, "hopper", "auto")),
    "ampere": Contender(partial(_forced, "ampere", "small"), most_tokens=64),
    "cusparselt": Contender(partial(_forced, "cusparselt", "fast")),
}
