"""How near `twofour advise` comes to what was measured on an H200: figures, and the plot of docs/advise.md.

    python benchmarks/advise_accuracy.py [--plot docs/advise-accuracy.svg]

Rows that the shipped figures were fitted to and rows that they never saw are told apart. The verdict of a
cell is whether 2:4 is faster than dense, predicted against measured; within 3 % of 1.0× neither is wrong.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fit_advise import FIT_PRODUCTS, FORMS, HELD_OUT_BATCH, LLAMA_3_8B, RESULTS, end_to_end_rows, predicted

from twofour.advise.gpus import find_gpu
from twofour.advise.layers import read_network
from twofour.advise.model import read_rows, shipped
from twofour.advise.products import product_time
from twofour.advise.schemes import DENSE, SPARSE

PLOT = Path(__file__).resolve().parents[1] / "docs" / "advise-accuracy.svg"
HELD_OUT_PRODUCTS = ("h200-products-70b.json",)
DEAD_ZONE = 0.03

#: What must hold: median and worst error, share of right verdicts.
GOALS = (0.10, 0.30, 0.95)


@dataclass(frozen=True)
class Cell:
    """One time, measured and predicted, in milliseconds."""

    what: str  # "products" or "whole model"
    held_out: bool
    name: str
    sparse: bool
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Verdict:
    what: str
    held_out: bool
    name: str
    measured: float  # dense over 2:4
    predicted: float

    @property
    def right(self) -> bool:
        return (self.measured > 1) == (self.predicted > 1)

    @property
    def right_or_near(self) -> bool:
        return self.right or min(abs(self.measured - 1), abs(self.predicted - 1)) <= DEAD_ZONE


def products(name: str, held_out: bool) -> tuple[list[Cell], list[Verdict]]:
    model, gpu = shipped(), find_gpu("H200")
    rows = read_rows(RESULTS / name)
    by_cell: dict[tuple[int, int, int], dict[bool, Cell]] = {}
    for scheme, timed in ((DENSE, rows.dense), (SPARSE, rows.sparse)):
        for row in timed:
            key = row.rows, row.columns, row.tokens
            told = product_time(model.curve(scheme), gpu, scheme, *key).us / 1e3
            cell = "{}×{} {} tokens".format(*key)
            made = Cell("products", held_out, f"{cell} {scheme.name}", scheme.sparse, row.us / 1e3, told)
            by_cell.setdefault(key, {})[scheme.sparse] = made
    verdicts = [
        Verdict("products", held_out, "{}×{} {} tokens".format(*key), *_ratios(both[False], both[True]))
        for key, both in by_cell.items()
        if len(both) == 2
    ]
    return [cell for both in by_cell.values() for cell in both.values()], verdicts


def whole_model() -> tuple[list[Cell], list[Verdict]]:
    model, network = shipped(), read_network(LLAMA_3_8B)
    cells: dict[tuple[str, ...], dict[str, Cell]] = {}
    for row in end_to_end_rows():
        key = (row["what"], str(row["batch"]), row["mode"], row["attention"], row["run"])
        held_out = row["what"] == "decode" and row["batch"] == HELD_OUT_BATCH
        form = row["contender"]
        told = predicted(network, model, row).ms
        made = Cell(
            "whole model",
            held_out,
            " ".join((*key[:4], form)),
            FORMS[form][0].sparse,
            row["ms"]["p50"],
            told,
        )
        cells.setdefault(key, {})[form] = made
    pairs = (("dense", "twofour"), ("dense", "fused"), ("dense_fused", "fused"))
    verdicts = [
        Verdict("whole model", by[a].held_out, by[b].name, *_ratios(by[a], by[b]))
        for by in cells.values()
        for a, b in pairs
        if a in by and b in by
    ]
    return [cell for by in cells.values() for cell in by.values()], verdicts


def _ratios(dense: Cell, sparse: Cell) -> tuple[float, float]:
    return dense.measured / sparse.measured, dense.predicted / sparse.predicted


def summary(cells: list[Cell], verdicts: list[Verdict]) -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for what in ("products", "whole model"):
        for held_out in (False, True):
            off = np.abs([c.error for c in cells if (c.what, c.held_out) == (what, held_out)])
            told = [v for v in verdicts if (v.what, v.held_out) == (what, held_out)]
            if not len(off):
                continue
            made.append(
                {
                    "what": what,
                    "rows": "held out" if held_out else "fitted",
                    "cells": len(off),
                    "median_error": round(float(np.median(off)), 4),
                    "worst_error": round(float(off.max()), 4),
                    "verdicts": len(told),
                    "right": round(float(np.mean([v.right for v in told])), 4),
                    # What "it pays" would score without looking: the bar for a verdict that is of use.
                    "always_pays": round(float(np.mean([v.measured > 1 for v in told])), 4),
                    "ratio_median_error": round(
                        float(np.median([abs(v.predicted / v.measured - 1) for v in told])), 4
                    ),
                    "right_or_within_3_percent": round(float(np.mean([v.right_or_near for v in told])), 4),
                }
            )
    return made


def plot(cells: list[Cell], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.fonttype"] = "none"  # letters, not their outlines: a third of the bytes
    matplotlib.rcParams["svg.hashsalt"] = "twofour"  # the same bytes for the same rows
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axis, what in zip(axes, ("products", "whole model"), strict=True):
        for held_out, marker in ((False, "o"), (True, "^")):
            for sparse, colour in ((False, "#777777"), (True, "#2b7a3d")):
                chosen = [c for c in cells if (c.what, c.held_out, c.sparse) == (what, held_out, sparse)]
                label = f"{'2:4' if sparse else 'dense'}, {'held out' if held_out else 'fitted'}"
                x, y = [c.measured for c in chosen], [c.predicted / c.measured for c in chosen]
                face = colour if held_out else "none"
                axis.scatter(
                    x, y, s=16, marker=marker, edgecolors=colour, facecolors=face, label=label, lw=0.8
                )
        axis.axhline(1, color="black", lw=0.8)
        axis.axhspan(0.9, 1.1, color="black", alpha=0.06)
        for edge in (0.7, 1.3):
            axis.axhline(edge, color="black", lw=0.6, ls=":")
        axis.set_xscale("log")
        axis.set_title(what)
        axis.set_xlabel("measured, ms")
    axes[0].set_ylabel("predicted / measured")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=Path, nargs="?", const=PLOT, help="write the plot (needs matplotlib)")
    arguments = parser.parse_args()
    parts = [products(name, False) for name in FIT_PRODUCTS]
    parts += [products(name, True) for name in HELD_OUT_PRODUCTS if (RESULTS / name).exists()]
    parts.append(whole_model())
    cells = [cell for part in parts for cell in part[0]]
    verdicts = [verdict for part in parts for verdict in part[1]]
    for cell in sorted(cells, key=lambda c: -abs(c.error))[:12]:
        print(f"{cell.error:+.1%}  {cell.measured:.4g} ms  {cell.name}{', held out' * cell.held_out}")
    for verdict in verdicts:
        if not verdict.right:
            print(f"wrong verdict: {verdict.name}: {verdict.measured:.2f}×, told {verdict.predicted:.2f}×")
    if arguments.plot:
        plot(cells, arguments.plot)
    accuracy = summary(cells, verdicts)
    for part in accuracy:
        print(
            "{what}, {rows}: {cells} times, error {median_error:.1%} in the median".format(**part), end=", "
        )
        print("{worst_error:.1%} at worst; {verdicts} verdicts, {right:.1%} right".format(**part), end=" ")
        print("(always “pays”: {always_pays:.1%}), × off by {ratio_median_error:.1%}".format(**part))
    print(json.dumps({"goals": GOALS, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
