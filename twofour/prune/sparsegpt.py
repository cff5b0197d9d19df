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

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
        gram = torch.nn.functional.pad(known.mean.to(matrix.device), (0, short, 0, short))
        # The same for channels that never fire: their weights make no difference, so they go first.
        dead = gram.diagonal() <= 0
        gram.diagonal()[dead] = gram.diagonal()[~dead].mean()
        weight = torch.nn.functional.pad(matrix.detach().float(), (0, short)).masked_fill(dead, 0.0)

        factor, removal = known.derived(
            (self.name, self.damping, self.pairs, matrix.device), lambda: self._factors(gram, layer)
        )
        dropped = torch.tensor([[j in pair for j in range(4)] for pair in PAIRS], device=weight.device)
        for start in range(0, weight.shape[1], self.block):
            stop = min(start + self.block, weight.shape[1])
            errors = weight.new_empty(weight.shape[0], stop - start)
            for left in range(start, stop, 4):
                group = weight[:, left : left + 4]
                candidates = torch.einsum("rj,pij->rpi", group, removal[left // 4])  # [rows, 6, 4]
                if self.pairs:
                    pair = candidates.square().sum(-1).argmin(-1)
                else:
                    score = (group / factor.diagonal()[left : left + 4]).square()
                    # Which pair it is: the one that shares no column with those kept.
                    pair = (keep_best(score)[:, None] & dropped).any(-1).int().argmin(-1)
                error = candidates.gather(1, pair[:, None, None].expand(-1, 1, 4)).squeeze(1)
                weight[:, left:stop].addmm_(error, factor[left : left + 4, left:stop], alpha=-1)
                group.masked_fill_(dropped[pair], 0.0)  # zero already, up to rounding
                errors[:, left - start : left - start + 4] = error
            # One large product instead of block/4 thin ones over the rest of the matrix.
            weight[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
        return weight[:, :columns].to(matrix.dtype).contiguous()

    def _factors(self, gram: Tensor, layer: str | None) -> tuple[Tensor, Tensor]:
        factor = _inverse_factor(gram, self.damping, layer)
        return factor, _removal(factor, self.pairs)


def _inverse_factor(gram: Tensor, damping: float, layer: str | None) -> Tensor:
    """U, upper triangular, with Uᵀ·U = H⁻¹.

    Not by inverting H and factoring the result, which squares the rounding error: in reversed order the lower
    Cholesky factor of H becomes an upper R with R·Rᵀ = H, and U is the inverse of R.
    """
    lower, _ = damped_cholesky(gram.flip(0, 1), damping, layer)
    upper = lower.flip(0, 1)
    identity = torch.eye(upper.shape[0], dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, identity, upper=True)


def _removal(factor: Tensor, jointly: bool) -> Tensor:
    """M_P of every group and pair: [groups, 6, 4, 4]. In float64 for strongly correlated pairs."""
    columns = torch.arange(factor.shape[0], device=factor.device).reshape(-1, 4)
    blocks = factor[columns[:, :, None], columns[:, None, :]].double()  # the 4×4 blocks on the diagonal
    removal = blocks.new_zeros(blocks.shape[0], len(PAIRS), 4, 4)
    for i, pair in enumerate(PAIRS):
        if jointly:
            tall = blocks[:, :, pair]
            removal[:, i, :, pair] = tall @ torch.linalg.inv(tall.mT @ tall)
        else:  # one column after the other: e_a = w_a/U_aa, then e_b = (w_b - e_a·U_ab)/U_bb
            (a, b), square = pair, blocks[:, pair][:, :, pair]
            inverse = torch.linalg.inv(square.mT)
            removal[:, i, a, pair], removal[:, i, b, pair] = inverse[:, 0], inverse[:, 1]
    return removal.to(factor.dtype)
