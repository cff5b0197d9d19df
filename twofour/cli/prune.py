"""`twofour prune`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from twofour.cli.output import (
    Calib,
    Include,
    Json,
    Resume,
    Samples,
    Seed,
    Seqlen,
    alike,
    note,
    print_json,
    progress,
    quiet_libraries,
    say,
)
from twofour.errors import InputError
from twofour.progress import silent

EXAMPLE = "Example: [bold]twofour prune ./Llama-3-8B ./Llama-3-8B-24[/]"


def command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A dense model: config.json and safetensors.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make.", show_default=False)],
    method: Annotated[
        str | None,
        typer.Option(
            help="magnitude, wanda, ria, sparsegpt, admm or best. Default: best with text, else magnitude.",
            show_default=False,
        ),
    ] = None,
    calib: Calib = None,
    samples: Samples = 128,
    seqlen: Seqlen = None,
    seed: Seed = 0,
    lowrank: Annotated[
        int, typer.Option(min=0, help="Rank of a correction kept beside each weight; 0: none.")
    ] = 0,
    include: Include = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", "--keep-dense", help="Leave these layers dense. Repeatable."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="ppl=1.05x|speed=1.3x",
            help="Choose the layers that stay dense: most speed within this perplexity, or least loss for "
            "this speed. Both against dense; needs --calib.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Budget: the GPU, e.g. H100, L40S. Default: this machine's."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Budget: sequences at once.")] = 1,
    seq: Annotated[int, typer.Option(help="Budget: tokens of each prompt.")] = 2048,
    generate: Annotated[int, typer.Option(help="Budget: tokens generated for each prompt.")] = 256,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Keep at most two of every four neighbouring weights of each eligible layer."""
    from twofour.calibrate import parallel
    from twofour.io.prune import prune_checkpoint
    from twofour.io.prune_calibrated import CalibrationOptions
    from twofour.io.writer import require_new

    if lowrank and calib is None:
        raise InputError("--lowrank fits a correction to text.", hint="Give text with --calib FILE.")
    if budget and calib is None:
        raise InputError("--budget weighs losses on text.", hint="Give text with --calib FILE.")
    quiet_libraries()
    calibration = CalibrationOptions(calib, samples, seqlen, seed, lowrank) if calib else None
    chosen = None
    with parallel.group_of_torchrun():
        first = parallel.is_first()
        if budget and calibration is not None:
            from twofour.advise.budget import Work, plan, read_budget

            require_new(out)  # before minutes of measuring
            work = Work(gpu, batch, seq, generate)
            with progress("measuring") as on_progress:
                chosen = plan(
                    *(model, read_budget(budget), calibration, method, include or (), exclude or (), work),
                    on_progress=on_progress if first else silent,
                )
            chosen = parallel.of_first(chosen)  # rounding may differ from GPU to GPU
        with progress("pruning") as on_progress:
            step = prune_checkpoint(
                *(model, out, method, include or (), exclude or ()),
                calibration=calibration,
                kept=chosen.kept if chosen else None,
                budget=chosen.to_dict() if chosen else None,
                resume=resume,
                on_progress=on_progress if first else silent,
            )
    if not first:
        return
    errors = [layer["relative_error"] for layer in step["layers"].values()]
    if json:
        print_json({"verb": "prune", "out": str(out), **{k: v for k, v in step.items() if k != "verb"}})
        return
    say(f"Pruned {len(errors)} layers to 2:4 by {step['options']['method']}: {out}")
    say(f"Weight lost, as a share of each layer's norm: {min(errors):.3f} to {max(errors):.3f}.")
    if chosen:
        for text in chosen.notes:
            note(escape(text))
        say(
            f"Budget {chosen.budget}: {len(chosen.dense)} layers stay dense. Told for the {chosen.gpu}: "
            f"{chosen.speed:.2f} times dense's speed ({chosen.speed_all:.2f} with all pruned); of layers "
            f"pruned one by one: {chosen.perplexity:.3f} times its perplexity ({chosen.perplexity_all:.3f})."
        )
    if unseen := [name for name, layer in step["layers"].items() if layer.get("tokens") == 0]:
        say(
            f"No calibration token reached {len(unseen)} layers, such as {unseen[0]}: pruned by weight alone."
        )
    if blocks := step.get("blocks"):
        before, after = (
            sum(block[key] for block in blocks.values()) / len(blocks)
            for key in ("error_before", "error_after")
        )
        say(f"Output error of the blocks on held-out text: {before:.3f} pruned, {after:.3f} tuned (mean).")
        if back := sum(not block["kept"] for block in blocks.values()):
            say(f"{back} of {len(blocks)} blocks keep their untuned weights: there the tuning did not help.")
    left = sorted({f"{alike(name)} ({reason})" for name, reason in step["left"].items()})
    say("Left alone: " + ("; ".join(left) or "nothing") + ".")
    say(f"Next: [bold]twofour recover {out} {out}-r --data TEXT --teacher {model}[/], then pack it")
