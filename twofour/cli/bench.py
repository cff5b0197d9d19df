"""`twofour bench`"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twofour.cli.bench_model import show_model
from twofour.cli.output import (
    Json,
    Save,
    keep,
    note,
    print_error,
    print_json,
    progress,
    quiet_libraries,
    say,
    size,
    table,
)
from twofour.errors import InputError

if TYPE_CHECKING:  # it brings torch
    from twofour.quantize.schemes import Scheme

EXAMPLE = "Example: [bold]twofour bench ./Llama-3-8B-24-packed --data wiki.test.txt --save[/]"

DTYPES = ("bfloat16", "float16")

#: Tokens multiplied at once: from one sequence in decode to a long prefill.
GPU_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CPU_TOKENS = (1, 16, 64)

NO_GPU = (
    "There is no GPU here, and a CPU has no Sparse Tensor Cores: 2:4 saves memory on it, not time. "
    "Measuring tiny shapes only, to show the rows."
)

#: One block of this size, and short texts, are what a CPU can do in seconds.
TINY_MODEL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Measure this causal language model.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Its dense model. Default: the one that it was pruned from.")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="TEXT", help="Also its perplexity on a text.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the text to score.")] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="B,B,…", help="Sequences at once. Default: 1,4,16; on a CPU 1,4.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt. Default: 512; on a CPU 128.")
    ] = None,
    generate: Annotated[int, typer.Option(min=1, help="Tokens generated for each prompt.")] = 64,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Or products of these sizes: 8B, 70B or tiny. Default: 8B, or tiny on a CPU.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="M,M,…", help="Tokens multiplied at once. Default: 1 to 16384.")
    ] = None,
    sustained: Annotated[
        bool,
        typer.Option(
            "--sustained",
            help="Products in turns of half a second, at the clock that each can hold by itself.",
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end",
            help="Or a whole model of random weights shaped like Llama-3-8B; products only with --shapes.",
        ),
    ] = False,
    layers: Annotated[int, typer.Option(min=1, help="Layers of that model.")] = 32,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="S,S,…",
            help="With random weights of these schemes instead of 16 bits: int8, fp8, int4 and others.",
        ),
    ] = None,
    save: Save = False,
    json: Json = False,
) -> None:
    """Measure a model, or products of known shapes, packed against dense, on this machine."""
    import torch

    from twofour.bench.timing import about

    if directory is not None:
        if shapes is not None or end_to_end or tokens is not None or scheme is not None or sustained:
            raise InputError(
                "give a model directory, or --shapes, --end-to-end and --scheme for random weights.",
                hint="A directory takes --batches, --prompt and --generate instead.",
            )
        _model(
            *(directory, against, data, save, json),
            max_tokens=max_tokens,
            batches=_counts(batches, "--batches", "1,4,16"),
            prompt=prompt,
            generate=generate,
        )
        return
    given = {"--against": against, "--data": data, "--batches": batches, "--prompt": prompt}
    given |= {"--save": save or None, "--max-tokens": max_tokens}
    if alone := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{alone[0]} is for a model: give its directory.")
    if dtype not in DTYPES:
        raise InputError(f"cannot measure in {dtype!r}.", hint=f"Choose one of: {', '.join(DTYPES)}.")
    schemes = _schemes(scheme)
    gpu = torch.cuda.is_available()
    if sustained and not gpu:
        raise InputError("--sustained is about a GPU at its power limit, and PyTorch finds none.")
    if sustained and end_to_end and shapes is None:
        raise InputError("--sustained is for products: give --shapes too, or leave it out.")
    device = torch.device("cuda" if gpu else "cpu")
    counts = _counts(tokens, "--tokens", "1,16,2048") or (GPU_TOKENS if gpu else CPU_TOKENS)
    document: dict[str, Any] = {"verb": "bench", "about": about(device)}
    if not gpu:
        note(NO_GPU)
        document["note"] = NO_GPU
    try:
        if shapes is not None or not end_to_end:
            _products(document, shapes or "8B", counts, getattr(torch, dtype), device, schemes, sustained)
        if end_to_end:
            _end_to_end(document, layers, getattr(torch, dtype), device, schemes)
    except KeyboardInterrupt:
        if not any(document.get(rows) for rows in ("products", "end_to_end")):
            raise
        document["stopped"] = True
    if json:
        print_json(document)
    else:
        machine = document["about"]
        how = ", sustained" if sustained else ""
        say(f"{machine['gpu'] or 'CPU'}, torch {machine['torch']}, {dtype}, {machine['date']}{how}")
        if document.get("products"):
            _show_products(document)
        if document.get("end_to_end"):
            _show_end_to_end(document["end_to_end"])
    if "stopped" in document:
        note("Stopped: these are the rows that were measured until then.")
        raise typer.Exit(130)


def _counts(text: str | None, option: str, example: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"{option} {text!r} is not a list of positive numbers.", hint=f"Write it as {example}."
        )
    return tuple(int(part) for part in parts)


def _schemes(names: str | None) -> list[Scheme]:
    from twofour.quantize.schemes import scheme_named

    return [] if names is None else [scheme_named(name.strip()) for name in names.split(",")]


def _model(
    directory: Path, against: Path | None, data: Path | None, save: bool, json: bool, **options: Any
) -> None:
    import torch

    from twofour.bench.model import run_model
    from twofour.bench.timing import about

    quiet_libraries()
    with progress("measuring") as on_progress:
        found = run_model(directory, against, data=data, on_progress=on_progress, **options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    document = {"verb": "bench", "about": about(device), **found}
    if save:
        keep(document, directory)
    if json:
        print_json(document)
    else:
        show_model(document)
    if broken := _gives_nan(document):
        see = shlex.join(["twofour", "check", broken])
        print_error(f"{broken} gives NaN: its times are all there is to know. See: {see}", as_json=False)
        raise typer.Exit(1)


def _gives_nan(document: dict[str, Any]) -> str | None:
    """The model that does, if one of them does: the dense one is the cause where both do."""
    perplexity, agreement = document["perplexity"] or {}, document["agreement"] or {}
    if math.isnan(perplexity.get("dense") or 0):
        return str(document["dense"]["model"] or document["model"])
    nan = math.isnan(perplexity.get("sparse") or 0) or math.isnan(agreement.get("share") or 0)
    return str(document["model"]) if nan else None


def _products(
    document: dict[str, Any],
    shapes: str,
    counts: tuple[int, ...],
    dtype: Any,
    device: Any,
    schemes: list[Scheme],
    sustained: bool,
) -> None:
    """Rows come into the document one by one: a run that is stopped has what it has measured."""
    from twofour.bench.products import measure_ceilings, named_shapes, run_products

    chosen = named_shapes(shapes)  # a name that does not exist is an error on any machine
    if device.type != "cuda":
        chosen = named_shapes("tiny")
    ceilings = measure_ceilings(device, dtype)
    rows: list[dict[str, Any]] = []
    document |= {"ceilings": asdict(ceilings), "products": rows}
    each: list[Scheme | None] = [*schemes] or [None]
    for scheme in each:
        what = "measuring products" + (f" in {scheme.name}" if scheme else "")
        with progress(what) as on_progress:
            options: dict[str, Any] = {"scheme": scheme, "ceilings": ceilings, "on_progress": on_progress}
            options["sustained"] = sustained
            run_products(chosen, counts, dtype, device, into=rows, **options)


def _end_to_end(
    document: dict[str, Any], layers: int, dtype: Any, device: Any, schemes: list[Scheme]
) -> None:
    from twofour.bench.end_to_end import BASELINES, run_end_to_end
    from twofour.bench.steps import FEW_CASES, Case

    quiet_libraries()
    options: dict[str, Any] = {"into": document.setdefault("end_to_end", [])}
    if schemes:
        options |= {"contenders": [*BASELINES, *(scheme.name for scheme in schemes)], "cases": FEW_CASES}
    if device.type != "cuda":
        layers = min(layers, 2)
        options |= {"shape": TINY_MODEL, "cases": (Case("prefill", 1, 64), Case("decode", 1, 64))}
    with progress("measuring a model") as on_progress:
        run_end_to_end(layers, device, dtype=dtype, on_progress=on_progress, **options)


def _show_products(document: dict[str, Any]) -> None:
    ceilings, rows = document["ceilings"], document["products"]
    say(
        f"A copy reaches {ceilings['copy_gb_s']:.0f} GB/s here, a dense product "
        f"{ceilings['matmul_tflops']:.3g} TFLOP/s; the roofline is made of these."
    )
    shown = []
    for row in rows:
        how = "eager" if row["graph_ms"] is None else "graph"
        ratios = [
            row[f"{name}_{how}"] for name in ("times_dense", "times_dense_same") if f"{name}_{how}" in row
        ]
        shown.append(
            (
                " ".join(filter(None, [row.get("scheme"), row["shape"], f"{row['rows']}×{row['columns']}"])),
                row["tokens"],
                row["contender"],
                "failed" if "error" in row else f"{row[f'{how}_ms']['p50']:.4f}",
                *(_figure(ratio, "{:.2f}") for ratio in ratios),
                _figure(row["host_us"], "{:.0f}"),
                _figure(row["roofline_share"], "{:.0%}"),
            )
        )
    same = ["× dense, same bits"] if "scheme" in rows[0] else []
    columns = ("shape", "tokens", "contender", "ms", "× dense", *same, "host µs", "% roofline")
    table("Products y = x·Wᵀ", columns, shown)
    _show_errors(f"{row['contender']}: {row['error']}" for row in rows if "error" in row)


def _show_end_to_end(rows: list[dict[str, Any]]) -> None:
    shown = [
        (
            f"{row['what']} {row['batch']}×{row['tokens']}, {row['mode']}, {row['attention']}",
            row["contender"],
            "failed" if "error" in row else f"{row['ms']['p50']:.3f}",
            _figure(row["times_dense"], "{:.2f}"),
            _figure(row["times_dense_fused"], "{:.2f}"),
            _figure(row["tokens_per_s"], "{:.0f}"),
            "" if row["peak_bytes"] is None else size(row["peak_bytes"]),
        )
        for row in rows
    ]
    columns = ("what", "contender", "ms", "× dense", "× dense_fused", "tokens/s", "peak memory")
    table(f"A model of {rows[0]['layers']} layers", columns, shown)
    first = {row["contender"]: row for row in reversed(rows) if row.get("resident_share")}
    for packed in reversed(first.values()):
        say(
            f"{packed['contender']}: {packed['packed_layers']} packed layers take "
            f"{packed['resident_share']:.1%} of their dense bytes."
        )
    compared = next((row for row in rows if "logits_max_relative_error" in row), None)
    if compared is not None:
        say(
            "Against the pruned dense model the logits differ by at most "
            f"{compared['logits_max_relative_error']:.1e} of the largest."
        )
    _show_errors(
        f"{row['contender']}, {row['what']} {row['batch']}×{row['tokens']}: {row['error']}"
        for row in rows
        if "error" in row
    )


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _show_errors(errors: Iterable[str]) -> None:
    for error in dict.fromkeys(errors):  # the same failure at every size is said once
        say(("failed", "yellow"), f" {error}")
