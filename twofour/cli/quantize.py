"""`twofour quantize`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from twofour.cli.output import (
    Calib,
    Exclude,
    Include,
    Json,
    Resume,
    Samples,
    Seed,
    Seqlen,
    print_json,
    progress,
    quiet_libraries,
    say,
    size,
)

EXAMPLE = (
    "Example: [bold]twofour quantize ./Llama-3-8B-24 ./Llama-3-8B-24-int4 --scheme int4 --calib text.txt[/]"
)


def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A pruned model, still in dense form.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make.", show_default=False)],
    scheme: Annotated[
        str, typer.Option(help="int8, fp8, int4, int8-weight or fp8-weight.", show_default=False)
    ],
    calib: Calib = None,
    samples: Samples = 128,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    group: Annotated[
        int | None, typer.Option(help="int4: columns that share a scale, 128, 64 or 32.", show_default=False)
    ] = None,
    rounding: Annotated[
        str | None,
        typer.Option(
            help="nearest, compensated, or joint, which prunes a dense model on the way. "
            "Default: compensated with text, else nearest.",
            show_default=False,
        ),
    ] = None,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="int8, fp8: move scale from activations into weights.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Store a pruned model in 8 or 4 bits on top of 2:4, packed, as from_pretrained can load it."""
    from twofour.io.prune_calibrated import CalibrationOptions
    from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

    quiet_libraries()
    how: Any = rounding
    with progress("quantizing") as on_progress:
        step = quantize_checkpoint(
            *(model, out, QuantizeOptions(scheme, group, how, smooth), include or (), exclude or ()),
            calibration=CalibrationOptions(calib, samples, seqlen, seed) if calib else None,
            resume=resume,
            on_progress=on_progress,
        )
    if json:
        print_json({"verb": "quantize", "out": str(out), **{k: v for k, v in step.items() if k != "verb"}})
        return
    dense, packed = step["dense_bytes"], step["packed_bytes"]
    errors = [layer["relative_error"] for layer in step["layers"].values()]
    options = step["options"]
    groups = f" in groups of {options['group']}" if options["group"] else ""
    say(
        f"Quantized {len(errors)} layers to 2:4 {options['scheme']}{groups}, rounding {options['rounding']}, "
        f"into {size(packed)}, {packed / dense:.1%} of {size(dense)}: {out}"
    )
    say(f"Weight lost, as a share of each layer's norm: {min(errors):.4f} to {max(errors):.4f}.")
    outputs = [layer["output_error"] for layer in step["layers"].values() if "output_error" in layer]
    if outputs:
        say(f"Squared error of the layers' outputs, relative: {min(outputs):.2e} to {max(outputs):.2e}.")
    say(f"Next: [bold]twofour check {out}[/], [bold]twofour eval {out} --data TEXT[/].")
