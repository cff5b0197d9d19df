"""Write the tables of docs/speed.md from the rows in benchmarks/results: python benchmarks/tables.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"
END_TO_END, QUANTIZED = "h200-end-to-end-8b.json", "h200-quantized-8b.json"
INT4_70B = "h200-int4-70b.json"
NAMES = ("twofour", "hopper", "ampere", "cusparselt", "torch24")


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


def main() -> None:
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
        "quantized end-to-end": end_to_end(
            QUANTIZED, ("dense_fused", "fp8", "int4"), "dense", ("fp8", "int4")
        ),
        "quantized same fusions": end_to_end(QUANTIZED, ("fp8", "int4"), "dense_fused", ("fp8", "int4")),
    }
    for name, table in tables.items():
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        page = re.sub(f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{table}\n{marks[1]}", page, flags=re.S)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
