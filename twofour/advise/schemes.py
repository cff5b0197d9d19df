"""How a weight can be stored and multiplied: dense or 2:4, in 16, 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

#: Weights that share a 16-bit scale where there are 4 bits each.
GROUP = 128


@dataclass(frozen=True)
class Scheme:
    name: str
    value_bits: int  # of a kept weight
    sparse: bool
    arithmetic: str  # what the Tensor Cores multiply: "16bit", "fp8" or "int8"
    measured: bool  # on an H200; the others follow from bytes and the ratio of the ceilings

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


DENSE = Scheme("dense", 16, False, "16bit", True)
SPARSE = Scheme("2:4", 16, True, "16bit", True)

#: What can be done instead or on top. int4 is weight-only: it is multiplied in 16 bit.
ALTERNATIVES: tuple[Scheme, ...] = (
    Scheme("dense fp8", 8, False, "fp8", False),
    Scheme("dense int8", 8, False, "int8", False),
    Scheme("dense int4", 4, False, "16bit", False),
    Scheme("2:4 fp8", 8, True, "fp8", False),
    Scheme("2:4 int8", 8, True, "int8", False),
    Scheme("2:4 int4", 4, True, "16bit", False),
)

SCHEMES: tuple[Scheme, ...] = (DENSE, SPARSE, *ALTERNATIVES)
