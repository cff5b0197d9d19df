"""The sections about time: the roofline with the model's layers on it, each layer, the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twofour.quantize.schemes import SCHEMES
from twofour.report.content import Figure, Missing, Section, Table
from twofour.report.documents import Document
from twofour.report.figures import NONE, count, duration, is_number, number, shape, size, times
from twofour.report.layers import Kind, kinds_of, short_labels
from twofour.report.plots import Axis, Bar, Bars, Point, Reference, Scatter, Series
from twofour.report.subject import Subject, everyone
from twofour.report.times import (
    UNNAMED,
    Ceilings,
    Product,
    by_machine,
    ceilings_of,
    matched,
    moved_bytes,
    products_of,
    telling,
    whole_model,
)

DENSE, SPARSE = 0, 1
#: Where layers are put on the roof when nothing was measured for them.
UNMEASURED_TOKENS = (1, 16, 256, 2048)

NO_TENSOR_CORES = "A CPU has no Sparse Tensor Cores: there 2:4 saves bytes, not time."


def bench_command(subject: Subject) -> str:
    scheme = f" --scheme {subject.scheme.name}" if subject.scheme else ""
    return f"twofour bench --shapes 8B{scheme} --json > {subject.shell}/reports/bench.json"


def tune_command(subject: Subject) -> str:
    return f"twofour tune {subject.shell} --save"


def whole_model_command(subject: Subject) -> str:
    return f"twofour bench {subject.shell} --data TEXT --save"


def alike(subjects: Sequence[Subject]) -> list[tuple[Subject, str]]:
    """Models with the same 2:4 layers, in as many bits, and the same times look the same: one of them, with
    all their names."""
    grouped: dict[Any, list[Subject]] = {}
    for subject in subjects:
        if subject.layers:
            timed = {d.source for d in subject.documents if d.verb in ("bench", "tune")}
            key = (frozenset(subject.layers.items()), subject.scheme, frozenset(timed))
            grouped.setdefault(key, []).append(subject)
    return [(same[0], everyone(same)) for same in grouped.values()]


def roofline(subjects: Sequence[Subject]) -> Section:
    section = Section("roofline", "Roofline")
    section.items.append(
        "A product can be no faster than its bytes at the speed of a copy (the slope) and its arithmetic at "
        "the speed of a large dense product in 16 bits (the flat roof; twice as high for 2:4, which does "
        "half of it, and twice as high again where codes of 8 bits are multiplied with codes). Few tokens "
        "lie on the slope, where 2:4 wins by moving 9/16 of the weight, or 5/16 and 3/16 in 8 and 4 bits; "
        "many lie under the roof."
    )
    for subject, names in alike(subjects):
        ceilings = ceilings_of(subject.documents)
        if ceilings is None:
            what = "what its GPU reaches (copy and dense product), which the roofline is made of"
            section.items.append(Missing(names, what, bench_command(subject)))
            continue
        kinds = kinds_of(subject.layers)
        # Times that name no GPU are taken for this one's, and the caption says so.
        products = products_of(subject.documents, subject.scheme)
        found = matched(kinds, [p for p in products if p.gpu in (ceilings.gpu, UNNAMED)])
        section.items.append(_roofline(subject, names, ceilings, kinds, found))
        if not found:
            section.items.append(Missing(names, "times of its layers' shapes", tune_command(subject)))
    return section


def _roofline(
    subject: Subject,
    names: str,
    ceilings: Ceilings,
    kinds: Sequence[Kind],
    found: dict[Kind, list[Product]],
) -> Figure:
    scheme, form = subject.scheme, subject.sparse
    faster = 4 if scheme is not None and scheme.rounds_activations else 2  # its roof over dense's
    labels = short_labels([kind.pattern for kind in found or kinds])
    dense: list[Point] = []
    sparse: list[Point] = []
    rows = []
    for kind, products in found.items():
        for p in products:
            words = f"{labels[kind.pattern]} {shape(kind.shape)}, {count(p.tokens, 'token')}"
            places = []
            for points, ms, packed in ((dense, p.dense_ms, False), (sparse, p.sparse_ms, True)):
                intensity, rate = p.flops / p.moved(packed=packed), p.flops / ms / 1e9
                points.append(Point(intensity, rate, f"{words}: {number(rate)} TFLOP/s"))
                places += [number(intensity), number(rate)]
            rows.append([labels[kind.pattern], f"{p.tokens:,}", *places, p.source])
    if not found:
        for kind in kinds:
            for tokens in UNMEASURED_TOKENS:
                flops = 2.0 * kind.rows * kind.columns * tokens
                places = []
                for points, packed, height in ((dense, False, 1), (sparse, True, faster)):
                    moved = moved_bytes(kind.rows, kind.columns, tokens, 2, packed=packed, scheme=scheme)
                    roof = min(ceilings.gb_s / 1e3 * flops / moved, ceilings.tflops * height)
                    words = f"{labels[kind.pattern]} {shape(kind.shape)}, {count(tokens, 'token')}"
                    points.append(Point(flops / moved, roof, f"{words}: at most {number(roof)} TFLOP/s"))
                    places += [number(flops / moved), number(roof)]
                rows.append([labels[kind.pattern], f"{tokens:,}", *places, "computed, not measured"])
    low = min(p.x for p in (*dense, *sparse)) / 1.5
    high = max(max(p.x for p in (*dense, *sparse)) * 1.5, 6e3 * ceilings.tflops / ceilings.gb_s)
    bend = 1e3 * ceilings.tflops / ceilings.gb_s
    first = low * ceilings.gb_s / 1e3
    roofs = (
        Reference(
            [(low, first), (faster * bend, faster * ceilings.tflops), (high, faster * ceilings.tflops)],
            f"{form} roof {number(faster * ceilings.tflops)} TFLOP/s",
            SPARSE,
        ),
        Reference(
            [(low, first), (bend, ceilings.tflops), (high, ceilings.tflops)],
            f"dense roof {number(ceilings.tflops)} TFLOP/s",
            DENSE,
            below=True,
        ),
    )
    kind_words = "measured" if found else "where the roof would put them: not measured"
    plot = Scatter(
        f"Roofline of {ceilings.gpu} with the layers of {names}",
        f"Logarithmic axes. {count(len(rows), 'point')} each for dense and {form}, {kind_words}. "
        f"Slope {number(ceilings.gb_s)} GB/s, dense roof {number(ceilings.tflops)} TFLOP/s.",
        Axis("FLOP per byte moved", log=True),
        Axis("TFLOP/s, zeros counted", log=True),
        [
            Series("dense", dense, DENSE, hollow=not found),
            Series(form, sparse, SPARSE, hollow=not found),
        ],
        roofs,
        height=360,
    )
    caption = (
        f"{names} on {ceilings.gpu}: a copy reaches {number(ceilings.gb_s)} GB/s, a dense product "
        f"{number(ceilings.tflops)} TFLOP/s ({ceilings.source}). "
    )
    if found:
        caption += "A copy also writes; where weights are only read, points may lie above the slope."
        if any(p.gpu == UNNAMED for products in found.values() for p in products):
            caption += " Some times name no GPU (those of tune) and are taken for this one's."
    else:
        caption += (
            "Hollow marks are computed from the layers' shapes: none of those shapes was measured here."
        )
    columns = [
        "layer",
        "tokens",
        "FLOP/byte dense",
        "TFLOP/s dense",
        f"FLOP/byte {form}",
        f"TFLOP/s {form}",
        "source",
    ]
    table = Table("The points of the roofline", columns, rows, words=("source",), folded=True)
    return Figure(f"Layers of {names}", caption, [plot], table, [(DENSE, "dense"), (SPARSE, form)])


def layer_times(subjects: Sequence[Subject]) -> Section:
    section = Section("layer-times", "Time per layer, dense against 2:4")
    for subject, names in alike(subjects):
        machines = by_machine(products_of(subject.documents, subject.scheme)).values()
        own = [kinds for products in machines if (kinds := matched(kinds_of(subject.layers), products))]
        if not own:
            section.items.append(
                Missing(names, "time of each layer, dense and 2:4 (needs a GPU)", tune_command(subject))
            )
            continue
        section.items += [_layer_times(subject, names, found) for found in own]
        first = own[0]
        if whole_model(first, len(subject.layers), next(iter(first.values()))[0].tokens) is None:
            what = "times of all its layers (some have other shapes)"
            section.items.append(Missing(names, what, tune_command(subject)))
    return section


def _layer_times(subject: Subject, names: str, found: dict[Kind, list[Product]]) -> Figure:
    labels, form = short_labels([kind.pattern for kind in found]), subject.sparse
    gpu = next(iter(found.values()))[0].gpu
    plots = []
    for tokens in telling(p.tokens for ps in found.values() for p in ps):
        groups: list[tuple[str, list[Bar]]] = []
        for kind, products in found.items():
            for p in (p for p in products if p.tokens == tokens):
                said = f"{duration(p.sparse_ms)} · {times(p.ratio)}"
                name = f"{labels[kind.pattern]} {shape(kind.shape)}"
                bars = [
                    Bar(p.dense_ms, duration(p.dense_ms), DENSE, "dense"),
                    Bar(p.sparse_ms, said, SPARSE, form),
                ]
                groups.append((name, bars))
        title = f"{count(tokens, 'token')} at once"
        both = whole_model(found, len(subject.layers), tokens)
        if both is not None:
            together = (
                f"All {len(subject.layers)} layers: {duration(both[0])} dense, {duration(both[1])} in {form}."
            )
        else:
            together = "Not every layer of the model was measured."
        plots.append(Bars(title, f"Time of one product on {gpu}. {together}", groups))
    compared = any(p.same_bits_ms for products in found.values() for p in products)
    rows = [
        [
            kind.pattern,
            shape(kind.shape),
            f"{len(kind.names)}{' fused' if kind.parts else ''}",
            f"{p.tokens:,}",
            duration(p.dense_ms),
            duration(p.sparse_ms),
            times(p.ratio),
            *([times(p.same_bits_ms / p.sparse_ms) if p.same_bits_ms else NONE] if compared else []),
            p.source,
        ]
        for kind, products in found.items()
        for p in products
    ]
    columns = ["layer", "shape", "number", "tokens", "dense", form, f"dense / {form}"]
    columns += [*(["dense of as many bits / it"] if compared else []), "source"]
    sums = [
        f"{duration(both[0])} dense and {duration(both[1])} in {form} ({times(both[0] / both[1])}) "
        f"at {count(tokens, 'token')}"
        for tokens in telling(p.tokens for ps in found.values() for p in ps)
        if (both := whole_model(found, len(subject.layers), tokens)) is not None
    ]
    caption = f"{names} on {gpu}: medians of one product; above 1× is faster than dense. "
    if subject.scheme is not None:
        caption += "Dense has 16 bits. "
    if sums:
        caption += f"All {len(subject.layers)} 2:4 layers together: {'; '.join(sums)}."
    if gpu.startswith("CPU"):
        caption += NO_TENSOR_CORES
    table = Table("Every product that was measured", columns, rows, words=("shape", "source"), folded=True)
    legend = [(DENSE, "dense"), (SPARSE, form)]
    return Figure(f"Layers of {names}", caption, plots, table, legend, small=True)


def end_to_end(subjects: Sequence[Subject]) -> Section:
    section = Section("end-to-end", "A whole model")
    sources = {d.source: d for s in subjects for d in s.of("bench") if d.content.get("end_to_end")}
    for document in sources.values():
        section.items.append(_end_to_end(document))
    for subject in subjects:
        if subject.layers and not any(d.model and d.content.get("end_to_end") for d in subject.of("bench")):
            what = "prefill and decode of this model as a whole, and its memory"
            section.items.append(Missing(subject.name, what, whole_model_command(subject)))
    return section


def _end_to_end(document: Document) -> Figure:
    """The model itself, or one with random weights: the document says which."""
    rows, source, machine = document.content["end_to_end"], document.source, document.machine
    cases: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for index, row in enumerate(rows):
        where = f"{row['what']} {row['batch']}×{row['tokens']}, {row['mode']}, {row.get('attention', 'sdpa')}"
        cases.setdefault(where, []).append((index, row))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    shown = [c for c in ("dense", "twofour", "fused", "fast", *SCHEMES) if c in contenders] or contenders
    colours = {c: (DENSE if c == "dense" else number) for number, c in enumerate(shown)}
    groups = []
    table = []
    for case, found in cases.items():
        bars = []
        for index, row in found:
            ms = row["ms"].get("p50") if isinstance(row.get("ms"), dict) else None
            table.append(
                [
                    case,
                    row["contender"],
                    duration(ms) if "error" not in row else f"failed: {row['error']}",
                    times(row.get("times_dense")),
                    number(row.get("tokens_per_s")),
                    size(row.get("peak_bytes")),
                    f"{source}, end_to_end[{index}]",
                ]
            )
            if row["contender"] in shown and is_number(ms):
                said = f"{duration(ms)} · {times(row.get('times_dense'))}"
                bars.append(Bar(ms, said, colours[row["contender"]], row["contender"]))
        if bars:
            groups.append((case, bars))
    gpu = machine.get("gpu") or "a CPU"
    layers = rows[0].get("layers", NONE) if rows else NONE
    if document.model:
        described = f"{Path(document.model).name} itself, {layers} layers"
    else:
        described = (
            f"A model of {layers} layers with random weights, shaped as the bench verb makes it, not this "
            "page's weights"
        )
    plot = Bars(f"Prefill and decode on {gpu}", f"Median time of one forward. {described}.", groups)
    caption = (
        f"{described}; {gpu}, torch {machine.get('torch', NONE)}, {machine.get('date', NONE)} "
        f"({source}). Decode: one token for each sequence; prefill: batch × tokens."
    )
    if not machine.get("gpu"):
        caption += f" {NO_TENSOR_CORES}"
    columns = ["case", "contender", "time", "dense / this", "tokens/s", "peak memory", "source"]
    words = ("contender", "source")
    behind = Table("Every row", columns, table, words=words, folded=True)
    legend = [(colours[c], c) for c in shown]
    return Figure(f"End to end on {gpu}", caption, [plot], behind, legend)
