"""`twofour eval`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.output import Json, Save, keep, print_json, progress, quiet_libraries, say

EXAMPLE = "Example: [bold]twofour eval ./Llama-3-8B-24-packed --data wiki.test.txt --against ./Llama-3-8B[/]"


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A causal language model.", show_default=False)
    ],
    data: Annotated[Path, typer.Option(help="Text to score: plain, or .jsonl with a document a line.")],
    against: Annotated[Path | None, typer.Option(help="A model to compare the predictions with.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens a window. Default: the model's, at most 2048.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from window to window. Default: half a window.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = None,
    save: Save = False,
    json: Json = False,
) -> None:
    """Perplexity of a model on a text, with its tokens and seconds."""
    from twofour.bench.perplexity import evaluate
    from twofour.calibrate.text import read_documents
    from twofour.io.load import load_causal_lm

    documents = read_documents(data)
    quiet_libraries()
    model, tokenizer = load_causal_lm(directory)
    other = load_causal_lm(against)[0] if against else None
    with progress("evaluating") as on_progress:
        result = evaluate(
            model,
            tokenizer,
            documents,
            context=context,
            stride=stride,
            max_tokens=max_tokens,
            against=other,
            on_progress=on_progress,
        )
    document = {
        "verb": "eval",
        "model": str(directory),
        "against": against and str(against),
        "data": str(data),
        **asdict(result),
    }
    if save:
        keep(document, directory)
    if json:
        print_json(document)
        return
    say(
        f"{directory}: perplexity [bold]{result.perplexity:.3f}[/] over {result.tokens} tokens of "
        f"{result.documents} documents in {result.seconds:.1f} s"
    )
    say(
        f"Windows of {result.context} tokens, {result.stride} apart, every token scored once; "
        f"documents start {'with' if result.bos else 'without'} BOS."
    )
    if result.agreement is not None:
        say(
            f"Against {against}, whose perplexity is {result.against_perplexity:.3f}: the same most likely "
            f"token at {result.agreement:.1%} of the positions, KL {result.kl:.4f} nats."
        )
