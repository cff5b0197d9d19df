"""Instructions of Hopper for emulations of kernels, by what the PTX manual says of them.

The tensor copy engine with its swizzles, and sparse wgmma with A in registers.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.test_quantized_decode import halves


@dataclass(frozen=True)
class Map:
    """A matrix as the copy engine is told of it, dimensions fastest first."""

    element: int  # bytes
    address: int
    sizes: list[int]
    strides: list[int]  # bytes, that of the first dimension left out
    box: list[int]
    swizzle: int  # 0, or 1 to 3: 32, 64 or 128 bytes

    def __post_init__(self) -> None:
        assert self.address % 16 == 0
        assert all(stride % 16 == 0 for stride in self.strides)
        assert all(0 < side <= 256 for side in self.box)
        assert self.swizzle == 0 or self.box[0] * self.element <= 16 << self.swizzle

    @property
    def box_bytes(self) -> int:
        return self.element * torch.Size(self.box).numel()

    def copy(self, memory: Tensor, to: int, *first: int) -> None:
        """A box, from element `first` of every dimension on, to an address of shared memory."""
        assert to % 128 == 0
        inside, source = torch.tensor(True), torch.tensor(0)
        for size, stride, side, begin in zip(
            self.sizes, [self.element, *self.strides], self.box, first, strict=True
        ):
            at = torch.arange(begin, begin + side)
            inside = inside & ((at >= 0) & (at < size)).view(-1, *[1] * inside.dim())
            source = source + (at * stride).view(-1, *[1] * source.dim())
        at = (source.flatten()[:, None] + torch.arange(self.element)).flatten()
        there = inside.flatten().repeat_interleave(self.element)
        box = torch.zeros(len(at), dtype=torch.uint8)
        if bool(there.any()):
            matrix = ctypes.string_at(self.address, int(at[there].max()) + 1)
            box[there] = torch.frombuffer(bytearray(matrix), dtype=torch.uint8)[at[there]]
        memory[swizzled(to + torch.arange(len(at)), self.swizzle)] = box


def swizzled(address: Tensor, swizzle: int) -> Tensor:
    """32 bytes: bit 4 of an address is turned by bit 7; 64: 4 and 5 by 7 and 8; 128: 4 to 6 by 7 to 9."""
    return address ^ (address >> 7 & (1 << swizzle) - 1) << 4


def wgmma_sp(memory: Tensor, a: Tensor, b: int, places: Tensor, selector: int, tokens: int, dtype) -> Tensor:
    """m64nNk32 of every warp: [warp, lane, sum] from registers a [warp, lane, 4] and words of positions.

    `b` describes 32 columns of x, of all tokens, in shared memory.
    """
    # Registers 0 and 1: group lane % 4 of rows lane / 4 and the 8th after; 2 and 3: the group 4 further on.
    numbers = halves(a, dtype).view(-1, 8, 4, 2, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(-1, 16, 8, 2)
    # Lanes 2s and 2s + 1 of a quad have the groups 0-3 and 4-7, the low half those of row lane / 4.
    row, group = torch.arange(16)[:, None], torch.arange(8)
    word = places[:, row % 8 * 4 + 2 * selector + group // 4]
    nibble = word >> (16 * (row // 8) + 4 * (group % 4)) & 15
    first, second = nibble & 3, nibble >> 2
    # Beyond the edges positions are filled with zeros, as the numbers are.
    assert bool(((first < second) | (numbers == 0).all(-1)).all()), "not a valid pair of positions"
    # Rows of 128 bytes under the 128-byte swizzle, the next eight so far away as the descriptor says.
    assert b >> 62 == 1
    address, eights = (b & 0x3FFF) << 4, (b >> 32 & 0x3FFF) << 4
    token, column = torch.arange(tokens), torch.arange(32)[:, None]
    at = swizzled(address + token // 8 * eights + token % 8 * 128 + 2 * column, 3)
    x = memory.view(torch.int16)[at // 2].view(dtype).double()
    kept = x[4 * group[:, None] + torch.stack([first, second], -1)]  # [warp, row, group, which, token]
    sums = (numbers[..., None] * kept).sum((2, 3))
    lane, j = torch.arange(32)[:, None], torch.arange(tokens // 2)
    return sums[:, lane // 4 + 8 * (j % 4 // 2), 8 * (j // 4) + 2 * (lane % 4) + j % 2]
