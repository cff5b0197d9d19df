# Triton reads annotations in its own way, and is there only where there is a GPU.
# mypy: disable-error-code="no-untyped-def,import-not-found"
"""SparseGPT's sweep over one panel of columns as one launch: a Triton kernel for GPUs.

Within a panel no row looks at another: given the factor, each row goes through its groups by itself. So a
program takes a few rows, holds their panel in registers, and does all the groups in one go, where plain
operations on the whole matrix would be several launches for every four columns. The arithmetic is that of
`sparsegpt.sweep_panel`, which is the reference; sums are in another order, so results agree up to rounding.

Registers cannot be indexed by a number that is only known at run time. To take a column out of the panel,
all others are set to zero and the row is summed up, which is exact. With 128 columns to a panel every lane of
a warp holds one group, and such a sum is a few shuffles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Rows that a program works on. More would share the reads of the factor, fewer leave more programs to hide
#: latency behind; all of that is small beside the large product that follows.
ROWS = 8


@triton.jit
def _sweep(
    weight,  # [rows, stride], the panel starts at its pointer
    errors,  # [rows, width]
    factor,  # [k, factor_stride], the panel's block on the diagonal starts at its pointer
    removal,  # [groups, 6, 4, 2], the panel's first group starts at its pointer
    rows,
    stride,
    factor_stride,
    width: tl.constexpr,  # of the panel: the same for all but a matrix's last
    WIDTH: tl.constexpr,  # that, rounded up to a power of two
    ROWS: tl.constexpr,
    JOINTLY: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * stride + column[None, :]
    panel = tl.load(weight + place, mask=inside, other=0.0)
    error = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for left in range(0, width, 4):
        w0 = tl.sum(tl.where(column[None, :] == left, panel, 0.0), axis=1)
        w1 = tl.sum(tl.where(column[None, :] == left + 1, panel, 0.0), axis=1)
        w2 = tl.sum(tl.where(column[None, :] == left + 2, panel, 0.0), axis=1)
        w3 = tl.sum(tl.where(column[None, :] == left + 3, panel, 0.0), axis=1)
        if not JOINTLY:
            diagonal = factor + left * (factor_stride + 1)
            s0, s1 = w0 / tl.load(diagonal), w1 / tl.load(diagonal + factor_stride + 1)
            s2 = w2 / tl.load(diagonal + 2 * (factor_stride + 1))
            s3 = w3 / tl.load(diagonal + 3 * (factor_stride + 1))
            s0, s1, s2, s3 = s0 * s0, s1 * s1, s2 * s2, s3 * s3
            # How many of the others are kept before this one; of equals the one further left is.
            b0 = (s1 > s0).to(tl.int32) + (s2 > s0).to(tl.int32) + (s3 > s0).to(tl.int32)
            b1 = (s0 >= s1).to(tl.int32) + (s2 > s1).to(tl.int32) + (s3 > s1).to(tl.int32)
            b2 = (s0 >= s2).to(tl.int32) + (s1 >= s2).to(tl.int32) + (s3 > s2).to(tl.int32)
            b3 = (s0 >= s3).to(tl.int32) + (s1 >= s3).to(tl.int32) + (s2 >= s3).to(tl.int32)
        best = tl.full((ROWS,), float("inf"), dtype=tl.float32)
        e0 = tl.zeros((ROWS,), dtype=tl.float32)
        e1 = tl.zeros((ROWS,), dtype=tl.float32)
        e2 = tl.zeros((ROWS,), dtype=tl.float32)
        e3 = tl.zeros((ROWS,), dtype=tl.float32)
        gone = tl.zeros((ROWS,), dtype=tl.int32)  # a bit for each removed column
        for p in tl.static_range(6):
            # sparsegpt.PAIRS: (2, 3), (1, 3), (1, 2), (0, 3), (0, 2), (0, 1)
            a = 2 if p == 0 else (1 if p < 3 else 0)
            b = 1 if p == 5 else (2 if (p == 2 or p == 4) else 3)
            wa = w2 if p == 0 else (w1 if p < 3 else w0)
            wb = w1 if p == 5 else (w2 if (p == 2 or p == 4) else w3)
            m = removal + left * 12 + p * 8  # 48 numbers to a group of four columns
            c0 = tl.load(m) * wa + tl.load(m + 1) * wb
            c1 = tl.load(m + 2) * wa + tl.load(m + 3) * wb
            c2 = tl.load(m + 4) * wa + tl.load(m + 5) * wb
            c3 = tl.load(m + 6) * wa + tl.load(m + 7) * wb
            if JOINTLY:
                cost = c0 * c0 + c1 * c1 + c2 * c2 + c3 * c3
                take = cost < best
                best = tl.where(take, cost, best)
            else:
                ba = b2 if p == 0 else (b1 if p < 3 else b0)
                bb = b1 if p == 5 else (b2 if (p == 2 or p == 4) else b3)
                take = (ba >= 2) & (bb >= 2)
            e0 = tl.where(take, c0, e0)
            e1 = tl.where(take, c1, e1)
            e2 = tl.where(take, c2, e2)
            e3 = tl.where(take, c3, e3)
            gone = tl.where(take, (1 << a) + (1 << b), gone)
        right = (column >= left) & (column < width)
        line = factor + left * factor_stride + column
        panel -= e0[:, None] * tl.load(line, mask=right, other=0.0)[None, :]
        panel -= e1[:, None] * tl.load(line + factor_stride, mask=right, other=0.0)[None, :]
        panel -= e2[:, None] * tl.load(line + 2 * factor_stride, mask=right, other=0.0)[None, :]
        panel -= e3[:, None] * tl.load(line + 3 * factor_stride, mask=right, other=0.0)[None, :]
        offset = column - left
        here = (offset >= 0) & (offset < 4)
        bit = tl.where(here, 1 << tl.where(here, offset, 0), 0)
        panel = tl.where((gone[:, None] & bit[None, :]) != 0, 0.0, panel)  # zero already, up to rounding
        error = tl.where((offset == 0)[None, :], e0[:, None], error)
        error = tl.where((offset == 1)[None, :], e1[:, None], error)
        error = tl.where((offset == 2)[None, :], e2[:, None], error)
        error = tl.where((offset == 3)[None, :], e3[:, None], error)
    tl.store(weight + place, panel, mask=inside)
    tl.store(errors + row.to(tl.int64)[:, None] * width + column[None, :], error, mask=inside)


def sweep_panel(weight: Tensor, factor: Tensor, removal: Tensor, jointly: bool) -> Tensor:
    """What `sparsegpt.sweep_panel` does, on tensors of a GPU."""
    rows, width = weight.shape
    errors = weight.new_empty(rows, width)
    with torch.cuda.device_of(weight):
        _sweep[(triton.cdiv(rows, ROWS),)](
            *(weight, errors, factor, removal, rows, weight.stride(0), factor.stride(0)),
            width=width,
            WIDTH=triton.next_power_of_2(width),
            ROWS=ROWS,
            JOINTLY=jointly,
            num_warps=4,
        )
    return errors
