"""Low-rank compensation: two thin matrices beside a pruned weight give back the worst of what was lost.

The pruned layer errs by D·x, D = before - after. Of all L·R of rank r the one to add is the one that leaves
the least error on the layer's own inputs (the idea of EoRA, arXiv 2410.21271, and of SLiM, arXiv 2410.09615):

    min tr((D - L·R)·G·(D - L·R)ᵀ)        D [n, k], G [k, k] the Gram matrix, L [n, r], R [r, k]

With G = S·Sᵀ that is the best rank-r approximation of D·S, which is U·Uᵀ·D·S with U [n, r] the leading left
singular vectors of D·S: the eigenvectors of D·G·Dᵀ. So L = U and R = Uᵀ·D, without S ever being inverted:
a singular G, equal channels and channels that never fire need no special care and no damping.

It is not free. The layer reads r·(n+k) more weights and does as many more multiplications per token
(`twofour.nn.lowrank.lowrank_cost`), so it is an option and never part of the default.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import require_finite
from twofour.prune.hessian import require_inputs


def compensate(
    before: Tensor, after: Tensor, inputs: Gram, rank: int, layer: str | None = None
) -> tuple[Tensor, Tensor]:
    """L [n, r] and R [r, k], in the dtype of `before`: after + L·R is as near to it as rank r can come.

    >>> before, after = torch.tensor([[2.0, 1.0], [4.0, 2.0]]), torch.tensor([[2.0, 0.0], [4.0, 0.0]])
    >>> inputs = Gram(2)
    >>> inputs.add(torch.eye(2))
    >>> left, right = compensate(before, after, inputs, rank=1)
    >>> torch.allclose(after + left @ right, before)
    True

    r is `rank`, or the smaller side of the matrix if that is less: then nothing is lost any more.
    """
    if rank < 1:
        raise InputError(f"the rank of a compensation must be at least 1, got {rank}.", layer=layer)
    if before.shape != after.shape:
        raise InputError(
            f"the weight was {list(before.shape)} and is {list(after.shape)}: not the same layer.",
            layer=layer,
        )
    require_finite(before, layer)
    require_finite(after, layer)
    gram = require_inputs("low-rank compensation", before, layer, inputs).mean
    # float64: eigenvalues are squares, and half of the digits go with them.
    lost = before.detach().double() - after.detach().double()
    left = _leading(lost, gram.to(lost), min(rank, *lost.shape))
    right = left.t() @ lost
    # Any split of the scale between the two gives the same product; equal norms are safest in float16.
    scale = right.norm(dim=1).sqrt()
    left, right = left * scale, right / scale.where(scale > 0, 1.0)[:, None]
    return left.to(before.dtype).contiguous(), right.to(before.dtype).contiguous()


def _leading(lost: Tensor, gram: Tensor, rank: int) -> Tensor:
    """The leading left singular vectors of D·S, [n, r], from the smaller of the two possible matrices."""
    rows, columns = lost.shape
    if rows <= columns:
        return torch.linalg.eigh(_symmetric(lost @ gram @ lost.t()))[1][:, -rank:].flip(1)
    values, vectors = torch.linalg.eigh(_symmetric(gram))
    root = vectors * values.clamp(min=0).sqrt()  # S: rounding may leave eigenvalues just below zero
    seen = lost @ root
    right = torch.linalg.eigh(_symmetric(seen.t() @ seen))[1][:, -rank:].flip(1)
    # Directions that were not lost at all come out as zeros; QR makes them orthonormal like the rest.
    return torch.linalg.qr(seen @ right)[0]


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.t()) / 2
