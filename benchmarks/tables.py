"""Write the tables of docs/speed.md from the rows in benchmarks/results: python benchmarks/tables.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"
NAMES = ("twofour", "twofour small", "cusparselt", "torch24")


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


def end_to_end() -> str:
    rows = json.loads((RESULTS / "h200-end-to-end-8b.json").read_text())["end_to_end"]
    dense = {(r["what"], r["batch"], r["mode"], r["attention"]): r for r in rows if r["contender"] == "dense"}
    lines = ["| | attention | dense ms | 2:4 ms | ratio | peak memory |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row["contender"] != "twofour":
            continue
        key = (row["what"], row["batch"], row["mode"], row["attention"])
        what = f"{row['what']}, batch {row['batch']}, {row['mode']}"
        peak = f"{dense[key]['peak_bytes'] / 1e9:.1f} to {row['peak_bytes'] / 1e9:.1f} GB"
        times = f"{dense[key]['ms']['p50']:.2f} | {row['ms']['p50']:.2f} | {row['times_dense']:.2f}×"
        lines.append(f"| {what} | {row['attention']} | {times} | {peak} |")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text()
    for name, table in (("products", products()), ("end-to-end", end_to_end())):
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        page = re.sub(f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{table}\n{marks[1]}", page, flags=re.S)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
