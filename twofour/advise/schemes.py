"""How a weight can be stored and multiplied: dense or 2:4, in 16, 8 or 4 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Weights that share a 16-bit scale where there are 4 bits each.
GROUP = 128

#: Tokens of a tile in a library that has one for every number of them.
TILE_TOKENS = (8, 16, 32, 64, 96, 128, 192, 256)

#: Torch's kernel for 4 bits (`_weight_int4pack_mm`) has none larger and decodes the weight anew for each: its
#: time is proportional to the tokens from 16 on. Below 8 it still grows with them.
INT4_TILE_TOKENS = (1, 8)

#: Above so many nobody would call it: decoding the weight to 16 bit before the product is faster by far.
INT4_MOST_TOKENS = 512

#: Our own 2:4 int4 has tiles of so many, and above so many in all does just that (`widen` in
#: kernels/dispatch_codes.py).
SPARSE_INT4_TILE_TOKENS, SPARSE_INT4_MOST_TOKENS = (8, 16, 32, 64), 256


@dataclass(frozen=True)
class Scheme:
    name: str
    value_bits: int  # of a kept weight
    sparse: bool
    arithmetic: str  # what the Tensor Cores multiply: "16bit", "fp8" or "int8"
    tile_tokens: tuple[int, ...] = TILE_TOKENS
    most_tokens: float = math.inf  # of its kernel; with more the weight is decoded to 16 bit first

    @property
    def in_16_bit(self) -> Scheme:
        """Whose curve stands in where this one was not measured."""
        return SPARSE if self.sparse else DENSE

    @property
    def activation_bytes(self) -> int:
        """Of one input; outputs are 16 bit always."""
        return 2 if self.arithmetic == "16bit" else 1

    def weight_bytes(self, rows: int, columns: int) -> float:
        """Of the weight as it lies in memory, with its positions and scales."""
        kept = columns / 2 if self.sparse else columns
        positions = -(-columns // 8) if self.sparse else 0
        scales = 0.0 if self.value_bits == 16 else 2.0 * (columns / GROUP if self.value_bits == 4 else 1)
        return rows * (kept * self.value_bits / 8 + positions + scales)


DENSE = Scheme("dense", 16, False, "16bit")
SPARSE = Scheme("2:4", 16, True, "16bit")

#: What can be done instead or on top. int4 is weight-only: it is multiplied in 16 bit.
ALTERNATIVES: tuple[Scheme, ...] = (
    Scheme("dense fp8", 8, False, "fp8"),
    Scheme("dense int8", 8, False, "int8"),
    Scheme("dense int4", 4, False, "16bit", INT4_TILE_TOKENS, INT4_MOST_TOKENS),
    Scheme("2:4 fp8", 8, True, "fp8"),
    Scheme("2:4 int8", 8, True, "int8"),
    Scheme("2:4 int4", 4, True, "16bit", SPARSE_INT4_TILE_TOKENS, SPARSE_INT4_MOST_TOKENS),
)

SCHEMES: tuple[Scheme, ...] = (DENSE, SPARSE, *ALTERNATIVES)
