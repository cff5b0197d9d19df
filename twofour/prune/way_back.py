"""How far to go from the old weights of a block to the tuned ones: to where windows not tuned on say.

What tuning learns is in part true of all text and in part true of the windows tuned on only. The second part
is noise to other windows, and noise is best met half-way: on the straight line between old and tuned weights
the error on other windows first falls and then, perhaps, rises again. The error is a square, so along the
line it is nearly a parabola, and its values at the start, in the middle and at the end tell where it is
lowest. That costs two or three passes over a few windows; tuning anew would cost as much as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Where the lowest point is so near the end of the way, the end is taken without looking.
NEAR_THE_END = 0.9


@torch.no_grad()
def go_back_(
    parameters: Sequence[Tensor], start: Sequence[Tensor], best: float, error: Callable[[], float]
) -> float:
    """Leave the parameters where the error is lowest on the way from `start` to where they are.

    `best` is the error at the start. The lowest error.
    """
    end = [parameter.detach().clone() for parameter in parameters]

    def go_to(share: float) -> None:
        for parameter, old, new in zip(parameters, start, end, strict=True):
            torch.lerp(old, new, share, out=parameter.data)

    def error_at(share: float) -> float:
        go_to(share)
        return error()

    found = {0.0: best, 1.0: error(), 0.5: error_at(0.5)}
    share = lowest_point(found[0.0], found[0.5], found[1.0])
    if 0 < share < NEAR_THE_END:
        found[share] = error_at(share)
    finite = {share: value for share, value in found.items() if math.isfinite(value)}
    share = min(finite, key=finite.__getitem__)  # of equal ones the first: the start
    if share == 0:
        restore_(parameters, start)  # not by going there: the end may be infinite
    else:
        go_to(share)
    return finite[share]


def lowest_point(start: float, half: float, end: float) -> float:
    """Where from 0 to 1 the parabola through the three errors is lowest.

    >>> lowest_point(0.0625, 0.0625, 0.5625)
    0.25
    """
    bend = 2 * (start - 2 * half + end)
    slope = end - start - bend
    if not (math.isfinite(bend) and bend > 0):
        return 1.0 if end < start else 0.0
    return min(max(-slope / (2 * bend), 0.0), 1.0)


@torch.no_grad()
def restore_(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
