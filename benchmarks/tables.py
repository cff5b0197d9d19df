"""Write the tables of docs/speed-tables.md and the plot of docs/speed.md from the rows in benchmarks/results.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from twofour.report.plots import Axis, Point, Reference, Scatter, Series

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed-tables.md"
PLOT = ROOT / "docs" / "speed.svg"
END_TO_END, QUANTIZED = "h200-end-to-end-8b.json", "h200-quantized-8b.json"
INT4_70B, SUSTAINED = "h200-int4-70b.json", "h200-sustained-8b.json"
NAMES = ("twofour", "hopper", "ampere", "cusparselt", "torch24")
#: Of the plot: its colours on paper and on a dark page. One drawing for both, as a README shows it.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c1e21 } .tick, .note { fill: #565d64 }
.grid { stroke: #dfe1dd } .axis { stroke: #565d64 } .line, .reference { fill: none; stroke-width: 2 }
.reference { stroke: #767d85; stroke-dasharray: 4 3 }
.s0 { stroke: #767d85 } .s1 { stroke: #0a63b8 } .s2 { stroke: #b14a00 } .s3 { stroke: #1b7a4b }
.s4 { stroke: #a8324a }
.mark.s0 { fill: #767d85 } .mark.s1 { fill: #0a63b8 } .mark.s2 { fill: #b14a00 } .mark.s3 { fill: #1b7a4b }
.mark.s4 { fill: #a8324a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8ea } .tick, .note { fill: #a9b1b8 } .grid { stroke: #33383d }
}
"""


def product_rows(model: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"h200-products-{model}.json").read_text())["products"]
    return rows


