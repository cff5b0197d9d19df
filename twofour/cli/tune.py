"""`twofour tune`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.output import Json, Save, keep, note, print_json, progress, quiet_libraries, say, table

EXAMPLE = "Example: [bold]twofour tune ./Llama-3-8B-24-packed[/]"


def command(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Tune the layers of this model.", show_default=False)
    ] = None,
    shapes: Annotated[str | None, typer.Option(help="Or the shapes of a known one: 8B, 70B.")] = None,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens, or all.")] = "all",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Tune weights of this scheme: int8, fp8, int4, int8-weight, fp8-weight. "
            "Default: that of the model, else 16 bits."
        ),
    ] = None,
    group: Annotated[int | None, typer.Option(help="Columns that share a scale in int4.")] = None,
    save: Save = False,
    json: Json = False,
) -> None:
    """Measure which kernel is fastest for each layer and number of tokens on this GPU, and remember it."""
    import torch

    from twofour.bench.products import named_shapes
    from twofour.bench.timing import about
    from twofour.bench.tune import shapes_to_tune, tune
    from twofour.errors import InputError
    from twofour.io.checkpoint import Checkpoint
    from twofour.io.format import is_packed, packed_modules, scheme_of
    from twofour.io.structure import checkpoint_layers
    from twofour.kernels import dispatch, dispatch_codes, tuning
    from twofour.quantize.schemes import scheme_named

    quiet_libraries()
    if (directory is None) == (shapes is None):
        raise InputError("give a model directory or --shapes, one of them.")
    if save and directory is None:
        raise InputError("--save keeps the document beside a model: give its directory.")
    if group is not None and scheme is None:
        raise InputError("--group is for a scheme: give --scheme int4.")
    chosen = None if scheme is None else scheme_named(scheme, group)
    if not torch.cuda.is_available():
        raise InputError("tuning needs a GPU, and PyTorch finds none.", hint="See twofour doctor.")
    if dtype not in ("bfloat16", "float16"):
        raise InputError(f"the kernels multiply bfloat16 and float16, not {dtype}.")
    try:
        counts = None if tokens == "all" else [int(t) for t in tokens.split(",")]
    except ValueError:
        raise InputError(f"--tokens takes numbers with commas, not {tokens!r}.") from None
    if shapes is not None:
        wanted = [(n, k) for n, k in named_shapes(shapes).values()]
    else:
        assert directory is not None
        checkpoint = Checkpoint(directory)
        if is_packed(checkpoint.config):
            ours = checkpoint.config["quantization_config"]
            modules, own = packed_modules(ours), scheme_of(ours)
            if chosen is not None and chosen != own:
                raise InputError(
                    f"{directory} is packed in {'16 bits' if own is None else own.name}, not in {scheme}.",
                    hint="Leave --scheme out.",
                )
            chosen = own
        else:
            modules = {layer.name: layer.shape for layer in checkpoint_layers(checkpoint).by_tensor.values()}
        wanted = shapes_to_tune({name: (s[0], s[1]) for name, s in modules.items() if len(s) == 2})
    device = torch.device("cuda", torch.cuda.current_device())
    with progress("tuning") as on_progress:
        by = dispatch if chosen is None else dispatch_codes
        buckets = by.BUCKETS if counts is None else [by.bucket_of(count) for count in counts]
        rows = tune(wanted, buckets, getattr(torch, dtype), device, on_progress, chosen)
    for n, k in wanted:
        if not any((n, k) == (row["n"], row["k"]) for row in rows):
            note(f"No kernel runs a weight of {n}×{k} here: it is left to the reference.")
    where = tuning.own_path(device.index)
    document = {"verb": "tune", "about": about(device), "kept_in": str(where), "rows": rows}
    if save and directory is not None:
        keep(document, directory)
    if json:
        print_json(document)
        return
    shown = [
        (
            f"{r['n']}×{r['k']}",
            r["tokens"],
            f"{1e3 * r['dense_ms']:.1f}",
            next(iter(r["best"])),
            f"{r['times_dense']:.2f}",
        )
        for r in rows
    ]
    what = (
        "16 bits" if chosen is None else chosen.name + (f", groups of {chosen.group}" if chosen.group else "")
    )
    table(f"What is fastest in {what}", ("weight", "tokens", "dense µs", "backend", "× dense"), shown)
    say(f"Kept in {where}")
