"""Random quantized 2:4 matrices, made in the packed form at once: how fast a product is does not depend on
what a model has learned, and rounding a matrix of 60 million weights well takes longer than timing it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twofour.packed import FOUR_BIT, Packed24, to_nibbles, unpack
from twofour.quantize.schemes import Scheme

#: Two positions of four, the lower in the low bits (see packed.py). In reverse: the two that are left.
_PAIRS = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)

#: Standard deviation of the codes: the largest ones of a few thousand then fill the range.
_SPREAD = {"int8": 32.0, "fp8": 112.0, "int4": 2.5}


def random_codes(
    rows: int, columns: int, scheme: Scheme, dtype: torch.dtype, random: torch.Generator
) -> Packed24:
    """Normal codes at random positions, with scales of `dtype` that keep the size of a product's input.

    `columns` must be a multiple of 4.
    """
    options: dict[str, Any] = {"device": random.device, "generator": random}
    values = _random_values(rows, columns, scheme, random)
    pairs = torch.tensor(_PAIRS, dtype=torch.uint8, device=random.device)
    places = pairs[torch.randint(6, (rows, columns // 4), dtype=torch.int32, **options)]
    meta, odd = places[:, 0::2].clone(), places[:, 1::2]
    meta[:, : odd.shape[1]] |= odd << 4
    width = scheme.scale_width(columns)
    mean = (2 / columns) ** 0.5 / _SPREAD[scheme.codes]
    scale = torch.rand(rows, width, **options).add_(0.5).mul_(mean)
    signs = torch.tensor(scheme.signs, device=random.device)
    scale *= signs[torch.randint(len(signs), scale.shape, **options)]
    scale = scheme.rounded_scale(scale, dtype).to(dtype)
    return Packed24(values, meta, columns, scale)


def _random_values(rows: int, columns: int, scheme: Scheme, random: torch.Generator) -> Tensor:
    scaled = torch.randn(rows, columns // 2, device=random.device, generator=random)
    codes = scheme.to_codes(scaled.mul_(_SPREAD[scheme.codes]))
    if scheme.stored == FOUR_BIT:
        return to_nibbles(codes.to(torch.int8))
    return codes.to(scheme.stored)


class Halves(NamedTuple):
    """A matrix of codes before it was pruned: what is kept and the rest, both 2:4, with the same scales."""

    kept: Packed24
    rest: Packed24

    @classmethod
    def around(cls, kept: Packed24, scheme: Scheme, random: torch.Generator) -> Halves:
        """With random codes at the positions that `kept` leaves."""
        values = _random_values(kept.shape[0], kept.columns, scheme, random)
        others = torch.zeros(16, dtype=torch.uint8)  # half a byte at the end of a row may be empty
        for pair, other in zip(_PAIRS, reversed(_PAIRS), strict=True):
            others[pair] = other
        both = (others[:, None] << 4 | others[None, :]).flatten().to(kept.meta.device)
        return cls(kept, Packed24(values, both[kept.meta.int()], kept.columns, kept.scale))

    def codes(self) -> Tensor:
        """[n, k] without scales; 4 bits as int8."""
        kept, rest = (unpack(half.values, half.meta, half.columns) for half in self)
        # Where one has a code, the bits of the other are all zero.
        return (kept.view(torch.uint8) | rest.view(torch.uint8)).view(kept.dtype)

    def unpack(self) -> Tensor:
        return self.kept.unpack() + self.rest.unpack()

    def exact_rows(self, rows: Tensor) -> Tensor:
        return exact_rows(self.kept, rows) + exact_rows(self.rest, rows)


def in_other_order(packed: Packed24, random: torch.Generator) -> Packed24:
    """The same rows in another order: as good as a new matrix, and cheaper."""
    order = torch.randperm(packed.shape[0], device=random.device, generator=random)
    assert packed.scale is not None
    # Indexing knows no fp8, so its bits move as integers.
    values = packed.values.view(torch.uint8)[order].view(packed.values.dtype)
    return Packed24(values, packed.meta[order], packed.columns, packed.scale[order])


def exact_rows(packed: Packed24, rows: Tensor) -> Tensor:
    """Some rows of the dequantized matrix in float64: code × scale, not rounded."""
    assert packed.scale is not None
    values = packed.values.view(torch.uint8)[rows].view(packed.values.dtype)
    return unpack(values, packed.meta[rows], packed.columns, packed.scale[rows], torch.float64)
