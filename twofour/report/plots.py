"""Plots as SVG, written by hand: axes, lines, points and bars, in the colours of the page's style sheet.

A plot is drawn for a width, in CSS pixels, so that its letters keep their size: the page holds a wide and a
narrow drawing of each and shows the one that fits. Every plot has a title and a description for those who do
not see it, and every point and bar a title with its figures. Text is escaped here; nothing else writes SVG.

Colours are classes: `s0` is dense, `s1` the first 2:4 model, `s2`… further ones. Each series also has a
marker of its own, for print and for eyes that do not tell colours apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from twofour.report.figures import number
from twofour.report.scales import Scale, linear, logarithmic

#: How many series have a colour; further ones begin again.
COLOURS = 6

LEFT, RIGHT, TOP, BOTTOM = 60, 14, 14, 42
BAR, BAR_GAP = 15, 13
#: Room a letter takes in labels: that of a wide font, as the reader's is not known.
LETTER = 7.0


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str  # its figures in words


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int = 1
    line: bool = False
    markers: bool = True
    hollow: bool = False


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    zero: bool = True
    tight: bool = False  # ends at the last value, not at a round one
    low: float | None = None  # values that must be on the axis
    high: float | None = None


@dataclass(frozen=True)
class Reference:
    """A line that is not data: a roof, a threshold."""

    points: Sequence[tuple[float, float]]
    label: str
    colour: int | None = None
    below: bool = False  # the label stands under the line


@dataclass(frozen=True)
class Scatter:
    title: str
    description: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    references: Sequence[Reference] = field(default=())
    height: int = 240

    def draw(self, width: int, name: str) -> str:
        points = [p for s in self.series for p in s.points]
        edges = [p for r in self.references for p in r.points]
        right = width - RIGHT
        x = _scale(self.x, [p.x for p in points] + [e[0] for e in edges], LEFT, right)
        y = _scale(self.y, [p.y for p in points] + [e[1] for e in edges], self.height - BOTTOM, TOP)
        parts = [_axes(self.x, self.y, x, y, width, self.height)]
        for reference in self.references:
            parts.append(_reference(reference, x, y, right))
        for series in self.series:
            parts.append(_series(series, x, y))
        return _svg(name, self.title, self.description, width, self.height, parts)


@dataclass(frozen=True)
class Bar:
    value: float
    words: str  # the figure with its unit, shown at the bar's end
    colour: int = 1
    series: str = ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars in named groups: names of layers and models are long, pages are narrow."""

    title: str
    description: str
    groups: Sequence[tuple[str, Sequence[Bar]]]
    axis: str = ""

    def draw(self, width: int, name: str) -> str:
        words = max((len(bar.words) for _, bars in self.groups for bar in bars), default=0)
        label = max((len(group) for group, _ in self.groups), default=0) * LETTER + 10
        beside = label < 0.34 * width  # a long name stands above its bars instead
        left = label if beside else 2.0
        right = width - words * LETTER - 8
        x = linear([bar.value for _, bars in self.groups for bar in bars], left, right)
        parts = []
        top = 4.0
        for group, bars in self.groups:
            if beside:
                middle = top + len(bars) * BAR / 2 + 4
                parts.append(_text(left - 8, middle, group, anchor="end"))
            else:
                parts.append(_text(left, top + 10, shortened(group, width)))
                top += 16
            for bar in bars:
                long = max(x(bar.value) - x(0), 1.0)
                said = ": ".join(part for part in (group, bar.series, bar.words) if part)
                parts.append(
                    f'<rect class="bar s{bar.colour % COLOURS}" x="{_at(left)}" y="{_at(top)}" '
                    f'width="{_at(long)}" height="{BAR - 2}"><title>{escape(said)}</title></rect>'
                )
                parts.append(_text(left + long + 5, top + BAR - 5, bar.words, kind="figure"))
                top += BAR
            top += BAR_GAP
        height = max(round(top - BAR_GAP + 4), 20)
        return _svg(name, self.title, self.description, width, height, parts)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    bounds = [bound for bound in (axis.low, axis.high) if bound is not None]
    if axis.log:
        return logarithmic([*values, *bounds], start, end)
    if axis.tight and min(values) < max(values):
        return Scale(min(values), max(values), start, end)
    return linear([*values, *bounds], start, end, zero=axis.zero)


