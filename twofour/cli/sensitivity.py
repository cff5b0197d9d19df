"""`twofour sensitivity`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.output import (
    Include,
    Json,
    Samples,
    Save,
    Seed,
    Seqlen,
    keep,
    print_json,
    progress,
    quiet_libraries,
    say,
    table,
)

EXAMPLE = "Example: [bold]twofour sensitivity ./Llama-3-8B --calib c4.txt[/]"

#: Rows that are shown; --json has them all.
SHOWN = 20


def command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A dense model: config.json and safetensors.", show_default=False
        ),
    ],
    calib: Annotated[Path, typer.Option(help="Text: plain or .jsonl; self: the model writes it.")],
    method: Annotated[
        str, typer.Option(help="What prunes a layer: magnitude, wanda, ria, sparsegpt, admm or best.")
    ] = "sparsegpt",
    samples: Samples = 128,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    include: Include = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Not these layers. Repeatable.")] = None,
    save: Save = False,
    json: Json = False,
) -> None:
    """Estimate how much pruning each layer alone would raise the model's loss."""
    from twofour.advise.sensitivity import sensitivity
    from twofour.io.prune_calibrated import CalibrationOptions

    quiet_libraries()
    with progress("measuring") as on_progress:
        found = sensitivity(
            *(model, CalibrationOptions(calib, samples, seqlen, seed), method, include or (), exclude or ()),
            on_progress=on_progress,
        )
    document = {"verb": "sensitivity", **found.to_dict()}
    if save:
        keep(document, model)
    if json:
        print_json(document)
        return
    ranked = sorted(found.layers.items(), key=lambda item: -item[1].loss_increase)
    total = sum(layer.loss_increase for layer in found.layers.values())
    first = sum(layer.first_order for layer in found.layers.values())
    rises = sum(max(0.0, layer.loss_increase) for layer in found.layers.values())
    rows = [
        (
            name,
            f"{layer.loss_increase:.4f}",
            f"± {layer.standard_error:.4f}",
            f"{layer.first_order:+.4f}",
            f"{max(0.0, layer.loss_increase) / rises:.1%}" if rises else "–",
            "–" if layer.output_error is None else f"{layer.output_error:.3f}",
        )
        for name, layer in ranked[:SHOWN]
    ]
    columns = ("layer", "loss added, nats a token", "", "of first order", "share", "output error")
    table(f"{model}, each layer alone by {found.method}; dense {found.dense_loss:.4f}", columns, rows)
    if len(ranked) > SHOWN:
        say(f"The {SHOWN} most sensitive of {len(ranked)} layers; --json has all.")
    say(
        f"All together {total:.3f} nats if losses added up; usually it is more. Estimated on {found.scored} "
        f"windows of {found.seqlen} tokens in {found.seconds:.0f} s."
    )
    if first:
        say(
            f"Of that {first:+.3f} are of first order: they belong to this text "
            "and would differ on another. --calib self leaves them out."
        )
    if unseen := [name for name, layer in found.layers.items() if layer.tokens == 0]:
        say(f"No token reached {len(unseen)} layers, such as {unseen[0]}: nothing is known of their loss.")
