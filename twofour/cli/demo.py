"""`twofour demo`"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from twofour.cli.output import Json, bold, print_json, progress, quiet_libraries, say, shell, size, table

EXAMPLE = "Example: [bold]twofour demo --model ./my-model --out ./my-demo[/]"


def command(
    out: Annotated[Path, typer.Option(help="Where the models and results go.")] = Path("demo"),
    model: Annotated[
        Path | None, typer.Option(help="A model of yours. Default: SmolLM2-135M-Instruct.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text to evaluate on. Default: Python's documentation.")
    ] = None,
    method: Annotated[str, typer.Option(help="How to prune, see twofour prune.")] = "sparsegpt",
    tokens: Annotated[int, typer.Option(help="How many tokens to evaluate on.")] = 4096,
    json: Json = False,
) -> None:
    """The whole way on a small real model, on any machine: prune, pack, check, evaluate, generate."""
    from twofour.demo import run

    quiet_libraries()
    found = run(out, progress, model=model, data=data, method=method, tokens=tokens)
    if json:
        print_json({"verb": "demo", **found})
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    dense, packed = found["dense_eval"], found["packed_eval"]
    share = found["layer_packed_bytes"] / found["layer_dense_bytes"]
    rows = [
        ("size on disk", size(found["dense_bytes"]), size(found["packed_bytes"])),
        (
            f"of which the {found['layers']} pruned layers",
            size(found["layer_dense_bytes"]),
            f"{size(found['layer_packed_bytes'])} ({share:.1%})",
        ),
        ("perplexity", f"{dense['perplexity']:.2f}", f"{packed['perplexity']:.2f}"),
        ("same most likely token as dense", "100 %", f"{packed['agreement']:.1%}"),
        ("KL divergence from dense, nats", "0", f"{packed['kl']:.3f}"),
        *(
            (
                f"seconds to {what}",
                f"{found[f'dense_{what}_seconds']:.1f}",
                f"{found[f'packed_{what}_seconds']:.1f}",
            )
            for what in ("load", "generate")
        ),
    ]
    table(f"{found['dense']}: dense, and 2:4 by {found['method']}", ("", "dense", "2:4, packed"), rows)
    say(
        f"Perplexity over {dense['tokens']} tokens, windows of {dense['context']}, {dense['stride']} apart. "
        f"Pruned in {found['prune_seconds']:.1f} s, packed in {found['pack_seconds']:.1f} s."
    )
    say("\n", bold(found["prompt"]), " …")
    say(f"  dense: {found['dense_text']!r}")
    say(f"  2:4:   {found['packed_text']!r}")
    say("")
    if found["is_demo_model"]:
        say('SmolLM2 comes from weights that were rounded to 4 bits: "dense" here is after that.')
    if found["method"] == "magnitude":
        say("Magnitude pruning uses no data and ruins a language model, as you see: it is the baseline.")
    else:
        say("One-shot pruning costs so small a model much; twofour recover is there to win it back.")
    say("A CPU has no Sparse Tensor Cores: here 2:4 saves bytes, not time.")
    say("\nWhat to try next:")
    made = found["packed"]
    say("  ", shell("check", made))
    say("  ", shell("eval", made, "--data", "YOUR.txt", "--against", found["dense"]))
    say("  ", shell("demo", "--model", "YOUR-MODEL", "--out", "YOUR-DEMO"))
    code = (
        "import twofour; from transformers import AutoModelForCausalLM as M; "
        f"print(M.from_pretrained({json.dumps(made)}))"  # with quotes that a shell leaves alone
    )
    say("  python -c ", shlex.quote(code))
