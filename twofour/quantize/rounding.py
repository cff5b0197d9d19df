"""Rounding the weights of a 2:4 matrix to codes, three ways.

    nearest       each weight to the nearest code. The scale of a row or group is the one, of a grid downwards
                  from what the largest weight needs, that makes the least error: with integers, clipping a
                  few large weights is often better than coarse codes for all. In int4 each is tried with
                  both signs, for there is a code -8 and no 8. An fp8 code is as exact,
                  relative to itself, at any scale, so there the grid ends where clipping would begin.
    compensated   left to right, each column's rounding error is made up for by the columns still to come, as
                  SparseGPT does for removed weights (GPTQ, arXiv 2210.17323). Then codes, and scales, go back
                  and forth in descent: each in turn gets the best value while all others stay.
    joint         the same sweep on a dense matrix: of each group of four it first removes the cheapest pair,
                  knowing what the rounding so far has cost.

What is minimised is the error of the layer's outputs, tr(D·G·Dᵀ) with G the mean of x·xᵀ (see
prune/hessian.py) and D the change of the weights; without inputs, the plain sum of squares.

Only kept weights have codes. A pruned weight may become nonzero on the way (columns before it push their
error there too), but when its turn comes it is zero again and pushes that on. So the pattern cannot break.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.packed import FOUR_BIT, Packed24, pack, to_nibbles
from twofour.pattern import CHUNK, check_pattern, require_finite
from twofour.prune.hessian import require_inputs
from twofour.prune.sparsegpt import PAIRS, SparseGPT, factors, spread_removal
from twofour.quantize.schemes import Scheme

Rounding = Literal["nearest", "compensated", "joint"]

#: What the scale by the largest weight is multiplied with, to find a better one. The first of equals wins.
#: Down to half: for fp8 that is all there is, for at half the scale codes differ in their exponents only.
SHRINK = tuple(1 - 0.025 * step for step in range(21))

#: Columns that are finished before the rest of the matrix is updated; a multiple of every group.
BLOCK = 128

#: As a share of the mean diagonal, added to the diagonal of G: no trust in what the text hardly visited.
DAMPING = 0.01

#: Rounds of descent. Most is won in the first, and it ends by itself when no code changes.
ROUNDS = 4


@dataclass(frozen=True)
class Quantized:
    """A rounded matrix: `codes` [n, k], int or fp8 numbers in float32; `scale` [n, 1] or [n, ⌈k/group⌉]."""

    codes: Tensor
    scale: Tensor
    scheme: Scheme

    def weight(self) -> Tensor:
        """What the codes stand for, float32 and exact."""
        return self.codes * per_column(self.scale, self.scheme, self.codes.shape[1])

    def packed(self, layer: str | None = None, dtype: torch.dtype = torch.bfloat16) -> Packed24:
        """In the packed form, with scales of `dtype`. A matrix that is not 2:4 is an error here, too."""
        stored = self.scheme.stored
        packed = pack(self.codes.to(torch.int8 if stored == FOUR_BIT else stored), layer)
        values = to_nibbles(packed.values) if stored == FOUR_BIT else packed.values
        return Packed24(values, packed.meta, packed.columns, self.scale.to(dtype))


def quantize_matrix(
    matrix: Tensor,
    scheme: Scheme,
    rounding: Rounding = "nearest",
    inputs: Gram | None = None,
    layer: str | None = None,
    dtype: torch.dtype | None = None,
    target: Tensor | None = None,
) -> Quantized:
    """Round a matrix [n, k], which must be 2:4 unless the rounding prunes it.

    `dtype` is that of the layer, if the matrix is not in it. `target`, for compensated and joint rounding, is
    what the codes should be near to instead of the matrix, whose mask they keep (see quantize/blocks.py).

    >>> from twofour.quantize.schemes import SCHEMES
    >>> quantize_matrix(torch.tensor([[0.0, 12.7, 0.0, -0.5]]), SCHEMES["int8"]).codes
    tensor([[  0., 127.,   0.,  -5.]])
    """
    if rounding not in get_args(Rounding):
        raise InputError(
            f"there is no rounding {rounding!r}.", hint=f"Choose one of: {', '.join(get_args(Rounding))}."
        )
    weight, dtype = matrix.detach().float(), dtype or matrix.dtype
    if rounding == "joint":
        require_finite(matrix, layer)
    else:
        require_two_four(matrix.detach(), layer)
    if rounding == "nearest":
        importance = None
        if inputs is not None:
            importance = require_inputs(rounding, matrix, layer, inputs).mean.diagonal().to(weight.device)
        codes, scale = nearest(weight, scheme, dtype, importance)
        return Quantized(codes, scale, scheme)
    known = require_inputs(f"{rounding} rounding", matrix, layer, inputs)
    mask = weight != 0
    weight = weight if target is None else target.float()
    start = weight * mask
    if rounding == "joint":
        # Its kept weights, already grown to make up for the removed ones, are what the scales must fit.
        start = SparseGPT(damping=DAMPING).prune(weight, layer, known)
        mask = start != 0
    codes, scale, mask = _sweep(weight, start, mask, scheme, dtype, known, rounding == "joint", layer)
    _descend(codes, scale, weight, mask, scheme, dtype, known.mean.to(weight.device))
    return Quantized(codes, scale, scheme)


def per_column(scale: Tensor, scheme: Scheme, columns: int) -> Tensor:
    """A scale for every column, or one for all: [n, k] or [n, 1]."""
    if scheme.group is None:
        return scale
    # By index: of repeated scales that are cut, torch's compiler for CPUs reads what lies behind them.
    return scale.index_select(1, torch.arange(columns, device=scale.device) // scheme.group)


def nearest(
    weight: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales with the least error, each column's counted by its importance [k]."""
    rows, columns = weight.shape
    width = scheme.scale_width(columns)
    codes, scale = torch.empty_like(weight), weight.new_ones(rows, width)
    step = max(1, CHUNK // max(columns, 1))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        scale[part] = search_scale(weight[part], scheme, dtype, importance)
        codes[part] = scheme.to_codes(weight[part] / per_column(scale[part], scheme, columns))
    return codes, scale


def scale_factors(scheme: Scheme) -> list[float]:
    """What the largest weight is multiplied with, to get the scales that are tried."""
    return [sign * shrink / scheme.largest for sign in scheme.signs for shrink in SHRINK]


def search_scale(
    weight: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor | None = None
) -> Tensor:
    """The scales [n, width] of the grid that round the weights with the least error."""
    rows, columns = weight.shape
    if not columns:
        return weight.new_ones(rows, 1)
    size = scheme.group or columns
    grouped = F.pad(weight, (0, -columns % size)).reshape(rows, -1, size)
    counts = torch.ones(columns, device=weight.device) if importance is None else importance
    counts = F.pad(counts, (0, -columns % size)).reshape(-1, size)
    largest = grouped.abs().amax(-1)
    best = torch.full_like(largest, torch.inf)
    found = torch.ones_like(largest)
    for factor in scale_factors(scheme):
        scale = scheme.rounded_scale(largest * factor, dtype)
        rounded = scheme.to_codes(grouped / scale[..., None]).mul_(scale[..., None])
        error = rounded.sub_(grouped).square_().mul_(counts).sum(-1)
        better = error < best
        best, found = torch.where(better, error, best), torch.where(better, scale, found)
    return found


def _sweep(
    weight: Tensor,
    start: Tensor,
    mask: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    inputs: Gram,
    prunes: bool,
    layer: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and mask, column after column. `start` is 2:4 and tells which scales the matrix needs.

    With `prunes` the mask is found anew on the way.
    """
    rows, columns = weight.shape
    short = -columns % 4
    gram = inputs.mean.to(weight.device)
    # Channels that never fire, and those that fill up the last group, are uncorrelated with all others.
    dead = F.pad(gram.diagonal(), (0, short)) <= 0
    factor, removal = inputs.derived(
        (SparseGPT.name, DAMPING, True, weight.device), lambda: factors(gram, dead, DAMPING, True, layer)
    )
    matrices = spread_removal(removal) if prunes else None
    dropped = torch.tensor([[j in pair for j in range(4)] for pair in PAIRS], device=weight.device)
    importance = gram.diagonal()
    scale = search_scale(start, scheme, dtype, importance)
    per = scheme.group
    w = F.pad(weight, (0, short))
    mask = F.pad(mask, (0, short))
    if prunes:
        w = w.masked_fill(dead, 0.0)
    codes = torch.zeros_like(w)
    for left in range(0, w.shape[1], BLOCK):
        right = min(left + BLOCK, w.shape[1])
        panel, errors = w[:, left:right], w.new_zeros(rows, right - left)
        for column in range(left, right):
            j = column - left
            if per and not prunes and column % per == 0:
                # What the columns before have pushed here changes which scale is best.
                own = slice(column, min(column + per, columns))
                now = w[:, own] * mask[:, own]
                scale[:, column // per] = search_scale(now, scheme, dtype, importance[own]).squeeze(1)
            if matrices is not None and column % 4 == 0:
                candidates = torch.einsum("rj,pij->rpi", panel[:, j : j + 4], matrices[column // 4])
                pair = candidates.square().sum(-1).argmin(-1)
                error = candidates.gather(1, pair[:, None, None].expand(-1, 1, 4)).squeeze(1)
                panel[:, j:].addmm_(error, factor[column : column + 4, column:right], alpha=-1)
                errors[:, j : j + 4] += error
                mask[:, column : column + 4] = ~dropped[pair]
            unit = scale[:, column // per if per else 0]
            code = scheme.to_codes(panel[:, j] / unit) * mask[:, column]
            codes[:, column] = code
            error = (panel[:, j] - code * unit) / factor[column, column]
            panel[:, j:].addr_(error, factor[column, column:right], alpha=-1)
            errors[:, j] += error
        w[:, right:].addmm_(errors, factor[left:right, right:], alpha=-1)
    return codes[:, :columns].contiguous(), scale, mask[:, :columns]


def _descend(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    mask: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    gram: Tensor,
) -> None:
    """Make the error of the outputs smaller in place: never larger, whatever it starts from.

    R = (W - Q)·G tells for each weight how the error would change with it. The best value of one weight, all
    others as they are, is R/G_jj away, and of all codes the nearest to that is the best; so for a scale.
    """
    gram = gram.clone()
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())
    columns = weight.shape[1]
    size = scheme.group or max(columns, 1)
    for _ in range(ROUNDS):
        before = codes.clone()
        spread = per_column(scale, scheme, columns).expand_as(codes)
        slope = (weight - codes * spread) @ gram
        for left in range(0, columns, BLOCK):
            right = min(left + BLOCK, columns)
            panel = slope[:, left:right].clone()
            moved = torch.zeros_like(panel)
            # Few and simple operations a column: on a GPU it is their number that takes the time. A removed
            # weight has the code zero and no step away from it.
            steps = mask[:, left:right] / (gram.diagonal()[left:right] * spread[:, left:right])
            for column in range(left, right):
                j, old = column - left, codes[:, column]
                code = scheme.to_codes(torch.addcmul(old, panel[:, j], steps[:, j]))
                step = torch.sub(code, old).mul_(spread[:, column])
                codes[:, column] = code
                moved[:, j] = step
                panel[:, j:].addr_(step, gram[column, column:right], alpha=-1)
            slope.addmm_(moved, gram[left:right], alpha=-1)
        for number, left in enumerate(range(0, columns, size)):
            own = codes[:, left : left + size]
            inside = gram[left : left + size, left : left + size]
            curvature = (own @ inside).mul_(own).sum(1)
            step = (slope[:, left : left + size] * own).sum(1) / curvature
            old = scale[:, number]
            new = scheme.rounded_scale(old + step, dtype)
            # No codes, no curvature, no step; a scale that would change its sign stays.
            new = torch.where(((old + step) * old > 0) & (curvature > 0), new, old)
            slope.addmm_((own * (new - old)[:, None]), gram[left : left + size], alpha=-1)
            scale[:, number] = new
        if torch.equal(codes, before):
            return


def require_two_four(weight: Tensor, layer: str | None) -> None:
    """Refuse a matrix that is not finite, or keeps more than two of four."""
    require_finite(weight, layer)
    first = check_pattern(weight).first
    if first is not None:
        raise InputError(
            f"row {first.row}, group {first.group} (columns {4 * first.group} to "
            f"{4 * first.group + len(first.values) - 1}) keeps {first.kept} of 4 weights, and 2:4 allows 2.",
            layer=layer,
            hint="Prune it first, or do both at once with `twofour prune --scheme`.",
        )
