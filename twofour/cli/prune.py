"""`twofour prune`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    shell,
)
from twofour.cli.quantize import Group, Tune
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
    permute: Annotated[
        bool,
        typer.Option(
            "--permute",
            help="Reorder the channels inside each block first, so that 2:4 keeps more; costs nothing at "
            "run time. Needs --calib.",
        ),
    ] = False,
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
    batch: Annotated[int, typer.Option(min=1, help="Budget: sequences at once.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Budget: tokens of each prompt.")] = 2048,
    generate: Annotated[int, typer.Option(min=0, help="Budget: tokens generated for each prompt.")] = 256,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Prune and round at once, into a packed model of 8 or 4 bits: int8, fp8, int4, "
            "int8-weight or fp8-weight. Needs --calib.",
            show_default=False,
        ),
    ] = None,
    group: Group = None,
    tune: Tune = False,
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
    if permute and calib is None:
        raise InputError("--permute goes by the inputs of the layers.", hint="Give text with --calib FILE.")
    if budget and calib is None:
        raise InputError("--budget weighs losses on text.", hint="Give text with --calib FILE.")
    if (group is not None or tune) and scheme is None:
        raise InputError("--group and --tune go with --scheme.", hint="Give one, such as --scheme int4.")
    if scheme is not None:
        from twofour.cli.quantize import run
        from twofour.io.checkpoint import Checkpoint
        from twofour.io.quantize import QuantizeOptions
        from twofour.io.record import last_step

        given = {"--lowrank": lowrank, "--permute": permute, "--budget": budget}
        if calib is None:
            raise InputError("--scheme prunes and rounds on text.", hint="Give text with --calib FILE.")
        if method not in (None, "joint") or any(given.values()):
            extra = next((flag for flag, value in given.items() if value), f"--method {method}")
            raise InputError(
                f"{extra} does not go with --scheme, which prunes and rounds in one sweep.",
                hint="Prune with it first, then use: twofour quantize.",
            )
        rounded = CalibrationOptions(calib, samples, seqlen, seed)
        options = QuantizeOptions(scheme, group, "joint", tune=tune)
        if last_step(Checkpoint(model).record, "prune") is not None:
            words = shell("quantize", model, out, "--scheme", scheme)
            note(f"{model} is pruned already, and is pruned again: to keep its zeros use ", words, ".")
        run("prune", model, out, options, include, exclude, rounded, resume, json)
        return
    quiet_libraries()
    calibration = CalibrationOptions(calib, samples, seqlen, seed, lowrank, permute) if calib else None
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
            note(text)
        say(
            f"Budget {chosen.budget}: {len(chosen.dense)} layers stay dense. Told for the {chosen.gpu}: "
            f"{chosen.speed:.2f} times dense's speed ({chosen.speed_all:.2f} with all pruned); of layers "
            f"pruned one by one: {chosen.perplexity:.3f} times its perplexity ({chosen.perplexity_all:.3f})."
        )
    if unseen := [name for name, layer in step["layers"].items() if layer.get("tokens") == 0]:
        say(
            f"No calibration token reached {len(unseen)} layers, such as {unseen[0]}: pruned by weight alone."
        )
    if permute:
        moved = [layer["permutation"] for layer in step["layers"].values() if "permutation" in layer]
        before, after = (
            sum(fold[key] for fold in moved) / max(1, len(moved)) for key in ("kept_before", "kept")
        )
        say(
            f"Channels reordered for {len(moved)} layers: of what their weights matter 2:4 keeps "
            f"{after:.1%} instead of {before:.1%} (mean, before any weight is updated)."
            if moved
            else "No channels were reordered: no layer that was pruned reads any that may change their order."
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
    if lowrank:
        say("Next: ", shell("pack", out, f"{out}-packed"))
        return
    say("Next: ", shell("recover", out, f"{out}-r", "--data", "TEXT", "--teacher", model), ", then pack it")
