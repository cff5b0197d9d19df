"""The teacher's forward beside the student's, in a CUDA stream of its own.

The two do not need each other until the loss. Product after product leaves a part of the GPU idle towards its
end, and that part can work for the other model.

    beside = Beside(device)
    beliefs = beside.begin(lambda: teacher(tokens))   # asked for, not there yet
    logits = student(tokens)
    with beside.joined():                             # from here on it is
        loss = recovery_loss(logits, targets, beliefs)

Each model computes what it computes alone, in the same order, so results are the same bits. What it takes is
memory: torch keeps what a stream has allocated for that stream, so the two models share no temporary tensors.

A tensor may go once both streams have met after its last use. So the other stream waits for this one at the
end of `joined`, and nothing is left to `record_stream`, which would hold the predictions of several steps
where Python is ahead of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Whether `recover` does it: benchmarks/masked_step.py has a row for each.
RUNS_BESIDE = True


class Beside:
    """With `wanted=False`, and on devices without streams, `begin` just calls."""

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self._stream = torch.cuda.Stream(device) if wanted and device.type == "cuda" else None

    def begin(self, work: Callable[[], Tensor]) -> Tensor:
        """What the work returns, to be looked at only in `joined`. It may use all that there is by now."""
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            return work()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Here what has begun may be used, and after that it may be dropped."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        try:
            yield
        finally:
            self._stream.wait_stream(current)
