"""ADMM: let all weights and the mask negotiate, instead of deciding group by group.

The best 2:4 matrix for the layer's inputs is min tr((W-A)·H·(W-A)ᵀ) with W in 2:4, A the dense weights. The
quadratic alone is easy and the pattern alone is easy; the alternating direction method (Boza, arXiv
2401.02938; Meng et al., ALPS, arXiv 2406.07831) solves them in turn, tied by their running disagreement V:

    Z = (W + V) with the two smaller of each four set to zero      the pattern
    V = V + W - Z                                                  what the two still disagree about
    W = (A·H + rho·(Z - V))·(H + rho·I)⁻¹                          the quadratic, one product per step

All rows share H, so one inverse serves every step, and all layers with the same inputs. The mask may change
in the first `mask_iterations` steps only: the pattern is not convex and would flicker for ever, but on a
fixed mask the steps do converge. What they leave over is removed by some steps of conjugate gradients on
exactly the chosen weights (`refit`). Nothing promises that a row ends better than where it started, at
Wanda's mask; the few that do not go back there.

Two changes of form make a step little more than its product. With S = W + V, the two kept of each four are
those of Z, the others those of the new V, and Z - V is S with the sign of the others turned:

    S = A + V + (Z - V - A)·rho·(H + rho·I)⁻¹

And the columns are sorted: first those that come first in their groups of four, then the second ones, and so
on ("in quarters"). The four of a group are then compared by comparing four contiguous pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import require_finite
from twofour.prune.hessian import damped_cholesky, refit, require_inputs


@dataclass(frozen=True)
class ADMM:
    """Options: `iterations` in all, the mask free in the first `mask_iterations`; `damping` as a share of the
    Hessian's mean diagonal; `refit` conjugate-gradient steps. One iteration without refit is Wanda."""

    iterations: int = 30
    damping: float = 0.01
    mask_iterations: int = 20
    refit: int = 10

    name: ClassVar[str] = "admm"
    needs_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.mask_iterations < 1 or self.refit < 0:
            raise InputError(
                f"admm: iterations and mask_iterations must be at least 1 and refit at least 0, "
                f"got {self.iterations}, {self.mask_iterations} and {self.refit}."
            )
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise InputError(f"admm: damping must be a finite number not below 0, got {self.damping}.")

    def prune(self, matrix: Tensor, layer: str | None = None, inputs: Gram | None = None) -> Tensor:
        """The pruned matrix, its kept weights refitted to the layer's outputs."""
        require_finite(matrix, layer)
        known = require_inputs(self.name, matrix, layer, inputs)
        problem = known.derived(
            (self.name, self.damping, matrix.device),
            lambda: _problem(known, self.damping, matrix.device, layer),
        )
        # Scaled weights are Wanda's scores, and the scaled Gram matrix has ones on its diagonal. A channel
        # that never fires gets weight zero: it makes no difference, and its place is better used.
        dense = _in_quarters(matrix.detach().float()) * problem.norms
        solved = dense - dense @ problem.tied

        wish = dense
        for step in range(self.iterations):
            if step < self.mask_iterations:
                mask = _two_largest(wish)
                ones = mask.float()  # products with it are twice as fast as choosing by the mask
            if step == 0:
                start = wish.where(mask, 0.0)
            if step + 1 < self.iterations:
                kept = wish * ones
                disagreement = wish - kept
                wish = (solved + disagreement).addmm_(kept.sub_(disagreement), problem.tied)
        pruned = wish.where(mask, 0.0)

        error_start, pull_start = problem.error(dense - start)
        error, pull = problem.error(dense - pruned)
        better = error <= error_start
        error = error.where(better, error_start)
        pruned, pull = pruned.where(better[:, None], start), pull.where(better[:, None], pull_start)
        fitted = refit(pruned, pull, problem.hessian, self.refit)
        # The refit lowers the damped error. Where the damping is most of a row's error, that may cost the
        # row some of the error proper.
        better = problem.error(dense - fitted)[0] <= error
        fitted = fitted.where(better[:, None], pruned)
        found = (fitted * problem.inverse_norms).where(fitted != 0, 0.0)
        return _in_order(found)[:, : matrix.shape[1]].to(matrix.dtype)


