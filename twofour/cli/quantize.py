"""`twofour quantize`"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    note,
    print_json,
    progress,
    quiet_libraries,
    say,
    shell,
    size,
)
from twofour.errors import InputError

if TYPE_CHECKING:
    from twofour.io.prune_calibrated import CalibrationOptions
    from twofour.io.quantize import QuantizeOptions

EXAMPLE = (
    "Example: [bold]twofour quantize ./Llama-3-8B-24 ./Llama-3-8B-24-int4 --scheme int4 --calib text.txt[/]"
)

Group = Annotated[
    int | None, typer.Option(help="int4: columns that share a scale, 128, 64 or 32.", show_default=False)
]
Tune = Annotated[
    bool,
    typer.Option("--tune", help="Tune each block as a whole after its layers are rounded. Needs --calib."),
]

#: Of a pruned model; `joint`, which prunes, is for a dense one.
ROUNDINGS = ("nearest", "compensated")


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
    seed: Seed = 1,  # other windows than `prune` takes: see tuned_on_the_same_windows
    group: Group = None,
    rounding: Annotated[
        str | None,
        typer.Option(
            help="nearest or compensated. Default: compensated with text, else nearest.",
            show_default=False,
        ),
    ] = None,
    smooth: Annotated[
        bool | None,
        typer.Option(
            "--smooth/--no-smooth",
            help="int8, fp8: move scale from activations into weights. Default: int8 with text.",
            show_default=False,
        ),
    ] = None,
    tune: Tune = False,
    teacher: Annotated[
        Path | None,
        typer.Option(
            help="The dense model: come near to it, and not to MODEL. Needs --calib.", show_default=False
        ),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Store a pruned model in 8 or 4 bits on top of 2:4, packed, as from_pretrained can load it."""
    from twofour.io.prune_calibrated import CalibrationOptions
    from twofour.io.quantize import QuantizeOptions

    how: Any = rounding
    if how == "joint":
        raise InputError(
            "joint rounding prunes a dense model.", hint="Use: twofour prune MODEL OUT --scheme SCHEME."
        )
    if how not in (None, *ROUNDINGS):
        raise InputError(f"there is no rounding {how!r}.", hint=f"Choose one of: {', '.join(ROUNDINGS)}.")
    calibration = CalibrationOptions(calib, samples, seqlen, seed) if calib else None
    options = QuantizeOptions(scheme, group, how, smooth, tune, teacher)
    if calibration and teacher is None and (dense := pruned_layer_by_layer(model)):
        flags = f"--teacher {shlex.quote(dense)} --tune"
        note(f"Pruned from {dense}: {flags} would win back some of what that lost.")
    if calibration and tuned_on_the_same_windows(model, calibration):
        note("Pruning was tuned on these windows, so they tell little of other text: take another --seed.")
    run("quantize", model, out, options, include, exclude, calibration, resume, json)


def pruned_layer_by_layer(model: Path) -> str | None:
    """The dense model, if it is there and nothing but a pruning of layers has made this one of it.

    `best` has tuned its blocks towards the dense model already, and there is little to win back.
    """
    from twofour.io.checkpoint import Checkpoint
    from twofour.io.record import was_permuted, was_tuned
    from twofour.io.recover import recorded_teacher

    checkpoint = Checkpoint(model)
    steps = checkpoint.record.get("steps", [])
    just_pruned = bool(steps) and steps[-1].get("verb") == "prune"
    if not just_pruned or was_permuted(checkpoint.record) or was_tuned(checkpoint.record):
        return None
    return recorded_teacher(checkpoint)


def tuned_on_the_same_windows(model: Path, calibration: CalibrationOptions) -> bool:
    """Whether `prune --method best` has seen them: the model then knows them by heart, and rounding that goes
    by what it does there can do much harm elsewhere (docs/accuracy.md)."""
    from twofour.io.checkpoint import Checkpoint
    from twofour.io.record import last_step, was_tuned

    record = Checkpoint(model).record
    if not was_tuned(record):
        return False
    seen = (last_step(record, "prune") or {})["options"]
    return (seen.get("calib"), seen.get("seed")) == (str(calibration.calib), calibration.seed)


def run(
    verb: str,
    model: Path,
    out: Path,
    options: QuantizeOptions,
    include: list[str] | None,
    exclude: list[str] | None,
    calibration: CalibrationOptions | None,
    resume: bool,
    json: bool,
) -> None:
    """Round, or prune and round, and say what came out: `quantize` and `prune --scheme` do the same work."""
    from twofour.io.quantize import quantize_checkpoint

    quiet_libraries()
    with progress("quantizing" if verb == "quantize" else "pruning") as on_progress:
        step = quantize_checkpoint(
            *(model, out, options, include or (), exclude or ()),
            calibration=calibration,
            resume=resume,
            on_progress=on_progress,
        )
    if json:
        print_json({"verb": verb, "out": str(out), **{k: v for k, v in step.items() if k != "verb"}})
        return
    dense, packed = step["dense_bytes"], step["packed_bytes"]
    errors = [layer["relative_error"] for layer in step["layers"].values()]
    recorded = step["options"]
    groups = f" in groups of {recorded['group']}" if recorded["group"] else ""
    done = f"Quantized {len(errors)} layers to" if verb == "quantize" else f"Pruned {len(errors)} layers to"
    rounding = f", rounding {recorded['rounding']}" if verb == "quantize" else ", rounded on the way"
    say(
        f"{done} 2:4 {recorded['scheme']}{groups}{rounding}, "
        f"into {size(packed)}, {packed / dense:.1%} of {size(dense)}: {out}"
    )
    say(f"Weight lost, as a share of each layer's norm: {min(errors):.4f} to {max(errors):.4f}.")
    outputs = [layer["output_error"] for layer in step["layers"].values() if "output_error" in layer]
    if outputs:
        say(f"Squared error of the layers' outputs, relative: {min(outputs):.2e} to {max(outputs):.2e}.")
    if blocks := step.get("blocks"):
        before, after = (
            sum(block[key] for block in blocks.values()) / len(blocks)
            for key in ("error_before", "error_after")
        )
        back = sum(not block["kept"] for block in blocks.values())
        say(
            f"Output error of the blocks on held-out text: {before:.2e} rounded, {after:.2e} tuned (mean); "
            f"{back} of {len(blocks)} stay untuned, where it did not help."
        )
    say("Next: ", shell("check", out), ", ", shell("eval", out, "--data", "TEXT"), ",")
    say("or ", shell("recover", out, f"{out}-r", "--data", "TEXT"), ", which trains its scales.")
