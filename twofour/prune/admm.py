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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import keep_best, require_finite
from twofour.prune.hessian import damped_cholesky, require_inputs


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
        hessian, rho = problem.hessian, problem.rho
        # Scaled weights are Wanda's scores, and the scaled Gram matrix has ones on its diagonal. A channel
        # that never fires gets weight zero: it makes no difference, and its place is better used.
        dense = matrix.detach().float() * problem.norms
        target = dense @ hessian

        weight, disagreement = dense, torch.zeros_like(dense)
        for step in range(self.iterations):
            wish = weight + disagreement
            if step < self.mask_iterations:
                mask = keep_best(wish.abs())
            pruned = wish.where(mask, 0.0)
            if step == 0:
                start = pruned
            disagreement = wish - pruned
            if step + 1 < self.iterations:
                weight = (target + rho * (pruned - disagreement)) @ problem.inverse
        worse = problem.error(pruned - dense) > problem.error(start - dense)
        pruned = start.where(worse[:, None], pruned)
        fitted = _refit(pruned, pruned != 0, target, hessian, self.refit)
        # The refit lowers the damped error. Where the damping is most of a row's error, that may cost the
        # row some of the error proper.
        worse = problem.error(fitted - dense) > problem.error(pruned - dense)
        fitted = pruned.where(worse[:, None], fitted)
        return (fitted * problem.inverse_norms).where(fitted != 0, 0.0).to(matrix.dtype)


@dataclass(frozen=True)
class _Problem:
    """What all layers with the same inputs share: the scaled and damped Hessian and what comes of it."""

    norms: Tensor
    inverse_norms: Tensor
    hessian: Tensor
    inverse: Tensor  # of hessian + rho·I
    added: float  # to the diagonal of the Hessian
    rho: float

    def error(self, change: Tensor) -> Tensor:
        """The squared error of every row's outputs, without damping: [rows]."""
        return (change @ self.hessian).mul_(change).sum(1) - self.added * change.square().sum(1)


def _problem(inputs: Gram, damping: float, device: torch.device, layer: str | None) -> _Problem:
    norms = inputs.channel_norms.to(device)
    inverse_norms = torch.where(norms > 0, 1 / norms, 0.0)
    hessian = inputs.mean.to(device) * inverse_norms[:, None] * inverse_norms
    hessian.diagonal().fill_(1.0)  # up to rounding so already, but for channels that never fire
    factor, added = damped_cholesky(hessian, damping, layer)
    hessian.diagonal().add_(added)
    # How strongly the two solutions are tied: directions in which H is above rho follow the data, the
    # others follow the pattern. Too small and the mask flickers, too large and it stays where Wanda put
    # it. Boza takes 1, the mean eigenvalue of the scaled matrix; but inputs have a few huge directions
    # and many small ones, and the geometric mean sits where most of them are. On random problems it was
    # close to the best rho from flat spectra to one dominant direction; 1 was up to eight times worse.
    rho = float(factor.diagonal()[norms > 0].log().mean().mul(2).exp())
    tied = hessian.clone()
    tied.diagonal().add_(rho)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(tied))
    return _Problem(norms, inverse_norms, hessian, inverse, added, rho)


def _refit(weight: Tensor, mask: Tensor, target: Tensor, hessian: Tensor, steps: int) -> Tensor:
    """Conjugate gradients for W·H = target on the kept weights, every row a system of its own.

    Removed weights stay out because the residual is masked: that is CG on each row's own submatrix of H
    without ever cutting it out. The usual preconditioner, the diagonal of H, is the scaling of the columns
    done before. Every step lowers the error, so it can be stopped anywhere.
    """
    residual = (target - weight @ hessian).where(mask, 0.0)
    direction = residual
    size = residual.square().sum(1, keepdim=True)
    for _ in range(steps):
        image = (direction @ hessian).where(mask, 0.0)
        curvature = (direction * image).sum(1, keepdim=True)
        # A row that is solved, or all zeros, has no direction left: 0/0.
        length = torch.where(curvature > 0, size / curvature, 0.0)
        weight = weight + length * direction
        residual = residual - length * image
        new_size = residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(size > 0, new_size / size, 0.0) * direction
        size = new_size
    return weight
