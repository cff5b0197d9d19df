"""Fit the figures of the time model to measured rows: for the shipped defaults, and for a user's own GPU.

Levenberg–Marquardt on the logarithms of the figures, which keeps them positive, with the logarithm of
predicted over measured as the residual, bent so that a single odd cell does not pull everything its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from twofour.advise.gpus import Gpu
from twofour.advise.products import Curve, product_time
from twofour.advise.schemes import Scheme

#: Residuals (logarithms) beyond this count little more than this.
BEND = 0.4

#: How hard figures are held to where the fit starts: ten cells cannot determine nine figures.
HOLD = 0.03

#: Figures may not leave these ranges; beyond them rows of a narrow grid could push them anywhere.
RANGES = {"quantised": (0.01, 1.0), "bandwidth": (0.2, 1.1), "peak": (0.01, 2.0), "overlap": (0.01, 10.0)}
#: Rows in 8 and 4 bits are fewer still, and would drive the bandwidth past the data sheet, and the time of an
#: idle chip so far up that a larger product is told to take less time.
RANGES_BELOW_16_BIT = RANGES | {"bandwidth": (0.2, 1.0), "idle": (1e-3, 1e-3)}
ANY = (1e-3, 1e3)


@dataclass(frozen=True)
class Measured:
    """One product that was timed."""

    rows: int
    columns: int
    tokens: int
    us: float


def of_its_kernel(rows: Sequence[Measured], scheme: Scheme) -> list[Measured]:
    """Those that say something about the scheme's curve: with more tokens the product is one in 16 bit."""
    return [row for row in rows if row.tokens <= scheme.most_tokens]


def minimise(residuals: Callable[[Any], Any], start: Any, rounds: int = 100) -> Any:
    """The point where the sum of the squared residuals is smallest, going downhill from `start`."""
    point, damping, step = np.asarray(start, float), 1e-2, 1e-4
    now = residuals(point)
    for _ in range(rounds):
        slopes = np.stack([(residuals(point + step * e) - now) / step for e in np.eye(len(point))], axis=1)
        normal, down = slopes.T @ slopes, -slopes.T @ now
        move = np.linalg.solve(normal + damping * np.eye(len(point)), down)
        then = residuals(point + move)
        gain = float(now @ now - then @ then)
        if gain > 0:
            point, now, damping = point + move, then, max(damping / 3, 1e-6)
            if gain < 1e-7 * float(now @ now):
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return point


def fit_curve(rows: Sequence[Measured], gpu: Gpu, scheme: Scheme, start: Curve, hold: float = HOLD) -> Curve:
    """The curve nearest to `start` that gives the measured times."""
    names = [field.name for field in fields(Curve)]
    ranges = RANGES if scheme.value_bits == 16 else RANGES_BELOW_16_BIT
    low, high = (np.log([ranges.get(name, ANY)[end] for name in names]) for end in (0, 1))
    measured = np.log([row.us for row in rows])
    first = np.log([max(value, 1e-3) for value in start.to_dict().values()])

    def curve(point: Any) -> Curve:
        values = np.exp(np.clip(point, low, high))
        return Curve(**{name: float(value) for name, value in zip(names, values, strict=True)})

    def residuals(point: Any) -> Any:
        tried = curve(point)
        # Not the cached function: every trial has figures of its own, and none comes back.
        timed = product_time.__wrapped__
        predicted = [timed(tried, gpu, scheme, r.rows, r.columns, r.tokens).us for r in rows]
        off = np.log(predicted) - measured
        return np.concatenate([BEND * np.tanh(off / BEND), hold * (point - first)])

    return curve(minimise(residuals, first))