def _axes(x_axis: Axis, y_axis: Axis, x: Scale, y: Scale, width: int, height: int) -> str:
    bottom = height - BOTTOM
    parts = []
    for tick in y.ticks(5):
        up = _at(y(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{up}" y2="{up}"/>')
        parts.append(_text(LEFT - 6, y(tick) + 4, _tick(tick), anchor="end", kind="tick"))
    last = -1e9
    for tick in x.ticks(6 if width > 500 else 4):
        at, words = x(tick), _tick(tick)
        parts.append(f'<line class="axis" x1="{_at(at)}" x2="{_at(at)}" y1="{bottom}" y2="{bottom + 4}"/>')
        if at - last > (len(words) + 2) * LETTER:  # labels never run into each other
            parts.append(_text(at, bottom + 17, words, anchor="middle", kind="tick"))
            last = at
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text((LEFT + width - RIGHT) / 2, height - 6, x_axis.label, anchor="middle", kind="tick"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="tick" text-anchor="middle" transform="translate(12 {_at(middle)}) rotate(-90)">'
        f"{escape(y_axis.label)}</text>"
    )
    return "".join(parts)


def _tick(value: float) -> str:
    if value and abs(value) >= 1e6:
        return f"{value / 1e6:,g}M"
    return f"{value:,g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}"


def _reference(reference: Reference, x: Scale, y: Scale, right: float) -> str:
    path = " ".join(f"{_at(x(a))},{_at(y(b))}" for a, b in reference.points)
    colour = "plain" if reference.colour is None else f"s{reference.colour % COLOURS}"
    last = reference.points[-1]
    shift = 24 if reference.below else -6
    label = _text(min(x(last[0]), right) - 2, y(last[1]) + shift, reference.label, anchor="end", kind="note")
    return f'<polyline class="reference {colour}" points="{path}"/>{label}'


def _series(series: Series, x: Scale, y: Scale) -> str:
    colour = series.colour % COLOURS
    parts = []
    if series.line and len(series.points) > 1:
        path = " ".join(f"{_at(x(p.x))},{_at(y(p.y))}" for p in series.points)
        parts.append(f'<polyline class="line s{colour}" points="{path}"/>')
    if series.markers:
        hollow = " hollow" if series.hollow else ""
        for point in series.points:
            shape = _marker(colour, x(point.x), y(point.y), hollow)
            said = escape(f"{series.name}: {point.label}")
            parts.append(shape.replace("/>", f"><title>{said}</title></{shape[1:].split()[0]}>"))
    return "".join(parts)


def _marker(colour: int, x: float, y: float, hollow: str) -> str:
    style = f'class="mark s{colour}{hollow}"'
    if colour == 0:
        return f'<circle {style} cx="{_at(x)}" cy="{_at(y)}" r="3.4"/>'
    corners = {
        1: ((0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0)),
        2: ((-3.4, -3.4), (3.4, -3.4), (3.4, 3.4), (-3.4, 3.4)),
        3: ((0, -4.4), (4.2, 3.2), (-4.2, 3.2)),
        4: ((0, 4.4), (4.2, -3.2), (-4.2, -3.2)),
        5: ((-4, -1.5), (-1.5, -4), (4, 1.5), (1.5, 4)),
    }[colour]
    path = " ".join(f"{_at(x + dx)},{_at(y + dy)}" for dx, dy in corners)
    return f'<polygon {style} points="{path}"/>'


def key(colour: int) -> str:
    """A series' marker alone, for a legend. The words beside it say the same, so it is not read out."""
    mark = _marker(colour % COLOURS, 7, 7, "")
    return f'<svg class="key" width="14" height="14" viewBox="0 0 14 14" aria-hidden="true">{mark}</svg>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> str:
    return f'<text class="{kind}" x="{_at(x)}" y="{_at(y)}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(name: str, title: str, description: str, width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg role="img" tabindex="0" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(description)}</desc>{"".join(parts)}</svg>'
    )


def _at(value: float) -> str:
    """A place with a tenth of a pixel: more would only make the page heavier."""
    return f"{value:.1f}".removesuffix(".0")


def shortened(words: str, width: float) -> str:
    """Words that fit, with their middle left out if need be: names differ at their ends.

    >>> shortened("a-very-long-name-indeed", 84)
    'a-ver…indeed'
    """
    most = int(width / LETTER)
    if len(words) <= most:
        return words
    tail = most // 2
    return f"{words[: most - tail - 1]}…{words[-tail:]}"


def spread(values: Sequence[float], words: str) -> str:
    """
    >>> spread([0.5, 0.25, 1.0], "error")
    'error 0.250 to 1.00, median 0.500'
    """
    if not values:
        return f"no {words}"
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return f"{words} {number(ordered[0])} to {number(ordered[-1])}, median {number(middle)}"
