"""What a layer's codes should be near to, when its inputs are no longer what they were.

Errors add up: behind a few rounded blocks a layer no longer gets the inputs x that it had, but others, x′.
What it should give is A·x, with A its own weights W as they are, or those that the dense model has there (the
teacher; then x are its inputs). So what is rounded is the matrix that comes nearest to that on x′ and keeps
the mask of W. With G the mean of x′·x′ᵀ and D that of (x - x′)·x′ᵀ, it is W + S with

    S·G = A·D + (A - W)·G       on the kept weights

A matrix with so many weights also learns by heart what only these tokens have. How much of S carries over to
others is seen on windows that are held out: S is made without them, and they say how far to go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.prune.hessian import refit
from twofour.quantize.rounding import DAMPING

#: Steps of conjugate gradients. Three times as many fit the tokens better, and others no better.
STEPS = 10


@dataclass(frozen=True)
class Drift:
    """D, and G and D of the windows that say how much of a shift carries over."""

    mean: Tensor
    held_out: tuple[Gram, Tensor] | None = None


def fitted_target(
    weight: Tensor, gram: Gram, drift: Drift, aim: Tensor | None = None, follow: float = 1.0
) -> Tensor:
    """W + S, as far as S carries over. W is 2:4, and so is what comes out; without `aim`, A is W.

    With `follow` below 1, x lies only so far on the way from x′ to what it was.

    >>> gram = Gram(2)
    >>> gram.add(torch.eye(2))
    >>> fitted_target(torch.ones(1, 2), gram, Drift(torch.zeros(2, 2)))
    tensor([[1., 1.]])
    """
    weight = weight.float()
    aim = weight if aim is None else aim.float()
    gram_mean, drift_mean = gram.mean.to(weight.device), drift.mean.to(weight.device) * follow
    shift = _shift(weight, aim, gram_mean, drift_mean)
    if drift.held_out is None:
        return weight + shift
    held_gram, held_drift = drift.held_out[0].mean.to(weight.device), drift.held_out[1].to(weight.device)
    held_drift = held_drift * follow
    part = drift.held_out[0].tokens / gram.tokens
    rest_gram = (gram_mean - part * held_gram) / (1 - part)
    rest_drift = (drift_mean - part * held_drift) / (1 - part)
    trial = _shift(weight, aim, rest_gram, rest_drift)
    # |A·x - W·x′ - a·trial·x′|² over the held-out tokens is least for this a.
    wanted = (_pull(weight, aim, held_gram, held_drift) * trial).sum()
    moved = ((trial @ held_gram) * trial).sum()
    return weight + shift * (wanted / moved).clamp(0, 1) if bool(moved > 0) else weight


def _shift(weight: Tensor, aim: Tensor, gram: Tensor, drift: Tensor) -> Tensor:
    # Channels are scaled to the same size, those that never fire left as they are: nothing pulls there.
    norms = gram.diagonal().clamp(min=0).sqrt()
    norms = torch.where(norms > 0, norms, 1.0)
    hessian = (gram / norms).div_(norms[:, None])
    hessian.diagonal().fill_(1 + DAMPING)
    return refit(weight * norms, _pull(weight, aim, gram, drift) / norms, hessian, STEPS) / norms - weight


def _pull(weight: Tensor, aim: Tensor, gram: Tensor, drift: Tensor) -> Tensor:
    """The mean of (A·x - W·x′)·x′ᵀ."""
    return (aim @ drift).addmm_(aim - weight, gram)