@dataclass(frozen=True)
class _Problem:
    """What all layers with the same inputs share: the scaled and damped Hessian and what comes of it.

    All in quarters.
    """

    norms: Tensor
    inverse_norms: Tensor
    hessian: Tensor
    tied: Tensor  # rho times the inverse of hessian + rho·I
    added: float  # to the diagonal of the Hessian

    def error(self, lost: Tensor) -> tuple[Tensor, Tensor]:
        """The squared error of every row's outputs, without damping: [rows]. And `lost` times the Hessian."""
        pull = lost @ self.hessian
        return (pull * lost).sum(1) - self.added * lost.square().sum(1), pull


def _problem(inputs: Gram, damping: float, device: torch.device, layer: str | None) -> _Problem:
    norms = _in_quarters(inputs.channel_norms.to(device))
    inverse_norms = torch.where(norms > 0, 1 / norms, 0.0)
    hessian = _in_quarters(_in_quarters(inputs.mean.to(device)).mT)  # symmetric: its own transpose
    # Of four columns this is the Gram matrix itself, so the first product must not be in place.
    hessian = (hessian * inverse_norms[:, None]).mul_(inverse_norms)
    hessian.diagonal().fill_(1.0)  # up to rounding so already, but for channels that never fire
    factor, added = damped_cholesky(hessian, damping, layer)
    hessian.diagonal().add_(added)
    # How strongly the two solutions are tied: directions in which H is above rho follow the data, the
    # others follow the pattern. Too small and the mask flickers, too large and it stays where Wanda put
    # it. Boza takes 1, the mean eigenvalue of the scaled matrix; but inputs have a few huge directions
    # and many small ones, and the geometric mean sits where most of them are. On random problems it was
    # close to the best rho from flat spectra to one dominant direction; 1 was up to eight times worse.
    rho = float(factor.diagonal()[norms > 0].log().mean().mul(2).exp())
    sum_of_both = hessian.clone()
    sum_of_both.diagonal().add_(rho)
    tied = torch.cholesky_inverse(torch.linalg.cholesky(sum_of_both)).mul_(rho)
    return _Problem(norms, inverse_norms, hessian, tied, added)


def _in_quarters(x: Tensor) -> Tensor:
    """The last dimension sorted by the place in the group of four; a last group that is short gets zeros.

    Those are then channels that never fire.
    """
    short = -x.shape[-1] % 4
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.unflatten(-1, (-1, 4)).mT.flatten(-2)


def _in_order(x: Tensor) -> Tensor:
    """The other way round."""
    return x.unflatten(-1, (4, -1)).mT.flatten(-2)


def _two_largest(wish: Tensor) -> Tensor:
    """The mask that keeps the two weights of every group that are largest in size, in quarters.

    Of equal ones the left stay, as in `twofour.pattern.keep_best`: a weight goes if at least two others beat
    it, and one to the right of it beats it only if it is larger.
    """
    pieces = wish.abs().unflatten(-1, (4, -1))
    a, b, c, d = pieces.unbind(-2)
    b_a, c_a, d_a, c_b, d_b, d_c = b > a, c > a, d > a, c > b, d > b, d > c  # which beats which
    mask = torch.empty(pieces.shape, dtype=torch.bool, device=wish.device)
    keep_a, keep_b, keep_c, keep_d = mask.unbind(-2)
    # Two of three are true if the first two are, or the third and one of these. A weight stays if it is not
    # so of those that beat it, or, the same, if it is so of those that it beats.
    torch.logical_not((b_a & c_a) | (d_a & (b_a | c_a)), out=keep_a)
    torch.logical_not((c_b & d_b) | (~b_a & (c_b | d_b)), out=keep_b)
    torch.logical_or(c_a & c_b, ~d_c & (c_a | c_b), out=keep_c)
    torch.logical_or(d_a & d_b, d_c & (d_a | d_b), out=keep_d)
    return mask.flatten(-2)
