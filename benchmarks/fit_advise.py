"""Fit the time model of `twofour advise` to the rows of an H200 and write the defaults that are shipped:

    python benchmarks/fit_advise.py

Products in 16 bit: the 8B rows of `bench` and `tune`. In 8 and 4 bits: the 8B rows of `bench --scheme`.
Everything beside the products: the whole-model rows in 16 bit, batch 16 left out. What is left out here, all
of 70B, and in 8 and 4 bits a fit to half of the shapes, judge the fit in advise_accuracy.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from twofour.advise.fit import HOLD, Measured, fit_curve, minimise, of_its_kernel
from twofour.advise.gpus import find_gpu
from twofour.advise.layers import Network, read_network
from twofour.advise.model import DEFAULTS, read_rows, to_dict
from twofour.advise.products import Curve
from twofour.advise.schemes import ALTERNATIVES, DENSE, SPARSE, Scheme
from twofour.advise.steps import Rest, Step, TimeModel, Workload, step_time

RESULTS = Path(__file__).resolve().parent / "results"
FIT_PRODUCTS = ("h200-products-8b.json", "h200-tune-8b.json")
QUANTIZED = "h200-quantized-8b.json"
END_TO_END = ("h200-end-to-end-8b.json", "h200-end-to-end-8b-before.json")

#: qkv and gate_up: what a fit in 8 and 4 bits sees before it is judged by o and down.
HALF = ((6144, 4096), (28672, 4096))

#: Decode at this batch is not fitted to.
HELD_OUT_BATCH = 16

#: Rows of the whole model that are modelled: the scheme of eligible layers, and whether fuse_ was called.
FORMS: dict[str, tuple[Scheme, bool]] = {
    "dense": (DENSE, False),
    "dense_fused": (DENSE, True),
    "twofour": (SPARSE, False),
    "fused": (SPARSE, True),
}

#: The same in 8 and 4 bits. Not fitted to: what lies beside the products does not depend on their bits.
QUANTIZED_FORMS = {s.name.removeprefix("2:4 "): (s, True) for s in ALTERNATIVES if s.sparse}

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
}

#: Where the fits start: ordinary figures for a tuned library.
START = Curve(2.0, 0.9, 1.0, 0.5, 1.0, 0.8, 30.0, 30.0, 0.5)
START_REST = Rest(2.3, 1.5, 0.6, 0.7, 0.04, 10.0, 400.0, 20.0)
FITTED_REST = [field.name for field in fields(Rest) if field.name != "attention"]


def product_rows(scheme: Scheme) -> list[Measured]:
    """Of 16 bit, dense or 2:4."""
    return [row for name in FIT_PRODUCTS for row in read_rows(RESULTS / name).by_scheme[scheme.name]]


def quantized_rows() -> dict[Scheme, list[Measured]]:
    """Those in 8 and 4 bits, by scheme. Dense int8 has none."""
    found = read_rows(RESULTS / QUANTIZED).by_scheme
    return {scheme: found[scheme.name] for scheme in ALTERNATIVES if scheme.name in found}


def end_to_end_rows() -> list[dict[str, Any]]:
    """Those with a time and of a modelled form, each the faster one of two runs: what else a host does
    can only add to a time, and in one of them it added half to plain decode."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in END_TO_END:
        for row in json.loads((RESULTS / name).read_text())["end_to_end"]:
            if row["ms"] and row["contender"] in FORMS:
                which = tuple(row[part] for part in ("what", "batch", "mode", "attention", "contender"))
                if which not in best or row["ms"]["p50"] < best[which]["ms"]["p50"]:
                    best[which] = row
    return list(best.values())


def predicted(network: Network, model: TimeModel, row: dict[str, Any], form: tuple[Scheme, bool]) -> Step:
    scheme, fused = form
    tokens = row["tokens"] if row["what"] == "prefill" else 1
    work = Workload(row["batch"], tokens, row["tokens"], row["mode"] == "graph", row["attention"])
    return step_time(network, find_gpu("H200"), model, scheme, fused, work)


def fit_products(rows: list[Measured], scheme: Scheme, start: Curve = START, hold: float = 1e-3) -> Curve:
    """From several starts, as a fit downhill may end in the next hollow."""
    gpu = find_gpu("H200")
    random = np.random.default_rng(0)
    best: tuple[float, Curve] | None = None
    for trial, base in enumerate([start] * 4 + [START] * 4 * (start != START)):
        shaken = {
            k: v * float(np.exp(random.normal(0, 0.3 * (trial % 4 > 0)))) for k, v in base.to_dict().items()
        }
        curve = fit_curve(rows, gpu, scheme, Curve(**shaken), hold)
        off = float(np.mean(np.square(np.tanh(np.log(ratios(rows, scheme, curve)) / 0.4))))
        if best is None or off < best[0]:
            best = off, curve
    assert best is not None
    return best[1]


def ratios(rows: list[Measured], scheme: Scheme, curve: Curve) -> Any:
    """Predicted over measured."""
    from twofour.advise.products import product_time

    gpu = find_gpu("H200")
    times = [product_time(curve, gpu, scheme, r.rows, r.columns, r.tokens).us for r in rows]
    return np.array(times) / np.array([r.us for r in rows])


def fit_quantized(rows: list[Measured], scheme: Scheme, curves: Mapping[str, Curve]) -> Curve:
    """Held to 16 bit, where it starts: the rows are few."""
    return fit_products(of_its_kernel(rows, scheme), scheme, curves[scheme.in_16_bit.name], HOLD)


def fit_rest(curves: dict[str, Curve], rows: list[dict[str, Any]]) -> Rest:
    network = read_network(LLAMA_3_8B)
    measured = np.log([row["ms"]["p50"] for row in rows])
    first = np.log([getattr(START_REST, name) for name in FITTED_REST])

    def rest(point: Any) -> Rest:
        return Rest(**{name: float(np.exp(v)) for name, v in zip(FITTED_REST, point, strict=True)})

    def residuals(point: Any) -> Any:
        model = TimeModel(curves, rest(point), "", frozenset(curves))
        times = [predicted(network, model, row, FORMS[row["contender"]]).ms for row in rows]
        return np.concatenate([np.log(times) - measured, 1e-3 * (point - first)])

    return rest(minimise(residuals, first))


def main() -> None:
    rows = {scheme: product_rows(scheme) for scheme in (DENSE, SPARSE)}
    curves = {scheme.name: fit_products(timed, scheme) for scheme, timed in rows.items()}
    whole = [
        row for row in end_to_end_rows() if not (row["what"] == "decode" and row["batch"] == HELD_OUT_BATCH)
    ]
    rest = fit_rest(curves, whole)
    for scheme, timed in quantized_rows().items():
        rows[scheme] = of_its_kernel(timed, scheme)
        curves[scheme.name] = fit_quantized(timed, scheme, curves)
    products = sum(len(timed) for timed in rows.values())
    said = f"{products} products and {len(whole)} whole-model rows of an H200"
    model = TimeModel(curves, rest, said, frozenset(curves))
    DEFAULTS.parent.mkdir(exist_ok=True)
    DEFAULTS.write_text(json.dumps(to_dict(model), indent=1) + "\n")
    print(DEFAULTS.read_text())


if __name__ == "__main__":
    main()
