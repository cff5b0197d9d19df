"""What the calibrated methods share: the inputs they are given, the damped Hessian, the error they minimise.

A layer computes y = W·x. With G the mean of x·xᵀ over the calibration tokens (`Gram.mean`, [k, k]), changing
W by D makes a squared error of tr(D·G·Dᵀ) per token, so G is the Hessian of every row's error (up to a factor
2 that no method notices). It is often singular: fewer tokens than channels, equal channels, channels that
never fire. Adding a share of its mean diagonal (*damping*) makes it invertible, and keeps the weight update
from trusting directions that the calibration text hardly visited.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError, TwoFourError

#: How often the damping is raised tenfold before giving up. From 0.01 that reaches ten times the mean
#: diagonal, where little is left of the data: a matrix that still fails was never a Gram matrix.
RETRIES = 3


def require_inputs(method: str, matrix: Tensor, layer: str | None, inputs: Gram | None) -> Gram:
    """The layer's inputs, or an error that says what is missing or does not fit.

    A layer that no token reached (an expert never routed to) has a Gram matrix of zeros. Nothing is known of
    its inputs, so all channels count the same: an identity matrix, and only the weights themselves decide.
    """
    if inputs is None:
        raise InputError(
            f"{method} looks at the layer's inputs, and there are none.",
            layer=layer,
            hint="Give calibration text, or choose magnitude, which needs no data.",
        )
    if not matrix.is_floating_point():
        raise InputError(f"{method} needs floating-point weights, got {matrix.dtype}.", layer=layer)
    columns = matrix.shape[-1]
    if matrix.dim() != 2 or inputs.mean.shape != (columns, columns):
        raise InputError(
            f"the weight is {list(matrix.shape)}, but its inputs were measured as {list(inputs.mean.shape)}; "
            f"expected [rows, k] and [k, k].",
            layer=layer,
            hint="Calibrate the same model that is pruned.",
        )
    if not bool(inputs.mean.isfinite().all()):
        raise InputError(
            "the inputs measured in calibration are NaN or infinite.",
            layer=layer,
            hint="Run the calibration in bfloat16 or float32: float16 overflows in some models.",
        )
    if not bool(inputs.mean.diagonal().any()):
        unseen = Gram(columns, inputs.mean.device)
        unseen.mean.fill_diagonal_(1.0)
        return unseen
    return inputs


def damped_cholesky(gram: Tensor, damping: float, layer: str | None) -> tuple[Tensor, float]:
    """L with L·Lᵀ = G + s·I, and s: damping · mean diagonal, raised tenfold while there is no root."""
    scale = float(gram.diagonal().mean())
    for _ in range(RETRIES + 1):
        # Factored in place: the matrix may be gigabytes. The library wants columns, and of a symmetric
        # matrix the transpose is as good.
        factor, failed = (
            gram.clone(memory_format=torch.contiguous_format).mT,
            gram.new_empty((), dtype=torch.int32),
        )
        factor.diagonal().add_(damping * scale)
        torch.linalg.cholesky_ex(factor, out=(factor, failed))
        # A pivot that rounding alone kept above zero passes as a success but blows up the inverse, hence the
        # second test: pivots are squared, and float32 knows the diagonal to about one part in ten million.
        if not int(failed) and float(factor.diagonal().square().min()) > 1e-6 * scale:
            return factor, damping * scale
        damping = max(10 * damping, 1e-4)
    raise TwoFourError(
        f"the matrix of its inputs has no Cholesky factor, even with damping {damping / 10:g}.",
        layer=layer,
        hint="Calibrate on more tokens, or prune this layer with wanda, which inverts nothing.",
    )


def relative_output_error(before: Tensor, after: Tensor, inputs: Gram) -> float:
    """Squared error of the outputs over the squared outputs: tr(D·G·Dᵀ) / tr(W·G·Wᵀ), D = before - after.

    >>> inputs = Gram(2)
    >>> inputs.add(torch.eye(2))
    >>> relative_output_error(torch.tensor([[3.0, 1.0]]), torch.tensor([[3.0, 0.0]]), inputs)
    0.1
    """
    old = before.detach().float()
    gram = inputs.mean.to(old.device)
    lost, total = (
        float((x @ gram).mul_(x).sum(dtype=torch.float64)) for x in (old - after.detach().float(), old)
    )
    return max(lost, 0.0) / total if total > 0 else 0.0


def refit(weight: Tensor, pull: Tensor, hessian: Tensor, steps: int) -> Tensor:
    """Conjugate gradients for W·H = A·H on the weights that are not zero, every row a system of its own.

    `pull` is what is missing at the start, (A - W)·H. Removed weights stay out because the residual is
    masked: that is CG on each row's own submatrix of H without ever cutting it out. The usual preconditioner,
    the diagonal of H, is for the caller to have scaled to ones. Every step lowers the error, so it can be
    stopped anywhere.
    """
    ones = (weight != 0).float()
    residual = pull * ones
    direction = residual
    size = residual.square().sum(1, keepdim=True)
    for _ in range(steps):
        image = (direction @ hessian).mul_(ones)
        curvature = (direction * image).sum(1, keepdim=True)
        # A row that is solved, or all zeros, has no direction left: 0/0.
        length = torch.where(curvature > 0, size / curvature, 0.0)
        weight = weight + length * direction
        residual = residual - length * image
        new_size = residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(size > 0, new_size / size, 0.0) * direction
        size = new_size
    return weight
