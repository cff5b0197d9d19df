"""Hopper: the kernels of cuda/*_sm90.cu, which read the packed tensors as they lie in memory.

`Decode` is for few tokens, `Prefill` for many; `Decode8` and `Prefill8` are for operands that are both codes
of 8 bits, `Decode4` is for weights of 4 bits. Each describes how its kernel is compiled. The row pitch of
positions must be a multiple of 16 bytes for the copy engine, so k must be a multiple of 128. Nothing is
repacked, but weights of 4 bits have an order of their own (streamed.py). hopper_launch.py has what is kept
per layer, hopper_source.py makes their sources, hopper_choices.py says which are worth a try.

Both can end with a gated activation: for a weight of two matrices, gate above beside,
y = activate(x·gateᵀ) * (x·besideᵀ).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch

SHARED_BYTES = 227 << 10  # that a block may have
RESERVED = 1 << 10  # bytes that a multiprocessor keeps back for each block, beside these
BARRIERS = 512  # bytes of shared memory that are not tiles, at most


class Shares(NamedTuple):
    """How the units of work of a product are shared out among the blocks."""

    blocks: int
    whole: int = 0  # units that are not cut
    parts: int = 1  # along the columns, of each of the others
    part_bytes: int = 0  # of memory for the parts' sums


@dataclass(frozen=True)
class Decode:
    """Few tokens: tokens a tile has room for, warpgroups of 64 rows a block, blocks that share a row block's
    columns, columns a tile, tiles in flight, row blocks that are worked on together."""

    tokens: int
    warpgroups: int
    split: int
    step: int
    stages: int
    grouped: int = 16

    kernel: ClassVar[str] = "decode"
    source: ClassVar[str] = "decode"
    value_bytes: ClassVar[int] = 128  # of a row, that one copy fetches

    @property
    def height(self) -> int:
        """Blocks of 64 rows that a block of threads has."""
        return self.warpgroups

    @property
    def tall(self) -> int:
        """Those that a warpgroup has, at most."""
        return -(-self.height // self.warpgroups)

    @property
    def shared_bytes(self) -> int:
        sums = 64 * self.warpgroups * self.tall * self.tokens * 4 if self.split > 1 else 0
        return self.stages * self.stage_bytes + sums + 1024  # alignment

    @property
    def stage_bytes(self) -> int:
        return 64 * self.warpgroups * (self.step + self.step // 8) + 2 * self.step * self.tokens

    @property
    def threads(self) -> int:
        """Those that multiply, and a warp that copies."""
        return 128 * self.warpgroups + 32

    @property
    def registers(self) -> int:
        """That a thread needs: its sums, and what it works with."""
        return self.tokens // 2 + 48

    @property
    def cluster(self) -> int:
        return self.split

    @property
    def x_box(self) -> int:
        """Tokens that one copy fetches."""
        return self.tokens

    @property
    def gates(self) -> bool:
        """Whether a thread ends with both sums of a gated output."""
        return (self.tokens // 2 // self.split) % 4 == 0

    @property
    def position_bytes(self) -> int:
        """Of a row, that one copy fetches."""
        return self.step // 8

    def row_units(self, rows: int) -> int:
        return -(-rows // (64 * self.height))

    def share_out(self, units: int, steps: int, resident: int) -> Shares:
        return Shares(units * self.split)


@dataclass(frozen=True)
class Decode8(Decode):
    """Few tokens, both operands of 8 bits: a tile of as many bytes has twice the columns."""

    kernel: ClassVar[str] = "decode8"

    @property
    def stage_bytes(self) -> int:
        return 64 * self.warpgroups * (self.step // 2 + self.step // 8) + self.step * self.tokens

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + 4 * self.tokens  # their scales


@dataclass(frozen=True)
class Decode4(Decode):
    """Few tokens of 16 bits, weights of 4: teams of warpgroups, which take tiles in turns, and tiles of x in
    flight, beside those of the weight."""

    teams: int = 1
    x_stages: int = 2
    blocks: int = 0  # of 64 rows; 0: one for each warpgroup

    kernel: ClassVar[str] = "decode4"
    source: ClassVar[str] = "decode4"

    @property
    def height(self) -> int:
        return self.blocks or self.warpgroups

    @property
    def stage_bytes(self) -> int:
        """Codes, positions and scales of 64 rows and 128 columns are 3200."""
        return 3200 * self.height * (self.step // 128)

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + self.x_stages * 2 * self.step * self.tokens

    @property
    def threads(self) -> int:
        """A copying warp for every warpgroup of a team, or for two, and one for x."""
        copying = 2 if self.warpgroups > 3 and self.tall > 1 else self.warpgroups
        return 128 * self.warpgroups * self.teams + 32 * copying + 32

    @property
    def registers(self) -> int:
        return 64 + self.tall * self.tokens // 2

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has memory and registers for: the compiler is told."""
        by_memory = (SHARED_BYTES + RESERVED) // (self.shared_bytes + RESERVED + BARRIERS)
        # A quarter of the registers for every fourth warp, eight of them at a time.
        warps = 4 * (16384 // (32 * -(-self.registers // 8) * 8))
        return min(by_memory, warps // (self.threads // 32))

    @property
    def gates(self) -> bool:
        """Every second warpgroup has rows of the matrix beside the gate, or each has both."""
        in_one = self.height == 2 * self.warpgroups and self.split == 1
        return in_one or (self.tall == 1 and self.warpgroups % 2 == 0 and self.tokens // 4 % self.split == 0)


@dataclass(frozen=True)
class Prefill:
    """Many tokens: tokens a tile, warpgroups of 64 rows a block, blocks that share x, row blocks together."""

    tokens: int
    warpgroups: int = 2
    cluster: int = 2
    grouped: int = 8

    kernel: ClassVar[str] = "prefill"
    source: ClassVar[str] = "prefill"
    value_bytes: ClassVar[int] = 128
    step: ClassVar[int] = 128  # columns a tile of the weight
    position_bytes: ClassVar[int] = 32
    e_stages: ClassVar[int] = 2
    gates: ClassVar[bool] = True

    @property
    def threads(self) -> int:
        """The copying warp is one of four where there are registers to be had from the others."""
        return 128 * self.warpgroups + (128 if self.warpgroups < 3 else 32)

    @property
    def a_stages(self) -> int:
        return 3 if self.tokens > 192 or self.warpgroups > 2 else 4

    @property
    def b_stages(self) -> int:
        left = SHARED_BYTES - 1024 - BARRIERS - self._weight_bytes
        return min(left // (128 * self.tokens), 10)

    @property
    def shared_bytes(self) -> int:
        return self._weight_bytes + self.b_stages * 128 * self.tokens + 1024

    @property
    def _weight_bytes(self) -> int:
        return 64 * self.warpgroups * (self.a_stages * 128 + self.e_stages * self.position_bytes)

    @property
    def leaving(self) -> int:
        """Tokens whose sums leave together (cuda/tiles_sm90.cuh)."""
        return 32 if self.warpgroups > 2 else self.tokens // 2

    @property
    def x_box(self) -> int:
        return self.tokens // self.cluster

    def row_units(self, rows: int) -> int:
        return -(-rows // (64 * self.warpgroups * self.cluster))

    def share_out(self, units: int, steps: int, resident: int) -> Shares:
        """Every cluster takes a unit a round. Those left for the last round are cut if they are few."""
        left = units % resident
        may_cut = left and self.warpgroups < 3  # as in cuda/tiles_sm90.cuh
        together = 8 * self.position_bytes // self.step  # steps whose positions are not parted
        most = min(resident // left, -(-steps // together)) if may_cut else 1
        parts = min(range(1, most + 1), key=lambda parts: round_of_parts(parts, steps))
        if parts == 1:
            return Shares(min(units, resident) * self.cluster, units)
        clusters = resident if units > resident else left * parts
        block_bytes = self.warpgroups * (32 + 256 * self.tokens)  # as in cuda/tiles_sm90.cuh
        return Shares(
            clusters * self.cluster, units - left, parts, left * (parts - 1) * self.cluster * block_bytes
        )


@dataclass(frozen=True)
class Prefill8(Prefill):
    """Many tokens, both operands of 8 bits."""

    kernel: ClassVar[str] = "prefill8"
    source: ClassVar[str] = "prefill8"
    value_bytes: ClassVar[int] = 64
    position_bytes: ClassVar[int] = 64

    @property
    def threads(self) -> int:
        """The copying warp is one of four, so that the others can have the registers of a whole warpgroup."""
        return 128 * self.warpgroups + 128

    @property
    def at_once(self) -> int:
        """Tokens of one instruction, whose sums must fit the registers that a thread begins with."""
        return self.tokens // 2 if self.warpgroups > 2 and self.tokens > 192 else self.tokens

    @property
    def stages(self) -> int:
        beside = 1024 + BARRIERS + 4 * self.tokens * self.warpgroups  # scales of tokens
        return min((SHARED_BYTES - beside - self._position_ring) // self.stage_bytes, 10)

    @property
    def stage_bytes(self) -> int:
        return 64 * 64 * self.warpgroups + 128 * self.tokens

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self._position_ring + 1024

    @property
    def _position_ring(self) -> int:
        return 64 * self.warpgroups * self.e_stages * self.position_bytes


def round_of_parts(parts: int, steps: float) -> float:
    """The time of a round of units that are cut, as a share of that of whole ones.

    To gather a unit's sums takes about four steps' time for each part of it.
    """
    return 1 / parts + (4 * parts / steps if parts > 1 else 0)


Config = Decode | Prefill


def as_dict(config: Config) -> dict[str, Any]:
    return {"kernel": config.kernel, **asdict(config)}


def from_dict(options: dict[str, Any]) -> Config:
    kinds = {kind.kernel: kind for kind in (Decode, Decode8, Decode4, Prefill, Prefill8)}
    kind = kinds[options.get("kernel", "decode")]
    return kind(**{name: value for name, value in options.items() if name != "kernel"})


def why_not(device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """The reason why this backend cannot run a layer, None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it is written for compute capability 9.0 (Hopper)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it multiplies float16 and bfloat16, not {dtype}"
    if k % 128:
        return f"it needs a multiple of 128 columns, not {k}"
    return None
