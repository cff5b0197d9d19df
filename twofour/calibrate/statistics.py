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


class Gram:
    """Running mean of x·xᵀ in float32 over tokens."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.mean = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.tokens = 0
        self._derived: dict[Hashable, Any] = {}

    def add(self, x: Tensor) -> None:
        """Count inputs [..., columns] in."""
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        if not flat.shape[0]:
            return
        total = self.tokens + flat.shape[0]
        # mean ← mean·(old/total) + xᵀx/total, in place: the matrix may be a gigabyte.
        self.mean.addmm_(flat.t(), flat, beta=self.tokens / total, alpha=1 / total)
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
