"""Write the tables of docs/speed.md from the rows in benchmarks/results: python benchmarks/tables.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"
NAMES = ("twofour", "twofour fast", "cusparselt", "torch24")


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
        ratios = [f"{cells[shape, tokens, n]['times_dense_graph']:.2f}×" for n in NAMES]
        lines.append(f"| {shape} | {tokens} | {1e3 * dense:.1f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def host_time() -> str:
    rows = product_rows("8b") + product_rows("70b")
    lines = ["| | lowest | median | highest |", "|---|---|---|---|"]
    for name in ("dense", *NAMES):
        times = sorted(r["host_us"] for r in rows if r["contender"] == name and r["host_us"])
        lines.append(f"| {name} | {times[0]:.0f} | {times[len(times) // 2]:.0f} | {times[-1]:.0f} |")
    return "\n".join(lines)


def end_to_end(file: str, forms: tuple[str, ...], baseline: str) -> str:
    """× `baseline` of each form; where it fails, that."""
    rows = json.loads((RESULTS / file).read_text())["end_to_end"]
    cells = {(r["what"], r["batch"], r["mode"], r["attention"], r["contender"]): r for r in rows}
    lines = [
        "| | attention | dense ms | " + " | ".join(forms) + " | peak memory, dense and fused |",
        "|---|---|---|" + "---|" * len(forms) + "---|",
    ]
    for key in dict.fromkeys(key[:4] for key in cells):
        what, batch, mode, attention = key
        dense, fused = cells[(*key, baseline)], cells[(*key, "fused")]
        times = [cells[(*key, form)]["ms"] for form in forms]
        shown = [f"{dense['ms']['p50'] / time['p50']:.2f}×" if time else "fails" for time in times]
        peak = f"{dense['peak_bytes'] / 1e9:.1f} and {fused['peak_bytes'] / 1e9:.1f} GB"
        start = f"| {what}, batch {batch}, {mode} | {attention} | {dense['ms']['p50']:.2f} | "
        lines.append(start + " | ".join(shown) + f" | {peak} |")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text()
    now, earlier = "h200-end-to-end-8b.json", "h200-end-to-end-8b-earlier.json"
    tables = {
        "8b": products("8b"),
        "70b": products("70b"),
        "host": host_time(),
        "end-to-end": end_to_end(now, ("dense_fused", "fused", "fast"), "dense"),
        "same norms": end_to_end(now, ("fused", "fast"), "dense_fused"),
        "earlier": end_to_end(earlier, ("torch24", "twofour", "fused", "fast"), "dense"),
    }
    for name, table in tables.items():
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        page = re.sub(f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{table}\n{marks[1]}", page, flags=re.S)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