def products(model: str) -> str:
    rows = product_rows(model)
    cells = {(r["shape"], r["tokens"], r["contender"]): r for r in rows}
    lines = [
        "| weight | tokens | dense µs | " + " | ".join(NAMES) + " |",
        "|---|---|---|" + "---|" * len(NAMES),
    ]
    for shape, tokens in dict.fromkeys((r["shape"], r["tokens"]) for r in rows):
        dense = cells[shape, tokens, "dense"]["graph_ms"]["p50"]
        ratios = [_ratio(cells.get((shape, tokens, name)), "times_dense_graph") for name in NAMES]
        lines.append(f"| {shape} | {tokens} | {1e3 * dense:.1f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def host_time() -> str:
    rows = product_rows("8b") + product_rows("70b")
    lines = ["| | lowest | median | highest |", "|---|---|---|---|"]
    for name in ("dense", *NAMES):
        times = sorted(r["host_us"] for r in rows if r["contender"] == name and r["host_us"])
        lines.append(f"| {name} | {times[0]:.0f} | {times[len(times) // 2]:.0f} | {times[-1]:.0f} |")
    return "\n".join(lines)


def quantized(scheme: str, file: str) -> str:
    """× dense in 16 bits of each contender, and of ours × dense of the same bits, from CUDA graphs."""
    rows = [r for r in json.loads((RESULTS / file).read_text())["products"] if r["scheme"] == scheme]
    cells = {(r["shape"], r["tokens"], r["contender"]): r for r in rows}
    names = [name for name in dict.fromkeys(r["contender"] for r in rows) if name != "dense"]
    lines = [
        "| weight | tokens | dense µs | " + " | ".join(names) + " | twofour × dense, same bits |",
        "|---|---|---|" + "---|" * len(names) + "---|",
    ]
    for shape, tokens in dict.fromkeys((r["shape"], r["tokens"]) for r in rows):
        dense = cells[shape, tokens, "dense"]["graph_ms"]["p50"]
        ratios = [_ratio(cells.get((shape, tokens, name)), "times_dense_graph") for name in names]
        ratios.append(_ratio(cells[shape, tokens, "twofour"], "times_dense_same_graph"))
        lines.append(f"| {shape} | {tokens} | {1e3 * dense:.1f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def sustained() -> str:
    """× dense fp8 of the same run, everyone at the clock that it can hold by itself."""
    rows = json.loads((RESULTS / SUSTAINED).read_text())["products"]
    cells = {(r["scheme"], r["shape"], r["tokens"], r["contender"]): r for r in rows}
    lines = [
        "| weight | tokens | dense fp8 µs | fp8 | cusparselt fp8 | int8 | cusparselt int8 | int8 × our fp8 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, tokens in dict.fromkeys((r["shape"], r["tokens"]) for r in rows):
        dense = cells["fp8", shape, tokens, "dense fp8"]["graph_ms"]["p50"]
        shown = [
            _ratio(cells.get((scheme, shape, tokens, who)), "times_dense_same_graph")
            for scheme in ("fp8", "int8")
            for who in ("twofour", "cusparselt")
        ]
        codes = [cells.get(("int8", shape, tokens, who)) for who in ("twofour", "twofour fp8")]
        ours, fp8 = (row["graph_ms"]["p50"] if row else None for row in codes)
        shown.append(f"{fp8 / ours:.2f}×" if ours and fp8 else "")
        lines.append(f"| {shape} | {tokens} | {1e3 * dense:.1f} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _ratio(row: dict[str, Any] | None, name: str) -> str:
    """Nothing where it was not measured: not all contenders run with every number of tokens."""
    if row is None or (row[name] is None and "error" not in row):
        return ""
    return "fails" if row[name] is None else f"{row[name]:.2f}×"


def end_to_end(file: str, forms: tuple[str, ...], baseline: str, memory: tuple[str, ...] = ("fused",)) -> str:
    """× `baseline` of each form; where it fails, that. Last the peak memory of it and of some forms."""
    rows = json.loads((RESULTS / file).read_text())["end_to_end"]
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        case = row["what"], row["batch"], row["mode"], row["attention"]
        cases.setdefault(case, {})[row["contender"]] = row
    peak_of = " and ".join([", ".join(["dense", *memory[:-1]]), memory[-1]])
    lines = [
        "| | attention | dense ms | " + " | ".join(forms) + f" | peak memory, {peak_of} |",
        "|---|---|---|" + "---|" * len(forms) + "---|",
    ]
    for (what, batch, mode, attention), by_form in cases.items():
        dense = by_form[baseline]
        times = [by_form[form]["ms"] for form in forms]
        shown = [f"{dense['ms']['p50'] / time['p50']:.2f}×" if time else "fails" for time in times]
        peaks = [f"{by_form[form]['peak_bytes'] / 1e9:.1f}" for form in (baseline, *memory)]
        peak = " and ".join([", ".join(peaks[:-1]), peaks[-1]]) + " GB"
        start = f"| {what}, batch {batch}, {mode} | {attention} | {dense['ms']['p50']:.2f} | "
        lines.append(start + " | ".join(shown) + f" | {peak} |")
    return "\n".join(lines)


def plot() -> str:
    """A layer's four products together, × dense bf16 of the same run, over the number of tokens."""
    sixteen = product_rows("8b")
    fewer = json.loads((RESULTS / QUANTIZED).read_text())["products"]
    series = [
        _layer("int4", [r for r in fewer if r["scheme"] == "int4"], "twofour", 2),
        _layer("fp8", [r for r in fewer if r["scheme"] == "fp8"], "twofour", 3),
        _layer("16 bit", sixteen, "twofour", 1),
        _layer("dense fp8", [r for r in fewer if r["scheme"] == "fp8"], "dense fp8", 0),
        _layer("PyTorch's own 2:4, 16 bit", sixteen, "torch24", 4),
    ]
    drawn = Scatter(
        "The four products of a Llama-3-8B layer, times as fast as dense bf16",
        "; ".join(f"{s.name}: " + ", ".join(p.label for p in s.points) for s in series),
        Axis("tokens", log=True),
        Axis("times dense bf16", low=0.0),
        series,
        [Reference([(1, 1), (16384, 1)], "dense bf16")],
        height=320,
    ).draw(760, "speed")
    legend, left = [], 70.0
    for one in series:
        legend.append(f'<line class="line s{one.colour}" x1="{left:g}" x2="{left + 18:g}" y1="14" y2="14"/>')
        legend.append(f'<text x="{left + 23:g}" y="18">{one.name}</text>')
        left += 23 + 6.5 * len(one.name) + 22
    width, height = 760, 350
    inner = drawn.replace("<svg ", '<svg y="30" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}">'
        f"<style>{STYLE}</style>{''.join(legend)}{inner}</svg>\n"
    )


def _layer(name: str, rows: list[dict[str, Any]], contender: str, colour: int) -> Series:
    """Where all four weights were measured: the sum of dense's times over the sum of the contender's."""
    times: dict[int, list[tuple[float, float]]] = {}
    dense = {(r["shape"], r["tokens"]): r["graph_ms"]["p50"] for r in rows if r["contender"] == "dense"}
    for row in rows:
        if row["contender"] == contender and row["graph_ms"]:
            # The contenders of a cell may be of several runs; the row's own ratio is of its run.
            ratio, other = row["times_dense_graph"], dense[row["shape"], row["tokens"]]
            times.setdefault(row["tokens"], []).append((other, other / ratio))
    points = []
    for tokens, cells in sorted(times.items()):
        if len(cells) == 4:
            ratio = sum(d for d, _ in cells) / sum(ours for _, ours in cells)
            points.append(Point(tokens, ratio, f"{tokens} tokens {ratio:.2f}×"))
    return Series(name, points, colour, line=True)


def page() -> str:
    """The page with its tables made anew; what stands between them is kept."""
    page = PAGE.read_text()
    forms = ("torch24", "twofour", "dense_fused", "fused")
    tables = {
        "8b": products("8b"),
        "70b": products("70b"),
        "host": host_time(),
        "end-to-end": end_to_end(END_TO_END, forms, "dense"),
        "same fusions": end_to_end(END_TO_END, ("fused",), "dense_fused"),
        **{f"{scheme} 8b": quantized(scheme, QUANTIZED) for scheme in ("fp8", "int8", "int4")},
        "int4 70b": quantized("int4", INT4_70B),
        "sustained 8b": sustained(),
        "quantized end-to-end": end_to_end(
            QUANTIZED, ("dense_fused", "fp8", "int4"), "dense", ("fp8", "int4")
        ),
        "quantized same fusions": end_to_end(QUANTIZED, ("fp8", "int4"), "dense_fused", ("fp8", "int4")),
    }
    for name, table in tables.items():
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        page = re.sub(f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{table}\n{marks[1]}", page, flags=re.S)
    return page


if __name__ == "__main__":
    PAGE.write_text(page())
    PLOT.write_text(plot())
