"""How near `twofour advise` comes to what was measured on an H200: figures, and the plot of docs/advise.md.

    python benchmarks/advise_accuracy.py [--plot docs/advise-accuracy.svg]

Rows that the shipped figures were fitted to and rows that they never saw are told apart. The verdict of a
cell is whether 2:4 is faster than dense, predicted against measured; within 3 % of 1.0× neither is wrong.
In 8 and 4 bits there are four shapes only: all are fitted to in what is shipped, and what a fit is worth for
other shapes is judged by one to qkv and gate_up, which then tells o and down.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fit_advise import (
    FIT_PRODUCTS,
    FORMS,
    HALF,
    HELD_OUT_BATCH,
    LLAMA_3_8B,
    QUANTIZED,
    QUANTIZED_FORMS,
    RESULTS,
    end_to_end_rows,
    fit_quantized,
    predicted,
    quantized_rows,
)

from twofour.advise.fit import Measured
from twofour.advise.gpus import find_gpu
from twofour.advise.layers import read_network
from twofour.advise.model import read_rows, shipped
from twofour.advise.schemes import DENSE, SPARSE, Scheme
from twofour.advise.steps import TimeModel

PLOT = Path(__file__).resolve().parents[1] / "docs" / "advise-accuracy.svg"
HELD_OUT_PRODUCTS = ("h200-products-70b.json",)
DEAD_ZONE = 0.03

#: What must hold in 16 bit: median and worst error, share of right verdicts.
GOALS = (0.10, 0.30, 0.95)

#: In 8 and 4 bits: median and worst error of products that were fitted to, of those held out, of models. No
#: goals, but a little above what came out, so that a change for the worse is seen. Dense fp8, held out, is
#: near the 0.15 that we want.
QUANTIZED_BOUNDS = {"fitted": (0.05, 0.29), "held_out": (0.16, 0.41), "whole_model": (0.05, 0.07)}

QUANTIZED_COLOURS = ("#777777", "#bbbbbb", "#1b6ca8", "#c06c1b", "#2b7a3d")


@dataclass(frozen=True)
class Cell:
    """One time, measured and predicted, in milliseconds."""

    what: str  # "products" or "whole model"
    held_out: bool
    name: str
    scheme: str
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
    model, rows = shipped(), read_rows(RESULTS / name)
    by_cell: dict[tuple[int, int, int], dict[bool, Cell]] = {}
    for scheme in (DENSE, SPARSE):
        for row in rows.by_scheme[scheme.name]:
            key = row.rows, row.columns, row.tokens
            by_cell.setdefault(key, {})[scheme.sparse] = _product(row, scheme, model, held_out)
    verdicts = [
        Verdict("products", held_out, "{}×{} {} tokens".format(*key), *_ratios(both[False], both[True]))
        for key, both in by_cell.items()
        if len(both) == 2
    ]
    return [cell for both in by_cell.values() for cell in both.values()], verdicts


def _product(row: Measured, scheme: Scheme, model: TimeModel, held_out: bool) -> Cell:
    key = row.rows, row.columns, row.tokens
    told = model.product(find_gpu("H200"), scheme, *key).us / 1e3
    name = "{}×{} {} tokens {}".format(*key, scheme.name)
    return Cell("products", held_out, name, scheme.name, row.us / 1e3, told)


def whole_model() -> tuple[list[Cell], list[Verdict]]:
    model, network = shipped(), read_network(LLAMA_3_8B)
    cells: dict[tuple[str, ...], dict[str, Cell]] = {}
    for row in end_to_end_rows():
        key = (row["what"], str(row["batch"]), row["mode"], row["attention"])
        held_out = row["what"] == "decode" and row["batch"] == HELD_OUT_BATCH
        form = row["contender"]
        told = predicted(network, model, row, FORMS[form]).ms
        made = Cell(
            "whole model",
            held_out,
            " ".join((*key, form)),
            FORMS[form][0].name,
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


def quantized() -> tuple[list[Cell], list[Cell], list[Cell]]:
    """In 8 and 4 bits: products by the shipped curves, by a fit to half of the shapes, and whole models."""
    model, network = shipped(), read_network(LLAMA_3_8B)
    every: list[Cell] = []
    judged: list[Cell] = []
    for scheme, rows in quantized_rows().items():
        every += [_product(row, scheme, model, False) for row in rows]
        held_out = {row: (row.rows, row.columns) not in HALF for row in rows}
        half = fit_quantized([row for row in rows if not held_out[row]], scheme, model.curves)
        of_half = replace(model, curves={**model.curves, scheme.name: half})
        judged += [_product(row, scheme, of_half, held_out[row]) for row in rows]
    models = []
    for row in json.loads((RESULTS / QUANTIZED).read_text())["end_to_end"]:
        if row["contender"] in QUANTIZED_FORMS:
            form = QUANTIZED_FORMS[row["contender"]]
            told = predicted(network, model, row, form).ms
            name = f"{row['what']} {row['batch']} {form[0].name}"
            models.append(Cell("whole model", True, name, form[0].name, row["ms"]["p50"], told))
    return every, judged, models


def quantized_summary(every: list[Cell], judged: list[Cell], models: list[Cell]) -> list[dict[str, Any]]:
    """By scheme: number, median and worst error of each part."""

    def errors(cells: list[Cell], scheme: str) -> dict[str, float] | None:
        off = [abs(cell.error) for cell in cells if cell.scheme == scheme]
        if not off:
            return None
        return {"cells": len(off), "median": round(float(np.median(off)), 4), "worst": round(max(off), 4)}

    unseen = [cell for cell in judged if cell.held_out]
    return [
        {
            "scheme": scheme,
            "fitted": errors(every, scheme),
            "held_out": errors(unseen, scheme),
            "whole_model": errors(models, scheme),
        }
        for scheme in dict.fromkeys(cell.scheme for cell in every)
    ]


def summary(cells: list[Cell], verdicts: list[Verdict]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
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


def plot(cells: list[Cell], judged: list[Cell], models: list[Cell], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.fonttype"] = "none"  # letters, not their outlines: a third of the bytes
    matplotlib.rcParams["svg.hashsalt"] = "twofour"  # the same bytes for the same rows
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True)

    def scatter(axis: Any, chosen: list[Cell], marker: str, colour: str, filled: bool, label: str) -> None:
        x, y = [c.measured for c in chosen], [c.predicted / c.measured for c in chosen]
        face = colour if filled else "none"
        axis.scatter(x, y, s=16, marker=marker, edgecolors=colour, facecolors=face, label=label, lw=0.8)

    markers = ((False, "o", "fitted"), (True, "^", "held out"))
    for axis, what in zip(axes, ("products", "whole model"), strict=False):
        for held_out, marker, seen in markers:
            for scheme, colour in (("dense", "#777777"), ("2:4", "#2b7a3d")):
                chosen = [c for c in cells if (c.what, c.held_out, c.scheme) == (what, held_out, scheme)]
                scatter(axis, chosen, marker, colour, held_out, f"{scheme}, {seen}")
    schemes = dict.fromkeys(cell.scheme for cell in judged)
    for scheme, colour in zip(schemes, QUANTIZED_COLOURS, strict=True):
        for held_out, marker, seen in markers:
            chosen = [c for c in judged if (c.scheme, c.held_out) == (scheme, held_out)]
            scatter(axes[2], chosen, marker, colour, held_out, f"{scheme}, {seen}")
        chosen = [c for c in models if c.scheme == scheme]
        if chosen:
            scatter(axes[2], chosen, "s", colour, True, f"{scheme}, whole model")
    titles = ("products, 16 bit", "whole model, 16 bit", "8 and 4 bits, fitted to half of the shapes")
    for axis, title in zip(axes, titles, strict=True):
        axis.axhline(1, color="black", lw=0.8)
        axis.axhspan(0.9, 1.1, color="black", alpha=0.06)
        for edge in (0.7, 1.3):
            axis.axhline(edge, color="black", lw=0.6, ls=":")
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("measured, ms")
    axes[0].set_ylabel("predicted / measured")
    axes[0].legend(fontsize=7)
    axes[2].legend(fontsize=6, ncols=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _said(errors: dict[str, float]) -> str:
    return "{cells} times, {median:.1%} in the median, {worst:.1%} at worst".format(**errors)


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
    every, judged, models = quantized()
    if arguments.plot:
        plot(cells, judged, models, arguments.plot)
    accuracy = summary(cells, verdicts)
    for part in accuracy:
        print(
            "{what}, {rows}: {cells} times, error {median_error:.1%} in the median".format(**part), end=", "
        )
        print("{worst_error:.1%} at worst; {verdicts} verdicts, {right:.1%} right".format(**part), end=" ")
        print("(always “pays”: {always_pays:.1%}), × off by {ratio_median_error:.1%}".format(**part))
    schemes = quantized_summary(every, judged, models)
    for found in schemes:
        told = [f"{part} {_said(found[part])}" for part in QUANTIZED_BOUNDS if found[part]]
        print(f"{found['scheme']}: {'; '.join(told)}")
    document = {
        "goals": GOALS,
        "accuracy": accuracy,
        "quantized_bounds": QUANTIZED_BOUNDS,
        "schemes": schemes,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
