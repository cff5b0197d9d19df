"""What a layer's inputs look like: the Gram matrix X·Xᵀ over all calibration tokens.

Everything that one-shot pruning wants to know of the data is in it: for y = W·x the squared error that a
change D of the weights makes is tr(D·G·Dᵀ), whatever the tokens were. Its diagonal are the squared norms of
the input channels, which is all that Wanda and RIA need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from twofour.calibrate import parallel

Derived = TypeVar("Derived")

#: Rows of a Gram matrix that are made at a time where it cannot be added to in place.
STRIP = 4096


class Gram:
    """Running mean of x·xᵀ in float32 over tokens."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.mean = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.tokens = 0
        self._derived: dict[Hashable, Any] = {}

    def add(self, x: Tensor) -> None:
        """Count inputs [..., columns] in."""
        flat = x.detach().reshape(-1, x.shape[-1])
        if not flat.shape[0]:
            return
        total = self.tokens + flat.shape[0]
        # mean ← mean·(old/total) + xᵀx/total, in place: the matrix may be gigabytes.
        old, new = self.tokens / total, 1 / total
        if flat.is_cuda and flat.dtype in (torch.bfloat16, torch.float16):
            # Tensor cores multiply 16-bit numbers exactly and add up in float32: the same sum as after
            # widening, many times as fast. In strips, because the product is a matrix of its own.
            for strip, part in zip(self.mean.split(STRIP), flat.split(STRIP, 1), strict=True):
                strip.mul_(old).add_(torch.mm(part.t(), flat, out_dtype=torch.float32), alpha=new)
        else:
            flat = flat.float()
            self.mean.addmm_(flat.t(), flat, beta=old, alpha=new)
        self.tokens = total
        self._derived.clear()

    def share(self) -> None:
        """Count in what the other processes have seen, if there are any."""
        if not parallel.active():
            return
        seen = parallel.sum_(torch.tensor(self.tokens))
        self.mean.mul_(self.tokens / max(int(seen), 1))
        parallel.sum_(self.mean)
        self.tokens = int(seen)
        self._derived.clear()

    def lean_on(self, others: Tensor) -> None:
        """With fewer tokens than columns, fill up with what `others` look like (the mean of their x·xᵀ).

        A Gram matrix of few tokens says of most directions that nothing ever comes from there, so a weight
        update takes them as free, and the next text shows that they are not. Others that read the same
        stream are a better guess at them than none. As many are counted in as tokens are missing, so the
        more an expert saw the less it leans, and with as many tokens as columns it stands by itself.
        """
        own = min(1.0, self.tokens / self.mean.shape[0])
        self.mean.lerp_(others, 1 - own)
        self._derived.clear()

    def divide(self, channels: Tensor) -> None:
        """The inputs are divided by these from now on, channel by channel."""
        self.mean.div_(channels).div_(channels[:, None])
        self._derived.clear()

    def derived(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """What a method makes of the matrix (a factor, an inverse), made once for all layers that share it.

        It is kept as long as this object: q, k and v, or gate and up, are then one factorisation.
        """
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    @property
    def channel_norms(self) -> Tensor:
        """Root mean square of every input channel."""
        return self.mean.diagonal().clamp(min=0).sqrt()
