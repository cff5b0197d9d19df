"""From values to places on paper: linear and logarithmic scales, and round ticks on them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: Steps between ticks, before their power of ten.
ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """`low`…`high` are drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * self.share(value)

    def share(self, value: float) -> float:
        """How far from low to high. What lies outside is drawn at the edge, never outside the plot."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self, most: int = 5) -> list[float]:
        return _powers(self.low, self.high, most) if self.log else _steps(self.low, self.high, most)


def linear(values: Iterable[float], start: float, end: float, *, zero: bool = True) -> Scale:
    """A scale over the values, from zero unless told otherwise, that ends at a round figure."""
    given = list(values) or [0.0, 1.0]
    low, high = min(given), max(given)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (0.0, 1.0) if high == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    step = _step(low, high, 5)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale over the positive values among these, with a little room at both ends."""
    given = [value for value in values if value > 0] or [1.0, 10.0]
    low, high = min(given) / 1.25, max(given) * 1.25
    return Scale(low, high, start, end, log=True)


def _step(low: float, high: float, most: int) -> float:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in ROUND_STEPS if power * step >= rough * (1 - 1e-9))


def _steps(low: float, high: float, most: int) -> list[float]:
    step = _step(low, high, most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _powers(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    powers = range(first, last + 1)
    if len(powers) >= 2:
        every = math.ceil(len(powers) / most)
        return [10.0**power for power in powers if (power - first) % every == 0]
    near = [base * 10.0**power for power in range(first - 1, last + 2) for base in (1, 2, 5)]
    return [value for value in near if low <= value <= high]
