"""SparseGPT: prune from left to right and let the weights still to come repair the damage.

Removing the weights P of a row costs least, w_Pᵀ·(C_PP)⁻¹·w_P, if the others move by -C_:P·(C_PP)⁻¹·w_P,
where C is the inverse Hessian of the weights that are still free (optimal brain surgery). Each row has its
own mask and would need its own C; SparseGPT (arXiv 2301.00774) freezes the columns in a fixed order instead,
so that all rows share one C. With U the upper triangle in H⁻¹ = Uᵀ·U, the inverse Hessian of the columns from
g on is just U[g:, g:]ᵀ·U[g:, g:], so nothing is ever inverted again. The sweep goes over groups G of four
columns; per row:

    e = M_P·w_G       [4], P the pair to remove; M_P = U_GP·(U_GPᵀ·U_GP)⁻¹, and |e|² is just the cost above
    w ← w - e·U_G:    the group's own kept weights and everything to the right; w_P becomes zero

`pairs=True` evaluates all six pairs and takes the cheapest. The published rule (`pairs=False`) scores the
four weights one by one, w²/U_jj², as if the two removals did not interact, and lets only columns to the right
of a removed weight repair it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import keep_best, require_finite
from twofour.prune.hessian import damped_cholesky, require_inputs

#: The pairs of columns that can go. Among equal costs the first wins, so that the ones further left are kept.
PAIRS = ((2, 3), (1, 3), (1, 2), (0, 3), (0, 2), (0, 1))


@dataclass(frozen=True)
class SparseGPT:
    """Options: `damping` as a share of the Hessian's mean diagonal; `block` columns are finished before the
    rest of the matrix is updated (only the speed depends on it); `pairs` as the module says."""

    damping: float = 0.01
    block: int = 128
    pairs: bool = True

    name = "sparsegpt"
    needs_inputs = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise InputError(f"sparsegpt: damping must be a finite number not below 0, got {self.damping}.")
        if self.block < 4 or self.block % 4:
            raise InputError(f"sparsegpt: block must be a positive multiple of 4, got {self.block}.")

    def prune(self, matrix: Tensor, layer: str | None = None, inputs: Gram | None = None) -> Tensor:
        """The pruned matrix, its kept weights updated to make up for the removed ones."""
        require_finite(matrix, layer)
        known = require_inputs(self.name, matrix, layer, inputs)
        columns = matrix.shape[1]
        # A short last group is filled up with columns of zeros that are uncorrelated with all others: they
        # cost nothing, so they go first, and of three real columns one more goes, of two or one none.
        short = -columns % 4
        weight = matrix.new_zeros(matrix.shape[0], columns + short, dtype=torch.float32)
        weight[:, :columns] = matrix.detach()
        # The same for channels that never fire: their weights make no difference, so they go first.
        dead = F.pad(known.mean.diagonal().to(matrix.device), (0, short)) <= 0
        weight.masked_fill_(dead, 0.0)
        factor, removal = known.derived(
            (self.name, self.damping, self.pairs, matrix.device),
            lambda: factors(known.mean.to(matrix.device), dead, self.damping, self.pairs, layer),
        )
        sweep = _sweep_on(weight.device)
        for start in range(0, weight.shape[1], self.block):
            stop = min(start + self.block, weight.shape[1])
            errors = sweep(
                *(weight[:, start:stop], factor[start:stop, start:stop], removal[start // 4 : stop // 4]),
                self.pairs,
            )
            # One large product instead of block/4 thin ones over the rest of the matrix.
            weight[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
        return weight[:, :columns].to(matrix.dtype).contiguous()


#: How a panel of columns is swept: `sweep_panel`, or something faster that gives the same up to rounding.
SweepPanel = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def sweep_panel(weight: Tensor, factor: Tensor, removal: Tensor, jointly: bool) -> Tensor:
    """Prune the columns [rows, width] of a panel in place; the errors e of all its groups, [rows, width].

    `factor` [width, width] is the panel's block on the diagonal of U, `removal` [groups, 6, 4, 2] the columns
    P of its M_P, which are all that is not zero. Columns further right are for the caller to update.
    """
    dropped = torch.tensor([[j in pair for j in range(4)] for pair in PAIRS], device=weight.device)
    matrices = spread_removal(removal)
    errors = torch.empty_like(weight)
    for left in range(0, weight.shape[1], 4):
        group = weight[:, left : left + 4]
        candidates = torch.einsum("rj,pij->rpi", group, matrices[left // 4])  # [rows, 6, 4]
        if jointly:
            pair = candidates.square().sum(-1).argmin(-1)
        else:
            score = (group / factor.diagonal()[left : left + 4]).square()
            # Which pair it is: the one that shares no column with those kept.
            pair = (keep_best(score)[:, None] & dropped).any(-1).int().argmin(-1)
        error = candidates.gather(1, pair[:, None, None].expand(-1, 1, 4)).squeeze(1)
        weight[:, left:].addmm_(error, factor[left : left + 4, left:], alpha=-1)
        group.masked_fill_(dropped[pair], 0.0)  # zero already, up to rounding
        errors[:, left : left + 4] = error
    return errors


@functools.cache
def _sweep_on(device: torch.device) -> SweepPanel:
    """The fastest way to sweep there. On a GPU that is one launch a panel, if Triton can be used."""
    if device.type != "cuda":
        return sweep_panel
    try:
        from twofour.prune import sweep_triton

        # Triton compiles on first use and may find no compiler then: find out now, on one group.
        one = torch.eye(4, device=device)
        sweep_triton.sweep_panel(one.clone(), one, one.new_ones(1, len(PAIRS), 4, 2), True)
    except Exception as error:
        warnings.warn(f"sparsegpt sweeps without its Triton kernel, slowly: {error}", stacklevel=2)
        return sweep_panel
    return sweep_triton.sweep_panel


def factors(
    gram: Tensor, dead: Tensor, damping: float, jointly: bool, layer: str | None
) -> tuple[Tensor, Tensor]:
    """U and the M_P of all groups, for a Gram matrix to be padded to as many columns as `dead` has."""
    reverse = gram.flip(0, 1)
    if short := len(dead) - len(gram):
        reverse = F.pad(reverse, (short, 0, short, 0))
    diagonal = reverse.diagonal()
    diagonal[dead.flip(0)] = diagonal[~dead.flip(0)].mean()
    factor = _inverse_factor(reverse, damping, layer)
    return factor, _removal(factor, jointly)


def _inverse_factor(reverse: Tensor, damping: float, layer: str | None) -> Tensor:
    """U, upper triangular, with Uᵀ·U = H⁻¹, from H with its rows and columns in reverse order.

    Not by inverting H and factoring the result, which squares the rounding error: the lower Cholesky factor L
    of the reversed H is, reversed again, an upper R with R·Rᵀ = H, and U is the inverse of R. In a large
    model each of these matrices takes gigabytes, so none is kept for longer than it is needed.
    """
    lower, _ = damped_cholesky(reverse, damping, layer)
    # The transpose of a matrix in rows is one in columns, which is what the library works on in place.
    inverse = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device).mT
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    return inverse.flip(0, 1).contiguous()


def _removal(factor: Tensor, jointly: bool) -> Tensor:
    """The columns P of M_P for every group and pair: [groups, 6, 4, 2]; all others of its columns are zero.

    In float64 for strongly correlated pairs.
    """
    columns = torch.arange(factor.shape[0], device=factor.device).reshape(-1, 4)
    blocks = factor[columns[:, :, None], columns[:, None, :]].double()  # the 4×4 blocks on the diagonal
    removal = blocks.new_zeros(blocks.shape[0], len(PAIRS), 4, 2)
    for i, pair in enumerate(PAIRS):
        if jointly:
            tall = blocks[:, :, pair]
            removal[:, i] = tall @ torch.linalg.inv(tall.mT @ tall)
        else:  # one column after the other: e_a = w_a/U_aa, then e_b = (w_b - e_a·U_ab)/U_bb
            removal[:, i, pair] = torch.linalg.inv(blocks[:, pair][:, :, pair].mT)
    return removal.to(factor.dtype)


def spread_removal(removal: Tensor) -> Tensor:
    """M_P with its zeros: [groups, 6, 4, 4]."""
    matrices = removal.new_zeros(*removal.shape[:2], 4, 4)
    for i, pair in enumerate(PAIRS):
        matrices[:, i, :, pair] = removal[:, i]
    return matrices
