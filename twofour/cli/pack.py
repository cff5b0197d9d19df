"""`twofour pack`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.output import (
    Exclude,
    Include,
    Json,
    Resume,
    bold,
    print_json,
    progress,
    quiet_libraries,
    say,
    shell,
    size,
)

EXAMPLE = "Example: [bold]twofour pack ./Llama-3-8B-24 ./Llama-3-8B-24-packed[/]"


def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A pruned model, still in dense form.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make.", show_default=False)],
    include: Include = None,
    exclude: Exclude = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Store a pruned model in 9/16 of the bytes (16 bit), as from_pretrained can load it."""
    from twofour.io.pack import pack_checkpoint

    quiet_libraries()
    with progress("packing") as on_progress:
        step = pack_checkpoint(
            model, out, include or (), exclude or (), resume=resume, on_progress=on_progress
        )
    if json:
        print_json({"verb": "pack", "out": str(out), **{k: v for k, v in step.items() if k != "verb"}})
        return
    dense, packed = step["dense_bytes"], step["packed_bytes"]
    share = f"{packed / dense:.1%} of {size(dense)}"
    say(f"Packed {len(step['layers'])} layers into {size(packed)}, {share}: {out}")
    say("Next: ", shell("check", out), ", or load it: ", bold("import twofour"), ", then from_pretrained.")
