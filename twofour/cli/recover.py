"""`twofour recover`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.output import Json, Resume, bold, note, print_json, progress, quiet_libraries, say, shell
from twofour.progress import silent

EXAMPLE = (
    "Example: [bold]twofour recover ./Llama-3-8B-24 ./Llama-3-8B-24-r --data c4.txt --teacher ./Llama-3-8B[/]"
)


def command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A pruned model, not yet packed; or a quantized one.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make.", show_default=False)],
    data: Annotated[
        list[str], typer.Option(help="Text: plain or .jsonl; self: the teacher writes it. Repeatable.")
    ],
    teacher: Annotated[
        Path | None, typer.Option(help="The dense model. Default: the one that was pruned, if it is known.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to train on, repeated ones counted.")] = 10_000_000,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="masked, distill, adaptive or lora. Default: distill with a teacher, else masked. "
            "For a quantized model: scales.",
            show_default=False,
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Default: by the model's size, 3e-4 at 15 M.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows a step, over all processes. Default: by --tokens.")
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option(help="Tokens a window. Default: the model's, at most 1024.")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Parts a step is computed in, to save memory.")] = 1,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the rate rises.")] = 0.04,
    schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    weight_decay: Annotated[float, typer.Option(help="AdamW's.")] = 0.0,
    clip: Annotated[float, typer.Option(help="The largest norm of a step's gradient.")] = 1.0,
    kl_weight: Annotated[float, typer.Option(help="Weight of the teacher's predictions.")] = 1.0,
    task_weight: Annotated[float, typer.Option(help="Weight of the text itself beside them.")] = 0.1,
    temperature: Annotated[float, typer.Option(help="Of both models' predictions.")] = 1.0,
    dtype: Annotated[
        str | None, typer.Option(help="bf16 or fp32. Default: bf16 on a GPU; weights are always fp32.")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Less memory, a third slower.")
    ] = False,
    teacher_offload: Annotated[
        bool, typer.Option("--teacher-offload", help="Keep the teacher in the CPU's memory.")
    ] = False,
    eval_data: Annotated[
        Path | None, typer.Option(help="Text to evaluate on. Default: the end of the data, held out.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps. Default: a tenth of all.")] = None,
    patience: Annotated[
        int, typer.Option(help="Stop after so many evaluations without a gain; 0: never.")
    ] = 0,
    save_every: Annotated[int | None, typer.Option(help="Steps. Default: a tenth of all.")] = None,
    decay: Annotated[float, typer.Option(help="adaptive: what draws pruned weights to zero.")] = 2e-4,
    until: Annotated[float, typer.Option(help="adaptive: share of the steps with moving masks.")] = 0.5,
    rank: Annotated[int, typer.Option(help="lora: rank of the adapters.")] = 32,
    alpha: Annotated[float, typer.Option(help="lora: their scale is alpha / rank.")] = 32.0,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Train as quantize will round: int8, fp8, int4, int8-weight or fp8-weight.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="int4: columns that share a scale, 128, 64 or 32.", show_default=False)
    ] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="With torchrun: each process keeps a part.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile both models.")] = False,
    seed: Annotated[int, typer.Option(help="Order of the windows, and what the teacher writes.")] = 0,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Train a pruned model, so that it wins back accuracy and stays 2:4."""
    from twofour.calibrate import parallel
    from twofour.io.checkpoint import Checkpoint
    from twofour.io.recover import recorded_teacher, recover_checkpoint
    from twofour.recover.options import SCALES, Recover

    options = Recover(
        recipe=recipe,
        tokens=tokens,
        lr=lr,
        batch=batch,
        seqlen=seqlen,
        accumulate=accumulate,
        warmup=warmup,
        schedule=schedule,
        weight_decay=weight_decay,
        clip=clip,
        kl_weight=kl_weight,
        task_weight=task_weight,
        temperature=temperature,
        dtype=dtype,
        checkpointing=checkpointing,
        eval_every=eval_every,
        patience=patience,
        save_every=save_every,
        seed=seed,
        fsdp=fsdp,
        compile=compile,
        teacher_offload=teacher_offload,
        decay=decay,
        until=until,
        rank=rank,
        alpha=alpha,
        scheme=scheme,
        group=group,
    )
    quiet_libraries()
    with parallel.group_of_torchrun(), progress("recovering") as on_progress:
        first = parallel.is_first()
        if teacher is None and recipe != "masked" and (found := recorded_teacher(Checkpoint(model))):
            teacher = Path(found)
            if first:
                note(f"Teacher: {found}, which the model was pruned from.")
        step = recover_checkpoint(
            *(model, out, data, teacher, options),
            eval_data=eval_data,
            resume=resume,
            on_progress=on_progress if first else silent,
        )
    if not first:
        return
    if json:
        print_json({"verb": "recover", "out": str(out), **{k: v for k, v in step.items() if k != "verb"}})
        return
    told = step["held_out_perplexity"]
    say(
        f"Recovered by {step['options']['recipe']} over {step['tokens']:,} tokens "
        f"in {step['seconds']:.0f} s: {out}"
    )
    rounded = f", rounded to {scheme}" if scheme else ""
    say(
        f"Held-out perplexity{rounded}: {told['before']:.2f} before, ",
        bold(f"{told['after']:.2f}"),
        " after.",
    )
    if not told["after"] < told["before"]:
        say("Training did not help: try a smaller --lr, more --tokens or other text.")
    if step["stopped"]:
        say(f"Stopped after {step['steps']} steps: no gain in {patience} evaluations.")
    if step["best_step"] != step["steps"]:
        say(f"The weights are those of step {step['best_step']}, which evaluated best.")
    if step["frozen"]:
        say(
            f"Not trained, for they cannot be written back: {len(step['frozen'])} parameters, "
            f"such as {step['frozen'][0]}."
        )
    if step["options"]["recipe"] == SCALES:
        say("Next: ", shell("check", out), ", ", shell("eval", out, "--data", "TEXT"))
    elif scheme:
        groups = ["--group", group] if group else []
        way = ["--scheme", scheme, *groups, "--rounding", "nearest"]
        say("Next, for these very codes: ", shell("quantize", out, f"{out}-{scheme}", *way))
    else:
        say("Next: ", shell("pack", out, f"{out}-packed"))
