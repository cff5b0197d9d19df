"""The order in which the Hopper kernel for weights of 4 bits reads them: threads' order.

Of 64 rows and 128 columns each thread of a warpgroup finds what it needs in one piece, and what a block
copies is kilobytes in a row. The three packed tensors (packed.py) keep their bytes, `meta` changes its shape:

    values  [n, k/4]               as [n/64, k/128, 128, 16]: for a thread four words, of 32 columns each
    meta    [n/64, k/128, 128, 8]  for a thread two words, of 64 columns each
    scale   [n, k/128]             as [n/64, k/128, 32, 2]: for four threads those of their two rows

Thread 32w + 4r + q has columns 16j + 4q to 16j + 4q + 3 of rows 16w + r and 16w + r + 8. Bits 4i and 16 + 4i
of its word p have the left and the right code of row 16w + r + 8·(i % 2) and j = 2p + i / 2. Its positions
are those that `wgmma.sp` wants of it: word h has bytes 8h + 2q and 8h + 2q + 1 of either row.

Only in memory, and only where that kernel can run: files and state dicts have the packed tensors as they are.
It multiplies codes by scales in 16 bits, so these must be of a size that leaves room for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Columns that share a scale, and the rows and columns that go together.
GROUP, ROWS = 128, 64

Three = tuple[Tensor, Tensor, Tensor]


def is_streamed(meta: Tensor) -> bool:
    """Of a single matrix: with leading dimensions positions never lie so."""
    return meta.dim() == 4


def within_reach(scale: Tensor) -> bool:
    """Whether the kernel can multiply by such scales: not far beyond the size of any model's weights.

    In float16 a weight, up to 8 scales, must be a number; in bfloat16 see cuda/numbers.cuh.
    """
    size = scale.detach().abs().float()
    if scale.dtype == torch.float16:
        return bool((8 * size <= torch.finfo(torch.float16).max).all())
    return bool(((size < 2.0**55) & ((size >= 2.0**-66) | (size == 0))).all())


def stream(values: Tensor, meta: Tensor, scale: Tensor) -> Three:
    """Packed tensors of 4 bits in threads' order. There must be whole pieces of 64 rows and 128 columns.

    >>> values, meta = torch.randint(256, (64, 64)).byte(), torch.randint(256, (64, 32)).byte()
    >>> back = unstream(*stream(values, meta, torch.rand(64, 2)))
    >>> torch.equal(back[0], values) and torch.equal(back[1], meta)
    True
    """
    blocks, groups = values.shape[0] // ROWS, scale.shape[1]
    # row / 64, w, which of both rows, r, column / 128, p, j % 2, q
    codes = values.reshape(blocks, 4, 2, 8, groups, 4, 2, 4).permute(0, 4, 1, 3, 7, 5, 6, 2)
    above, below = codes.unbind(-1)
    words = torch.stack([above & 15 | below << 4, above >> 4 | below & 0xF0], dim=-2)  # left, right; j % 2
    # row / 64, w, which of both rows, r, column / 128, h, q, two bytes
    places = meta.reshape(blocks, 4, 2, 8, groups, 2, 4, 2).permute(0, 4, 1, 3, 6, 5, 2, 7)
    scales = scale.reshape(blocks, 4, 2, 8, groups).permute(0, 4, 1, 3, 2)
    return (
        words.reshape(values.shape),
        places.reshape(blocks, groups, 128, 8),
        scales.reshape(scale.shape),
    )


def unstream(values: Tensor, meta: Tensor, scale: Tensor) -> Three:
    """The packed tensors again as files have them."""
    blocks, groups = meta.shape[:2]
    left, right = values.reshape(blocks, groups, 4, 8, 4, 4, 2, 2).unbind(-2)
    codes = torch.stack([left & 15 | right << 4, left >> 4 | right & 0xF0], dim=-1)
    # row / 64, column / 128, w, r, q, p, j % 2, which of both rows
    codes = codes.permute(0, 2, 7, 3, 1, 5, 6, 4)
    places = meta.reshape(blocks, groups, 4, 8, 4, 2, 2, 2).permute(0, 2, 6, 3, 1, 5, 4, 7)
    scales = scale.reshape(blocks, groups, 4, 8, 2).permute(0, 2, 4, 3, 1)
    return (
        codes.reshape(values.shape),
        places.reshape(ROWS * blocks, GROUP // 8 * groups),
        scales.reshape(scale.shape),
    )
