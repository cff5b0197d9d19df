"""How long one product y = x·Wᵀ takes: W has n rows and k columns, x has `tokens` rows.

    launch + idle·(share of the chip without work) + ‖ bytes / bandwidth,  tiles / rate ‖ₚ

Bytes are the weight, x and y once each. The arithmetic is done in tiles of rows × tokens, of which each
multiprocessor does one at a time, so the last wave may be partly empty (`quantised` says how much of that is
felt: libraries have ways around it). Small tiles reach less of the peak than large ones: share
`peak · t/(t + half_tokens) · r/(r + half_rows)`. A tile's columns may be shared out over up to four
multiprocessors, for `split` more microseconds. Of all tilings the fastest counts, as in a tuned library. How
far bytes and arithmetic overlap is the exponent p: 1 is not at all, infinity is fully.

A `Curve` holds the nine figures, one for each scheme that was measured. Those in defaults/ were fitted to
rows of an H200 (benchmarks/fit_advise.py, twofour/advise/fit.py). Everything else is scaled from them:
another GPU by its data sheet, and a scheme without rows from 16 bit by its bytes and the ratio of the
ceilings. Where tokens are rounded to 8 bits before the product, that is in the rows and so in the curve.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

from twofour.advise.gpus import Gpu
from twofour.advise.schemes import Scheme

TILE_ROWS = (64, 128, 256)
SPLITS = (1, 2, 4)

#: Sums of a larger tile do not fit into a multiprocessor's registers.
LARGEST_TILE = 32768

#: Fewest columns that were measured. Below, a chip with little to do is done sooner: an assumption.
SHORTEST = 4096

#: Weights of the smallest matrix that was measured. Times of smaller ones are guesses.
SMALLEST = 1024 * 4096

Bound = Literal["launch", "bytes", "arithmetic"]


@dataclass(frozen=True)
class Curve:
    """Efficiency of one kind of product. Times in microseconds, shares of the data sheet's ceilings."""

    launch: float
    bandwidth: float
    overlap: float  # p - 1
    quantised: float
    split: float
    peak: float
    half_tokens: float
    half_rows: float
    idle: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class ProductTime:
    """Microseconds, and what most of them go to."""

    us: float
    bytes_us: float
    arithmetic_us: float
    bound: Bound


@cache
def tilings(tile_tokens: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Rows and tokens of a tile, and over how many multiprocessors its columns are shared out."""
    every = itertools.product(TILE_ROWS, tile_tokens, SPLITS)
    return tuple(tiling for tiling in every if tiling[0] * tiling[1] <= LARGEST_TILE)


@cache
def product_time(curve: Curve, gpu: Gpu, scheme: Scheme, n: int, k: int, tokens: int) -> ProductTime:
    """The predicted time of one product with the weight in the memory, not in the L2."""
    rate = gpu.rate(scheme.arithmetic)
    if rate is None:
        raise ValueError(f"{gpu.name} has no {scheme.arithmetic}")
    moved = scheme.weight_bytes(n, k) + tokens * (scheme.activation_bytes * k + 2 * n)
    bytes_us = moved / (gpu.bandwidth_gb_s * 1e3 * curve.bandwidth)
    # One multiprocessor's operations in a microsecond; those on zeros count too, hence the factor for 2:4.
    each = rate * 1e6 * (2 if scheme.sparse else 1) / gpu.multiprocessors * curve.peak
    arithmetic_us = math.inf
    for tile_rows, tile_tokens, split in tilings(scheme.tile_tokens):
        count = math.ceil(n / tile_rows) * math.ceil(tokens / tile_tokens) * split
        waves = count / gpu.multiprocessors
        waves += curve.quantised * (math.ceil(waves) - waves)
        share = tile_tokens / (tile_tokens + curve.half_tokens) * tile_rows / (tile_rows + curve.half_rows)
        took = waves * 2 * tile_rows * tile_tokens * k / split / (each * share)
        arithmetic_us = min(arithmetic_us, took + (curve.split if split > 1 else 0.0))
    busy = math.ceil(n / 64) * math.ceil(tokens / 64) / gpu.multiprocessors
    fixed = curve.launch + curve.idle * max(0.0, 1 - busy) * min(1.0, k / SHORTEST)
    p = 1 + curve.overlap
    largest = max(bytes_us, arithmetic_us)
    work = largest * ((bytes_us / largest) ** p + (arithmetic_us / largest) ** p) ** (1 / p)
    bound: Bound = "bytes" if bytes_us >= arithmetic_us else "arithmetic"
    if fixed > largest:
        bound = "launch"
    return ProductTime(fixed + work, bytes_us, arithmetic_us, bound)


def intensity(scheme: Scheme, n: int, k: int, tokens: int) -> float:
    """Operations per byte of a product, zeros of 2:4 not counted."""
    operations = 2 * n * k * tokens * (0.5 if scheme.sparse else 1)
    return operations / (scheme.weight_bytes(n, k) + tokens * (scheme.activation_bytes * k + 2 * n))
