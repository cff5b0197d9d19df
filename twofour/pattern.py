"""The rule: of every m neighbouring weights in a row, at most n are nonzero (2 of 4 for the hardware).

A *group* is m consecutive entries of the last dimension, starting at a multiple of m; where the last
dimension is not a multiple of m the last group is simply shorter. Everything works on any leading
dimensions, any device, contiguous or not. The corner cases, once and for all:

* a zero is a zero whatever its sign: -0.0 never counts as a kept weight;
* equal scores: the one further left is kept;
* infinite scores are honoured (+inf is kept before anything finite, -inf after); NaN scores are an error;
* NaN and infinite *weights* count as nonzero here; packing and pruning refuse them (`require_finite`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from twofour.errors import InputError

#: Elements worked on at a time: on a CPU temporaries stay in its cache, on a GPU launches are few; on both
#: they are small beside the matrix.
CHUNK = 1 << 19
CHUNK_ON_GPU = 1 << 24


@dataclass(frozen=True)
class Violation:
    """The first group that keeps too many weights. `row` counts over all leading dimensions."""

    row: int
    group: int
    kept: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class PatternReport:
    """How the groups of one matrix are filled."""

    groups: int
    full: int  # exactly n nonzeros
    under: int  # fewer than n: allowed, the spare slot stores a zero
    over: int  # more than n: breaks the rule
    first: Violation | None

    @property
    def legal(self) -> bool:
        return self.over == 0


def check_pattern(matrix: Tensor, n: int = 2, m: int = 4) -> PatternReport:
    """Count how the groups are filled and locate the first that breaks the rule.

    >>> check_pattern(torch.tensor([[1., 0., 2., 0., 3., 4., 5., 0.]])).first
    Violation(row=0, group=1, kept=3, values=(3.0, 4.0, 5.0, 0.0))
    """
    _require_n_of_m(n, m)
    groups = _grouped(matrix, m, fill=0)
    kept = (groups != 0).sum(-1, dtype=torch.int16)
    over = kept > n
    bad = int(over.sum())
    first = None
    if bad:
        row, group = divmod(int(over.reshape(-1).int().argmax()), kept.shape[-1])
        values = groups.reshape(-1, kept.shape[-1], m)[row, group]
        width = min(m, matrix.shape[-1] - group * m)
        first = Violation(row, group, int((values != 0).sum()), tuple(values[:width].double().tolist()))
    full = int((kept == n).sum())
    return PatternReport(kept.numel(), full, kept.numel() - full - bad, bad, first)


def keep_best(score: Tensor, n: int = 2, m: int = 4) -> Tensor:
    """The boolean mask that keeps the n highest scores of every m neighbours in the last dimension.

    >>> keep_best(torch.tensor([[1., 4., 3., 2.]]))
    tensor([[False,  True,  True, False]])
    """
    _require_n_of_m(n, m)
    _require_no_nan(score)
    if score.dim() == 0:
        raise InputError("a scalar has no groups: expected at least one dimension.")
    rows = score.detach().reshape(math.prod(score.shape[:-1]), score.shape[-1])
    keep = torch.empty(rows.shape, dtype=torch.bool, device=score.device)
    step = max(1, (CHUNK_ON_GPU if score.is_cuda else CHUNK) // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], step):
        keep[start : start + step] = _keep_best_rows(rows[start : start + step], n, m)
    return keep.reshape(score.shape)


def _keep_best_rows(score: Tensor, n: int, m: int) -> Tensor:
    # Padding must lose every tie, -inf scores included: it stands furthest right, and ties go left.
    groups = _grouped(score, m, fill=-torch.inf)
    # Rank by counting the neighbours that beat an entry: m(m-1)/2 comparisons on whole tensors are
    # several times faster than a sort of very short rows, and make the tie rule explicit.
    columns = groups.unbind(-1)
    beaten_by = [torch.zeros(columns[0].shape, dtype=torch.int16, device=score.device) for _ in range(m)]
    for left, right in itertools.combinations(range(m), 2):
        right_wins = columns[right] > columns[left]
        beaten_by[left] += right_wins
        beaten_by[right] += ~right_wins
    keep = torch.stack([lost < n for lost in beaten_by], dim=-1)
    return keep.flatten(-2)[..., : score.shape[-1]]


def keep_best_transposable(score: Tensor) -> Tensor:
    """The mask of highest total score that is 2:4 along the rows *and* along the columns.

    Each 4×4 tile has only 90 such patterns, so the search is exhaustive; sums are in float64. The
    weight and its transpose then both run on Sparse Tensor Cores, which is what training needs.
    Both of the last two dimensions must be multiples of 4.
    """
    if score.dim() < 2 or score.shape[-1] % 4 or score.shape[-2] % 4:
        raise InputError(
            f"a transposable mask needs a matrix whose sides are multiples of 4, got {tuple(score.shape)}."
        )
    _require_no_nan(score)
    *lead, rows, columns = score.shape
    tiles = _comparable(score.detach()).reshape(*lead, rows // 4, 4, columns // 4, 4).transpose(-3, -2)
    tiles = tiles.reshape(-1, 16).double()
    patterns = torch.tensor(_transposable_patterns(), dtype=torch.float64, device=tiles.device)  # [90, 16]
    # inf·0 is NaN, so infinities are counted apart: first the most (+inf minus -inf), then the best sum.
    infinite = tiles.isinf()
    infinities = torch.where(infinite, tiles.sign(), 0.0) @ patterns.T
    total = tiles.masked_fill(infinite, 0.0) @ patterns.T
    total = total.masked_fill(infinities < infinities.amax(-1, keepdim=True), -torch.inf)
    best = patterns[total.argmax(-1)].bool()
    best = best.reshape(*lead, rows // 4, columns // 4, 4, 4).transpose(-3, -2)
    return best.reshape(score.shape)


def require_finite(weight: Tensor, layer: str | None = None) -> None:
    """Refuse NaN and infinite weights by the name of their layer: no mask of them means anything."""
    values = _comparable(weight)
    if values.is_floating_point() and not bool(values.isfinite().all()):
        flat = (~values.isfinite()).reshape(-1)
        raise InputError(
            f"{int(flat.sum())} of {flat.numel()} weights are NaN or infinite "
            f"(the first at flat index {int(flat.int().argmax())}).",
            layer=layer,
            hint="Repair the checkpoint or leave this layer out with --exclude.",
        )


@cache
def _transposable_patterns() -> list[tuple[int, ...]]:
    """All 4×4 binary matrices with two ones in every row and column, flattened: [90, 16]."""
    rows = [tuple(int(i in pair) for i in range(4)) for pair in itertools.combinations(range(4), 2)]
    return [
        sum(tile, ())
        for tile in itertools.product(rows, repeat=4)
        if all(sum(column) == 2 for column in zip(*tile, strict=True))
    ]


def _grouped(x: Tensor, m: int, fill: float) -> Tensor:
    """[..., k] as [..., ⌈k/m⌉, m], the last group filled up."""
    if x.dim() == 0:
        raise InputError("a scalar has no groups: expected at least one dimension.")
    x = _comparable(x)
    short = -x.shape[-1] % m
    if short:
        if x.dtype in (torch.bool, torch.uint8):
            x = x.short()  # these have no value below all others to fill with
        lowest = fill if x.is_floating_point() else (0 if fill == 0 else torch.iinfo(x.dtype).min)
        x = torch.nn.functional.pad(x, (0, short), value=lowest)
    return x.reshape(*x.shape[:-1], x.shape[-1] // m, m)


def _comparable(x: Tensor) -> Tensor:
    """8-bit floats have no arithmetic of their own; float32 holds every one of them exactly."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _require_n_of_m(n: int, m: int) -> None:
    if not 0 < n <= m:
        raise InputError(f"an n:m pattern needs 0 < n <= m, got {n}:{m}.")


def _require_no_nan(score: Tensor) -> None:
    if score.is_floating_point() and bool(_comparable(score).isnan().any()):
        raise InputError("the scores contain NaN, so the best of them is not defined.")
