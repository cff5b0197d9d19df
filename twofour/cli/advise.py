"""`twofour advise`"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twofour.cli.output import Json, Save, bold, keep, note, print_json, say, size, table

if TYPE_CHECKING:
    from twofour.advise.advice import Advice, LayerAdvice, Phase

#: So that a row fits into a line.
SHORT = {"launch": "launch", "bytes": "bytes", "arithmetic": "math"}

EXAMPLE = "Example: [bold]twofour advise ./Llama-3-8B --gpu H200 --batch 16[/]"


def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A model directory, or a config.json: weights are not needed."),
    ],
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="E.g. H100, L40S. Default: this machine's.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 2048,
    generate: Annotated[int, typer.Option(min=0, help="Tokens generated for each prompt.")] = 256,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    fused: Annotated[
        bool, typer.Option("--fused/--no-fused", help="After twofour.fuse_, on both sides.")
    ] = True,
    eager: Annotated[
        bool, typer.Option("--eager", help="Decode without CUDA graphs or torch.compile.")
    ] = False,
    attention: Annotated[
        str, typer.Option(help="grouped, or sdpa: transformers' own with a static cache.")
    ] = "grouped",
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `twofour bench --shapes 8B --json` wrote on your GPU."),
    ] = None,
    save: Save = False,
    json: Json = False,
) -> None:
    """Tell before pruning whether 2:4 pays for a model, a GPU and a workload, layer by layer."""
    from twofour.advise.advice import advise

    advice = advise(
        model,
        gpu,
        batch=batch,
        prompt=seq,
        generate=generate,
        dtype=dtype,
        fused=fused,
        graph=not eager,
        attention=attention,  # type: ignore[arg-type]  # advise says which there are
        measured=measured,
    )
    document = {"verb": "advise", **advice.to_dict()}
    if save:
        keep(document, model if model.is_dir() else model.parent)
    if json:
        print_json(document)
        return
    _show(advice)


def _show(advice: Advice) -> None:
    say(bold(advice.verdict))
    if advice.instead:
        say(advice.instead)
    if advice.timed:
        _show_forms(advice)
    columns = ("layer", "weight", "ops/byte", "bound by", "dense µs", "2:4 µs", "×", "saves")
    block = _block([layer.name for layer in advice.layers if layer.count > 1])
    shown = [_layer_row(layer, block) for layer in advice.layers if layer.prefill]
    title = f"Layers of {block[:-1]}, prefill | decode" if block else "Layers, prefill | decode"
    table(title, columns, shown)
    left: dict[str, list[str]] = {}
    for layer in advice.layers:
        if layer.reason:
            left.setdefault(f"{layer.kind}: {layer.reason}", []).append(layer.name)
    for reason, names in left.items():
        say(f"Left alone: {', '.join(names[:4])}{' …' if len(names) > 4 else ''} ({reason})")
    for text in advice.notes:
        note(text)


def _show_forms(advice: Advice) -> None:
    how = f"{advice.batch} × {advice.prompt} tokens, then {advice.generate} each"
    forms = [
        (
            form.name + ("" if form.measured else " *"),
            _ms(form.prefill_ms),
            f"{form.prefill_x:.2f}",
            _ms(form.decode_ms),
            f"{form.decode_x:.2f}",
            f"{form.tokens_per_s:.0f}",
            f"{form.request_x:.2f}",
            size(form.weight_bytes),
            size(form.cache_bytes),
            {True: "yes", False: "no", None: "?"}[form.fits],
        )
        for form in advice.forms
    ]
    figures = ("", "prefill ms", "×", "decode ms", "×", "tokens/s", "all ×", "weights", "KV cache", "fits")
    table(f"{advice.model} on {advice.gpu.name}: {how}", figures, forms)
    say(
        f"2:4 can touch {advice.touched_prefill:.0%} of dense prefill and {advice.touched_decode:.0%} of "
        f"dense decode. × is against dense; rows with a star are not measured."
    )


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"


def _us(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _block(names: list[str]) -> str:
    """How the names of all repeated layers begin: said once, above the table."""
    parts = [name.split(".")[:-1] for name in names]
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return "".join(f"{column[0]}." for column in shared)


def _layer_row(layer: LayerAdvice, block: str) -> tuple[str, ...]:
    assert layer.prefill is not None
    assert layer.decode is not None
    phases = (layer.prefill, layer.decode)

    def gain(phase: Phase) -> str:
        return f"{phase.us['dense'] / phase.us['2:4']:.2f}" if "2:4" in phase.us else "–"

    def both(*texts: str) -> str:
        return " | ".join(texts)

    padded = f" (+{layer.padding[0]}, +{layer.padding[1]})" if any(layer.padding) else ""
    return (
        layer.name.removeprefix(block) + (f" ×{layer.count}" if layer.count > 1 else ""),
        f"{layer.rows}×{layer.columns}{padded}",
        both(*(f"{phase.intensity:.0f}" for phase in phases)),
        both(*(SHORT[phase.bound] for phase in phases)),
        both(*(_us(phase.us["dense"]) for phase in phases)),
        both(*(_us(phase.us["2:4"]) if "2:4" in phase.us else "–" for phase in phases)),
        both(*(gain(phase) for phase in phases)),
        size(layer.dense_bytes - layer.sparse_bytes) if layer.eligible else "",
    )
