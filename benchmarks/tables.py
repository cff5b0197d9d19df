"""Write the tables of docs/speed.md from the rows in benchmarks/results: python benchmarks/tables.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"
NAMES = ("twofour", "twofour fast", "cusparselt", "torch24")
FORMS = ("torch24", "twofour", "fused", "fast")


def products() -> str:
    rows = json.loads((RESULTS / "h200-products-8b.json").read_text())["products"]
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
    rows = json.loads((RESULTS / "h200-products-8b.json").read_text())["products"]
    lines = ["| | lowest | median | highest |", "|---|---|---|---|"]
    for name in ("dense", *NAMES):
        times = sorted(r["host_us"] for r in rows if r["contender"] == name and r["host_us"])
        lines.append(f"| {name} | {times[0]:.0f} | {times[len(times) // 2]:.0f} | {times[-1]:.0f} |")
    return "\n".join(lines)


def end_to_end() -> str:
    rows = json.loads((RESULTS / "h200-end-to-end-8b.json").read_text())["end_to_end"]
    cells = {(r["what"], r["batch"], r["mode"], r["attention"], r["contender"]): r for r in rows}
    lines = [
        "| | attention | dense ms | " + " | ".join(FORMS) + " | peak memory, dense and fused |",
        "|---|---|---|" + "---|" * len(FORMS) + "---|",
    ]
    for key in dict.fromkeys(key[:4] for key in cells):
        what, batch, mode, attention = key
        dense, fused = cells[(*key, "dense")], cells[(*key, "fused")]
        ratios = [cells[(*key, form)]["times_dense"] for form in FORMS]
        shown = [f"{ratio:.2f}×" if ratio else "fails" for ratio in ratios]
        peak = f"{dense['peak_bytes'] / 1e9:.1f} and {fused['peak_bytes'] / 1e9:.1f} GB"
        start = f"| {what}, batch {batch}, {mode} | {attention} | {dense['ms']['p50']:.2f} | "
        lines.append(start + " | ".join(shown) + f" | {peak} |")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text()
    for name, table in (("products", products()), ("host", host_time()), ("end-to-end", end_to_end())):
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        page = re.sub(f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{table}\n{marks[1]}", page, flags=re.S)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
